"""Checkpoints, evaluation, logs, and what replaces a run."""

from mindspeed_llm.flag import Group, count, optional, positive, switch, value

_CHECKPOINTING = "training.checkpointing"
_LOOP = "training.loop"
_MAIN = "training.main"

CHECKPOINT = Group(
    title="Checkpoints",
    flags=(
        value("--save", str, None, "folder for checkpoints.", "training.pretrain", metavar="DIR"),
        value("--save-interval", positive, None, "steps between checkpoints; by default one at the end.", _LOOP),
        switch("--no-save-optim", "leave the optimizer's state out.", _CHECKPOINTING),
        switch("--no-save-rng", "leave the state of random numbers out.", _CHECKPOINTING),
        value(
            "--load",
            str,
            None,
            "folder of checkpoints to go on from; or a Hugging Face model directory, whose weights are taken.",
            "training.folders training.checkpointing",
            metavar="DIR",
        ),
        switch("--no-load-optim", "do not load the optimizer's state.", _CHECKPOINTING),
        switch("--no-load-rng", "do not load the state of random numbers.", _CHECKPOINTING),
        switch("--finetune", "take the weights alone, and start at step 0.", _CHECKPOINTING),
        value(
            "--ckpt-step",
            count,
            None,
            "the step to load, instead of the latest; with checkpoints in --lora-load a step of those.",
            _CHECKPOINTING,
        ),
        switch(
            "--exit-on-missing-checkpoint",
            "stop where --load holds no checkpoint, also where it is the folder of --save.",
            _CHECKPOINTING,
        ),
        value(
            "--ckpt-format",
            str,
            "torch_dist",
            "torch: a file for each rank; torch_dist: can be loaded on any topology.",
            _CHECKPOINTING,
            choices=("torch", "torch_dist"),
        ),
        switch(
            "--enable-hf2mg-convert",
            "--load is a Hugging Face model directory (found out without this flag, too).",
            "training.folders",
        ),
        value(
            "--model-type-hf",
            str,
            None,
            "family of the Hugging Face model; by default read off its config.json.",
            "training.arguments.model_from_hf tasks.models.hf_weights",
            metavar="FAMILY",
        ),
    ),
)

EVALUATION = Group(
    title="Evaluation",
    flags=(
        value("--eval-interval", positive, 1000, "steps between evaluations.", _LOOP),
        value(
            "--eval-iters",
            count,
            100,
            "global batches of an evaluation; 0: no evaluation.",
            "training.loop training.data",
        ),
        value(
            "--eval-samples",
            count,
            0,
            "at every evaluation answer the first N prompts of the validation data, and write samples.jsonl beside the "
            "metrics.",
            "training.eval_samples",
        ),
        value(
            "--eval-samples-max-new-tokens",
            positive,
            64,
            "with --eval-samples: tokens of an answer, at most.",
            "training.eval_samples",
        ),
    ),
)

LOGS = Group(
    title="Logs",
    flags=(
        value("--log-interval", positive, 100, "steps between log lines.", _LOOP),
        switch("--log-throughput", "log TFLOP/s.", "training.pretrain"),
        switch("--log-params-norm", "log the norm of all parameters.", _LOOP),
        switch("--log-num-zeros-in-grad", "log the number of zeros in the gradient.", "training.setup"),
        value(
            "--metrics-dir",
            str,
            None,
            "folder for metrics.jsonl, loss.png and the resolved arguments; by default --save.",
            "training.pretrain",
            metavar="DIR",
        ),
        value(
            "--tensorboard-dir",
            str,
            None,
            "folder for TensorBoard; by default beside the metrics.",
            "training.pretrain",
            metavar="DIR",
        ),
    ),
)

INSTEAD = Group(
    title="Instead of a run, and errors",
    flags=(
        optional(
            "--check",
            positive,
            0,
            "check everything and print what each rank will hold; nothing is started. The number of ranks is the value "
            "of this flag, else WORLD_SIZE, else the smallest that fits.",
            _MAIN,
            metavar="RANKS",
        ),
        switch("--list-features", "list features: flags, on or off, what they change; nothing is started.", _MAIN),
        switch("--debug", "show tracebacks of errors (as MINDSPEED_DEBUG=1).", "cli"),
    ),
)
