"""Flags that have no effect: ever (`NO_EFFECT`), or as long as another flag stands where it stands (`IDLE`).

One line is printed when such a flag is given. The names of the first kind do not become arguments.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_llm.flag import count, number, one_of, positive


@dataclass(frozen=True, kw_only=True)
class Inert:
    """Why a flag has no effect, and what `argparse.add_argument` needs to read it."""

    reason: str
    parsing: Mapping[str, Any] = field(default_factory=lambda: {"action": "store_true"})


_ONE_KERNEL = "attention runs through one operator, which has no masked softmax of its own to be fused"
_GRADIENT_KERNEL = "gradients are accumulated by torch; the fused kernel is not used on any device"
_GROUPS = "process groups are made as torch makes them"
_CLASSIC = "there is one kind of model, that of megatron-core"

NO_EFFECT: dict[str, Inert] = {
    "--use-mcore-models": Inert(reason=_CLASSIC),
    "--transformer-impl": Inert(
        reason="layers are of one kind, local", parsing={"type": one_of(("local",)), "metavar": "local"}
    ),
    "--context-parallel-algo": Inert(
        reason="sequences are not shared between ranks yet",
        parsing={"metavar": "ALGORITHM"},
    ),
    "--distributed-backend": Inert(
        reason="the device says it: hccl on npu, nccl on cuda, gloo on cpu",
        parsing={"type": one_of(("nccl", "hccl", "gloo")), "metavar": "nccl|hccl|gloo"},
    ),
    "--no-masked-softmax-fusion": Inert(reason=_ONE_KERNEL),
    "--no-gradient-accumulation-fusion": Inert(reason=_GRADIENT_KERNEL),
    "--gemm-gradient-accumulation-fusion": Inert(reason=_GRADIENT_KERNEL),
    "--no-bias-gelu-fusion": Inert(reason="bias and GELU are separate operators"),
    "--no-bias-swiglu-fusion": Inert(reason="--use-fused-swiglu says whether SwiGLU is fused"),
    "--no-bias-dropout-fusion": Inert(reason="bias and dropout are separate operators"),
    "--no-rope-fusion": Inert(reason="--use-fused-rotary-pos-emb says whether rotary positions are fused"),
    "--no-persist-layer-norm": Inert(reason="norms run through torch or the device's operator, never apex"),
    "--no-async-tensor-model-parallel-allreduce": Inert(
        reason="on one stream of the device a collective overlaps what is independent of it"
    ),
    "--calculate-per-token-loss": Inert(reason="every token of the global batch weighs the same in any case"),
    "--moe-permutation-async-comm": Inert(
        reason="megatron-core's dispatchers have one order of permuting and sending tokens"
    ),
    "--moe-router-pre-softmax": Inert(
        reason="softmax is over all experts unless --norm-topk-prob asks for weights that sum to one"
    ),
    "--coc-fused-kernel": Inert(
        reason="chunks are multiplied by one operator and sent by another, with the same results"
    ),
    "--no-create-attention-mask-in-dataloader": Inert(reason="attention builds the causal mask itself"),
    "--no-mmap-bin-files": Inert(reason="data files are always mapped"),
    "--cut-max-seqlen": Inert(reason="samples are always cut to --seq-length"),
    "--tokenizer-padding-side": Inert(
        reason="rows are filled up behind their samples",
        parsing={"type": one_of(("right",)), "metavar": "right"},
    ),
    "--dataloader-type": Inert(
        reason="samples are read in one order, which the sample index says",
        parsing={"type": one_of(("single",)), "metavar": "single"},
    ),
    "--num-dataset-builder-threads": Inert(
        reason="sample indexes are made by one process", parsing={"type": positive, "metavar": "N"}
    ),
    "--disable-gloo-group": Inert(reason=_GROUPS),
    "--hccl-group-buffer": Inert(reason=_GROUPS, parsing={"metavar": "TEXT"}),
    "--hccl-group-buffer-adaptive": Inert(reason=_GROUPS),
    "--hccl-ep-group-buffer-adaptive-factor": Inert(reason=_GROUPS, parsing={"type": number, "metavar": "X"}),
    "--hccl-op-mode": Inert(reason=_GROUPS, parsing={"metavar": "TEXT"}),
    "--lora-fusion": Inert(reason="adapters of one layer are multiplied and sent together in any case"),
    "--lora-register-forward-hook": Inert(
        reason="gradients reach every adapter in any case, also with recomputation",
        parsing={"nargs": "+", "metavar": "NAME"},
    ),
    "--shape-order": Inert(
        reason="attention is called with the layout that the device's operator takes", parsing={"metavar": "TEXT"}
    ),
    "--hccl-slice-size": Inert(reason=_GROUPS, parsing={"type": count, "metavar": "N"}),
    "--jit-compile": Inert(reason="operators are never compiled while the run waits for them"),
    "--optimization-level": Inert(
        reason="each feature has a flag of its own", parsing={"type": one_of(("0", "1", "2")), "metavar": "0|1|2"}
    ),
    "--ai-framework": Inert(
        reason="there is one framework, torch", parsing={"type": one_of(("pytorch",)), "metavar": "pytorch"}
    ),
    "--local-rank": Inert(reason="the environment says it", parsing={"type": count, "metavar": "N"}),
    "--exit-signal-handler": Inert(reason="SIGTERM always saves and ends the run"),
    "--lazy-mpu-init": Inert(reason="process groups are made once, at the start", parsing={"metavar": "TEXT"}),
}
"""Flag -> why it never has an effect."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A flag has no effect while `idle(args)` is true, which `because` says in words."""

    because: str
    idle: Callable[[Namespace], bool]


