"""Section `parallel`: how the model is spread over the ranks, precision, recomputation and prefetching."""

from dataclasses import dataclass, field
from typing import Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.types import NonNegativeInt, PositiveInt

DTypeName = Literal["bf16", "fp16", "fp32"]
ShardPlacement = Literal["shard_by_dim_0", "shard_by_dim_1"]


def _layers() -> list[str]:
    return ["model.layers.{*}"]


def _experts() -> list[str]:
    return ["model.layers.{*}.mlp.experts"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Settings of parallelism and memory. Module lists hold patterns of `mindspeed_llm.fsdp2.config.patterns`."""

    tp_size: PositiveInt = 1
    """Ranks of a tensor parallel group."""

    fsdp_size: PositiveInt | None = None
    """Ranks that share one copy of the model. null: all. A smaller number that divides the world makes replicas
    (HSDP): world = replicas x fsdp_size."""

    recompute: bool = False
    """Drop activations in the forward pass and compute them again in the backward pass."""

    ep_size: PositiveInt = 1
    """Ranks of an expert parallel group."""

    ep_fsdp_size: PositiveInt = 1
    """Ranks that share one copy of an expert group's weights."""

    cp_size: PositiveInt = 1
    """Ranks that share one sequence (context parallel)."""

    cp_type: Literal["ulysses", "ring", "kvallgather"] = "ulysses"
    """How context parallel ranks exchange attention data."""

    fsdp_modules: list[str] = field(default_factory=lambda: ["model.layers.{*}", "model.embed_tokens", "lm_head"])
    """Patterns of the modules that are sharded as units; what they leave is sharded with the root."""

    ignored_modules: list[str] | None = None
    """Patterns of modules whose parameters stay whole on every rank."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a unit after its forward pass and gather them again for the backward pass: less
    memory, more communication."""

    shard_placement_fn: ShardPlacement | None = None
    """Dimension that parameters of `fsdp_modules` are cut along, where it divides evenly. null: the first."""

    efsdp_shard_placement_fn: ShardPlacement | None = "shard_by_dim_1"
    """Dimension that expert parameters are cut along inside an expert group."""

    hook_modules: list[str] = field(default_factory=_layers)
    """Patterns of the modules that the custom FSDP implementation hooks."""

    fsdp_implementation: Literal["native", "custom"] = "native"
    """`native` is torch's fully_shard."""

    tp_colwise: list[str] = field(
        default_factory=lambda: ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"]
    )
    """Patterns of linear layers cut along their output for tensor parallelism."""

    tp_rowwise: list[str] = field(default_factory=lambda: ["*.o_proj", "*.down_proj"])
    """Patterns of linear layers cut along their input for tensor parallelism."""

    ep_modules: list[str] = field(default_factory=_experts)
    """Patterns of the expert modules that expert parallelism distributes."""

    ep_fsdp_modules: list[str] = field(default_factory=_experts)
    """Patterns of the expert modules that are sharded within their expert group."""

    ep_dispatcher: Literal["eager", "fused", "mc2"] = "eager"
    """How tokens travel to their experts and back."""

    recompute_modules: list[str] = field(default_factory=_layers)
    """Patterns of the modules that `recompute` applies to."""

    param_dtype: DTypeName = "bf16"
    """Type that forward and backward compute in. Master weights and optimizer state are fp32."""

    reduce_dtype: DTypeName = "fp32"
    """Type that gradients are reduced in."""

    num_to_forward_prefetch: NonNegativeInt = 1
    """Units whose weights are gathered ahead in the forward pass."""

    num_to_backward_prefetch: NonNegativeInt = 1
    """Units whose weights are gathered ahead in the backward pass."""

    enable_chunk_batch: bool = False
    """Send a micro batch through each unit in chunks while its weights are gathered."""

    chunk_mbs: PositiveInt = 1
    """Samples of one chunk."""

    chunk_mbs_batch_dim: NonNegativeInt = 0
    """Dimension of the batch in the arguments that are split into chunks."""

    chunk_mbs_modules: list[str] = field(default_factory=_layers)
    """Patterns of the modules that work in chunks."""

    chunk_mbs_arg_indexs: list[int] = field(default_factory=lambda: [0])
    """Positional arguments to split into chunks."""

    chunk_mbs_kwarg_names: list[str] = field(
        default_factory=lambda: ["position_embeddings", "position_ids", "attention_mask", "input_ids"]
    )
    """Keyword arguments to split into chunks."""

    def resolved_fsdp_size(self, world_size: int) -> int:
        """The ranks that share one copy of the model in a world of `world_size` ranks.

        `UserError` where `fsdp_size` does not divide the world.
        """
        size = world_size if self.fsdp_size is None else self.fsdp_size
        if world_size % size:
            divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
            replicas, rest = divmod(world_size, size)
            raise UserError(
                f"parallel.fsdp_size = {size} does not fit a world of {world_size} ranks: world = replicas x "
                f"fsdp_size, but {world_size} = {replicas} x {size} + {rest}. Leave fsdp_size out (or null) to use "
                f"all ranks, set it to one of {', '.join(divisors)}, or start another number of ranks "
                "(torchrun --nproc_per_node x --nnodes)."
            )
        return size
