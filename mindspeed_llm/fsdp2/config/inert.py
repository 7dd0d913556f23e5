"""Fields without effect: ever (`INERT`), or as long as another field stands where it stands (`IDLE`).

One line is printed when such a field is set. `IDLE` rows are data too: field -> the field that it hangs on, the test of
that field's value, and the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRAINING = "it is read when text is generated, not in training"

INERT: dict[str, str] = {
    "model.use_fast_tokenizer": "transformers 5 has one kind of tokenizer and ignores the choice",
    "model.ms_hub_token": "only the Hugging Face hub is asked for files",
    "model.om_hub_token": "only the Hugging Face hub is asked for files",
    "data.eval_num_beams": "evaluation measures the loss and generates nothing",
    "data.create_attention_mask_in_dataloader": "attention builds the causal mask itself",
    "training.calculate_per_token_loss": "every token of the global batch weighs the same in any case",
    "inference.max_new_tokens": _TRAINING,
    "inference.do_sample": _TRAINING,
}


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A field has no effect while `idle(value of the field `because`)` is true."""

    because: str
    idle: Callable[[Any], bool]


def _rows(because: str, idle: Callable[[Any], bool], *fields: str) -> dict[str, Idle]:
    return {field: Idle(because=because, idle=idle) for field in fields}


IDLE: dict[str, Idle] = {
    **_rows(
        "model.quant_recipe_name",
        lambda recipe: recipe is None,
        "model.quant_apply_modules",
        "model.quant_ignored_modules",
        "model.quant_converters",
        "model.enable_fsdp_low_precision_all_gather",
        "model.fsdp_low_precision_all_gather_mode",
    ),
    **_rows(
        "training.stage",
        lambda stage: stage == "pt",
        "data.template",
        "data.tool_format",
        "data.default_system",
        "data.enable_thinking",
    ),
    # Of a pair, the last reply alone counts.
    **_rows("training.stage", lambda stage: stage != "sft", "data.train_on_prompt", "data.mask_history"),
    **_rows("training.stage", lambda stage: stage != "pt", "data.append_eod"),
    **_rows(
        "training.stage",
        lambda stage: stage != "dpo",
        "training.dpo_loss_type",
        "training.dpo_beta",
        "training.dpo_label_smoothing",
        "training.pref_ftx",
        "training.ref_model",
    ),
    **_rows(
        "data.data_manager_type",
        lambda manager: manager == "mg",
        "data.packing",
        "data.neat_packing",
        "data.mix_strategy",
        "data.interleave_probs",
        "data.preprocessing_batch_size",
        "data.eval_on_each_dataset",
        "data.tokenized_path",
        "data.data_shared_file_system",
        "training.disable_shuffling",
    ),
    **_rows(
        "data.data_manager_type",
        lambda manager: manager == "lf",
        "data.split",
        "data.no_shared_storage",
        "data.reset_attention_mask",
    ),
    **_rows("training.max_steps", lambda steps: steps > 0, "training.dataloader_drop_last"),
    **_rows("training.eval_samples", lambda count: count == 0, "training.eval_samples_max_new_tokens"),
    **_rows("data.streaming", lambda streaming: not streaming, "data.buffer_size"),
    **_rows(
        "parallel.ep_size",
        lambda size: size == 1,
        "parallel.ep_fsdp_size",
        "parallel.ep_modules",
        "parallel.ep_fsdp_modules",
        "parallel.ep_dispatcher",
        "parallel.efsdp_shard_placement_fn",
    ),
    **_rows("parallel.cp_size", lambda size: size == 1, "parallel.cp_type"),
    **_rows("parallel.tp_size", lambda size: size == 1, "parallel.tp_colwise", "parallel.tp_rowwise"),
    **_rows("parallel.fsdp_implementation", lambda kind: kind == "native", "parallel.hook_modules"),
    **_rows("parallel.recompute", lambda recompute: not recompute, "parallel.recompute_modules"),
    **_rows(
        "parallel.enable_chunk_batch",
        lambda chunks: not chunks,
        "parallel.chunk_mbs",
        "parallel.chunk_mbs_batch_dim",
        "parallel.chunk_mbs_modules",
        "parallel.chunk_mbs_arg_indexs",
        "parallel.chunk_mbs_kwarg_names",
    ),
    **_rows("training.lr_scheduler_type", lambda kind: kind != "cosine", "training.min_lr"),
    **_rows(
        "training.profile",
        lambda profile: not profile,
        "training.profile_step_start",
        "training.profile_step_end",
        "training.profile_ranks",
        "training.profile_level",
        "training.profile_export_type",
        "training.profile_data_simplification",
        "training.profile_with_cpu",
        "training.profile_with_stack",
        "training.profile_with_memory",
        "training.profile_record_shapes",
        "training.profile_save_path",
    ),
    **_rows(
        "training.save_hf_weights",
        lambda export: not export,
        "training.hf_export_dtype",
        "training.hf_shard_size",
    ),
}
