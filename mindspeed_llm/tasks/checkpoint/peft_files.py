"""LoRA adapters in PEFT's files: adapter_config.json and adapter_model.safetensors.

Their names are those of the Hugging Face modules behind `base_model.model.`: for `model.layers.0.self_attn.q_proj` the
tensors `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` and `...lora_B.weight`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.adapter import FLOATS, Adapter, adapter_model
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf, open_weight_file
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.lora import Place, places, split_name
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG, WEIGHTS, read_peft_config
from mindspeed_llm.tasks.checkpoint.plan import Plan
from mindspeed_llm.tasks.checkpoint.rules import StackedExperts
from mindspeed_llm.tasks.checkpoint.sources import HfSource
from mindspeed_llm.tasks.checkpoint.staging import write_text
from mindspeed_llm.tasks.checkpoint.tables import Family

_OLD_WEIGHTS = "adapter_model.bin"
_PREFIX = "base_model.model."


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's files."""
    return (folder / CONFIG).is_file()


def open_peft(
    folder: Path, family: Family, settings: Mapping[str, Any], *, config_folder: Path | None = None
) -> Adapter:
    """The adapter in a folder of PEFT.

    Args:
        family: of the model that it is for.
        settings: of that model.
        config_folder: where adapter_config.json is, if elsewhere.

    Raises:
        UserError: files are missing or damaged, it is no plain LoRA, half of a pair is missing, a layer has none while
            others have, or shapes do not fit the model; says which.
    """
    path = (config_folder or folder) / CONFIG
    config = read_peft_config(path)
    stored = _stored(folder, family)
    chosen = _places(folder, stored, family)
    # No class of transformers has MTP layers.
    expected = adapter_model(family, settings, config["r"], chosen, Topology()).hf_tensors()
    if missing := expected.keys() - stored.keys():
        raise UserError(f"{folder} has no {_PREFIX}{min(missing)}; expected an adapter on the same layers everywhere")
    if spare := stored.keys() - expected.keys():
        raise UserError(f"{folder}: {_PREFIX}{min(spare)} is for a layer that the model has not")
    for name, tensor in stored.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{tensor.file}: {_PREFIX}{name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)} "
                f"from the model's settings and r {config['r']} in {path}; check that they belong together"
            )
    _check_targets(path, config, weight_files(folder)[0])
    return Adapter(
        folder=folder,
        rank=config["r"],
        alpha=config["lora_alpha"],
        base=family,
        settings=settings,
        places=chosen,
        source=HfSource(stored, expected),
        topology=Topology(),
        in_megatron=False,
    )


def _check_targets(path: Path, config: Mapping[str, Any], weights: Path) -> None:
    """Refuse tensors that PEFT would not load, as it puts adapters on `target_modules` alone."""
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return
    for name in open_weight_file(weights):
        half = split_name(name.removeprefix(_PREFIX))
        module = name if half is None else half.weight.removesuffix(".weight")
        if not any(module == target or module.endswith(f".{target}") for target in targets):
            raise UserError(
                f"{path}: target_modules {' '.join(map(str, targets))} leave out {module}, for which {weights.name} "
                "beside it has an adapter; copy both files of one adapter"
            )


def weight_files(folder: Path) -> list[Path]:
    """The one file that holds an adapter's tensors.

    Raises:
        UserError: there is none.
    """
    found = [path for path in (folder / WEIGHTS, folder / _OLD_WEIGHTS) if path.is_file()]
    if not found:
        raise UserError(f"{folder} has no {WEIGHTS} beside its {CONFIG}; copy it there")
    return found[:1]


def _stored(folder: Path, family: Family) -> dict[str, StoredHf]:
    """The tensors by their names behind PEFT's prefix."""
    [path] = weight_files(folder)
    found: dict[str, StoredHf] = {}
    for full, tensor in open_weight_file(path).items():
        name = full.removeprefix(_PREFIX)
        for start, wanted in family.name_prefixes.items():
            if name.startswith(start):
                name = wanted + name.removeprefix(start)
                break
        if name == full or split_name(name) is None:
            raise UserError(
                f"{path}: {full} is no lora_A.weight or lora_B.weight behind {_PREFIX}; only adapters on linear "
                "layers can be converted"
            )
        if tensor.dtype not in FLOATS:
            raise UserError(f"{path}: {full} is {tensor.dtype}; expected float32, bfloat16 or float16")
        found[name] = tensor
    for name in sorted(found):
        half = split_name(name)
        if half is not None and half.other() not in found:
            raise UserError(
                f"{path}: {_PREFIX}{name} has no {_PREFIX}{half.other()} beside it; an adapter is both: copy the "
                "file again"
            )
    if not found:
        raise UserError(f"{path} holds no tensor; copy it again")
    return found


def _places(folder: Path, stored: Mapping[str, StoredHf], family: Family) -> tuple[Place, ...]:
    """Where an adapter is, one Hugging Face module at a time."""
    # Each module is one place, grouped experts aside: they are a layout of Megatron's.
    single = [
        place
        for place in places(family)
        if len(place.modules) == 1 and place.section is None and not isinstance(place.a.rule, StackedExperts)
    ]
    of_module: dict[re.Pattern[str], list[int]] = defaultdict(list)
    for index, place in enumerate(single):
        of_module[re.compile(re.escape(place.modules[0]).replace(r"\{expert\}", r"\d+"))].append(index)
    layer = _pattern(family.layer_prefix)
    found: set[int] = set()
    modules: dict[str, set[int]] = {}
    for name in stored:
        half = split_name(layer.sub("", name))
        assert half is not None, f"{name} is none of an adapter"
        module = half.weight.removesuffix(".weight")
        if module not in modules:
            modules[module] = {i for pattern, at in of_module.items() if pattern.fullmatch(module) for i in at}
        if not modules[module]:
            raise UserError(
                f"{folder}: {_PREFIX}{name} is for a module that a {family.ids[0]} model has not; it has "
                f"{', '.join(sorted({place.modules[0] for place in single}))}"
            )
        found |= modules[module]
    return tuple(place for index, place in enumerate(single) if index in found)


def _pattern(prefix: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(prefix)))


def to_peft(plan: Plan) -> Plan:
    """The plan of a Hugging Face directory that holds an adapter's tensors, as PEFT has them: one file, other names."""
    targets = [replace(target, key=_PREFIX + target.key) for file in plan.files for target in file.targets]
    [file, *_] = plan.files
    return replace(plan, files=[replace(file, path=WEIGHTS, targets=targets)])


def peft_config(adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    """The adapter_config.json of an adapter.

    Args:
        base_model: the name or the folder of the model that it is for, where it is known.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(adapter),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write adapter_config.json."""
    write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _target_modules(adapter: Adapter) -> list[str]:
    """The names that say where an adapter is: the last word of modules, with more of them in front where another module
    ends in it that has no adapter.
    """
    weights = bind(adapter.base, adapter.settings, Topology()).hf_tensors()
    modules = {name.removesuffix(".weight") for name, tensor in weights.items() if len(tensor.shape) == 2}
    adapted = {name.removesuffix(".weight") for name in adapter.weights} & modules
    layer = _pattern(adapter.base.layer_prefix)
    bare = {module.rpartition(".")[2] for module in modules - adapted}
    found = set()
    for module in adapted:
        last = module.rpartition(".")[2]
        found.add(layer.sub("", module) if last in bare else last)
    return sorted(found)
