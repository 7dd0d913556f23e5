"""Opening the source of a conversion: headers, configuration and arguments, no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import families
from mindspeed_llm.tasks.checkpoint.adapter import Adapter
from mindspeed_llm.tasks.checkpoint.adapter_reader import base_key, has_adapter, has_base, topology_of_adapter
from mindspeed_llm.tasks.checkpoint.arguments import (
    from_hf_config,
    from_megatron,
    language_model,
    layer_counts,
    with_layers_of,
)
from mindspeed_llm.tasks.checkpoint.contradictions import refuse_contradicted, refuse_impossible, said_by
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf, read_config
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.load_lora import OpenAdapter, open_wanted, refuse_unclear, refuse_unwanted
from mindspeed_llm.tasks.checkpoint.merge import MergedSource
from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory, padded_rows, refuse_lost_layers, topology_of
from mindspeed_llm.tasks.checkpoint.model import HfTensor, bind
from mindspeed_llm.tasks.checkpoint.peft_files import is_peft
from mindspeed_llm.tasks.checkpoint.quantised import Dequantised, open_source, refuse_other_types
from mindspeed_llm.tasks.checkpoint.replicas import check_replicas
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import MgSource, Source
from mindspeed_llm.tasks.checkpoint.tables import Family


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A source that is open, and the model that it holds."""

    family: Family
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    """config.json where there is one; empty for a Megatron checkpoint that was given none."""
    source: Source
    topology: Topology | None = None
    """Of a Megatron source."""
    dequantised: Dequantised | None = None
    adapter: Adapter | None = None
    """Merged into the source; or all of the source, if `alone`."""
    alone: bool = False
    check: Callable[[bool], None] | None = None
    """Compares values of the adapter's files, and in full those of weights that stand beside it, if told to."""


def load(request: ConversionRequest, held: MgDirectory | None = None) -> Loaded:
    """Open the source: read configuration, headers and arguments, no values but the scales of quantised weights.

    Args:
        held: the checkpoint of `load_dir`, where that is in memory.

    Raises:
        UserError: see the readers.
    """
    return _load_hf(request) if request.load_model_type == "hf" else _load_mg(request, held)


def _load_hf(request: ConversionRequest) -> Loaded:
    if not request.load_dir.is_dir():
        raise UserError(f"--load-dir {request.load_dir}: expected a folder with a Hugging Face model")
    alone = is_peft(request.load_dir)
    if alone:
        refuse_unwanted(request)
        refuse_unclear(request)
        if request.hf_cfg_dir is None:
            raise UserError(
                f"--load-dir {request.load_dir} holds an adapter alone; give the folder of the model that it is for "
                "(its config.json is enough) in --hf-cfg-dir"
            )
    # Weights may stand apart from their config.json.
    folder = request.load_dir if request.hf_cfg_dir is None else request.hf_cfg_dir
    config = language_model(read_config(folder))
    where = str(folder / "config.json")
    family = families.of_config(config, where, requested=request.model_type_hf)
    settings = from_hf_config(family, config, where)
    for name, value in request.settings.items():
        if settings.get(name, value) != value:
            raise UserError(
                f"--{name.replace('_', '-')} {value} contradicts {where}, which says {settings[name]}; leave it out"
            )
    if alone:
        return _alone(family, settings, config, open_wanted(request, family, settings, alone=True))
    # Every layer of the source counts here, however few the output will have.
    whole = Topology(mtp_num_layers=settings.get("num_nextn_predict_layers") or 0 if family.mtp else 0)
    model = bind(family, settings, whole)
    expected = model.hf_tensors()
    stored = open_hf(request.load_dir, family.name_prefixes, is_needed=lambda name: model.why_absent(name) is None)
    # How weights are stored is said beside them, if anywhere.
    beside = request.load_dir if (request.load_dir / "config.json").is_file() else folder
    source, dequantised = open_source(
        stored, expected | model.copy_tensors, read_config(beside), str(beside / "config.json")
    )
    loaded = Loaded(family=family, settings=settings, config=config, source=source, dequantised=dequantised)
    return _merged(loaded, open_wanted(request, family, settings), expected)


