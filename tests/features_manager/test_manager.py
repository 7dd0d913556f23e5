"""The manager: flags and their clashes, settings, patches as declared, and the table of `--list-features`."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.listing import print_features
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.features_manager.patches import Patches
from tests.features_manager.toy_features import ToyFeature, differences, picture

FORWARD = "megatron.core.transformer.mlp.MLP.forward"
DIVIDE = "megatron.core.utils.divide"


def plus_one(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: original(*arguments) + 1


def _parse(manager: FeaturesManager, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    manager.register_arguments(parser)
    return parser.parse_args(argv)


def test_each_feature_adds_its_flags_in_a_group_of_its_own() -> None:
    manager = FeaturesManager(
        [ToyFeature("one", flags=("--one", "--two")), ToyFeature("three"), ToyFeature("bare", flags=())]
    )
    parser = argparse.ArgumentParser(allow_abbrev=False)
    manager.register_arguments(parser)
    assert vars(parser.parse_args(["--two"])) == {"one": False, "two": True, "three": False}
    text = parser.format_help()
    assert "one:\n  a toy" in text and "three:\n  a toy" in text and "bare" not in text


def test_a_flag_of_two_features_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="'one' and 'two' both add the flag --same"):
        FeaturesManager([ToyFeature("one", flags=("--same",)), ToyFeature("two", flags=("--same",))])


def test_a_flag_that_the_parser_has_is_our_mistake() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    with pytest.raises(AssertionError, match="'one' adds --one, which the parser has already"):
        FeaturesManager([ToyFeature("one")]).register_arguments(parser)


def test_two_features_of_one_name_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="one name"):
        FeaturesManager([ToyFeature("one"), ToyFeature("one")])


def test_only_features_that_are_on_set_and_patch() -> None:
    from megatron.core.tensor_parallel import layers

    manager = FeaturesManager(
        [
            ToyFeature("on", (DIVIDE,), wrapper=plus_one, sets={"hidden_size": 8}),
            ToyFeature("off", (FORWARD,), new=len, sets={"num_layers": 3}),
        ]
    )
    args = _parse(manager, "--on")
    args.hidden_size, args.num_layers = 4, 2
    before = picture()
    manager.validate(args)
    assert (args.hidden_size, args.num_layers) == (8, 2)
    assert not differences(before, picture())
    manager.apply(args)
    try:
        assert layers.divide(6, 3) == 3
        assert [(patch.feature, patch.target) for patch in manager.applied()] == [("on", DIVIDE)]
        with pytest.raises(AssertionError, match="applied already"):
            manager.apply(args)
    finally:
        manager.undo()
    assert layers.divide(6, 3) == 2 and not manager.applied() and not differences(before, picture())
    manager.undo()  # there is nothing left to undo


def test_features_that_set_one_argument_differently_exclude_each_other() -> None:
    manager = FeaturesManager([ToyFeature("one", sets={"x": 1}), ToyFeature("two", sets={"x": 2})])
    with pytest.raises(UserError, match="'one' and 'two' exclude each other: the first sets x to 1, the second to 2"):
        manager.validate(_parse(manager, "--one", "--two"))
    manager.validate(_parse(manager, "--one"))
    agreeing = FeaturesManager([ToyFeature("one", sets={"x": 1}), ToyFeature("two", sets={"x": 1})])
    args = _parse(agreeing, "--one", "--two")
    agreeing.validate(args)
    assert args.x == 1


def test_a_check_runs_for_features_that_are_off_too() -> None:
    class Picky(ToyFeature):
        def validate(self, args: argparse.Namespace) -> None:
            raise UserError("--picky: not today")

    manager = FeaturesManager([Picky("picky")])
    with pytest.raises(UserError, match="not today"):
        manager.validate(_parse(manager))


def test_patches_other_than_the_declared_ones_are_our_mistake() -> None:
    class Liar(ToyFeature):
        def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
            patches.wrap(DIVIDE, plus_one, feature=self.name)

    for declared in ((), (DIVIDE, FORWARD)):
        manager = FeaturesManager([Liar("liar", declared)])
        with pytest.raises(AssertionError, match="'liar' declares the targets"):
            manager.apply(_parse(manager, "--liar"))


def test_two_features_that_replace_one_target_are_told_apart_by_name() -> None:
    manager = FeaturesManager([ToyFeature("one", (DIVIDE,), new=max), ToyFeature("two", (DIVIDE,), new=min)])
    before = picture()
    with pytest.raises(UserError, match="'one' and 'two' exclude each other"):
        manager.apply(_parse(manager, "--one", "--two"))
    assert not differences(before, picture())
    manager.apply(_parse(manager, "--two"))
    manager.undo()


def _two_features() -> FeaturesManager:
    features: list[Feature] = [
        ToyFeature("one", (DIVIDE,), wrapper=plus_one, sets={"x": [1, "[b]"]}),
        ToyFeature("two", (FORWARD, DIVIDE), new=len, flags=("--two", "--twice")),
    ]
    return FeaturesManager(features)


@pytest.mark.parametrize(
    ("argv", "states"), [([], ("off", "off")), (["--one"], ("on", "off")), (["--two"], ("off", "on"))]
)
def test_the_listing_says_what_is_on_and_what_it_does(argv: list[str], states: tuple[str, str]) -> None:
    manager = _two_features()
    out = io.StringIO()
    print_features(manager.listing(_parse(manager, *argv)), out)
    assert [line.split("\t") for line in out.getvalue().splitlines()] == [
        ["feature", "flags", "state", "sets", "patches"],
        ["one", "--one", states[0], "x=[1, '[b]']" if states[0] == "on" else "-", DIVIDE],
        ["two", "--two --twice", states[1], "-", f"{FORWARD} {DIVIDE}"],
    ]


def test_in_a_terminal_the_listing_is_a_drawn_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "160")
    manager, out = _two_features(), Terminal()
    print_features(manager.listing(_parse(manager, "--one")), out)
    text = out.getvalue()
    assert "┃" in text and "\t" not in text and "x=[1, '[b]']" in text
    assert all(word in text for word in ("--twice", FORWARD, "off", "on"))


def test_the_listing_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "from mindspeed_llm.features_manager.features import FEATURES\n"
        "from mindspeed_llm.features_manager.listing import print_features\n"
        "from mindspeed_llm.features_manager.manager import FeaturesManager\n"
        "from tests.features_manager.command import arguments\n"
        "print_features(FeaturesManager(FEATURES).listing(arguments('--noop-layers 0')))\n"
        "sys.exit([name for name in ('torch', 'megatron', 'transformers', 'numpy') if name in sys.modules] or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("feature\tflags\tstate")
