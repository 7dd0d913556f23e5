"""Patches of megatron-core: what is set where, in which order, and that undoing leaves nothing behind."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core.models.gpt.gpt_model
import megatron.core.tensor_parallel
import megatron.core.transformer.transformer_block
import megatron.core.utils
import pytest
from megatron.core import parallel_state
from megatron.core.transformer import transformer_block, transformer_config
from megatron.core.transformer.mlp import MLP

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.patches import Patches
from tests.features_manager.toy_features import differences, picture

VIEWLESS = "megatron.core.utils.make_viewless_tensor"
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
TOY = "megatron.toy_of_the_tests"


@pytest.fixture
def patches() -> Iterator[Patches]:
    """Patches that are undone, whatever the test did; megatron must then be what it was, object by object."""
    before = picture()
    patches = Patches()
    yield patches
    if patches.applied():
        patches.undo()
    assert not differences(before, picture())


@pytest.fixture
def toy(patches: Patches) -> Iterator[types.ModuleType]:
    """A module that passes for one of megatron, with every kind of attribute."""
    module = types.ModuleType(TOY)
    exec(_TOY_SOURCE, vars(module))
    sys.modules[TOY] = module
    setattr(sys.modules["megatron"], TOY.split(".")[1], module)
    yield module
    if patches.applied():
        patches.undo()
    del sys.modules[TOY]
    delattr(sys.modules["megatron"], TOY.split(".")[1])


_TOY_SOURCE = """
import functools
flag = False
other_flag = False
nothing = None
class Base:
    @staticmethod
    def static(x): return ("static", x)
    @classmethod
    def of_class(cls, x): return (cls.__name__, x)
    def method(self, x): "The method." ; return ("method", x)
    @property
    def value(self): "The value."; return self._value
    @value.setter
    def value(self, new): self._value = new
    class Inner:
        def deep(self): return "deep"
class Derived(Base):
    pass
class Stranger:
    pass
