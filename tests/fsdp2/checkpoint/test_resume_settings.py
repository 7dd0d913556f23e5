"""Settings that differ from the checkpoint's: what is only said, and what ends the run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.manifest import PROGRESS, Manifest, write_manifest
from mindspeed_llm.fsdp2.checkpoint.resume_settings import check_data_length, check_planned_resume, check_settings
from mindspeed_llm.fsdp2.config.adapter_files import base_fingerprint
from mindspeed_llm.fsdp2.config.config import Config, resolved_dict
from mindspeed_llm.fsdp2.config.data_config import DataConfig
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig

BASE = Config(
    model=ModelConfig(model_name_or_path="m"),
    data=DataConfig(dataset={"file_name": "a.jsonl"}),
    parallel=ParallelConfig(),
    training=TrainingConfig(output_dir="o", max_steps=20),
)
MANIFEST = Manifest(
    step=10,
    has_optimizer=True,
    files={},
    topology={},
    progress={"samples": 80, "num_samples": 90},
    versions={},
    config=json.loads(json.dumps(resolved_dict(BASE))),
)


def changed(**sections: dict[str, Any]) -> Config:
    return replace(BASE, **{name: replace(getattr(BASE, name), **fields) for name, fields in sections.items()})


def test_nothing_has_changed() -> None:
    assert check_settings(MANIFEST, BASE) is None


def test_what_does_not_matter() -> None:
    training = {
        "output_dir": "other",
        "resume_from_checkpoint": "latest",
        "save_steps": 7,
        "save_async": True,
        "logging_steps": 5,
        "profile": True,
        "tensorboard": False,
        "stop_on_nonfinite_loss": False,
    }
    config = changed(training=training, model={"hf_hub_token": "secret"})
    assert check_settings(MANIFEST, config) is None


def test_every_other_field_is_named() -> None:
    config = changed(
        training={"seed": 7, "per_device_train_batch_size": 4},
        data={"dataset": {"file_name": "b.jsonl"}},
        parallel={"param_dtype": "fp32"},
    )
    line = check_settings(MANIFEST, config)
    assert line is not None
    for part in ("training.seed 42 -> 7", "per_device_train_batch_size 8 -> 4", "b.jsonl", "param_dtype bf16 -> fp32"):
        assert part in line
    assert "learning rate" not in line


@pytest.mark.parametrize(
    "fields",
    [{"max_steps": 30}, {"lr": 1.0}, {"min_lr": 0.0}, {"warmup_ratio": 0.5}, {"lr_scheduler_type": "constant"}],
)
def test_a_bent_schedule(fields: dict[str, Any]) -> None:
    line = check_settings(MANIFEST, changed(training=fields))
    (name,) = fields
    assert line is not None and re.search(rf"; training\.{name} decide the course of the learning rate", line)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"stage": "pt"}}, "training.stage = pt"),
        ({"data": {"data_manager_type": "mg"}}, "data.data_manager_type = mg"),
        ({"data": {"streaming": True}}, "data.streaming = true"),
    ],
)
def test_data_of_another_kind(sections: dict[str, dict[str, Any]], key: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(key)}, but .*start anew from the exported model"):
        check_settings(MANIFEST, changed(**sections))


def test_max_steps_before_the_checkpoint() -> None:
    with pytest.raises(UserError, match=r"training\.max_steps = 9 lies before the checkpoint.*after step 10"):
        check_settings(MANIFEST, changed(training={"max_steps": 9}))
    assert check_settings(MANIFEST, changed(training={"max_steps": 10})) is not None


ADAPTED = changed(model={"lora_rank": 4, "lora_alpha": 8.0})
OF_ADAPTERS = replace(
    MANIFEST,
    has_optimizer=False,
    config=json.loads(json.dumps(resolved_dict(ADAPTED))),
    adapter={"r": 4, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}},
)


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_adapters_that_would_count_otherwise(tmp_path: Path, has_optimizer: bool) -> None:
    manifest = replace(OF_ADAPTERS, has_optimizer=has_optimizer)
    assert check_settings(manifest, ADAPTED) is None
    line = check_settings(manifest, changed(model={"lora_rank": 4}))  # the same alpha, twice the rank
    assert (line is not None) == has_optimizer
    with pytest.raises(UserError, match=r"lora_rank = 4 gives adapters of lora_alpha 32.* trained with lora_alpha 8:"):
        check_settings(manifest, changed(model={"lora_rank": 4, "lora_alpha": 32.0}))
    with pytest.raises(UserError, match=r"gives adapters of r 8, .* trained with r 4"):
        check_settings(manifest, changed(model={"lora_rank": 8, "lora_alpha": 8.0}))
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_model.safetensors").touch()
    for more, message in (
        ({"use_rslora": True}, "use_rslora True.* use_rslora False"),
        ({"alpha_pattern": {"q_proj": 16}}, r"adapters of alpha_pattern {'q_proj': 16}.* alpha_pattern {}"),
        ({"rank_pattern": {"q_proj": 2}}, r"adapters of rank_pattern {'q_proj': 2}"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter | more))
        with pytest.raises(UserError, match=message):
            check_settings(manifest, changed(model={"adapter_name_or_path": str(tmp_path)}))


def test_adapters_on_another_model() -> None:
    """A run that goes on says it among the settings that differ; so does one that takes the adapters alone."""
    other = replace(ADAPTED, model=replace(ADAPTED.model, model_name_or_path="other"))
    line = check_settings(OF_ADAPTERS, other)
    assert line == "the checkpoint's adapters were trained for model.model_name_or_path = m, and are put on other"
    line = check_settings(replace(OF_ADAPTERS, has_optimizer=True), other)
    assert line is not None and "model.model_name_or_path m -> other" in line
    of_model = replace(MANIFEST, has_optimizer=False)
    assert check_settings(of_model, changed(model={"model_name_or_path": "other"})) is None


def test_adapters_on_other_weights_of_the_same_shapes(tmp_path: Path) -> None:
    """Guards against a run that goes on with adapters on a model that they were not trained for."""

    def on(folder: str, text: bytes) -> Config:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("a.safetensors", "b.safetensors"):
            (tmp_path / folder / name).write_bytes(name.encode() + text)
        return changed(model={"lora_rank": 4, "lora_alpha": 8.0, "model_name_or_path": str(tmp_path / folder)})

    first = on("first", b"1" * 200_000)
    base = base_fingerprint(first.model)
    assert base is not None and OF_ADAPTERS.adapter is not None
    manifest = replace(OF_ADAPTERS, adapter=OF_ADAPTERS.adapter | {"base": base}, has_optimizer=True)
    # The same content is the same model, wherever it lies; a hub's name says nothing.
    for config in (first, on("moved", b"1" * 200_000), ADAPTED):
        check_settings(manifest, config)
    for other in (b"1" * 199_999 + b"2", b"2" + b"1" * 199_999, b"1" * 200_001):
        with pytest.raises(UserError, match=r"^model\.model_name_or_path = .*other has other weights .* = m then"):
            check_settings(manifest, on("other", other))
        line = check_settings(replace(manifest, has_optimizer=False), on("other", other))
        assert line is not None and "are put on" in line
        # Written before there were fingerprints.
        check_settings(replace(OF_ADAPTERS, has_optimizer=True), on("other", other))
    assert base_fingerprint(replace(first.model, lora_rank=None)) is None
    assert base_fingerprint(ADAPTED.model) is None


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_adapters_and_the_whole_model(has_optimizer: bool) -> None:
    of_adapters, of_model = (replace(it, has_optimizer=has_optimizer) for it in (OF_ADAPTERS, MANIFEST))
    with pytest.raises(
        UserError, match=r"model\.lora_rank is not set, but .* step 10 holds adapters, .*lora_rank = 4\."
    ):
        check_settings(of_adapters, BASE)
    with pytest.raises(UserError, match=r"model\.lora_rank = 4 trains adapters, but .* holds the whole model"):
        check_settings(of_model, ADAPTED)
    check_settings(replace(of_adapters, config={}), BASE)  # it does not say


def test_adapters_on_other_layers() -> None:
    def on(target: str) -> Config:
        return changed(model={"lora_rank": 4, "lora_alpha": 8.0, "lora_target": target})

    manifest = replace(OF_ADAPTERS, config=json.loads(json.dumps(resolved_dict(on("q_proj,v_proj")))))
    for same in ("q_proj,v_proj", "v_proj, q_proj", "self_attn.q_proj,v_proj", "all"):
        check_settings(manifest, on(same))
    for other in ("q_proj", "q_proj,v_proj,up_proj", "q_proj,my_v_proj"):
        with pytest.raises(UserError, match=r"model\.lora_target = .* of step 10 has adapters on q_proj,v_proj\. Set"):
            check_settings(manifest, on(other))


def check_length(num_samples: int, manifest: Manifest = MANIFEST, **training: Any) -> None:
    check_data_length(manifest, SimpleNamespace(num_samples=num_samples), replace(BASE.training, **training))  # type: ignore[arg-type]


def test_data_of_another_length() -> None:
    check_length(90)
    with pytest.raises(UserError, match="an epoch has 91 training samples, but had 90"):
        check_length(91)
    # A checkpoint that does not say it, and a stream, whose length is that of the run.
    check_length(91, replace(MANIFEST, progress={"samples": 80}))
    streamed = json.loads(json.dumps(resolved_dict(changed(data={"streaming": True}))))
    check_length(91, replace(MANIFEST, config=streamed))


def test_fewer_epochs_than_were_trained() -> None:
    check_length(90, max_steps=-1, num_train_epochs=0.9)
    with pytest.raises(UserError, match=r"num_train_epochs = 0\.5 takes 45 samples, but .* after 80"):
        check_length(90, max_steps=-1, num_train_epochs=0.5)


@pytest.mark.parametrize("wanted", ["latest", "checkpoints/global_step_10"])
def test_check_sees_what_the_run_would_refuse(tmp_path: Path, wanted: str) -> None:
    """`--check` reads the manifest alone; a damaged one is passed over as `latest` does."""
    folder = tmp_path / "checkpoints" / "global_step_10"
    folder.mkdir(parents=True)
    progress = dict.fromkeys(PROGRESS, 0)
    files = {"a": {"size": 1, "xxh3": "0"}}
    write_manifest(folder, replace(MANIFEST, files=files, topology={"ranks": 1}, progress=progress))
    (tmp_path / "checkpoints" / "global_step_20").mkdir()

    def planned(**training: Any) -> str | None:
        place = wanted if wanted == "latest" else str(tmp_path / wanted)
        return check_planned_resume(
            changed(training={"output_dir": str(tmp_path), "resume_from_checkpoint": place, **training})
        )

    assert planned() is None
    assert "training.lr" in (planned(lr=0.5) or "")
    with pytest.raises(UserError, match=r"training\.max_steps = 9 lies before the checkpoint"):
        planned(max_steps=9)
    # The numbers of adapters are looked at whatever is taken over.
    write_manifest(folder, replace(OF_ADAPTERS, files=files, topology={"ranks": 1}, progress=progress))
    place = wanted if wanted == "latest" else str(tmp_path / wanted)
    where = {"output_dir": str(tmp_path), "resume_from_checkpoint": place}
    with pytest.raises(UserError, match="adapters of lora_alpha 16"):
        check_planned_resume(changed(training=where, model={"lora_rank": 4, "lora_alpha": 16.0}))
