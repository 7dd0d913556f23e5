"""Finding the modules that a list of patterns of the configuration names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.patterns import compile_pattern


def find_modules(model: nn.Module, patterns: Sequence[str], *, field: str) -> dict[str, nn.Module]:
    """All modules whose name one of `patterns` matches, in the order of registration.

    Args:
        field: the configuration field that the patterns come from, for the message.

    Raises:
        UserError: a pattern matches no module (names the nearest existing ones), or one that is only a container.
    """
    names = [name for name, _ in model.named_modules() if name]
    wanted: set[str] = set()
    for pattern in patterns:
        compiled = compile_pattern(pattern)
        found = [name for name in names if compiled.fullmatch(name)]
        if not found:
            near = difflib.get_close_matches(pattern.replace("{*}", "0"), names, n=3, cutoff=0.3)
            raise UserError(
                f"{field}: {pattern!r} matches no module of {type(model).__name__}; its modules are named like "
                f"{', '.join(near or names[:3])}"
            )
        for name in found:
            if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
                raise UserError(
                    f"{field}: {pattern!r} matches {name}, which is a list of modules and never runs itself; name its "
                    f"members instead, such as {name}.{{*}}"
                )
        wanted.update(found)
    return {name: module for name, module in model.named_modules() if name in wanted}
