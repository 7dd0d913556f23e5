"""A conversion that is ready to run: its source is open, its plan is made, nothing is written."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import mg_writer
from mindspeed_llm.tasks.checkpoint.adapter import Adapter, check_complete, in_form, summary
from mindspeed_llm.tasks.checkpoint.arguments import config_of_layers, of_layers, to_hf_config, to_megatron
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.load import Loaded, load
from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.peft_files import peft_config, to_peft
from mindspeed_llm.tasks.checkpoint.plan import Plan, plan_hf, plan_mg
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import WithCopies
from mindspeed_llm.tasks.checkpoint.unused_flags import refuse_unused

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MTP_KEY = "num_nextn_predict_layers"
_HF_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion that is ready to run."""

    model: Model
    """The output's model; for a Hugging Face output its topology has no meaning."""
    loaded: Loaded
    plan: Plan
    report: Mapping[str, Any] = field(default_factory=dict)
    """What was done, once it is; see `report`."""

    @property
    def adapter_summary(self) -> dict[str, Any] | None:
        """What is said of the adapter that it is about, if it is about one."""
        adapter = self.loaded.adapter
        return None if adapter is None else summary(adapter, merged=not self.loaded.alone)


def prepare(request: ConversionRequest, held: MgDirectory | None = None) -> Conversion:
    """Open the source and make the whole plan; nothing is written.

    Args:
        held: the checkpoint of `load_dir`, where that is in memory.

    Raises:
        UserError: what is asked for cannot be done; says why.
    """
    for flag, folder in (("--load-dir", request.load_dir), ("--lora-load", request.lora_load)):
        if folder is None:
            continue
        if request.save_dir.resolve() == folder.resolve():
            raise UserError(f"--save-dir {request.save_dir} is {flag}; choose another folder")
        if request.overwrite and folder.resolve().is_relative_to(request.save_dir.resolve()):
            raise UserError(
                f"{flag} {folder} is in --save-dir {request.save_dir}, where --overwrite would remove it; choose "
                "another folder"
            )
    loaded = load(request, held)
    refuse_unused(request, loaded)
    dtype = _DTYPES[request.params_dtype] if request.params_dtype else None
    if loaded.alone and loaded.adapter is not None:
        return _prepare_adapter(request, loaded, loaded.adapter, dtype)
    if request.save_model_type == "hf":
        topology = Topology(mtp_num_layers=_mtp_layers(loaded))
    else:
        topology = _target_topology(request, loaded)
    model = bind(
        loaded.family,
        loaded.settings,
        topology,
        num_layers=request.num_layers,
        first_k_dense=request.first_k_dense_replace,
    )
    source = WithCopies(loaded.source, model.written_copies)
    if request.save_model_type == "hf":
        _refuse_new_numbers(model, loaded.settings["num_layers"])
        plan = plan_hf(model, source, shard_size=request.max_shard_size, params_dtype=dtype)
    else:
        plan = plan_mg(model, source, iteration=mg_writer.ITERATION_FOLDER, params_dtype=dtype)
    return Conversion(model=model, loaded=replace(loaded, source=source), plan=plan)


def _prepare_adapter(
    request: ConversionRequest, loaded: Loaded, adapter: Adapter, dtype: torch.dtype | None
) -> Conversion:
    """The conversion of an adapter alone: its `model` is that of the adapter."""
    if request.num_layers is not None or request.first_k_dense_replace is not None:
        raise UserError("--num-layers and --first-k-dense-replace: an adapter cannot be shortened; leave them out")
    to_hf = request.save_model_type == "hf"
    if to_hf and (sections := [place.name for place in adapter.places if place.section is not None]):
        raise UserError(
            f"--save-lora-to-hf: {adapter.folder} has an adapter on {sections[0]}, which is a part of one Hugging Face "
            "module; PEFT has no place for it. Merge the adapter into the model instead"
        )
    form = in_form(adapter, adapter.targets if to_hf else request.lora_target_modules or adapter.targets)
    model = adapter.model(Topology() if to_hf else _target_topology(request, loaded), form)
    check_complete(adapter, model, "the way in which the output stores its parameters")
    source = WithCopies(adapter.source, model.written_copies)
    if to_hf:
        plan = to_peft(plan_hf(model, source, shard_size=sys.maxsize, params_dtype=dtype))
    else:
        plan = plan_mg(model, source, iteration=mg_writer.ITERATION_FOLDER, params_dtype=dtype)
    written = replace(adapter, places=form)
    return Conversion(model=model, loaded=replace(loaded, source=source, adapter=written), plan=plan)


