"""The command `train_fsdp2.py`: from a YAML file to a trained model.

Torch and transformers are imported only after the configuration has passed its checks, so that a typo is answered at
once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.publish import warn_of_replaced
from mindspeed_llm.fsdp2.checkpoint.resume_source import LATEST, check_resume
from mindspeed_llm.fsdp2.config import (
    Config,
    check_config,
    dump_yaml,
    folder_to_list,
    parse_command_line,
    resolved_dict,
)
from mindspeed_llm.fsdp2.config.adapter_files import warn_of_base

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from mindspeed_llm.fsdp2.checkpoint.manager import CheckpointManager
    from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest
    from mindspeed_llm.fsdp2.distributed.mesh import DataMesh


def main(argv: list[str]) -> int:
    """Train as `argv` says (or only check, with `--check`, or list checkpoints); returns the exit code.

    Raises:
        UserError: a mistake in the configuration, the data or the model directory.
        SystemExit: `--help`.
    """
    output_dir = folder_to_list(argv)
    if output_dir is not None:
        from mindspeed_llm.fsdp2.checkpoint.listing import list_checkpoints

        if os.environ.get("RANK", "0") == "0":
            list_checkpoints(output_dir)
        return 0
    invocation = parse_command_line(argv)
    config = invocation.config
    world_size = _environment_world_size()
    notices = check_config(config, world_size=world_size)
    check_resume(config.training)

    from mindspeed_llm.observability.log import get_logger, setup_logging

    setup_logging()
    logger = get_logger(__name__)
    for notice in notices:
        logger.info(notice)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    if is_first_rank and (warning := warn_of_base(config.model)) is not None:
        logger.warning(warning)

    from mindspeed_llm.fsdp2.data.validate import validate_data

    validate_data(config)
    changes = None
    if invocation.check_only or config.training.resume_from_checkpoint != LATEST:
        from mindspeed_llm.fsdp2.checkpoint.resume_settings import check_planned_resume

        # Before anything is made. What `latest` stands for, a run knows only once it has read the files.
        changes = check_planned_resume(config)
    if invocation.check_only:
        from mindspeed_llm.fsdp2.plan.report import print_plan

        if changes is not None:
            logger.warning(changes)
        if is_first_rank:
            if config.training.resume_from_checkpoint is None and (warning := warn_of_replaced(config)) is not None:
                logger.warning(warning)
            print_plan(config, world_size=world_size)
        return 0
    _train(config)
    return 0


def _train(config: Config) -> None:
    from mindspeed_llm.checkpoints.run_lock import run_lock
    from mindspeed_llm.fsdp2.distributed.mesh import build_mesh
    from mindspeed_llm.fsdp2.models.preflight import preflight
    from mindspeed_llm.observability.log import get_logger
    from mindspeed_llm.platform import device as platform_device
    from mindspeed_llm.platform import distributed
    from mindspeed_llm.platform.memory import return_freed_blocks
    from mindspeed_llm.platform.random import seed_everything

    logger = get_logger(__name__)
    training = config.training
    seed_everything(training.seed, deterministic=training.deterministic)
    if training.cpu_mmap_threshold is not None and not return_freed_blocks(training.cpu_mmap_threshold):
        logger.info("no effect from training.cpu_mmap_threshold: it is for runs on the CPU with glibc")
    device = platform_device.current_device()
    created = distributed.init_process_group()
    mesh = build_mesh(
        world_size=distributed.world_size(), fsdp_size=config.parallel.resolved_fsdp_size(distributed.world_size())
    )
    logger.info(
        "Device %s (%s), ranks: %d = %d x %d (copies of the model x shards)",
        device.type,
        platform_device.device_name(),
        mesh.size,
        mesh.replicas,
        mesh.shards,
    )
    # What costs nothing to check comes first, then the data, then the weights.
    tokenizer = preflight(config).tokenizer
    with run_lock(Path(training.output_dir), "training.output_dir"):
        _train_alone(config, tokenizer, mesh, device)
    if created:
        # Only on success: after an error the group's store still serves to agree on the one rank that reports it.
        distributed.destroy_process_group()


def _train_alone(config: Config, tokenizer: PreTrainedTokenizerBase, mesh: DataMesh, device: torch.device) -> None:
    """What `_train` does once no other run can write to the output folder."""
    from mindspeed_llm.fsdp2.checkpoint.resume_settings import check_data_length, check_settings
    from mindspeed_llm.fsdp2.data.data_factory import DataFactory
    from mindspeed_llm.fsdp2.data.order import DataPosition
    from mindspeed_llm.fsdp2.models.model_factory import ModelFactory
    from mindspeed_llm.fsdp2.train.trainer import Trainer
    from mindspeed_llm.observability import metrics_file, samples_file
    from mindspeed_llm.observability.log import get_logger
    from mindspeed_llm.platform import device as platform_device
    from mindspeed_llm.platform import distributed
    from mindspeed_llm.platform.random import seed_everything, set_rng_state

    logger = get_logger(__name__)
    training = config.training
    micro_batches = training.per_device_train_batch_size * training.gradient_accumulation_steps
    saves = training.save_steps > 0 or training.save_epochs > 0
    wanted = training.resume_from_checkpoint
    checkpoints = _open_checkpoints(config, mesh) if wanted else None
    chosen = checkpoints.choose(wanted) if checkpoints and wanted else None
    if wanted == "latest" and chosen is None:
        logger.info("No checkpoint in %s yet: training starts at step 0", training.output_dir)
    # A checkpoint of the model alone gives the weights to start from, and nothing to go on with.
    progress = chosen[1].progress if chosen and chosen[1].has_optimizer else None
    start, changes = None, check_settings(chosen[1], config) if chosen else None
    goes_on = checkpoints is not None and chosen is not None and progress is not None and checkpoints.is_own(chosen[0])
    if not goes_on and distributed.is_rank_zero() and (warning := warn_of_replaced(config)) is not None:
        logger.warning(warning)
    if chosen and progress is not None:
        start = DataPosition(step=progress["step"], samples=progress["samples"], layouts=tuple(progress["layouts"]))
    data = DataFactory(config, tokenizer).build(
        rank=mesh.rank, world_size=mesh.size, global_batch_size=micro_batches * mesh.size, start=start
    )
    if checkpoints and chosen and progress is not None:
        check_data_length(chosen[1], data.train, training)
        is_finished = progress["step"] >= data.train.total_steps(training.num_train_epochs, training.max_steps)
        if is_finished:
            to_export = training.save_hf_weights and checkpoints.is_export_missing(chosen[0])
            logger.info(
                "Nothing left to train: %s was written after the last step%s",
                chosen[0],
                "; the model is still to be exported" if to_export else "",
            )
            if not to_export:
                return
    quiet_libraries(is_first_rank=distributed.is_rank_zero())
    built = ModelFactory.create(config, mesh=mesh, device=device, from_checkpoint=chosen is not None)
    reference = ModelFactory.create_reference(config, mesh=mesh, device=device) if config.needs_reference else None
    # From here on every rank draws its own dropout masks; weights and data order are fixed already.
    begun = progress["step"] if progress else 0
    seed_everything(training.seed + distributed.rank() + begun, deterministic=training.deterministic)
    # Without saving, too: what an earlier run left must not pass for this one's.
    if checkpoints is None and (saves or _are_there_checkpoints(config)):
        checkpoints = _open_checkpoints(config, mesh)
    trainer = Trainer(
        config,
        built=built,
        tokenizer=tokenizer,
        data=data,
        mesh=mesh,
        device=device,
        checkpoints=checkpoints if saves else None,
        reference=reference,
    )
    if checkpoints and chosen:
        folder, manifest = chosen
        rank_state = checkpoints.load(folder, manifest, model=built.model, optimizer=trainer.optimizer)
        if progress is not None:
            trainer.resume(progress)
        if rank_state is not None:
            set_rng_state(rank_state["rng"])
        logger.info(_resume_line(folder, manifest, mesh.size))
    if changes is not None and distributed.is_rank_zero():
        logger.warning(changes)
    # Not before all is ready: a run that could not start leaves the files of an earlier one as they are.
    if checkpoints:
        checkpoints.begin(chosen)
    if distributed.is_rank_zero():
        for name in (metrics_file.FILE_NAME, samples_file.FILE_NAME):
            file = Path(training.output_dir) / name
            if checkpoints and chosen and not checkpoints.is_own(chosen[0]) and file.exists():
                metrics_file.set_aside(file)
        _write_run_files(config, platform_device.device_name())
    trainer.train()


def _are_there_checkpoints(config: Config) -> bool:
    """Whether any rank sees checkpoints or exports of an earlier run, which this one then sets aside."""
    from mindspeed_llm.checkpoints.storage import on_any_rank
    from mindspeed_llm.fsdp2.checkpoint import manifest as layout

    output_dir = Path(config.training.output_dir)
    folders = (layout.checkpoints_folder(output_dir), layout.exports_folder(output_dir))
    return on_any_rank(any(layout.steps_in(folder) for folder in folders))


def _open_checkpoints(config: Config, mesh: DataMesh) -> CheckpointManager:
    from mindspeed_llm.fsdp2.checkpoint.manager import CheckpointManager, RunFacts
    from mindspeed_llm.fsdp2.config.adapter_files import BASE, adapter_scale, base_fingerprint
    from mindspeed_llm.observability.versions import versions
    from mindspeed_llm.platform.device import device_name

    training, adapter = config.training, adapter_scale(config.model)
    return CheckpointManager(
        Path(training.output_dir),
        facts=RunFacts(
            topology={
                "ranks": mesh.size,
                "replicas": mesh.replicas,
                "shards": mesh.shards,
                "micro_batch_size": training.per_device_train_batch_size,
                "accumulation": training.gradient_accumulation_steps,
            },
            versions=versions(device_name=device_name()),
            config=resolved_dict(config),
            adapter=None if adapter is None else adapter | {BASE: base_fingerprint(config.model)},
        ),
        total_limit=training.save_total_limit,
        only_model=training.save_only_model,
        asynchronous=training.save_async,
        export_file=_last_file_of_export(config),
    )


def _last_file_of_export(config: Config) -> str:
    from mindspeed_llm.fsdp2.config.adapter_files import CONFIG as ADAPTER_CONFIG
    from mindspeed_llm.fsdp2.config.adapter_files import MERGED

    if not config.model.has_adapters:
        return "config.json"
    return f"{MERGED}/config.json" if config.training.merge_adapter else ADAPTER_CONFIG


def _resume_line(folder: Path, manifest: Manifest, ranks: int) -> str:
    if not manifest.has_optimizer:
        return f"Weights from {folder}, which holds the model only: training starts at step 0"
    line = f"Resumed from {folder} after step {manifest.step}"
    if manifest.topology["ranks"] != ranks:
        now = f"{ranks} rank{'s' if ranks > 1 else ''}"
        line += f" on {now} instead of {manifest.topology['ranks']} (dropout draws new numbers)"
    return line


def quiet_libraries(*, is_first_rank: bool) -> None:
    """Leave transformers' progress bars to the first rank, and to a terminal."""
    import sys

    from transformers.utils import logging as transformers_logging

    if not (is_first_rank and sys.stderr.isatty()):
        transformers_logging.disable_progress_bar()


def _write_run_files(config: Config, device_name: str) -> None:
    """The resolved configuration and the versions of this run, beside its results."""
    from mindspeed_llm.observability.versions import write_versions

    folder = Path(config.training.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run_config.yaml").write_text(dump_yaml(resolved_dict(config)), encoding="utf-8")
        write_versions(folder, device_name=device_name)
    except OSError as error:
        raise UserError(f"training.output_dir: cannot write to {folder} ({error}); choose another folder") from error


def _environment_world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isdecimal() and int(text) > 0):
        raise UserError(f"environment variable WORLD_SIZE={text!r}: expected a whole number above 0 (torchrun sets it)")
    return int(text)
