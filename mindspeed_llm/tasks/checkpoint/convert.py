"""One conversion from its request to the published folder."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import families, hf_writer, mg_writer
from mindspeed_llm.tasks.checkpoint.arguments import (
    config_of_layers,
    from_hf_config,
    from_megatron,
    language_model,
    of_layers,
    to_hf_config,
    to_megatron,
)
from mindspeed_llm.tasks.checkpoint.fill import OpenFile, fill
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf, read_config
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.mg_reader import TRACKER, MgDirectory, topology_of
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.plan import Plan, TargetFile, plan_hf, plan_mg
from mindspeed_llm.tasks.checkpoint.progress import Progress
from mindspeed_llm.tasks.checkpoint.report import REPORT, Figures, make_report, report_text, sha256
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import HfSource, MgSource, Renamed, Source, WithCopies
from mindspeed_llm.tasks.checkpoint.staging import Staging, write_text
from mindspeed_llm.tasks.checkpoint.tables import Family
from mindspeed_llm.tasks.checkpoint.verify import Verified, forget_cached, verify
from mindspeed_llm.tasks.checkpoint.write_back import WriteBack

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HF_DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


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


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A conversion that is ready to run."""

    model: Model
    """The output's model; for a Hugging Face output its topology has no meaning."""
    loaded: Loaded
    plan: Plan
    report: Mapping[str, Any] = field(default_factory=dict)
    """What was done, once it is; see `report`."""


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
    source = WithCopies(loaded.source, model.written_copies)
    if request.save_model_type == "hf":
        _refuse_new_numbers(model, loaded.settings["num_layers"])
        plan = plan_hf(model, source, shard_size=request.max_shard_size, params_dtype=dtype)
    else:
        plan = plan_mg(model, source, iteration=mg_writer.ITERATION_FOLDER, params_dtype=dtype)
    return Conversion(model=model, loaded=replace(loaded, source=source), plan=plan)


def convert(request: ConversionRequest, *, progress: Progress | None = None) -> Conversion:
    """Do what is asked: plan, write to a temporary folder, verify, publish.

    Raises:
        UserError: what is asked for cannot be done, or the output is not what it should be; nothing is left behind.
    """
    started = time.perf_counter(), time.process_time()
    conversion = prepare(request)
    try:
        with progress or Progress(show=False) as counted:
            report = _write(request, conversion, counted, started)
    except OSError as error:
        raise UserError(
            f"--save-dir {request.save_dir}: writing failed ({error.strerror or error}); nothing was left there"
        ) from error
    return replace(conversion, report=report)


def _write(
    request: ConversionRequest, conversion: Conversion, progress: Progress, started: tuple[float, float]
) -> Mapping[str, Any]:
    plan, to_hf = conversion.plan, request.save_model_type == "hf"
    with Staging(request.save_dir, nbytes=plan.nbytes) as staging, WriteBack() as disk:
        folder = staging.folder
        progress.begin("converted", plan.nbytes)
        checksums = fill(
            (_lay_out(request, conversion, file, folder) for file in plan.files),
            conversion.loaded.source,
            write_back=disk,
            workers=request.workers,
            on_bytes=progress.add,
        )
        if to_hf:
            hf_writer.write_index(folder, plan)
            if request.hf_cfg_dir is not None:
                hf_writer.copy_beside(request.hf_cfg_dir, folder)
            hf_writer.write_config(folder, _hf_config(request, conversion))
        else:
            mg_writer.write_tracker(folder)
        verified = _verify(request, conversion, folder, disk, progress)
        progress.begin("waiting for the disk")
        disk.wait()
        progress.begin("done")
        report = _report(request, conversion, folder, checksums, verified, progress, started)
        write_text(folder / REPORT, report_text(report))
        staging.publish(last=hf_writer.CONFIG if to_hf else TRACKER)
    return report


def _lay_out(request: ConversionRequest, conversion: Conversion, file: TargetFile, folder: Path) -> OpenFile:
    if file.rank is None:
        return hf_writer.lay_out(folder, file)
    chunks = [chunk.key for chunk in conversion.model.chunks if chunk.stage == file.rank.pp]
    return mg_writer.lay_out(folder, file, _mg_arguments(request, conversion), chunks)


