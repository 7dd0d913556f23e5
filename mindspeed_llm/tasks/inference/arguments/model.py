"""Which model is asked, and in what form texts reach it."""

from mindspeed_llm.flag import Group, count, optional, positive, switch, value
from mindspeed_llm.tasks.inference.bounds import SEED

_LOAD = "tasks.inference.load"
_SOURCE = "tasks.inference.source"
_PROMPTS = "tasks.inference.prompt_format"

MODEL = Group(
    title="Model to ask",
    flags=(
        value(
            "--load",
            str,
            None,
            "what to load; its kind is found out: a Hugging Face model directory, a PEFT adapter, a checkpoint of the "
            "FSDP2 backend (or the output folder of its run), a folder of Megatron checkpoints.",
            _SOURCE,
            metavar="DIR",
        ),
        value(
            "--backend",
            str,
            "auto",
            "what computes: hf, the model of transformers; megatron, with --tensor-model-parallel-size etc.; auto: "
            "megatron for its checkpoints and with --use-mcore-models, else hf.",
            _SOURCE,
            choices=("auto", "hf", "megatron"),
        ),
        switch("--use-mcore-models", "as --backend megatron.", _SOURCE),
        value(
            "--base-model",
            str,
            None,
            "a PEFT adapter or a checkpoint of the FSDP2 backend: the model directory that it was trained from; by "
            "default the one that its files name.",
            _LOAD,
            metavar="DIR",
        ),
        value(
            "--ckpt-step",
            count,
            None,
            "checkpoints of a run: the step to load, instead of the latest.",
            _SOURCE,
        ),
        switch(
            "--enable-hf2mg-convert",
            "as --backend megatron, with --load a Hugging Face model directory.",
            _SOURCE,
        ),
        value(
            "--dtype",
            str,
            "auto",
            "of weights and computation; auto: what --bf16 or --fp16 say, else fp32, except with hf on an "
            "accelerator: as config.json has it.",
            f"tasks.inference.arguments.checks {_LOAD}",
            choices=("auto", "fp32", "bf16", "fp16"),
        ),
        switch("--bf16", "as --dtype bf16.", "tasks.inference.arguments.checks"),
        switch("--fp16", "as --dtype fp16.", "tasks.inference.arguments.checks"),
        switch(
            "--shard-weights",
            "hf under torchrun: spread the weights of one model over all ranks, where it does not fit one device; "
            "without it each rank has a copy, and works on its own texts.",
            _LOAD,
        ),
        switch(
            "--trust-remote-code",
            "hf: run the code that a model directory brings for its model and tokenizer.",
            _LOAD,
        ),
        optional(
            "--check",
            positive,
            0,
            "check everything, print what would be loaded, and end. The number of ranks is the value of this flag, "
            "else WORLD_SIZE, else the smallest that fits.",
            "tasks.inference.main",
            metavar="RANKS",
        ),
        value(
            "--seed",
            SEED.read,
            1234,
            "start of the random numbers; each prompt has its own.",
            "tasks.inference.settings",
            metavar="N",
        ),
    ),
)

PROMPTS = Group(
    title="Form of prompts",
    flags=(
        value(
            "--prompt-type",
            str,
            None,
            "ask in a conversation, in the chat template of this name in configs/finetune/templates.json.",
            _PROMPTS,
            metavar="TEMPLATE",
        ),
        value(
            "--prompt-type-path",
            str,
            None,
            "file of chat templates; by default configs/finetune/templates.json.",
            "tasks.inference.arguments.checks",
            metavar="FILE",
        ),
        switch("--hf-chat-template", "ask in a conversation, in the tokenizer's own chat template.", _PROMPTS),
        value(
            "--enable-thinking",
            str,
            "none",
            "templates of reasoning models: true lets the model think, false has it answer at once; none: as the "
            "template does by default.",
            _PROMPTS,
            choices=("true", "false", "none"),
        ),
        value(
            "--drop-thinking",
            str,
            "true",
            "--prompt-type: leave out the thoughts of earlier turns.",
            _PROMPTS,
            choices=("true", "false"),
        ),
        value(
            "--reasoning-effort",
            str,
            None,
            "--prompt-type: how much the model is told to think (templates gpt_oss and deepseek4).",
            _PROMPTS,
            metavar="EFFORT",
        ),
    ),
)
