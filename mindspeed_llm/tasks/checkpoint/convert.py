"""One conversion from its request to the published folder."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import hf_writer, mg_writer, peft_files
from mindspeed_llm.tasks.checkpoint.check_source import check_source
from mindspeed_llm.tasks.checkpoint.copies import refuse_second_head, say_lost_values
from mindspeed_llm.tasks.checkpoint.earlier import earlier_files
from mindspeed_llm.tasks.checkpoint.fill import OpenFile, fill
from mindspeed_llm.tasks.checkpoint.load import load
from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.checkpoint.plan import TargetFile
from mindspeed_llm.tasks.checkpoint.prepare import (
    Conversion,
    adapter_config,
    hf_config,
    mg_arguments,
    output_settings,
    prepare,
)
from mindspeed_llm.tasks.checkpoint.progress import Progress
from mindspeed_llm.tasks.checkpoint.report import REPORT, Figures, make_report, report_text, sha256
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.sources import Renamed, Source, WithCopies
from mindspeed_llm.tasks.checkpoint.staging import Staging, write_text
from mindspeed_llm.tasks.checkpoint.verify import Verified, forget_cached, verify
from mindspeed_llm.tasks.checkpoint.write_back import WriteBack


def convert(
    request: ConversionRequest, *, progress: Progress | None = None, held: MgDirectory | None = None
) -> Conversion:
    """Do what is asked: plan, write to a temporary folder, verify, publish.

    Args:
        held: the checkpoint of `load_dir`, where that is in memory; for `verify` sample or none.

    Raises:
        UserError: what is asked for cannot be done, or the output is not what it should be; nothing is left behind.
    """
    started = time.perf_counter(), time.process_time()
    conversion = prepare(request, held)
    if request.verify == "full":
        check_source(request.load_dir, request.load_model_type, workers=request.workers)
        if request.lora_load is not None:
            kind = "hf" if peft_files.is_peft(request.lora_load) else "mg"
            check_source(request.lora_load, kind, workers=request.workers)
    if conversion.loaded.check is not None:
        conversion.loaded.check(request.verify == "full")
    refuse_second_head(conversion.plan, conversion.model, conversion.loaded.source)
    if request.verify != "none":
        plan, source = conversion.plan, conversion.loaded.source
        plan = say_lost_values(plan, conversion.model, source, full=request.verify == "full")
        conversion = replace(conversion, plan=plan)
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
    alone = conversion.loaded.adapter if conversion.loaded.alone else None
    earlier = earlier_files(request.save_dir) if request.overwrite else None
    workers = request.workers
    with (
        Staging(request.save_dir, nbytes=plan.nbytes, earlier=earlier, workers=workers) as staging,
        WriteBack() as disk,
    ):
        folder = staging.folder
        progress.begin("converted", plan.nbytes)
        checksums = fill(
            (_lay_out(request, conversion, file, folder) for file in plan.files),
            conversion.loaded.source,
            write_back=disk,
            workers=request.workers,
            on_bytes=progress.add,
        )
        if to_hf and alone is not None:
            peft_files.write_config(staging.last, adapter_config(request, alone))
        elif to_hf:
            hf_writer.write_index(folder, plan)
            if request.hf_cfg_dir is not None:
                hf_writer.copy_beside(request.hf_cfg_dir, folder)
            hf_writer.write_config(staging.last, hf_config(request, conversion))
        else:
            mg_writer.write_tracker(staging.last)
        verified = _verify(request, conversion, staging, disk, progress)
        progress.begin("waiting for the disk")
        disk.wait()
        report = _report(request, conversion, staging, checksums, verified, progress, started)
        write_text(folder / REPORT, report_text(report))
        staging.publish()
    return report


def _lay_out(request: ConversionRequest, conversion: Conversion, file: TargetFile, folder: Path) -> OpenFile:
    if file.rank is None:
        return hf_writer.lay_out(folder, file)
    chunks = [chunk.key for chunk in conversion.model.chunks if chunk.stage == file.rank.pp]
    return mg_writer.lay_out(folder, file, mg_arguments(request, conversion), chunks)


def _verify(
    request: ConversionRequest, conversion: Conversion, staging: Staging, disk: WriteBack, progress: Progress
) -> Verified | None:
    if request.verify == "none":
        return None
    model, plan, folder = conversion.model, conversion.plan, staging.folder
    full = request.verify == "full"
    if full:
        progress.begin("waiting for the disk")
        disk.wait()
        for file in plan.files:
            forget_cached(folder / file.path)

    def output() -> Source:
        to_hf = request.save_model_type == "hf"
        loaded = conversion.loaded
        if loaded.alone and to_hf:
            return peft_files.open_peft(folder, loaded.family, loaded.settings, config_folder=staging.last).source
        itself = ConversionRequest(
            load_model_type=request.save_model_type,
            save_model_type="hf",
            load_dir=folder if to_hf else folder / mg_writer.ITERATION_FOLDER,
            save_dir=request.save_dir,
            model_type_hf=conversion.loaded.family.ids[0],
            hf_cfg_dir=staging.last if to_hf else None,
            save_lora_to_hf=loaded.alone,
        )
        if loaded.alone:
            return load(itself).source
        # A shortened model has new numbers for its layers.
        settings = output_settings(request, conversion)
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
    staging: Staging,
    checksums: Mapping[Path, int],
    verified: Verified | None,
    progress: Progress,
    started: tuple[float, float],
) -> dict[str, Any]:
    # What stands in `last` now will stand beside the rest.
    files = {
        str(path.relative_to(staging.last if path.parent == staging.last else staging.folder)): path
        for path in sorted(staging.folder.rglob("*"))
        if path.is_file()
    }
    hashes = {
        name: {"crc32": f"{checksums[path] if path in checksums else zlib.crc32(path.read_bytes()):08x}"}
        for name, path in files.items()
    }
    if request.verify == "full":
        progress.begin("hashing")
        with ThreadPoolExecutor(max_workers=request.workers) as pool:
            for name, digest in zip(files, pool.map(sha256, files.values()), strict=True):
                hashes[name]["sha256"] = digest
    topologies = {"input": conversion.loaded.topology, "output": conversion.model.topology}
    if request.save_model_type == "hf":
        del topologies["output"]
    return make_report(
        request,
        family=conversion.loaded.family.ids[0],
        topology={side: topology for side, topology in topologies.items() if topology is not None},
        plan=conversion.plan,
        source=conversion.loaded.source,
        dequantised=conversion.loaded.dequantised,
        hashes=hashes,
        sizes={name: path.stat().st_size for name, path in files.items()},
        verified=verified,
        figures=Figures(
            seconds=time.perf_counter() - started[0],
            cpu_seconds=time.process_time() - started[1],
            peak_anonymous_bytes=progress.peak_anonymous_bytes,
        ),
        adapter=conversion.adapter_summary,
    )
