"""`data.tokenized_path`: tokenized training and evaluation samples kept in a folder of the user's choice."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data.lf_samples import StoredSamples
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.indexed_format import temporary_name
from mindspeed_llm.tasks.preprocess.sample_store import SampleStore, write_store

_INFO = "tokenized_info.json"
_CHUNK_SAMPLES = 1000


def tokenized_exists(path: Path) -> bool:
    """Whether the folder holds tokenized data; raises UserError when it holds something else."""
    if (path / _INFO).is_file():
        return True
    if path.is_file() or (path.is_dir() and any(path.iterdir()) and not any(path.glob("train_packed_*"))):
        raise UserError(
            f"data.tokenized_path {path} exists, but holds no tokenized data ({_INFO} is missing); name an empty or "
            "new folder to write it there"
        )
    return False


def save_tokenized(
    path: Path, train: StoredSamples, evaluation: Mapping[str, StoredSamples], settings: Mapping[str, Any]
) -> None:
    """Write the samples in their order with the settings that made them; the file that marks the folder as finished
    comes last.
    """
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "train", train)
    prefixes = {name: f"eval{number}" for number, name in enumerate(evaluation)}
    for name, samples in evaluation.items():
        _write(path / prefixes[name], samples)
    temporary = temporary_name(path / _INFO)
    info = {"train": "train", "eval": prefixes, "settings": settings}
    temporary.write_text(json.dumps(info, indent=2), encoding="utf-8")
    temporary.replace(path / _INFO)


def load_tokenized(path: Path, settings: Mapping[str, Any]) -> tuple[StoredSamples, dict[str, StoredSamples]]:
    """Read what `save_tokenized` wrote. Raises UserError where it was made with other settings."""
    check_settings(path, settings)
    info = json.loads((path / _INFO).read_text(encoding="utf-8"))
    return _read(path / info["train"]), {name: _read(path / prefix) for name, prefix in info["eval"].items()}


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError naming every setting whose value differs from the one that the data in `path` was made with."""
    kept = json.loads((path / _INFO).read_text(encoding="utf-8")).get("settings")
    advice = "name another folder, or delete this one to make the data anew"
    if kept is None:
        raise UserError(f"data.tokenized_path {path} does not say which settings made its data; {advice}")
    # Through JSON, as the kept values went.
    wanted = json.loads(json.dumps(settings))
    differing = [
        f"{name} (there {json.dumps(kept.get(name))}, now {json.dumps(wanted.get(name))})"
        for name in dict.fromkeys((*kept, *wanted))
        if kept.get(name) != wanted.get(name)
    ]
    if differing:
        raise UserError(
            f"data.tokenized_path {path} holds data made with other settings: {', '.join(differing)}. Set them as they "
            f"were, {advice}"
        )


def _write(prefix: Path, samples: StoredSamples) -> None:
    summary = Summary()
    write_store(prefix, ("input_ids", "labels"), _chunks(samples, summary), summary)


def _chunks(samples: StoredSamples, summary: Summary) -> Iterator[Chunk]:
    for start in range(0, len(samples), _CHUNK_SAMPLES):
        rows = [samples.tokens(index) for index in range(start, min(start + _CHUNK_SAMPLES, len(samples)))]
        arrays = {
            "input_ids": np.concatenate([ids for ids, _ in rows]),
            "labels": np.concatenate([labels for _, labels in rows]),
        }
        lengths = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
        chunk = Chunk(arrays, dict.fromkeys(arrays, lengths), len(rows))
        summary.add(chunk)
        yield chunk


def _read(prefix: Path) -> StoredSamples:
    store = SampleStore(prefix)
    return StoredSamples([store], np.zeros(len(store), dtype=np.int64), np.arange(len(store)))
