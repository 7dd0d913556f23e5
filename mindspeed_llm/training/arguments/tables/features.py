"""Flags of features that do not register them yet; each row goes when its feature does."""

from mindspeed_llm.training.arguments.flag import Group, positive, switch, value

KERNELS = Group(
    title="Kernels and overlap",
    flags=(
        switch(
            "--use-ascend-coc",
            "compute linear layers of TP in chunks, each sent while the next is computed (any device).",
            "features_manager.features",
        ),
        value("--coc-parallel-num", positive, None, "number of those chunks.", "features_manager.features"),
        switch(
            "--reuse-fp32-param",
            "bf16 parameters are the upper halves of their fp32 masters, in the same memory.",
            "features_manager.features",
        ),
    ),
)

DOCUMENTS = Group(
    title="Documents",
    flags=(
        switch(
            "--reset-attention-mask",
            "no attention across the ends of documents in a sample.",
            "training.data.tokens",
        ),
    ),
)
