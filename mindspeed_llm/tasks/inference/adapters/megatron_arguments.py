"""Arguments of a model that generates: what training alone needs is taken out of those of a run."""

from __future__ import annotations

from argparse import Namespace

_KEPT = (
    *("load", "ckpt_step", "model_type_hf", "enable_hf2mg_convert", "distributed_timeout_minutes", "debug"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layer_list", "noop_layers"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"),
    *("bf16", "fp16", "deterministic_mode", "moe_token_dispatcher_type"),
    *("lora_target_modules", "lora_r", "lora_alpha", "lora_load"),
    *("tokenizer_type", "tokenizer_name_or_path", "tokenizer_not_use_fast", "tokenizer_model"),
    *("vocab_file", "merge_file"),
)
"""Arguments that say something about a model which generates, besides those that describe the model."""
_OF_TRAINING = frozenset(
    ("attention_dropout", "hidden_dropout", "attention_softmax_in_fp32", "moe_shared_expert_overlap")
) | frozenset(("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"))
"""Arguments of the groups below that say how a model is trained."""
_INSTEAD = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "use_flash_attn": True,
    "micro_batch_size": 1,
    "finetune": True,
    "exit_on_missing_checkpoint": True,
    "no_load_optim": True,
    "no_load_rng": True,
}


def for_inference(args: Namespace, world_size: int) -> Namespace:
    """The arguments of a model that generates, checked and complete.

    Weights are the same without sequence parallelism, recomputation, dropout, virtual stages, overlap and auxiliary
    losses; so these are off, whatever `args` say. Experts take every token that comes, however the model was trained.

    Args:
        args: of the project's own parser, before or after its checks.
        world_size: ranks of the job.

    Raises:
        UserError: sizes are missing or do not fit together, or do not fit the ranks.
    """
    from mindspeed_llm.features_manager.features import FEATURES
    from mindspeed_llm.features_manager.manager import FeaturesManager
    from mindspeed_llm.training.arguments.checks.experts import check_experts
    from mindspeed_llm.training.arguments.checks.parallel import check_batch, check_ranks, check_stages
    from mindspeed_llm.training.arguments.checks.schedule import check_precision
    from mindspeed_llm.training.arguments.checks.structure import check_structure
    from mindspeed_llm.training.arguments.parser import parse

    found = parse([], FEATURES)
    kept = {name: getattr(args, name) for name in (*_KEPT, *model_arguments()) if hasattr(args, name)}
    vars(found).update(kept)
    vars(found).update(_INSTEAD)
    found.given = tuple(name for name in args.given if name in kept)
    if found.num_experts is None:
        # Checks of training put it in.
        found.expert_tensor_parallel_size = None
    if found.seq_length is None:
        # The length of samples, which a check wants to know.
        found.seq_length = 1
    check_structure(found)
    check_stages(found)
    # Where tensor parallel ranks share experts, training wants sequence parallelism: generation computes the same
    # tokens on all of them, which is correct as well.
    found.sequence_parallel = found.tensor_model_parallel_size > 1
    check_experts(found)
    found.sequence_parallel = False
    check_ranks(found, world_size)
    check_batch(found)
    check_precision(found)
    # Results are the same, and a step of one token is mostly calls.
    found.use_fused_rmsnorm = found.normalization == "RMSNorm"
    found.use_fused_swiglu = found.swiglu
    found.use_fused_rotary_pos_emb = found.position_embedding_type == "rope"
    FeaturesManager(FEATURES).validate(found)
    return found


def model_arguments() -> tuple[str, ...]:
    """The names of the arguments that describe a model."""
    from mindspeed_llm.training.arguments.tables.model import ATTENTION, LAYERS, POSITIONS, SIZES
    from mindspeed_llm.training.arguments.tables.moe import EXPERTS, ROUTER

    groups = (SIZES, ATTENTION, POSITIONS, LAYERS, EXPERTS, ROUTER)
    return tuple(flag.dest for group in groups for flag in group.flags if flag.dest not in _OF_TRAINING)
