"""Flags of features that do not register them yet; each row goes when its feature does."""

from mindspeed_llm.flag import Group, switch

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
