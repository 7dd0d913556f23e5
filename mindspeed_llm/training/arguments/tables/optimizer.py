"""Batch sizes, optimizer, learning rate, precision."""

from mindspeed_llm.flag import (
    Group,
    amount,
    count,
    fraction,
    negative,
    positive,
    switch,
    value,
)

_CONFIG = "tasks.models.config"
_OPTIMIZER = "training.setup"
_SCHEDULE = "training.arguments.checks.schedule"

BATCH = Group(
    title="Batch and length of the run",
    flags=(
        value(
            "--micro-batch-size",
            positive,
            None,
            "samples that a rank computes at once.",
            "training.data training.train_step",
        ),
        value(
            "--global-batch-size",
            positive,
            None,
            "samples of a step; by default --micro-batch-size times the data-parallel ranks.",
            "training.data",
        ),
        value("--train-iters", positive, None, "steps of the run.", "training.loop"),
        value(
            "--train-samples",
            positive,
            None,
            "samples of the run, instead of --train-iters.",
            _SCHEDULE,
        ),
        value(
            "--exit-interval", positive, None, "save and exit after a step that this number divides.", "training.loop"
        ),
        value("--exit-duration-in-mins", positive, None, "save and exit after so many minutes.", "training.loop"),
        switch("--manual-gc", "collect garbage at fixed steps only, on all ranks together.", "training.garbage"),
        value("--manual-gc-interval", count, 0, "steps between collections; 0: none.", "training.garbage"),
        negative("--no-manual-gc-eval", "manual_gc_eval", "no collection around evaluations.", "training.garbage"),
    ),
)

OPTIMIZER = Group(
    title="Optimizer",
    flags=(
        value(
            "--optimizer", str, "adam", "AdamW, or stochastic gradient descent.", _OPTIMIZER, choices=("adam", "sgd")
        ),
        value("--weight-decay", amount, 0.01, "weight decay.", _SCHEDULE),
        value("--start-weight-decay", amount, None, "weight decay at the first step.", _OPTIMIZER),
        value("--end-weight-decay", amount, None, "weight decay at the last step.", _OPTIMIZER),
        value(
            "--weight-decay-incr-style",
            str,
            "constant",
            "how weight decay changes between them.",
            _OPTIMIZER,
            choices=("constant", "linear", "cosine"),
        ),
        value("--clip-grad", amount, 1.0, "largest norm of the gradient; 0: any.", _OPTIMIZER),
        value("--adam-beta1", fraction, 0.9, "decay of the first moment.", _OPTIMIZER),
        value("--adam-beta2", fraction, 0.999, "decay of the second moment.", _OPTIMIZER),
        value("--adam-eps", amount, 1e-8, "epsilon of Adam.", _OPTIMIZER),
        value("--sgd-momentum", fraction, 0.9, "momentum of SGD.", _OPTIMIZER),
    ),
)

LEARNING_RATE = Group(
    title="Learning rate",
    flags=(
        value("--lr", amount, None, "highest learning rate.", _OPTIMIZER),
        value("--min-lr", amount, 0.0, "lowest learning rate after the warm-up.", _OPTIMIZER),
        value(
            "--lr-decay-style",
            str,
            "linear",
            "how it falls.",
            _OPTIMIZER,
            choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        ),
        value("--lr-decay-iters", positive, None, "steps until it is lowest; by default all.", _SCHEDULE),
        value(
            "--lr-decay-samples",
            positive,
            None,
            "the same in samples, with --train-samples.",
            _SCHEDULE,
        ),
        value("--lr-warmup-fraction", fraction, None, "part of the decay steps in which it rises.", _SCHEDULE),
        value("--lr-warmup-iters", count, 0, "steps in which it rises.", _SCHEDULE),
        value(
            "--lr-warmup-samples",
            count,
            0,
            "the same in samples, with --train-samples.",
            _SCHEDULE,
        ),
        value("--lr-warmup-init", amount, 0.0, "learning rate that it rises from.", _OPTIMIZER),
        value(
            "--lr-wsd-decay-style",
            str,
            "exponential",
            "WSD: how it falls at the end.",
            _OPTIMIZER,
            choices=("exponential", "linear", "cosine", "minus_sqrt"),
        ),
        value("--lr-wsd-decay-iters", positive, None, "WSD: steps in which it falls.", _SCHEDULE),
        value("--lr-wsd-decay-samples", positive, None, "WSD: the same in samples.", _SCHEDULE),
        switch(
            "--override-opt_param-scheduler",
            "take the schedule from these flags, not from the checkpoint.",
            _OPTIMIZER,
        ),
        switch(
            "--use-checkpoint-opt_param-scheduler",
            "take the schedule from the checkpoint where it differs from these flags.",
            _OPTIMIZER,
        ),
    ),
)

PRECISION = Group(
    title="Precision",
    flags=(
        switch("--bf16", "compute in bfloat16.", f"{_CONFIG} {_OPTIMIZER}"),
        switch("--fp16", "compute in float16, with a loss scale.", f"{_CONFIG} {_OPTIMIZER}"),
        value("--loss-scale", amount, None, "fp16: a fixed loss scale, instead of one that adapts.", _OPTIMIZER),
        value("--initial-loss-scale", amount, float(2**32), "fp16: the loss scale to begin with.", _OPTIMIZER),
        value("--min-loss-scale", amount, 1.0, "fp16: the lowest loss scale.", _OPTIMIZER),
        value("--loss-scale-window", amount, 1000.0, "fp16: steps after which the loss scale grows.", _OPTIMIZER),
        value("--hysteresis", positive, 2, "fp16: overflows before the loss scale falls.", _OPTIMIZER),
        negative(
            "--no-check-for-nan-in-loss-and-grad",
            "check_for_nan_in_loss_and_grad",
            "go on after a loss or a gradient that is not finite.",
            "training.loop",
        ),
    ),
)
