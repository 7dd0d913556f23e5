"""What a feature of the Megatron backend is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from mindspeed_llm.features_manager.patches import Patches


class ArgumentTarget(Protocol):
    """Where flags are added: a parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


class Feature:
    """Flags, their checks, and what they change: settings of ours and of megatron-core first, patches last.

    A feature keeps no state: everything it knows is in `args`, the flat namespace with Megatron's names. One file holds
    one feature; what its patches put in place is imported inside `register_patches`, so that flags can be read, checked
    and listed without torch and megatron.
    """

    name: ClassVar[str]
    """How messages and `--list-features` call it."""
    description: ClassVar[str]
    """What it is for, in one line."""
    targets: ClassVar[tuple[str, ...]] = ()
    """The dotted paths that `register_patches` patches, all of them and no others."""

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add the feature's flags, if it has flags of its own."""

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flags ask for the feature. One that is off changes nothing."""
        raise NotImplementedError

    def validate(self, args: argparse.Namespace) -> None:
        """Check the flags of the feature, against each other and against others; also called when the feature is off.

        All other arguments have passed the checks of `training.arguments`.

        Raises:
            UserError: names the flags, their values, and what to do.
        """

    def settings(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """What the flags mean in other arguments: name in `args` -> value. Asked only when the feature is on.

        Tuples are sets: those of several features are joined. Any other value that two features give must be the same.
        """
        return {}

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Declare the patches of the feature, under its name. Called only when the feature is on."""
