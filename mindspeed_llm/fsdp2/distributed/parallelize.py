"""The order in which parallel features are put on a model."""

from __future__ import annotations

from torch import nn

from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
from mindspeed_llm.fsdp2.distributed.fsdp import ShardedModel, apply_fsdp, module_groups
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh
from mindspeed_llm.fsdp2.distributed.modules import find_modules
from mindspeed_llm.fsdp2.distributed.recompute import apply_recompute


def parallelize(model: nn.Module, *, mesh: DataMesh, config: ParallelConfig) -> ShardedModel:
    """Recomputation first, then FSDP: FSDP's hooks must lie outside the recomputed part of a module, or every backward
    would gather the parameters twice."""
    if config.recompute:
        apply_recompute(find_modules(model, config.recompute_modules, field="parallel.recompute_modules"))
    return apply_fsdp(model, mesh=mesh, config=config)


def check_patterns(model: nn.Module, config: ParallelConfig) -> None:
    """Raise `UserError` for a pattern of `config` that matches no module of `model` (which may be on meta)."""
    module_groups(model, config)
    if config.recompute:
        find_modules(model, config.recompute_modules, field="parallel.recompute_modules")
