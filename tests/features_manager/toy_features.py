"""Small features for the tests of the manager, and a picture of megatron's modules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.features_manager.patches import Patches


class ToyFeature(Feature):
    """On with `--NAME`; replaces its targets by `new`, or wraps them with `wrapper`."""

    description = "a toy"

    def __init__(
        self,
        name: str,
        targets: tuple[str, ...] = (),
        *,
        new: Any = None,
        wrapper: Callable[..., Any] | None = None,
        sets: Mapping[str, Any] | None = None,
        flags: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.targets = name, targets  # type: ignore[misc]
        self._new, self._wrapper, self._sets = new, wrapper, sets or {}
        self._flags = (f"--{name}",) if flags is None else flags

    def register_arguments(self, group: ArgumentTarget) -> None:
        for flag in self._flags:
            group.add_argument(flag, action="store_true")

    def is_on(self, args: argparse.Namespace) -> bool:
        return bool(getattr(args, self.name))

    def settings(self, args: argparse.Namespace) -> Mapping[str, Any]:
        return self._sets

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        for target in self.targets:
            if self._wrapper is None:
                patches.replace(target, self._new, feature=self.name)
            else:
                patches.wrap(target, self._wrapper, feature=self.name)


def picture() -> dict[tuple[str, str], Any]:
    """Every attribute of every loaded megatron module, and of every class that such a module holds, as it stands."""
    seen: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "megatron" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            seen[name, attribute] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == "megatron":
                seen.update({(f"{name}.{attribute}", inner): held for inner, held in list(vars(value).items())})
    return seen


def differences(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> list[str]:
    """Where two pictures hold other objects; what only the later one has (newly imported modules) does not count."""
    modules = {name for name, _ in before}
    return sorted(
        f"{name}.{attribute}"
        for name, attribute in before.keys() | {key for key in after if key[0] in modules}
        if before.get((name, attribute), picture) is not after.get((name, attribute), picture)
    )
