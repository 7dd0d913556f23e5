"""All features together: their flags, checks and settings, their patches, and the table of `--list-features`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.patches import AppliedPatch, Patches


@dataclass(frozen=True, kw_only=True)
class ListedFeature:
    """One row of `--list-features`."""

    name: str
    description: str
    flags: tuple[str, ...]
    is_on: bool
    settings: tuple[str, ...]
    """What it sets in other arguments, as `name=value`; empty where it is off."""
    targets: tuple[str, ...]
    """What it patches in megatron-core, or would patch if it were on."""


class _Recorder:
    """Passes flags on to a parser and notes them."""

    def __init__(self, parser: argparse._ActionsContainer) -> None:
        self._parser = parser
        self.flags: list[str] = []

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = self._parser.add_argument(*names, **options)
        self.flags += action.option_strings
        return action


class FeaturesManager:
    """Runs a fixed list of features through a start-up: flags, checks, settings, patches."""

    def __init__(self, features: Sequence[Feature]) -> None:
        """Take the features in the order in which their wrappers stack (the first one innermost).

        Raises:
            AssertionError: two features have one name or one flag.
        """
        names = [feature.name for feature in features]
        assert len(set(names)) == len(names), f"two features have one name: {sorted(names)}"
        self._features = tuple(features)
        self._flags = _flags_of(features)
        self._patches: Patches | None = None

    def register_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of every feature to a parser, one group for each feature.

        Raises:
            AssertionError: the parser has a flag of a feature already.
        """
        taken = parser._option_string_actions
        for feature in self._features:
            twice = [flag for flag in self._flags[feature.name] if flag in taken]
            assert not twice, f"feature {feature.name!r} adds {', '.join(twice)}, which the parser has already"
            if self._flags[feature.name]:
                feature.register_arguments(parser.add_argument_group(feature.name, feature.description))

    def validate(self, args: argparse.Namespace) -> None:
        """Check the flags of all features, then put what they mean into `args` (`Feature.settings`).

        Where several features set one argument to tuples, it gets the elements of all.

        Raises:
            UserError: a feature refuses its flags, or two features set one argument to different values.
        """
        for feature in self._features:
            feature.validate(args)
        found: dict[str, Any] = {}
        origin: dict[str, str] = {}
        for feature in self._on(args):
            for name, value in feature.settings(args).items():
                first = origin.setdefault(name, feature.name)
                other = found.setdefault(name, value)
                if isinstance(other, tuple) and isinstance(value, tuple):
                    found[name] = tuple(dict.fromkeys(other + value))
                elif other != value:
                    raise UserError(
                        f"features {first!r} and {feature.name!r} exclude each other: the first sets {name} to "
                        f"{other!r}, the second to {value!r}; leave out the flags of one of them"
                    )
        for name, value in found.items():
            setattr(args, name, value)

    def apply(self, args: argparse.Namespace) -> None:
        """Make the patches of the features that are on. Once, at start-up, after `validate`.

        Raises:
            UserError: see `Patches.apply`.
            AssertionError: patches are in force already, or a feature patches other targets than it declares.
        """
        assert self._patches is None, "the features have been applied already"
        patches = Patches()
        for feature in self._on(args):
            feature.register_patches(patches, args)
            found = patches.targets(feature.name)
            assert set(found) == set(feature.targets), (
                f"feature {feature.name!r} declares the targets {sorted(feature.targets)} and patches {sorted(found)}"
            )
        patches.apply()
        self._patches = patches

    def undo(self) -> None:
        """Undo what `apply` did; nothing where it has failed or has not been called."""
        if self._patches is not None:
            self._patches.undo()
            self._patches = None

    def applied(self) -> list[AppliedPatch]:
        """The patches in force; empty before `apply` and after `undo`."""
        return [] if self._patches is None else self._patches.applied()

    def listing(self, args: argparse.Namespace) -> list[ListedFeature]:
        """One row for each feature, in order. Needs validated arguments, and neither torch nor megatron."""
        return [
            ListedFeature(
                name=feature.name,
                description=feature.description,
                flags=self._flags[feature.name],
                is_on=(is_on := feature.is_on(args)),
                settings=tuple(f"{name}={value}" for name, value in feature.settings(args).items()) if is_on else (),
                targets=feature.targets,
            )
            for feature in self._features
        ]

    def _on(self, args: argparse.Namespace) -> list[Feature]:
        return [feature for feature in self._features if feature.is_on(args)]


def _flags_of(features: Sequence[Feature]) -> dict[str, tuple[str, ...]]:
    """The flags of each feature, by its name."""
    flags: dict[str, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for feature in features:
        recorder = _Recorder(argparse.ArgumentParser(add_help=False))
        feature.register_arguments(recorder)
        flags[feature.name] = tuple(recorder.flags)
        for flag in recorder.flags:
            first = owners.setdefault(flag, feature.name)
            assert first == feature.name, f"features {first!r} and {feature.name!r} both add the flag {flag}"
    return flags