def _rows(because: str, idle: Callable[[Namespace], bool], *flags: str) -> dict[str, Idle]:
    return {flag: Idle(because=because, idle=idle) for flag in flags}


def _without(flag: str, *flags: str) -> dict[str, Idle]:
    dest = flag.lstrip("-").replace("-", "_")
    return _rows(f"without {flag}", lambda args: not getattr(args, dest), *flags)


IDLE: dict[str, Idle] = {
    **_without(
        "--fp16",
        "--loss-scale",
        "--initial-loss-scale",
        "--min-loss-scale",
        "--loss-scale-window",
        "--hysteresis",
    ),
    **_without(
        "--num-experts",
        "--moe-ffn-hidden-size",
        "--moe-layer-freq",
        "--first-k-dense-replace",
        "--moe-router-topk",
        "--moe-router-load-balancing-type",
        "--moe-aux-loss-coeff",
        "--moe-router-score-function",
        "--moe-router-dtype",
        "--moe-token-dispatcher-type",
        "--norm-topk-prob",
    ),
    **_without("--eval-samples", "--eval-samples-max-new-tokens"),
    **_without("--variable-seq-lengths", "--pad-to-multiple-of"),
    **_without("--manual-gc", "--manual-gc-interval", "--no-manual-gc-eval"),
    **_without("--overlap-grad-reduce", "--no-align-grad-reduce"),
    **_without("--overlap-param-gather", "--no-align-param-gather"),
    **_without("--sliding-window", "--window-attn-skip-freq"),
    **_without("--save", "--save-interval", "--no-save-optim", "--no-save-rng", "--ckpt-format"),
    **_without("--load", "--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"),
    **_rows(
        "without --lu-lora-final-layer-index",
        lambda args: args.lu_lora_final_layer_index is None,
        "--lu-lora-lr",
        "--lu-lora-lr-ratio",
    ),
    **_without("--use-ascend-coc", "--coc-parallel-num", "--coc-mode"),
    **_rows(
        "unless --tensor-model-parallel-size and --coc-parallel-num are above 1, nor with --coc-mode 0 or 1",
        lambda args: args.tensor_model_parallel_size == 1 or args.coc_parallel_num == 1 or args.coc_mode in (0, 1),
        "--use-ascend-coc",
    ),
    **_without("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"),
    **_without(
        "--profile",
        "--profile-step-start",
        "--profile-step-end",
        "--profile-ranks",
        "--profile-level",
        "--profile-export-type",
        "--profile-data-simplification",
        "--profile-with-cpu",
        "--profile-with-stack",
        "--profile-with-memory",
        "--profile-record-shapes",
        "--profile-save-path",
    ),
    **_without(
        "--rope-scaling-type",
        "--rope-scaling-factor",
        "--low-freq-factor",
        "--high-freq-factor",
        "--original-max-position-embeddings",
        "--rope-scaling-original-max-position-embeddings",
        "--beta-fast",
        "--beta-slow",
        "--rope-scaling-mscale",
        "--rope-scaling-mscale-all-dim",
        "--rope-scaling-attention-factor",
    ),
    **_rows(
        "with --lr-decay-style constant",
        lambda args: args.lr_decay_style == "constant",
        "--min-lr",
        "--lr-decay-iters",
        "--lr-decay-samples",
    ),
    **_rows(
        "without --lr-decay-style WSD",
        lambda args: args.lr_decay_style != "WSD",
        "--lr-wsd-decay-style",
        "--lr-wsd-decay-iters",
        "--lr-wsd-decay-samples",
    ),
    **_rows(
        "with --optimizer sgd",
        lambda args: args.optimizer == "sgd",
        "--adam-beta1",
        "--adam-beta2",
        "--adam-eps",
    ),
    **_rows("with --optimizer adam", lambda args: args.optimizer == "adam", "--sgd-momentum"),
    **_rows(
        "unless --position-embedding-type is learned_absolute (rotary positions say distances alone, and "
        "--reset-attention-mask keeps documents apart)",
        lambda args: args.position_embedding_type != "learned_absolute",
        "--reset-position-ids",
    ),
    **_rows("with --eval-iters 0", lambda args: args.eval_iters == 0, "--eval-interval"),
    **_rows(
        "without --num-layers-per-virtual-pipeline-stage",
        lambda args: args.virtual_pipeline_model_parallel_size is None,
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--no-overlap-p2p-communication",
    ),
}
"""Flag -> when it has no effect. Asked once the arguments are complete."""
