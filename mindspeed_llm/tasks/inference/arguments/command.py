"""A command that asks a model: its own flags together with those that describe models of the Megatron backend."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_llm.flag import Group
from mindspeed_llm.tasks.inference.arguments.checks import settle_dtype
from mindspeed_llm.tasks.inference.arguments.model import MODEL, PROMPTS
from mindspeed_llm.valid_text import check_words

if TYPE_CHECKING:
    from mindspeed_llm.features_manager.feature import Feature
    from mindspeed_llm.training.arguments.no_effect import Inert
    from mindspeed_llm.training.arguments.parser import Surface

# Flags of training, besides those that describe the model and its spread over ranks, that mean something here.
_ALSO_HERE = (
    *("--seq-length", "--debug", "--model-type-hf"),
    *("--lora-load", "--lora-target-modules", "--lora-r", "--lora-alpha"),
)
# Features that are about how a model computes, not about how it is trained.
_FEATURES_HERE = (
    *("flash_attention", "fused_rmsnorm", "fused_swiglu", "fused_rotary"),
    *("num_layer_list", "noop_layers", "deterministic_mode"),
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and its flags."""

    program: str
    description: str
    groups: tuple[Group, ...]
    """Its own, besides those of every command that asks a model."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Flag of another command -> why this one does not take it."""
    no_effect: Mapping[str, str] = field(default_factory=dict)
    """Switch -> why it does nothing."""
    no_effect_values: Mapping[str, str] = field(default_factory=dict)
    """The same for flags with a value."""

    @property
    def own(self) -> tuple[Group, ...]:
        """All groups but those of the Megatron backend."""
        return (*self.groups, MODEL, PROMPTS)


def parse(argv: Sequence[str], command: Command) -> argparse.Namespace:
    """The arguments of a command line, each flag on its own; see `training.arguments.parser.parse`.

    Flags of training that have no part in a model's answers are at their defaults, and named in one notice.

    Raises:
        UserError: an unknown flag (names the nearest), one that is refused, a value of the wrong kind or that is no
            valid text, a contradiction about dtypes.
        SystemExit: `--help`.
    """
    from mindspeed_llm.features_manager.features import FEATURES
    from mindspeed_llm.training.arguments import parser

    check_words(argv, sys.getfilesystemencoding())
    surface = surface_of(command)
    args = parser.parse(argv, FEATURES, program=command.program, description=command.description, surface=surface)
    args.notices += tuple(_repeated(argv))
    _forget_training(args, surface)
    settle_dtype(args)
    return args


def _repeated(argv: Sequence[str]) -> Iterator[str]:
    """A line for each flag that stands in a command line more than once, with different values.

    Scripts put what their user adds behind flags of their own, so this is no mistake; but nothing is lost silently.
    """
    said: dict[str, list[list[str]]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values = [value] if value else []
            said.setdefault(name, []).append(values)
        else:
            values.append(word)
    for name, found in said.items():
        if any(values != found[-1] for values in found):
            yield f"{name} is given {_times(len(found))}: the last one counts"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"


def surface_of(command: Command) -> Surface:
    """All flags of a command, and what it says of others."""
    from mindspeed_llm.features_manager.features import FEATURES
    from mindspeed_llm.training.arguments import no_effect, not_yet, parser, renamed, tables

    own = {flag.name for group in command.own for flag in group.flags}
    silent = {**command.no_effect, **command.no_effect_values}
    taken = own | set(silent) | set(command.refused)
    described = (*tables.OF_MODEL, tables.TOKENIZER)
    others = tuple(group for group in tables.TRAINING if group not in described)
    listed = {flag.name for group in described for flag in group.flags} | set(_ALSO_HERE)
    of_features = {feature.name: _flags_of(feature) for feature in FEATURES}
    listed |= {name for feature in _FEATURES_HERE for name in of_features[feature]}
    everything = {flag.name for group in (*tables.TRAINING, *tables.OF_FEATURES) for flag in group.flags}
    everything |= {name for names in of_features.values() for name in names}
    rows: dict[str, Inert] = {name: row for name, row in no_effect.NO_EFFECT.items() if name not in own}
    rows |= {name: no_effect.Inert(reason=reason) for name, reason in command.no_effect.items()}
    rows |= {
        name: no_effect.Inert(reason=reason, parsing={"metavar": "X", "nargs": "+"})
        for name, reason in command.no_effect_values.items()
    }
    return parser.Surface(
        groups=(*command.own, *(_without(group, taken) for group in (*described, *others))),
        of_features=tuple(_without(group, taken) for group in tables.OF_FEATURES),
        unlisted=frozenset(everything - listed - own),
        no_effect=rows,
        not_yet={name: reason for name, reason in not_yet.NOT_YET.items() if name not in taken} | dict(command.refused),
        deprecated={old: new for old, new in renamed.DEPRECATED.items() if old not in own},
        elsewhere={name: flag for name, flag in renamed.ELSEWHERE.items() if flag in listed | own} | _ELSEWHERE,
    )


_ELSEWHERE = {
    "--model-name-or-path": "--load",
    "--model-path": "--load",
    "--model": "--load",
    "--load-dir": "--load",
    "--tokenizer": "--tokenizer-name-or-path",
    "--template": "--prompt-type",
    "--chat-template": "--prompt-type",
    "--max-tokens": "--max-new-tokens",
}
"""Names of the same setting elsewhere, for `did you mean`."""


def _flags_of(feature: Feature) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    feature.register_arguments(parser)
    return [name for action in parser._actions for name in action.option_strings]


def _without(group: Group, names: set[str]) -> Group:
    return Group(title=group.title, flags=tuple(flag for flag in group.flags if flag.name not in names))


def _forget_training(args: argparse.Namespace, surface: Surface) -> None:
    """Set flags that have no part here to their defaults; a notice names those that were given."""
    from mindspeed_llm.features_manager.features import FEATURES
    from mindspeed_llm.training.arguments.parser import make_parser

    actions = make_parser(FEATURES, program="", surface=surface)._actions
    forgotten = {
        action.dest: action
        for action in actions
        if action.dest in args.given and not surface.unlisted.isdisjoint(action.option_strings)
    }
    if not forgotten:
        return
    for dest, action in forgotten.items():
        default = action.default
        setattr(args, dest, tuple(default) if isinstance(default, list) else default)
    flags = " ".join(action.option_strings[0] for action in forgotten.values())
    args.notices += (f"no effect, as nothing is trained: {flags}",)
    args.given = tuple(name for name in args.given if name not in forgotten)
