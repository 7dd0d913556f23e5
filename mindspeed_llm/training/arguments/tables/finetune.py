"""Fine-tuning: the stage, instruction data, and how their samples become batches."""

from mindspeed_llm.flag import Group, positive, switch, value

_DATA = "tasks.posttrain"
_RAW = "tasks.posttrain.raw_records"

FINETUNE = Group(
    title="Fine-tuning (posttrain_gpt.py)",
    flags=(
        value(
            "--stage",
            str,
            None,
            "what is trained: sft, supervised fine-tuning; dpo, preference optimisation.",
            "training.main",
            choices=("sft", "dpo"),
        ),
        switch("--is-instruction-dataset", "the data are instructions; --stage sft implies it.", "training.arguments"),
        value(
            "--prompt-type",
            str,
            None,
            "raw records: chat template of configs/finetune/templates.json; by default the tokenizer's own.",
            _RAW,
            metavar="TEMPLATE",
        ),
        value(
            "--prompt-type-path",
            str,
            None,
            "raw records: file of chat templates; by default configs/finetune/templates.json.",
            _RAW,
            metavar="FILE",
        ),
        value(
            "--enable-thinking",
            str,
            "none",
            "raw records, templates of reasoning models: true trains on thoughts, false removes them.",
            _RAW,
            choices=("true", "false", "none"),
        ),
        value(
            "--drop-thinking",
            str,
            "true",
            "raw records: leave out the thoughts of earlier turns.",
            _RAW,
            choices=("true", "false"),
        ),
        value(
            "--reasoning-effort",
            str,
            None,
            "raw records: how much the model is told to think (templates gpt_oss and deepseek4).",
            _RAW,
            metavar="EFFORT",
        ),
        switch("--mask-history", "raw records: loss on the last reply of a conversation alone.", _RAW),
        value("--map-keys", str, None, "raw records: column of each role, as JSON.", _RAW, metavar="JSON"),
        switch("--pack", "raw records: several samples in one row of --seq-length tokens.", _DATA),
        switch(
            "--neat-pack",
            "with --pack and --reset-attention-mask: the samples of a row do not see each other.",
            _DATA,
        ),
        switch(
            "--no-pad-to-seq-lengths",
            "pad a micro batch to its longest sample, not to --seq-length.",
            "training.arguments.checks",
        ),
        switch(
            "--variable-seq-lengths", "as --no-pad-to-seq-lengths.", "tasks.posttrain.instructions tasks.models.config"
        ),
        value(
            "--pad-to-multiple-of",
            positive,
            8,
            "with --no-pad-to-seq-lengths: tokens that the length of a micro batch is a multiple of.",
            _DATA,
        ),
        switch("--no-shuffle", "take samples in the order of the files.", _DATA),
        switch(
            "--full-shuffle-instruction-dataset",
            "shuffle the samples of all epochs together, not epoch by epoch.",
            _DATA,
        ),
        switch(
            "--padded-samples",
            "fill each epoch up to whole global batches, with its first samples.",
            _DATA,
        ),
    ),
)
