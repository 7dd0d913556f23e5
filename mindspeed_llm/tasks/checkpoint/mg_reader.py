"""A Megatron checkpoint directory (`torch` format), and what it says about itself.

<load>/latest_checkpointed_iteration.txt      a number, or "release"
<load>/iter_0000001/mp_rank_00_000/model_optim_rng.pt
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.layout import Rank, Topology, blocks
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor, read_torch_file

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
# What Transformer Engine and old versions of Megatron save beside weights.
_NO_WEIGHTS = ("._extra_state", "rotary_pos_emb.inv_freq", "rotary_emb.inv_freq")


class RankTensor(Protocol):
    """A tensor of a rank, in a file or in memory."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on this rank."""

    def view(self) -> torch.Tensor:
        """Its values."""


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """One rank's file: its models by key (`model`, or `model0`, ...), each with its tensors by key."""

    path: Path
    arguments: Mapping[str, Any]
    models: Mapping[str, Mapping[str, RankTensor]]


class MgDirectory:
    """A checkpoint; files are opened when they are needed and stay mapped.

    Raises:
        UserError: no checkpoint at `folder`; says what was expected.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = _iteration_folder(folder)
        self.rank_folders = sorted(path for path in self.folder.glob("mp_rank_*") if path.is_dir())
        if not self.rank_folders:
            raise UserError(f"{self.folder} has no mp_rank_* folders; expected a Megatron checkpoint in format torch")
        self._files: dict[Path, RankFile] = {}

    def file(self, rank: Rank, topology: Topology) -> RankFile:
        """The file of one rank."""
        return self._open(self.folder / rank.folder(topology))

    @cached_property
    def any_file(self) -> RankFile:
        """The first rank's file, for what all say alike."""
        return self._open(self.rank_folders[0])

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments that the checkpoint carries; empty where it carries none."""
        return self.any_file.arguments

    def _open(self, folder: Path) -> RankFile:
        path = folder / RANK_FILE
        if path not in self._files:
            self._files[path] = open_rank_file(path)
        return self._files[path]

    def files(self) -> Iterator[RankFile]:
        """All rank files that are there."""
        for folder in self.rank_folders:
            if self.is_there(folder):
                yield self._open(folder)

    def is_there(self, folder: Path) -> bool:
        """Whether the file of one of `rank_folders` is there."""
        return (folder / RANK_FILE).is_file()

    def keys(self) -> Iterable[str]:
        """The keys of the first rank's tensors, to tell storage layouts apart."""
        return [key for model in self.any_file.models.values() for key in model]

    def view(self, rename: Callable[[str], str | None]) -> MgDirectory:
        """The same checkpoint with other keys: what `rename` says, and without those for which that is None."""
        return _View(self, rename)


class _View(MgDirectory):
    def __init__(self, directory: MgDirectory, rename: Callable[[str], str | None]) -> None:
        self.folder, self.rank_folders = directory.folder, directory.rank_folders
        self._directory, self._rename = directory, rename
        self._files = {}

    def is_there(self, folder: Path) -> bool:
        """See `MgDirectory`."""
        return self._directory.is_there(folder)

    def _open(self, folder: Path) -> RankFile:
        path = folder / RANK_FILE
        if path not in self._files:
            file = self._directory._open(folder)
            self._files[path] = replace(
                file, models={chunk: self._renamed(file.path, model) for chunk, model in file.models.items()}
            )
        return self._files[path]

    def _renamed(self, path: Path, model: Mapping[str, RankTensor]) -> dict[str, RankTensor]:
        found: dict[str, RankTensor] = {}
        for key, tensor in model.items():
            name = self._rename(key)
            if name in found:
                raise UserError(f"{path}: holds {key} and another tensor that is the same, {name}; remove one of them")
            if name is not None:
                found[name] = tensor
        return found


def _iteration_folder(folder: Path) -> Path:
    if any(folder.glob("mp_rank_*")):
        return folder
    tracker = folder / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{tracker} is missing; expected a Megatron checkpoint (this file, and iter_*/mp_rank_*/{RANK_FILE})"
        ) from None
    if text != "release" and not text.isdecimal():
        raise UserError(f"{tracker}: {text[:40]!r}; expected the number of an iteration, or release")
    found = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise UserError(f"{tracker} names {text}, but {found} is missing; copy it, or correct the number")
    return found


