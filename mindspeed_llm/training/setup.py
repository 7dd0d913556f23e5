"""What a training loop works with: the model's chunks of this rank, their optimizer, the schedule of its parameters."""

from __future__ import annotations

import contextlib
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import nn

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.lora.attach import attach
from mindspeed_llm.core.lora.local_learning import local_rules
from mindspeed_llm.core.lora.local_settings import LocalSettings, local_settings
from mindspeed_llm.core.lora.settings import LoraSettings, lora_settings
from mindspeed_llm.core.shared_master import share_masters
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.tasks.models.config import transformer_config
from mindspeed_llm.tasks.models.hf_weights import load_hf_weights
from mindspeed_llm.tasks.models.provider import build_model


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A model that is ready to be trained."""

    config: LlmConfig
    chunks: list[DistributedDataParallel]
    """One per virtual stage of this rank."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def modules(self) -> list[nn.Module]:
        """The chunks without what wraps them."""
        return [unwrapped(chunk) for chunk in self.chunks]


@contextlib.contextmanager
def complete_weights(model: TrainingModel) -> Iterator[None]:
    """A context in which all weights of this rank are those of the last step.

    With `--overlap-param-gather` a step leaves each data-parallel rank with its own share of new weights, and the
    others arrive in the course of the next forward.
    """
    overlapped = [chunk for chunk in model.chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


def unwrapped(module: nn.Module) -> nn.Module:
    """A chunk without the modules around it."""
    while isinstance(module, DistributedDataParallel | Float16Module):
        module = module.module
    return module


def build_training_model(args: Namespace, *, hf_weights: Path | None = None) -> TrainingModel:
    """Build this rank's part of the model, fill it, and make its optimizer.

    Args:
        args: validated arguments; `initialize` has run.
        hf_weights: a Hugging Face directory whose weights to take; None: initial weights, for a checkpoint to be loaded
            into later or to be trained from.

    Raises:
        UserError: the weights do not belong to the model.
    """
    config = transformer_config(args)
    if hf_weights is not None:
        draw_nothing(config)
    modules = build_chunks(args, config)
    if hf_weights is not None:
        load_hf_weights(modules, hf_weights, args)
    lora = lora_settings(args)
    local = local_settings(args)
    if lora is not None:
        _adapt(modules, lora, local)
    for module in modules:
        for parameter in module.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    wrapped: list[nn.Module] = [Float16Module(config, m) for m in modules] if args.bf16 or args.fp16 else list(modules)
    for rule in local_rules(modules):
        rule.keep_in_fp32()
    ddp_config = _ddp_config(args)
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=module,
            # Later chunks' gradients are ready first: their buckets cannot overlap with anything.
            disable_bucketing=index > 0 or args.overlap_param_gather_with_optimizer_step,
        )
        for index, module in enumerate(wrapped)
    ]
    optimizer_config = _optimizer_config(args)
    optimizer = get_megatron_optimizer(optimizer_config, chunks, _rates(optimizer_config, local))
    if args.reuse_fp32_param:
        share_masters(optimizer)
    _connect(config, args, chunks, optimizer)
    return TrainingModel(config=config, chunks=chunks, optimizer=optimizer, scheduler=_scheduler(args, optimizer))


def draw_nothing(config: LlmConfig) -> None:
    """Let a model be built without initial weights, where every parameter is filled from files or the model is refused.

    Not by `perform_initialization`, without which megatron-core does not mark the parameters that are shards.
    """
    config.init_method = config.output_layer_init_method = config.embedding_init_method = _leave


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _adapt(modules: list[nn.Module], settings: LoraSettings, local: LocalSettings | None) -> None:
    """Put adapters on the model, and freeze the rest (a collective).

    Raises:
        UserError: on all ranks; a target is on no rank.
    """
    of_ranks: list[Any] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, attach(modules, settings, local))
    everywhere = set().union(*of_ranks)
    if missing := [target for target in settings.targets if target not in everywhere]:
        raise UserError(
            f"--lora-target-modules {' '.join(settings.targets)}: {missing[0]} matches no layer of the model; it has "
            f"{' '.join(sorted(everywhere)) or 'none of them'}"
        )


def build_chunks(args: Namespace, config: LlmConfig) -> list[nn.Module]:
    """The models of this rank's stage, one per virtual stage, on this rank's device."""
    count = args.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if count is None else list(range(count))
    return [
        build_model(
            args,
            config,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=count is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=count is None, vp_stage=stage),
            vp_stage=stage,
        ).to(current_device())
        for stage in stages
    ]


def _connect(
    config: LlmConfig, args: Namespace, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Tell the schedule how gradients and parameters are brought together."""
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    several = len(chunks) > 1
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if several else chunks[0].no_sync
        if args.align_grad_reduce:
            sync = [chunk.start_grad_sync for chunk in chunks]
            config.grad_sync_func = sync if several else sync[0]
    if args.overlap_param_gather and args.align_param_gather:
        gather = [chunk.start_param_sync for chunk in chunks]
        config.param_sync_func = gather if several else gather[0]


def _ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        # The loop looks at loss and norm of the gradients itself, which sees the same, and knows the step. Overflows
        # are a part of fp16 with a dynamic scale.
        check_for_nan_in_grad=False,
        bucket_size=args.ddp_bucket_size,
        average_in_collective=False,
    )


def _rates(config: OptimizerConfig, local: LocalSettings | None) -> dict[ParamKey, Any] | None:
    """What differs between parameters; None: nothing but what megatron-core always tells apart."""
    if local is None or local.ratio == 1.0:
        return None
    of_b = ParamWithNamePredicate(name="lora_b", fn=lambda _, name: "lora_B." in name or name.endswith("_lora_b"))
    # megatron-core's schedule knows limits alone; the factor is for who sets them anew.
    rates = {"lr_mult": local.ratio, "max_lr": config.lr * local.ratio, "min_lr": config.min_lr * local.ratio}
    return {**get_standard_config_overrides(config), ParamKey(with_name_predicate=of_b): rates}


def _optimizer_config(args: Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        overlap_param_gather_with_optimizer_step=args.overlap_param_gather_with_optimizer_step,
        # The norm is reported, and looked at, without clipping as well.
        clip_grad=args.clip_grad or math.inf,
        log_num_zeros_in_grad=args.log_num_zeros_in_grad,
    )


def _scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule counts in samples, as Megatron's does; `training.arguments` has worked out how many."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_steps,
        lr_decay_steps=args.lr_decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.wd_incr_steps,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
