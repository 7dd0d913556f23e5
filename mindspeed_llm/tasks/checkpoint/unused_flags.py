"""Flags that can have no effect on the model at hand."""

from __future__ import annotations

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.load import Loaded
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest


def refuse_unused(request: ConversionRequest, loaded: Loaded) -> None:
    """Refuse settings that the model does not have, and say which size has no effect on it; other flags are refused
    where they would be used.

    Raises:
        UserError: names the flag and the family.
    """
    family = loaded.family.ids[0]
    for name, value in request.settings.items():
        if name not in loaded.settings:
            raise UserError(f"--{name.replace('_', '-')} {value}: {family} has no such setting; leave it out")
    if "etp" in request.target and not loaded.settings.get("num_experts"):
        print(f"--expert-tensor-parallel-size has no effect: {family} has no experts")