def open_rank_file(path: Path) -> RankFile:
    """The models and the arguments of one rank file; reads no values.

    Raises:
        UserError: it is damaged, or holds no model.
    """
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected the state of a Megatron model")
    models = {
        key: {
            name: tensor
            for name, tensor in value.items()
            if isinstance(tensor, StoredTensor) and not name.endswith(_NO_WEIGHTS)
        }
        for key, value in content.items()
        if key.startswith("model") and key.removeprefix("model").isdecimal() | (key == "model")
        if isinstance(value, dict)
    }
    if not models:
        raise UserError(f"{path}: has no model among its keys {sorted(map(str, content))}; expected model or model0")
    for key, value in content.items():
        if key in models:
            _check_keys(f"{path}: {key}", value, models[key])
    arguments = content.get("args")
    return RankFile(path=path, arguments=vars(arguments) if hasattr(arguments, "__dict__") else {}, models=models)


def _check_keys(where: str, content: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse forms of a model's state that other programs write: wrapped, or nested as before Megatron Core."""
    nested = [name for name, value in content.items() if isinstance(value, dict)]
    if nested and not tensors:
        raise UserError(
            f"{where} holds {', '.join(map(str, nested[:3]))} with keys inside, the form of Megatron before Megatron "
            "Core; expected keys such as decoder.layers.0.mlp.linear_fc1.weight. Save it again from Megatron Core"
        )
    wrapped = [name for name in tensors if name.startswith("module.")]
    if wrapped:
        raise UserError(
            f"{where}/{wrapped[0]} and {len(wrapped) - 1} more keys start with module., those of a wrapped model; "
            f"expected {wrapped[0].removeprefix('module.').removeprefix('module.')}. Save the state of the model inside"
        )


def topology_of(directory: MgDirectory, overrides: Mapping[str, Any]) -> Topology:
    """The topology that a checkpoint says it has; `overrides` (fields of `Topology`) win.

    How parameters are stored is read off the keys, which cannot be wrong; the rest, and what the keys of the first rank
    do not show, is what the arguments say.
    """
    arguments = directory.arguments
    _check_types(arguments, directory.any_file.path)
    keys = list(directory.keys())
    says = arguments.get
    sizes: dict[str, Any] = {
        "tp": says("tensor_model_parallel_size"),
        "pp": says("pipeline_model_parallel_size"),
        "ep": says("expert_model_parallel_size"),
        "etp": says("expert_tensor_parallel_size"),
        "num_layer_list": numbers(says("num_layer_list")),
        "noop_layers": numbers(says("noop_layers")),
        "schedules_method": says("schedules_method"),
        "mtp_num_layers": says("mtp_num_layers") or len({key.split(".")[2] for key in keys if key.startswith("mtp.l")}),
        "moe_tp_extend_ep": says("moe_tp_extend_ep"),
        "moe_grouped_gemm": _seen(
            keys, yes=(".experts.weight1", ".experts.linear_fc1.weight"), no=(".local_experts.",)
        ),
        "mla_mm_split": _seen(keys, yes=(".linear_v.weight",), no=(".linear_kv_up_proj.weight",)),
        "transformer_impl": _seen(keys, yes=("linear_qkv.layer_norm_weight",), no=(".input_layernorm.weight",)),
    }
    if sizes["transformer_impl"] is not None:
        sizes["transformer_impl"] = "transformer_engine" if sizes["transformer_impl"] else "local"
    for name in ("moe_grouped_gemm", "mla_mm_split", "transformer_impl"):
        # A first stage without such a layer shows nothing; then the arguments must say it.
        sizes[name] = says(name) if sizes[name] is None else sizes[name]
    if not arguments:
        sizes |= _sizes_of_names(directory.rank_folders)
    given: dict[str, Any] = {name: value for name, value in (sizes | dict(overrides)).items() if value is not None}
    num_layers, pp = says("num_layers"), given.get("pp") or 1
    if given.get("schedules_method") is None and "layers_per_virtual_stage" not in given:
        virtual = says("virtual_pipeline_model_parallel_size")
        derived = num_layers // pp // virtual if virtual and num_layers else None
        given["layers_per_virtual_stage"] = says("num_layers_per_virtual_pipeline_stage") or derived
    topology = Topology(**given)
    _check_chunks(directory.any_file, topology)
    if "noop_layers" in given or not num_layers:
        return topology
    return replace(topology, noop_layers=_absent_layers(directory, topology, num_layers))


def refuse_lost_layers(
    directory: MgDirectory, topology: Topology, overrides: Mapping[str, Any], said: Collection[int]
) -> None:
    """Refuse layers that no file has where nobody says that they are noop layers: they may as well be lost.

    Args:
        topology: by `topology_of`, with the same `overrides`.
        said: how many layers the model has, by whatever says it.

    Raises:
        UserError: names the positions, and how to say that they are noop layers.
    """
    absent, arguments = topology.noop_layers, directory.arguments
    if not absent or "noop_layers" in overrides or numbers(arguments.get("noop_layers")):
        return
    positions = arguments["num_layers"]
    if positions - len(absent) in said:
        return
    listed = ",".join(map(str, absent))
    counts = " or ".join(map(str, sorted(set(said))))
    known = f"the model should have {counts}" if said else "nothing says how many the model has"
    raise UserError(
        f"{directory.any_file.path}: its arguments say num_layers {positions} and no noop_layers, but no file has the "
        f"layers at positions {listed}: {positions - len(absent)} layers are left, and {known}. If they were lost, "
        f"copy the checkpoint again. If they are noop layers, say so: with --noop-layers {listed} on the way to "
        "Hugging Face, or in noop_layers of its arguments"
    )


_COUNTS = (
    *("num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage", "virtual_pipeline_model_parallel_size"),
)


def _check_types(arguments: Mapping[str, Any], path: Path) -> None:
    """Refuse arguments about the split that are no numbers."""
    for name in (*_COUNTS, "mtp_num_layers"):
        value, least = arguments.get(name), 0 if name == "mtp_num_layers" else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UserError(
                f"{path}: its arguments say {name} {value!r}; expected a whole number of at least {least}: correct it "
                "there"
            )
    for name in ("num_layer_list", "noop_layers"):
        try:
            good = all(type(each) is int for each in numbers(arguments.get(name)) or ())
        except (TypeError, ValueError):
            good = False
        if not good:
            raise UserError(
                f"{path}: its arguments say {name} {arguments[name]!r}; expected whole numbers, such as '0,5' or a "
                "list: correct it there"
            )


def _check_chunks(file: RankFile, topology: Topology) -> None:
    """Refuse a file whose models are not those of the pipeline stages that its arguments say."""
    if topology.is_virtual == ("model" in file.models):
        expected = "model0, model1, ..." if topology.is_virtual else "model"
        raise UserError(
            f"{file.path}: holds {', '.join(sorted(file.models))}, but its arguments say "
            f"{'' if topology.is_virtual else 'no '}virtual pipeline stages "
            f"(virtual_pipeline_model_parallel_size, schedules_method): expected {expected}. Correct the arguments, or "
            "copy the checkpoint again"
        )


def _sizes_of_names(folders: Iterable[Path]) -> dict[str, int]:
    """Tensor and pipeline parallel size by the names of the rank folders, of a checkpoint without arguments."""
    numbers_of = [[int(part) for part in folder.name.removeprefix("mp_rank_").split("_")] for folder in folders]
    return {"tp": max(n[0] for n in numbers_of) + 1, "pp": max((n[1] for n in numbers_of if n[1:]), default=0) + 1}


def _absent_layers(directory: MgDirectory, topology: Topology, num_positions: int) -> tuple[int, ...]:
    """The positions of layers that no file has: upstream's converter does not write down its noop layers."""
    absent = []
    for stage, of_stage in enumerate(blocks(topology, num_positions)):
        file = directory.file(Rank(0, stage, 0), topology)
        for index, block in enumerate(of_stage):
            keys = file.models.get(f"model{index}" if topology.is_virtual else "model", {})
            present = {key.split(".")[2] for key in keys if key.startswith("decoder.layers.")}
            absent += [position for local, position in enumerate(block) if str(local) not in present]
    return tuple(absent)


def _seen(keys: Iterable[str], *, yes: tuple[str, ...], no: tuple[str, ...]) -> bool | None:
    """Which of two ways to store something keys show; None where they show neither."""
    for key in keys:
        if any(word in key for word in yes):
            return True
        if any(word in key for word in no):
            return False
    return None


def numbers(value: Any) -> tuple[int, ...] | None:
    """A list of numbers as arguments hold it: "1,3", a list or a set."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return tuple(int(part) for part in value.split(","))
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else tuple(value)


def padded_rows(directory: MgDirectory, topology: Topology, vocab_size: int) -> int | None:
    """The padded vocabulary of a checkpoint, read off its embedding; None where the first file has none."""
    for model in directory.any_file.models.values():
        stored = model.get("embedding.word_embeddings.weight")
        if stored is not None and stored.shape[0] * topology.tp >= vocab_size:
            return stored.shape[0] * topology.tp
    return None
