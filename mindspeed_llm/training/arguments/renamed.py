"""Other names of flags: old ones, which still work and say what to write, and names of the same thing elsewhere."""

DEPRECATED: dict[str, str] = {
    "--use-deter-comp": "--deterministic-mode",
    "--use-mc2": "--use-ascend-mc2",
    "--cp-attention-mask-type": "--attention-mask-type",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--n-group": "--moe-router-num-groups",
    "--topk-group": "--moe-router-group-topk",
    "--routed-scaling-factor": "--moe-router-topk-scaling-factor",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--qk-nope-head-dim": "--qk-head-dim",
    "--multi-head-latent-attention": "--multi-latent-attention",
    "--rope-scaling-beta-fast": "--beta-fast",
    "--rope-scaling-beta-slow": "--beta-slow",
    "--encoder-seq-length": "--seq-length",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
}
"""Old name -> name. One line says so when it is given."""

ALIASES: dict[str, str] = {
    "--npu-deterministic": "--deterministic-mode",
    "--moe-shared-expert-gate": "--shared-expert-gate",
    "--partial-rotary-factor": "--rotary-percent",
}
"""Name of the mirrored interfaces -> name here."""

ELSEWHERE: dict[str, str] = {
    "--model-name-or-path": "--model-from-hf",
    "--model-path": "--model-from-hf",
    "--dataset": "--data-path",
    "--cutoff-len": "--seq-length",
    "--max-steps": "--train-iters",
    "--learning-rate": "--lr",
    "--lr-scheduler-type": "--lr-decay-style",
    "--warmup-ratio": "--lr-warmup-fraction",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--max-grad-norm": "--clip-grad",
    "--output-dir": "--save",
    "--save-steps": "--save-interval",
    "--logging-steps": "--log-interval",
    "--eval-steps": "--eval-interval",
    "--resume-from-checkpoint": "--load",
    "--target-tensor-parallel-size": "--tensor-model-parallel-size",
    "--target-pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--target-expert-parallel-size": "--expert-model-parallel-size",
    "--tp-size": "--tensor-model-parallel-size",
    "--ep-size": "--expert-model-parallel-size",
    "--cp-size": "--context-parallel-size",
    "--load-dir": "--load",
    "--save-dir": "--save",
}
"""Names of the same setting in the FSDP2 backend, the converter and other trainers, for `did you mean`."""