"""


def tag(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper that puts a text before what the original returns."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (text, original(*arguments, **options))

    return wrapper


def test_a_function_is_rebound_wherever_megatron_imported_it(patches: Patches) -> None:
    original = megatron.core.utils.make_viewless_tensor
    holders = {
        f"{name}.{attribute}" for (name, attribute), value in picture().items() if value is original and "." in name
    }
    assert "megatron.core.transformer.transformer_block.make_viewless_tensor" in holders and len(holders) > 2

    def ours(inp: Any, requires_grad: bool, keep_graph: bool) -> Any:
        return inp

    patches.replace(VIEWLESS, ours, feature="views")
    assert megatron.core.utils.make_viewless_tensor is original, "nothing happens before apply"
    patches.apply()
    [applied] = patches.applied()
    assert (applied.feature, applied.kind, applied.target) == ("views", "replace", VIEWLESS)
    assert set(applied.places) == holders and applied.places[0] == VIEWLESS
    assert transformer_block.make_viewless_tensor is ours
    assert not [key for key, value in picture().items() if value is original]
    patches.undo()
    assert transformer_block.make_viewless_tensor is original and not patches.applied()


def test_a_class_named_by_the_package_that_exports_it_is_rebound_where_it_is_defined(patches: Patches) -> None:
    from megatron.core.tensor_parallel import layers

    class Ours(layers.ColumnParallelLinear):
        pass

    patches.replace("megatron.core.tensor_parallel.ColumnParallelLinear", Ours, feature="linear")
    patches.apply()
    assert (
        layers.ColumnParallelLinear is Ours is megatron.core.models.gpt.gpt_model.tensor_parallel.ColumnParallelLinear
    )
    assert patches.applied()[0].places[0] == "megatron.core.tensor_parallel.ColumnParallelLinear"


def test_a_module_imported_later_gets_the_new_object_and_loses_it_again(patches: Patches) -> None:
    late = "megatron.core.transformer.transformer_block"
    patches.wrap(VIEWLESS, tag("wrapped"), feature="views")
    original, module = megatron.core.utils.make_viewless_tensor, sys.modules.pop(late)
    patches.apply()
    try:
        again = importlib.import_module(late)
        assert again.make_viewless_tensor is megatron.core.utils.make_viewless_tensor is not original
        patches.undo()
        assert again.make_viewless_tensor is original
    finally:
        sys.modules[late] = module
        sys.modules["megatron.core.transformer"].transformer_block = module  # type: ignore[attr-defined]


def test_a_constant_is_set_in_its_own_module_only(patches: Patches, toy: types.ModuleType) -> None:
    patches.replace(f"{TOY}.flag", True, feature="flag")
    patches.replace(f"{TOY}.nothing", 3, feature="flag")
    patches.apply()
    assert toy.flag is True and toy.other_flag is False and toy.nothing == 3
    assert [applied.places for applied in patches.applied()] == [(f"{TOY}.flag",), (f"{TOY}.nothing",)]
    patches.undo()
    assert toy.flag is False and toy.nothing is None


def test_wrappers_stack_in_order_over_the_original(patches: Patches, toy: types.ModuleType) -> None:
    for text in ("first", "second", "third"):
        patches.wrap(f"{TOY}.Base.method", tag(text), feature=text)
    patches.apply()
    assert toy.Base().method(1) == ("third", ("second", ("first", ("method", 1))))


def test_wrappers_stack_over_the_replacement_whenever_it_was_declared(patches: Patches, toy: types.ModuleType) -> None:
    patches.wrap(f"{TOY}.Base.method", tag("first"), feature="a")
    patches.replace(f"{TOY}.Base.method", lambda self, x: ("new", x), feature="b")
    patches.wrap(f"{TOY}.Base.method", tag("second"), feature="c")
    patches.apply()
    assert toy.Base().method(1) == ("second", ("first", ("new", 1)))
    assert [(a.feature, a.kind) for a in patches.applied()] == [("a", "wrap"), ("b", "replace"), ("c", "wrap")]


def test_a_wrapped_function_keeps_name_docstring_and_signature(patches: Patches) -> None:
    original = megatron.core.utils.make_viewless_tensor
    signature = inspect.signature(original)
    patches.wrap(VIEWLESS, tag("wrapped"), feature="views")
    patches.apply()
    wrapped = transformer_block.make_viewless_tensor
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__module__) == (
        original.__name__,
        original.__doc__,
        "megatron.core.utils",
    )
    assert inspect.signature(wrapped) == signature and inspect.unwrap(wrapped) is original


def test_a_wrapped_class_does_not_lend_its_namespace(patches: Patches, toy: types.ModuleType) -> None:
    patches.wrap(f"{TOY}.Stranger", tag("made"), feature="maker")
    patches.apply()
    text, made = toy.Stranger()
    assert text == "made" and type(made).__name__ == "Stranger"
    assert "__weakref__" not in vars(toy.Stranger) and toy.Stranger.__name__ == "Stranger"


@pytest.mark.parametrize("kind", ["replace", "wrap"])
def test_descriptors_stay_what_they_are(patches: Patches, toy: types.ModuleType, kind: str) -> None:
    before = dict(vars(toy.Base))
    if kind == "wrap":
        for name in ("static", "of_class", "value"):
            patches.wrap(f"{TOY}.Base.{name}", tag("new"), feature="f")
    else:
        patches.replace(f"{TOY}.Base.static", lambda x: ("new", ("static", x)), feature="f")
        patches.replace(f"{TOY}.Base.of_class", lambda cls, x: ("new", (cls.__name__, x)), feature="f")
        patches.replace(f"{TOY}.Base.value", lambda self: ("new", self._value), feature="f")
    patches.apply()
    assert [type(vars(toy.Base)[name]) for name in ("static", "of_class", "value")] == [
        staticmethod,
        classmethod,
        property,
    ]
    one = toy.Derived()
    one.value = 7  # the setter stays
    assert one.static(1) == toy.Base.static(1) == ("new", ("static", 1))
    assert toy.Derived.of_class(2) == ("new", ("Derived", 2))
    assert one.value == ("new", 7)
    if kind == "wrap":
        assert toy.Base.value.__doc__ == "The value." and toy.Base.static.__name__ == "static"
    patches.undo()
    assert {name: value for name, value in vars(toy.Base).items() if before.get(name) is not value} == {}


def test_a_descriptor_given_as_such_is_taken_as_it_is(patches: Patches, toy: types.ModuleType) -> None:
    new = staticmethod(lambda x: ("given", x))
    read_only = property(lambda self: "given")
    patches.replace(f"{TOY}.Base.static", new, feature="f")
    patches.replace(f"{TOY}.Base.value", read_only, feature="f")
    patches.apply()
    assert vars(toy.Base)["static"] is new and vars(toy.Base)["value"] is read_only


def test_an_inherited_attribute_becomes_the_class_own_and_goes_again(patches: Patches, toy: types.ModuleType) -> None:
    patches.wrap(f"{TOY}.Derived.method", tag("derived"), feature="f")
    patches.apply()
    assert toy.Derived().method(1) == ("derived", ("method", 1)) and toy.Base().method(1) == ("method", 1)
    assert "method" in vars(toy.Derived)
    patches.undo()
    assert "method" not in vars(toy.Derived)


def test_a_wrapped_inherited_attribute_sees_the_patch_of_its_base(patches: Patches, toy: types.ModuleType) -> None:
    patches.wrap(f"{TOY}.Derived.method", tag("derived"), feature="f")
    patches.wrap(f"{TOY}.Base.method", tag("base"), feature="g")
    patches.apply()
    assert toy.Derived().method(1) == ("derived", ("base", ("method", 1)))
    patches.undo()
    assert toy.Derived().method(1) == ("method", 1)


def test_nested_classes_are_reached(patches: Patches, toy: types.ModuleType) -> None:
    patches.replace(f"{TOY}.Base.Inner.deep", lambda self: "deeper", feature="f")
    patches.apply()
    assert toy.Derived.Inner().deep() == "deeper"


def test_a_missing_target_names_feature_and_target(patches: Patches) -> None:
    for target, missing in {
        "megatron.core.utils.no_such_function": "'no_such_function' in megatron.core.utils",
        "megatron.core.no_such_module.function": "'no_such_module' in megatron.core",
        f"{LAYER}.no_such_method": f"'no_such_method' in {LAYER}",
        f"{LAYER}.forward.inner": f"'inner' in {LAYER}.forward",
    }.items():
        wrong = Patches()
        wrong.replace(target, len, feature="wishful")
        with pytest.raises(UserError) as error:
            wrong.apply()
        assert "'wishful'" in str(error.value) and target in str(error.value) and missing in str(error.value)
        assert "0.16.1" in str(error.value)


def test_two_replacements_of_one_target_name_both_features(patches: Patches) -> None:
    patches.replace(f"{LAYER}.forward", len, feature="one")
    with pytest.raises(
        UserError, match=r"'one' and 'two' exclude each other: both replace .*TransformerLayer\.forward"
    ):
        patches.replace(f"{LAYER}.forward", len, feature="two")


def test_two_replacements_of_one_object_by_two_paths_are_found(patches: Patches) -> None:
    patches.replace("megatron.core.tensor_parallel.ColumnParallelLinear", int, feature="one")
    patches.replace("megatron.core.tensor_parallel.layers.ColumnParallelLinear", float, feature="two")
    with pytest.raises(UserError, match=r"'one' and 'two' .*layers\.ColumnParallelLinear, one object"):
        patches.apply()


def test_wrappers_by_two_paths_meet_on_the_one_object(patches: Patches) -> None:
    original = megatron.core.utils.make_viewless_tensor
    patches.wrap(VIEWLESS, tag("first"), feature="one")
    patches.wrap(f"{transformer_block.__name__}.make_viewless_tensor", tag("second"), feature="two")
    patches.apply()
    import torch

    text, (inner, _) = megatron.core.utils.make_viewless_tensor(torch.ones(1), False, False)
    assert (text, inner) == ("second", "first") and original is not megatron.core.utils.make_viewless_tensor


def test_a_change_inside_a_class_that_is_replaced_is_refused(patches: Patches, toy: types.ModuleType) -> None:
    patches.replace(f"{TOY}.Base", toy.Stranger, feature="one")
    patches.wrap(f"{TOY}.Base.method", tag("x"), feature="two")
    with pytest.raises(UserError, match=r"'one' and 'two' exclude each other.*inside which"):
        patches.apply()


def test_a_change_inside_a_class_that_a_subclass_replaces_is_inherited(patches: Patches, toy: types.ModuleType) -> None:
    patches.replace(f"{TOY}.Base", type("Ours", (toy.Base,), {}), feature="one")
    patches.wrap(f"{TOY}.Base.method", tag("x"), feature="two")
    patches.apply()
    assert toy.Base.__name__ == "Ours" and toy.Base().method(1) == ("x", ("method", 1))


def test_apply_that_fails_half_way_leaves_nothing(patches: Patches) -> None:
    before = picture()

    def broken(original: Any) -> Any:
        raise RuntimeError("no wrapper today")

    patches.replace(VIEWLESS, lambda *a, **k: None, feature="a")
    patches.wrap(f"{LAYER}.forward", tag("x"), feature="b")
    patches.wrap(f"{MLP.__module__}.MLP.forward", broken, feature="c")
    with pytest.raises(RuntimeError, match="no wrapper today"):
        patches.apply()
    assert not differences(before, picture()) and not patches.applied()
    # The same process can apply other patches after that.
    other = Patches()
    other.wrap(f"{LAYER}.forward", tag("x"), feature="b")
    other.apply()
    other.undo()


def test_apply_happens_once_in_a_process(patches: Patches) -> None:
    patches.wrap(f"{LAYER}.forward", tag("x"), feature="b")
    patches.apply()
    with pytest.raises(AssertionError, match="in force already"):
        patches.apply()
    with pytest.raises(AssertionError, match="in force already"):
        Patches().apply()
    with pytest.raises(AssertionError, match="after patches have been applied"):
        patches.wrap(f"{LAYER}.forward", tag("y"), feature="c")
    with pytest.raises(AssertionError, match="not in force"):
        Patches().undo()


def test_undo_over_many_kinds_leaves_megatron_as_it_was(patches: Patches) -> None:
    before = picture()
    patches.wrap(f"{LAYER}.forward", tag("x"), feature="b")
    patches.wrap(f"{LAYER}.sharded_state_dict", tag("x"), feature="b")
    patches.replace(f"{LAYER}.train", lambda self, mode=True: self, feature="b")  # of torch's Module, inherited
    patches.wrap(f"{transformer_config.__name__}.TransformerConfig.__post_init__", tag("x"), feature="c")
    patches.wrap(f"{parallel_state.__name__}.get_tensor_model_parallel_world_size", tag("x"), feature="c")
    patches.apply()
    attributes = {place.rsplit(".", 1)[1] for applied in patches.applied() for place in applied.places}
    # The picture looks into a class from each module that holds it, so only the names of the attributes are compared.
    assert {place.rsplit(".", 1)[1] for place in differences(before, picture())} == attributes
    assert len(attributes) == 5
    patches.undo()
    assert not differences(before, picture())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("torch.nn.Linear.forward", "not in megatron"),
        ("megatron.core.transformer.mlp.F.gelu", "leads out of megatron"),
        ("megatron.core.transformer", "is a module"),
    ],
)
def test_what_is_no_attribute_of_megatron_is_our_mistake(patches: Patches, target: str, reason: str) -> None:
    patches.replace(target, len, feature="f")
    with pytest.raises(AssertionError, match=reason):
        patches.apply()


def test_a_replacement_that_megatron_holds_itself_is_our_mistake(patches: Patches) -> None:
    before = picture()
    patches.replace(VIEWLESS, megatron.core.utils.divide, feature="f")
    with pytest.raises(AssertionError, match="holds the new object itself"):
        patches.apply()
    assert not differences(before, picture())


def test_a_wrapper_that_returns_what_it_got_is_our_mistake(patches: Patches) -> None:
    patches.wrap(VIEWLESS, lambda original: original, feature="f")
    with pytest.raises(AssertionError, match="another callable"):
        patches.apply()


def test_a_constant_cannot_be_wrapped(patches: Patches, toy: types.ModuleType) -> None:
    patches.wrap(f"{TOY}.flag", functools.partial, feature="f")
    with pytest.raises(AssertionError, match="can only be replaced"):
        patches.apply()
