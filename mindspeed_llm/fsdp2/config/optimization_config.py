"""Section `optimization`: fused operators and other ways to save time and memory."""

from dataclasses import dataclass

from mindspeed_llm.fsdp2.config.types import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Switches that change how a result is computed, not the result."""

    use_fused_rmsnorm: bool = False
    """RMSNorm as one operator."""

    moe_grouped_gemm: bool = False
    """Compute all experts of a layer with grouped matrix products."""

    use_fused_rotary_pos_emb: bool = False
    """Rotary position embedding as one operator."""

    use_flash_attn: bool = False
    """Attention as one operator that never holds the matrix of scores."""

    use_sparse_flash_attn: bool = False
    """Fused sparse attention of models with an indexer (DSA)."""

    use_fused_lightning_indexer: bool = False
    """Fused indexer of models with sparse attention (DSA)."""

    use_fused_lightning_indexer_loss: bool = False
    """Fused loss of the indexer of models with sparse attention (DSA)."""

    use_ascend_mhc: bool = False
    """Fused hyper-connections of deepseek_v4."""

    use_triton_swiglu_limit: bool = False
    """Fused SwiGLU with a limit, of deepseek_v4."""

    pre_tokens: NonNegativeInt = 1048576
    """Tokens before a position that the window of sparse attention (DSA) holds."""

    next_tokens: NonNegativeInt = 0
    """Tokens after a position that the window of sparse attention (DSA) holds."""

    use_triton_gdn: bool = False
    """Gated delta net of qwen3_next as Triton kernels. Excludes `use_flash_gdn`."""

    use_flash_gdn: bool = False
    """Gated delta net of qwen3_next as fused operators. Excludes `use_triton_gdn`."""

    gdn_chunk_size: PositiveInt = 64
    """Tokens of one chunk of the gated delta net of qwen3_next."""

    chunk_loss_size: PositiveInt | None = None
    """Compute logits and loss in chunks of this many tokens, so that the logits of a whole sequence never exist."""

    use_triton_rmsnormgated: bool = False
    """Gated RMSNorm of mamba3 as a Triton kernel."""

    fix_router: bool = False
    """Give tokens to experts in turn instead of by the router; for speed measurements only."""