def _load_mg(request: ConversionRequest, held: MgDirectory | None) -> Loaded:
    directory = everything = MgDirectory(request.load_dir) if held is None else held
    arguments = dict(directory.arguments) | dict(request.settings)
    adapted = has_adapter(everything)
    if adapted:
        refuse_unwanted(request)
        if not has_base(everything):
            refuse_unclear(request)
        directory = everything.view(base_key)
        topology = topology_of_adapter(everything, request.loaded)
    else:
        with said_by(str(directory.any_file.path)):
            topology = topology_of(directory, request.loaded)
    config: Mapping[str, Any] = {}
    if request.hf_cfg_dir is not None:
        config = language_model(read_config(request.hf_cfg_dir))
        where = str(request.hf_cfg_dir / "config.json")
        family = families.of_config(config, where, requested=request.model_type_hf)
        refuse_lost_layers(directory, topology, request.loaded, layer_counts(family, arguments, config))
        config = with_layers_of(family, config, arguments, len(topology.noop_layers))
        settings = from_hf_config(family, config, where)
        refuse_contradicted(family, settings, directory.arguments, str(directory.any_file.path), where)
    else:
        where = str(directory.any_file.path)
        requested = request.model_type_hf or arguments.get("model_type_hf")
        if requested is None:
            raise UserError(f"{where} does not say of which family it is; give --model-type-hf or --hf-cfg-dir")
        family = families.by_id(requested)
        refuse_lost_layers(directory, topology, request.loaded, layer_counts(family, arguments))
        settings = from_megatron(family, arguments, where)
    refuse_impossible(family, settings, arguments, str(directory.any_file.path))
    if "transformer_impl" not in request.loaded and any(refused.when == "te" for refused in family.refused):
        # Names have one form only, whatever the arguments say that training computes with.
        topology = replace(topology, transformer_impl="local")
    said = arguments.get("num_layers")
    held = settings["num_layers"] if said is None else said - len(topology.noop_layers)
    settings = dict(settings) | {"num_layers": held}
    if family.mtp:
        settings["num_nextn_predict_layers"] = max(
            settings.get("num_nextn_predict_layers") or 0, topology.mtp_num_layers
        )
    if topology.padded_vocab_size is None:
        topology = replace(topology, padded_vocab_size=padded_rows(directory, topology, settings["vocab_size"]))
    alone = request.save_lora_to_hf or (adapted and not has_base(everything))
    found = open_wanted(request, family, settings, everything if adapted else None, topology, alone=alone)
    if alone:
        return _alone(family, settings, config, found)
    with said_by(str(directory.any_file.path)):
        model = bind(family, settings, topology)
    source = MgSource(directory, model, mixed=request.params_dtype is not None)
    loaded = Loaded(
        family=family,
        settings=settings,
        config=config,
        source=source,
        topology=topology,
        check=lambda full: _check_replicas(source, full, request),
    )
    return _merged(loaded, found, model.hf_tensors())


def _check_replicas(source: MgSource, full: bool, request: ConversionRequest) -> None:
    if request.verify != "none":
        check_replicas(source.replicas(), full=full, workers=request.workers)


def _merged(loaded: Loaded, found: OpenAdapter | None, tensors: Mapping[str, HfTensor]) -> Loaded:
    """The source with an adapter merged into it, if there is one."""
    refuse_other_types(loaded.source, tensors)
    if found is None:
        return loaded

    def check(full: bool) -> None:
        if loaded.check is not None:
            loaded.check(full)
        if found.check_replicas is not None:
            found.check_replicas()
        if found.check_base is not None:
            found.check_base(loaded.source, tensors, full)

    merged = MergedSource(loaded.source, tensors, found.adapter)
    return replace(loaded, source=merged, adapter=found.adapter, check=check)


def _alone(family: Family, settings: Mapping[str, Any], config: Mapping[str, Any], found: OpenAdapter | None) -> Loaded:
    """An adapter instead of a model. The family and its settings are those of the model that it is for."""
    assert found is not None, "an adapter was asked for"
    replicas = found.check_replicas
    return Loaded(
        family=family,
        settings=settings,
        config=config,
        source=found.adapter.source,
        topology=found.adapter.topology if found.adapter.in_megatron else None,
        adapter=found.adapter,
        alone=True,
        check=None if replicas is None else lambda full: replicas(),
    )
