"""Fields, or values of fields, whose feature this package does not have yet.

The one table of such refusals: a feature that arrives deletes its row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NotAvailable:
    """Why a field cannot be set. The default is always accepted; `refused` narrows the refusal to the values for which
    it is true."""

    reason: str
    refused: Callable[[Any], bool] | None = None

    def refuses(self, value: Any, default: Any) -> bool:
        """Whether `value` is refused."""
        if value == default:
            return False
        return self.refused is None or self.refused(value)


_DSA = "there is no model with sparse attention (DSA) yet"
_GDN = "the gated delta net runs as transformers computes it"
_VOCABULARY = "embeddings keep their size; added tokens must fit into the rows that the model has"

NOT_AVAILABLE: dict[str, NotAvailable] = {
    "model.model_id": NotAvailable(
        reason="available are qwen3, qwen3_moe, qwen3_next, gpt_oss, and with null every model that transformers knows",
        refused=lambda value: value not in ("qwen3", "qwen3_moe", "qwen3_next", "gpt_oss"),
    ),
    "model.resize_vocab": NotAvailable(reason=_VOCABULARY),
    "model.new_special_tokens_config": NotAvailable(reason=_VOCABULARY),
    "model.init_special_tokens": NotAvailable(reason=_VOCABULARY),
    "model.quant_recipe_name": NotAvailable(reason="training computes in parallel.param_dtype"),
    "data.dataset_dir": NotAvailable(
        reason="data sets are read from local files; give the folder of dataset_info.json",
        refused=lambda value: value == "ONLINE" or value.startswith("REMOTE:"),
    ),
    "data.ignore_pad_token_for_loss": NotAvailable(reason="padding never counts in the loss"),
    "parallel.tp_size": NotAvailable(reason="tensor parallelism; keep 1"),
    "parallel.ep_size": NotAvailable(reason="expert parallelism; keep 1"),
    "parallel.cp_size": NotAvailable(reason="context parallelism; keep 1"),
    "parallel.fsdp_implementation": NotAvailable(reason="only native, torch's fully_shard"),
    "parallel.enable_chunk_batch": NotAvailable(reason="a micro batch goes through the model as a whole"),
    "training.optimizer": NotAvailable(
        reason="available are adamw and fused_adamw", refused=lambda value: value == "muon"
    ),
    "training.indexer_loss_coeff": NotAvailable(reason=_DSA),
    "training.mtp_loss_scaling_factor": NotAvailable(reason="there is no model with multi-token prediction yet"),
    "optimization.use_sparse_flash_attn": NotAvailable(reason=_DSA),
    "optimization.use_fused_lightning_indexer": NotAvailable(reason=_DSA),
    "optimization.use_fused_lightning_indexer_loss": NotAvailable(reason=_DSA),
    "optimization.use_ascend_mhc": NotAvailable(reason="model deepseek_v4"),
    "optimization.use_triton_swiglu_limit": NotAvailable(reason="model deepseek_v4"),
    "optimization.pre_tokens": NotAvailable(reason=_DSA),
    "optimization.next_tokens": NotAvailable(reason=_DSA),
    "optimization.use_triton_gdn": NotAvailable(reason=_GDN),
    "optimization.use_flash_gdn": NotAvailable(reason=_GDN),
    "optimization.gdn_chunk_size": NotAvailable(reason=_GDN),
    "optimization.chunk_loss_size": NotAvailable(reason="the loss is computed over whole sequences"),
    "optimization.use_triton_rmsnormgated": NotAvailable(reason="model mamba3"),
    "optimization.fix_router": NotAvailable(reason="tokens go where the router sends them"),
}
