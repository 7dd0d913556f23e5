"""Preference pairs: the loss on them, and the model that the policy is compared with."""

from mindspeed_llm.flag import Group, amount, positive, switch, value

_TASK = "tasks.posttrain.dpo"
_REFERENCE = "tasks.posttrain.reference_source"

PREFERENCE = Group(
    title="Preference pairs (posttrain_gpt.py --stage dpo)",
    flags=(
        switch(
            "--is-pairwise-dataset",
            "the data are pairs of a chosen and a rejected reply; --stage dpo needs it.",
            "training.arguments.checks",
        ),
        value(
            "--dpo-loss-type",
            str,
            "sigmoid",
            "loss on a pair; ipo compares means per token, the others sums.",
            _TASK,
            choices=("sigmoid", "hinge", "ipo"),
        ),
        value("--dpo-beta", amount, 0.1, "how closely the model is kept to the reference; above 0.", _TASK),
        value(
            "--dpo-label-smoothing",
            amount,
            0.0,
            "loss sigmoid: part of the pairs that are taken to be labelled the wrong way round, below 0.5.",
            _TASK,
        ),
        value("--pref-ftx", amount, 0.0, "weight of the mean loss per token of chosen replies.", _TASK),
        value(
            "--ref-model",
            str,
            None,
            "reference: Hugging Face model directory or folder of checkpoints; by default the model at the beginning.",
            _REFERENCE,
            metavar="DIR",
        ),
        value(
            "--refer-model-iter",
            positive,
            None,
            "reference: the checkpoint of this step in --ref-model, or in --load without one.",
            _REFERENCE,
        ),
    ),
)