def _verify(
    request: ConversionRequest, conversion: Conversion, folder: Path, disk: WriteBack, progress: Progress
) -> Verified | None:
    if request.verify == "none":
        return None
    model, plan = conversion.model, conversion.plan
    full = request.verify == "full"
    if full:
        progress.begin("waiting for the disk")
        disk.wait()
        for file in plan.files:
            forget_cached(folder / file.path)

    def output() -> Source:
        itself = ConversionRequest(
            load_model_type=request.save_model_type,
            save_model_type="hf",
            load_dir=folder,
            save_dir=request.save_dir,
            model_type_hf=conversion.loaded.family.ids[0],
        )
        # A shortened model has new numbers for its layers.
        settings = _settings(request, conversion)
        written = bind(conversion.loaded.family, settings, model.topology)
        names = dict(zip(model.hf_tensors(), written.hf_tensors(), strict=True))
        return Renamed(WithCopies(load(itself).source, written.written_copies), names)

    progress.begin("verified", plan.nbytes if full else 0)
    return verify(
        folder,
        plan,
        conversion.loaded.source,
        output,
        model.hf_tensors(),
        full=full,
        workers=request.workers,
        on_bytes=progress.add,
    )


def _report(
    request: ConversionRequest,
    conversion: Conversion,
    folder: Path,
    checksums: Mapping[Path, int],
    verified: Verified | None,
    progress: Progress,
    started: tuple[float, float],
) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {
        path: {"crc32": f"{checksums[path] if path in checksums else zlib.crc32(path.read_bytes()):08x}"}
        for path in files
    }
    if request.verify == "full":
        progress.begin("hashing")
        with ThreadPoolExecutor(max_workers=request.workers) as pool:
            for path, digest in zip(files, pool.map(sha256, files), strict=True):
                hashes[path]["sha256"] = digest
    topologies = {"input": conversion.loaded.topology, "output": conversion.model.topology}
    if request.save_model_type == "hf":
        del topologies["output"]
    return make_report(
        request,
        family=conversion.loaded.family.ids[0],
        topology={side: topology for side, topology in topologies.items() if topology is not None},
        plan=conversion.plan,
        source=conversion.loaded.source,
        hashes={str(path.relative_to(folder)): found for path, found in hashes.items()},
        sizes={str(path.relative_to(folder)): path.stat().st_size for path in files},
        verified=verified,
        figures=Figures(
            seconds=time.perf_counter() - started[0],
            cpu_seconds=time.process_time() - started[1],
            peak_anonymous_bytes=progress.peak_anonymous_bytes,
        ),
    )


def _refuse_new_numbers(model: Model, total: int) -> None:
    """Names of Hugging Face tensors carry the number of their layer, which must be the one in the source."""
    if model.layers != list(range(total if model.topology.mtp_num_layers else len(model.layers))):
        raise UserError(
            "--num-layers and --first-k-dense-replace would give layers of the Hugging Face output other numbers than "
            "they have in the source; shorten the model on the way to a Megatron checkpoint, and convert that one"
        )


def _load_hf(request: ConversionRequest) -> Loaded:
    if not request.load_dir.is_dir():
        raise UserError(f"--load-dir {request.load_dir}: expected a folder with a Hugging Face model")
    config = language_model(read_config(request.load_dir))
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
        config = language_model(read_config(request.hf_cfg_dir))
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
        config=config,
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
    return (
        to_megatron(_settings(request, conversion), loaded.config)
        | mg_writer.topology_arguments(model.topology, len(model.layers), model.padded_vocab_size)
        | {"model_type_hf": loaded.family.ids[0], "iteration": mg_writer.ITERATION}
    )


def _hf_config(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
    loaded, layers = conversion.loaded, conversion.model.layers
    if loaded.config:
        config = config_of_layers(loaded.family, loaded.config, layers, loaded.settings["num_layers"])
    else:
        config = to_hf_config(loaded.family, _settings(request, conversion))
        config["dtype"] = _most_common_dtype(conversion.plan)
    if request.params_dtype is not None:
        # transformers 5 writes dtype, older ones torch_dtype.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _HF_DTYPE_NAMES[request.params_dtype]
    return config


def _settings(request: ConversionRequest, conversion: Conversion) -> dict[str, Any]:
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
