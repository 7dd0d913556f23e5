"""How the model and the batch are spread over ranks."""

from mindspeed_llm.flag import Group, negative, positive, switch, value

_CONFIG = "tasks.models.config"
_INIT = "training.initialize"
_SCHEDULE = "training.arguments.checks.schedule"

PARALLEL = Group(
    title="Parallelism",
    flags=(
        value("--tensor-model-parallel-size", positive, 1, "ranks that share each layer (TP).", f"{_CONFIG} {_INIT}"),
        switch("--sequence-parallel", "split the sequence over the TP ranks outside of matrix products.", _CONFIG),
        value("--pipeline-model-parallel-size", positive, 1, "stages of the pipeline (PP).", f"{_CONFIG} {_INIT}"),
        value(
            "--num-layers-per-virtual-pipeline-stage",
            positive,
            None,
            "cut each stage into parts of so many layers, which take turns (VPP).",
            "training.arguments.checks.parallel",
        ),
        value(
            "--num-virtual-stages-per-pipeline-rank",
            positive,
            None,
            "the same as a number of parts.",
            "training.arguments.checks.parallel",
        ),
        value(
            "--microbatch-group-size-per-virtual-pipeline-stage",
            positive,
            None,
            "with VPP: micro batches that a part takes before the next part is at it; by default the number of stages.",
            _CONFIG,
            dest="microbatch_group_size_per_vp_stage",
        ),
        negative(
            "--no-overlap-p2p-communication",
            "overlap_p2p_comm",
            "with VPP: wait for what a stage sends before the next part is computed.",
            _CONFIG,
        ),
        value(
            "--expert-model-parallel-size",
            positive,
            1,
            "ranks that the experts are dealt out to (EP).",
            f"{_CONFIG} {_INIT}",
        ),
        value(
            "--expert-tensor-parallel-size",
            positive,
            None,
            "ranks that share each expert; by default as many as share other layers.",
            f"{_CONFIG} {_INIT}",
        ),
        value("--context-parallel-size", positive, 1, "ranks that share each sequence (CP).", f"{_CONFIG} {_INIT}"),
        value("--distributed-timeout-minutes", positive, 30, "how long a collective waits for all ranks.", _INIT),
    ),
)

DATA_PARALLEL = Group(
    title="Data parallelism",
    flags=(
        switch(
            "--use-distributed-optimizer", "spread the optimizer's state over data-parallel ranks.", "training.setup"
        ),
        switch("--overlap-grad-reduce", "reduce gradients while others are still computed.", "training.setup"),
        switch(
            "--overlap-param-gather",
            "gather updated parameters while the forward pass runs (--use-distributed-optimizer).",
            "training.setup",
        ),
        switch(
            "--overlap-param-gather-with-optimizer-step",
            "with virtual stages: update the first part, and gather its parameters while the others are updated.",
            "training.setup",
        ),
        negative(
            "--no-align-grad-reduce",
            "align_grad_reduce",
            "each stage reduces gradients when it has them, instead of all stages together.",
            "training.setup",
        ),
        negative(
            "--no-align-param-gather",
            "align_param_gather",
            "each stage gathers parameters when it needs them, instead of all stages together.",
            "training.setup",
        ),
        value(
            "--ddp-bucket-size",
            positive,
            None,
            "parameters of a bucket whose gradients travel together.",
            "training.setup",
        ),
        switch(
            "--accumulate-allreduce-grads-in-fp32",
            "accumulate and reduce gradients in fp32; --bf16 does so unless --grad-reduce-in-bf16.",
            "training.setup",
        ),
        switch("--grad-reduce-in-bf16", "reduce gradients in bf16.", _SCHEDULE),
    ),
)