def _refuse_new_numbers(model: Model, total: int) -> None:
    """Names of Hugging Face tensors carry the number of their layer, which must be the one in the source."""
    if model.layers != list(range(total if model.topology.mtp_num_layers else len(model.layers))):
        raise UserError(
            "--num-layers and --first-k-dense-replace would give layers of the Hugging Face output other numbers than "
            "they have in the source; shorten the model on the way to a Megatron checkpoint, and convert that one"
        )


def _mtp_layers(loaded: Loaded) -> int:
    if loaded.topology is not None:
        return loaded.topology.mtp_num_layers
    return loaded.settings.get("num_nextn_predict_layers") or 0


def _target_topology(request: ConversionRequest, loaded: Loaded) -> Topology:
    topology = Topology(**request.target)
    if topology.padded_vocab_size is not None:
        return topology
    multiple = request.make_vocab_size_divisible_by * topology.tp
    return replace(topology, padded_vocab_size=-(-loaded.settings["vocab_size"] // multiple) * multiple)


def mg_arguments(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    """The arguments that a Megatron output carries."""
    model, loaded = conversion.model, conversion.loaded
    return (
        to_megatron(output_settings(request, conversion), loaded.config)
        | mg_writer.topology_arguments(model.topology, len(model.layers), model.padded_vocab_size)
        | {"model_type_hf": loaded.family.ids[0], "iteration": mg_writer.ITERATION}
        | (_lora_arguments(loaded.adapter) if loaded.alone and loaded.adapter is not None else {})
    )


def _lora_arguments(adapter: Adapter) -> dict[str, Any]:
    return {"lora_r": adapter.rank, "lora_alpha": adapter.alpha, "lora_target_modules": adapter.targets}


def adapter_config(request: ConversionRequest, adapter: Adapter) -> dict[str, Any]:
    """The adapter_config.json of an output that is an adapter in PEFT's files."""
    return peft_config(adapter, None if request.hf_cfg_dir is None else str(request.hf_cfg_dir))


def hf_config(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    """The config.json of a Hugging Face output."""
    loaded, layers = conversion.loaded, conversion.model.layers
    if loaded.config:
        config = config_of_layers(loaded.family, loaded.config, layers, loaded.settings["num_layers"])
        if loaded.family.mtp and config.get(_MTP_KEY):
            config[_MTP_KEY] = conversion.model.topology.mtp_num_layers
    else:
        config = to_hf_config(loaded.family, output_settings(request, conversion))
        config["dtype"] = _most_common_dtype(conversion.plan)
    # Configurations of models with several parts name the class of the whole, not that of the language model.
    config = {"architectures": [loaded.family.architectures[0]], "model_type": loaded.family.model_type} | config
    # transformers 5 writes dtype, older ones torch_dtype.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if request.params_dtype is not None:
        config[key] = _HF_DTYPE_NAMES[request.params_dtype]
    elif config.get(key) is not None:
        # It may come with weights of another dtype; quantised ones are never written.
        config[key] = _most_common_dtype(conversion.plan)
    return config


def output_settings(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    """The settings of the output, which may have fewer layers than the source."""
    settings = of_layers(conversion.loaded.family, conversion.loaded.settings, conversion.model.layers)
    if settings.get("num_experts") and request.first_k_dense_replace is not None:
        settings["first_k_dense_replace"] = request.first_k_dense_replace
    if request.save_model_type == "hf" and conversion.loaded.family.mtp:
        settings["num_nextn_predict_layers"] = conversion.model.topology.mtp_num_layers
    return settings


def _most_common_dtype(plan: Plan) -> str:
    bytes_of: Counter[str] = Counter()
    for file in plan.files:
        for target in file.targets:
            bytes_of[str(target.dtype).removeprefix("torch.")] += target.nbytes
    return bytes_of.most_common(1)[0][0]
