"""One conversion from its request to the published folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import families, hf_writer, mg_writer
from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config, from_megatron, to_hf_config, to_megatron
from mindspeed_llm.tasks.checkpoint.fill import fill
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf, read_config
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.mg_reader import TRACKER, MgDirectory, topology_of
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.plan import Plan, plan_hf, plan_mg
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import HfSource, MgSource, Source, WithCopies
from mindspeed_llm.tasks.checkpoint.staging import Staging
from mindspeed_llm.tasks.checkpoint.tables import Family

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HF_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A source that is open, and the model that it holds."""

    family: Family
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    """config.json where there is one, else what can be said of it."""
    source: Source
    topology: Topology | None = None
    """Of a Megatron source."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion that is ready to run."""

    model: Model
    """The output's model; for a Hugging Face output its topology has no meaning."""
    loaded: Loaded
    plan: Plan


def load(request: ConversionRequest) -> Loaded:
    """Open the source: read configuration, headers and arguments, no values.

    Raises:
        UserError: see the readers.
    """
    return _load_hf(request) if request.load_model_type == "hf" else _load_mg(request)


def prepare(request: ConversionRequest) -> Conversion:
    """Open the source and make the whole plan; nothing is written.

    Raises:
        UserError: what is asked for cannot be done; says why.
    """
    loaded = load(request)
    dtype = _DTYPES[request.params_dtype] if request.params_dtype else None
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
    source = WithCopies(loaded.source, model.copies)
    if request.save_model_type == "hf":
        plan = plan_hf(model, source, shard_size=request.max_shard_size, params_dtype=dtype)
    else:
        plan = plan_mg(model, source, iteration=mg_writer.ITERATION_FOLDER, params_dtype=dtype)
    return Conversion(model=model, loaded=replace(loaded, source=source), plan=plan)


def convert(request: ConversionRequest, *, on_bytes: Callable[[int], None] | None = None) -> Conversion:
    """Do what is asked: plan, write to a temporary folder, publish.

    Args:
        on_bytes: called with the number of bytes of each part that was written.

    Raises:
        UserError: what is asked for cannot be done; nothing is left behind.
    """
    conversion = prepare(request)
    try:
        _write(request, conversion, on_bytes)
    except OSError as error:
        raise UserError(
            f"--save-dir {request.save_dir}: writing failed ({error.strerror or error}); nothing was left there"
        ) from error
    return conversion


def _write(request: ConversionRequest, conversion: Conversion, on_bytes: Callable[[int], None] | None) -> None:
    model, plan = conversion.model, conversion.plan
    with Staging(request.save_dir, nbytes=plan.nbytes) as staging:
        if request.save_model_type == "hf":
            files = (hf_writer.lay_out(staging.folder, file) for file in plan.files)
        else:
            arguments = _mg_arguments(request, conversion)
            files = (
                mg_writer.lay_out(
                    staging.folder,
                    file,
                    arguments,
                    [chunk.key for chunk in model.chunks if file.rank is not None and chunk.stage == file.rank.pp],
                )
                for file in plan.files
            )
        fill(files, conversion.loaded.source, workers=request.workers, on_bytes=on_bytes)
        if request.save_model_type == "hf":
            hf_writer.write_index(staging.folder, plan)
            if request.hf_cfg_dir is not None:
                hf_writer.copy_beside(request.hf_cfg_dir, staging.folder)
            hf_writer.write_config(staging.folder, _hf_config(request, conversion))
            staging.publish(last=hf_writer.CONFIG)
        else:
            mg_writer.write_tracker(staging.folder)
            staging.publish(last=TRACKER)


def _load_hf(request: ConversionRequest) -> Loaded:
    if not request.load_dir.is_dir():
        raise UserError(f"--load-dir {request.load_dir}: expected a folder with a Hugging Face model")
    config = read_config(request.load_dir)
    where = str(request.load_dir / "config.json")
    family = families.of_config(config, where, requested=request.model_type_hf)
    settings = from_hf_config(family, config, where)
    for name, value in request.settings.items():
        if settings.get(name, value) != value:
            raise UserError(
                f"--{name.replace('_', '-')} {value} contradicts {where}, which says {settings[name]}; leave it out"
            )
    # Every layer of the source counts here, however few the output will have.
    whole = Topology(mtp_num_layers=settings.get("num_nextn_predict_layers") or 0 if family.mtp else 0)
    expected = bind(family, settings, whole).hf_tensors()
    return Loaded(
        family=family,
        settings=settings,
        config=config,
        source=HfSource(open_hf(request.load_dir, family.name_prefixes), expected),
    )


def _load_mg(request: ConversionRequest) -> Loaded:
    directory = MgDirectory(request.load_dir)
    arguments = dict(directory.arguments) | dict(request.settings)
    topology = topology_of(directory, request.loaded)
    config: Mapping[str, Any] = {}
    if request.hf_cfg_dir is not None:
        config = read_config(request.hf_cfg_dir)
        where = str(request.hf_cfg_dir / "config.json")
        family = families.of_config(config, where, requested=request.model_type_hf)
        settings = from_hf_config(family, config, where)
    else:
        where = str(directory.any_file.path)
        requested = request.model_type_hf or arguments.get("model_type_hf")
        if requested is None:
            raise UserError(f"{where} does not say of which family it is; give --model-type-hf or --hf-cfg-dir")
        family = families.by_id(requested)
        settings = from_megatron(family, arguments, where)
    said = arguments.get("num_layers")
    held = settings["num_layers"] if said is None else said - len(topology.noop_layers)
    settings = dict(settings) | {"num_layers": held}
    if family.mtp:
        settings["num_nextn_predict_layers"] = max(
            settings.get("num_nextn_predict_layers") or 0, topology.mtp_num_layers
        )
    if topology.padded_vocab_size is None:
        topology = replace(topology, padded_vocab_size=_padded_rows(directory, topology, settings["vocab_size"]))
    model = bind(family, settings, topology)
    return Loaded(
        family=family,
        settings=settings,
        config=config or to_hf_config(family, settings),
        source=MgSource(directory, model),
        topology=topology,
    )


def _padded_rows(directory: MgDirectory, topology: Topology, vocab_size: int) -> int | None:
    """The padded vocabulary of a checkpoint, read off its embedding; None where the first file has none."""
    for model in directory.any_file.models.values():
        stored = model.get("embedding.word_embeddings.weight")
        if stored is not None and stored.shape[0] * topology.tp >= vocab_size:
            return stored.shape[0] * topology.tp
    return None


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


def _mg_arguments(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    model, loaded = conversion.model, conversion.loaded
    settings = dict(loaded.settings)
    if settings.get("num_experts") and request.first_k_dense_replace is not None:
        settings["first_k_dense_replace"] = request.first_k_dense_replace
    return (
        to_megatron(settings, loaded.config)
        | mg_writer.topology_arguments(model.topology, len(model.layers), model.padded_vocab_size)
        | {"model_type_hf": loaded.family.ids[0], "iteration": mg_writer.ITERATION}
    )


def _hf_config(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    config = dict(conversion.loaded.config)
    config["num_hidden_layers"] = len(conversion.model.layers)
    if request.params_dtype is not None:
        # transformers 5 writes dtype, older ones torch_dtype.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _HF_DTYPE_NAMES[request.params_dtype]
    return config
