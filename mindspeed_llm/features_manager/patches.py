"""Changes to megatron-core at run time that are declared first, made once, listed, and undone.

    patches = Patches()
    patches.replace("megatron.core.fusions.fused_softmax.SoftmaxOne", OurSoftmax, feature="softmax")
    patches.wrap("megatron.core.transformer.mlp.MLP.forward", with_clock, feature="clock")
    patches.apply()
    ...
    patches.undo()

A target is a dotted path to an attribute of a module or of a class. What happens to it:

    function or class of megatron    every megatron module that holds the same object is rebound: the one that defines
                                     it, and those that said `from x import f`, also when they are imported later
    attribute of a class             set on the class that is named; an inherited one becomes the class's own, so the
                                     base class and its other subclasses keep theirs
    any other value of a module      set in the module that is named, and nowhere else: `HAVE_TE = False` is the same
                                     object in a hundred places that mean something else

Modules of ours are never rebound: a replacement may import the original by name in order to call it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from mindspeed_llm.errors import UserError

ROOT = "megatron"
PINNED = "megatron-core 0.16.1"

Kind = Literal["replace", "wrap"]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_MISSING = object()
# Patches that are in force in this process. Two sets at a time would not see each other's conflicts.
_in_force: list[Patches] = []


@dataclass(frozen=True, kw_only=True)
class AppliedPatch:
    """One patch that is in force."""

    feature: str
    kind: Kind
    target: str
    places: tuple[str, ...]
    """Every attribute that was set for it, the one of `target` first."""


@dataclass(frozen=True, kw_only=True)
class _Patch:
    feature: str
    kind: Kind
    target: str
    new: Any
    """The replacement, or the wrapper."""


@dataclass(kw_only=True)
class _Spot:
    """One object of megatron with all that is to happen to it."""

    owner: Any
    attribute: str
    raw: Any
    """What stands there, with its descriptor (staticmethod, property, ...)."""
    patches: list[_Patch] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def everywhere(self) -> bool:
        """Whether all modules that hold the object are meant."""
        return isinstance(self.owner, ModuleType) and callable(self.raw) and _is_of_megatron(self.raw)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two paths that lead to the same thing."""
        return (id(self.raw),) if self.everywhere else (id(self.owner), self.attribute)

    @property
    def target(self) -> str:
        return self.patches[0].target

    @property
    def replacement(self) -> _Patch | None:
        return next((patch for patch in self.patches if patch.kind == "replace"), None)


class Patches:
    """Patches that are declared, then applied together, then undone together; see the module's docstring."""

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        self._spots: list[_Spot] = []
        self._changes: list[tuple[Any, str, Any]] = []  # owner, attribute, what stood there: in the order of setting
        self._installed: list[tuple[Any, Any]] = []  # (new, original) of what modules may have imported by name

    def replace(self, target: str, new: Any, *, feature: str) -> None:
        """Declare that `new` takes the place of `target`.

        For a static method, class method or property, `new` may be the plain function: it gets the same descriptor. A
        property keeps its setter and deleter then.

        Args:
            target: dotted path of an attribute of a megatron module or class.
            new: what comes there. No object that megatron holds itself.
            feature: name of the feature that asks for it.

        Raises:
            UserError: another feature replaces the same target.
        """
        self._add(_Patch(feature=feature, kind="replace", target=target, new=new))

    def wrap(self, target: str, wrapper: Wrapper, *, feature: str) -> None:
        """Declare that `wrapper(original)` takes the place of the function or class `target`.

        Wrappers of one target stack in the order of these calls, the first one innermost, around the replacement if
        there is one. What a wrapper makes of a function gets the function's name, docstring and signature. A wrapper of
        a property is given its getter.

        Args:
            target: dotted path of a function, method or class.
            wrapper: takes the original and returns another callable.
            feature: name of the feature that asks for it.
        """
        self._add(_Patch(feature=feature, kind="wrap", target=target, new=wrapper))

    def targets(self, feature: str) -> tuple[str, ...]:
        """The targets that a feature has declared, each once, in order."""
        return tuple(dict.fromkeys(patch.target for patch in self._patches if patch.feature == feature))

    def apply(self) -> None:
        """Make all declared changes, or none: when one fails, those before it are undone.

        Raises:
            UserError: a target does not exist in the installed megatron-core, or two features exclude each other.
            AssertionError: patches are in force in this process already.
        """
        assert not _in_force, f"patches are in force already: {[patch.target for patch in _in_force[0]._patches]}"
        spots = self._resolve()
        _in_force.append(self)
        try:
            for spot in spots:
                self._change(spot)
        except BaseException:
            self.undo()
            raise
        self._spots = spots

    def undo(self) -> None:
        """Put every original back, also into modules that were imported while the patches were in force."""
        assert _in_force == [self], "these patches are not in force"
        while self._changes:
            owner, attribute, previous = self._changes.pop()
            _set(owner, attribute, previous)
        while self._installed:
            new, original = self._installed.pop()
            for module, attribute in _places(new):
                _set(module, attribute, original)
        self._spots = []
        _in_force.remove(self)

    def applied(self) -> list[AppliedPatch]:
        """The patches in force, in the order of declaration; empty before `apply` and after `undo`."""
        spot_of = {id(patch): spot for spot in self._spots for patch in spot.patches}
        return [
            AppliedPatch(
                feature=patch.feature, kind=patch.kind, target=patch.target, places=tuple(spot_of[id(patch)].places)
            )
            for patch in self._patches
            if id(patch) in spot_of
        ]

    def _add(self, patch: _Patch) -> None:
        assert self not in _in_force, f"{patch.feature} patches {patch.target} after patches have been applied"
        if patch.kind == "replace":
            for other in self._patches:
                if other.kind == "replace" and other.target == patch.target:
                    _refuse_two(other, patch)
        self._patches.append(patch)

    def _resolve(self) -> list[_Spot]:
        """One spot for each object that is patched, base classes before the classes that inherit from them."""
        spots: dict[tuple[Any, ...], _Spot] = {}
        for patch in self._patches:
            found = _find(patch)
            spot = spots.setdefault(found.key, found)
            if patch.kind == "replace" and spot.replacement is not None:
                _refuse_two(spot.replacement, patch)
            spot.patches.append(patch)
        for spot in spots.values():
            for other in spots.values():
                _check_reachable(spot, other)
        return sorted(spots.values(), key=lambda spot: len(inspect.getmro(spot.owner)) if _is_class(spot.owner) else 0)

    def _change(self, spot: _Spot) -> None:
        # Read again: the base class may have got a new one since.
        raw = spot.raw if spot.everywhere else _raw(spot.owner, spot.attribute)
        new = raw
        if spot.replacement is not None:
            new = _replaced(raw, spot.replacement)
        for patch in spot.patches:
            if patch.kind == "wrap":
                new = _wrapped(new, patch)
        if isinstance(spot.owner, ModuleType) and callable(new):
            held = [_name_of(module, name) for module, name in _places(new)]
            # `undo` could not tell such places from those that have imported the new object by name.
            assert not (held and spot.everywhere), f"{spot.target}: megatron holds the new object itself, as {held[0]}"
            if not held:
                self._installed.append((new, raw))
        for owner, attribute in _places(raw) if spot.everywhere else [(spot.owner, spot.attribute)]:
            previous = vars(owner).get(attribute, _MISSING)
            setattr(owner, attribute, new)
            self._changes.append((owner, attribute, previous))
            spot.places.append(_name_of(owner, attribute))
        spot.places.sort(key=lambda place: place != _name_of(spot.owner, spot.attribute))


def _refuse_two(first: _Patch, second: _Patch) -> None:
    assert first.feature != second.feature, f"{first.feature} replaces {first.target} twice"
    names = first.target if first.target == second.target else f"{first.target} and {second.target}, one object,"
    raise UserError(
        f"features {first.feature!r} and {second.feature!r} exclude each other: both replace {names} of "
        "megatron-core; leave out the flags of one of them (--list-features shows them)"
    )


def _check_reachable(spot: _Spot, other: _Spot) -> None:
    """Refuse a change inside a class that another feature replaces by an unrelated one: it would have no effect."""
    replacement = other.replacement
    if replacement is None or not _is_class(spot.owner) or spot.owner is not other.raw:
        return
    if _is_class(replacement.new) and issubclass(replacement.new, spot.owner):
        return
    inner = spot.patches[0]
    assert replacement.feature != inner.feature, f"{inner.feature} changes {inner.target} in a class that it replaces"
    raise UserError(
        f"features {replacement.feature!r} and {inner.feature!r} exclude each other: the first replaces the class "
        f"{replacement.target} of megatron-core, inside which the second changes {inner.target}; leave out the flags "
        "of one of them (--list-features shows them)"
    )


def _find(patch: _Patch) -> _Spot:
    """Import what the path of a patch leads through, and return where it ends.

    Raises:
        UserError: there is nothing of that name.
    """
    parts = patch.target.split(".")
    assert parts[0] == ROOT, f"{patch.target} is not in megatron; what else is patched is platform's"
    owner: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        found = _raw(owner, part) if isinstance(owner, ModuleType | type) else _MISSING
        if found is _MISSING and isinstance(owner, ModuleType):
            found = _submodule(owner, part)
        if found is _MISSING:
            path = ".".join(parts[:index])
            raise UserError(
                f"feature {patch.feature!r} patches {patch.target}, but the installed megatron-core has no {part!r} in "
                f"{path}; it is written for {PINNED}: install that version, or leave out the flags of the feature"
            )
        if index < len(parts) - 1:
            owner = found
    assert _is_of_megatron(owner), f"{patch.target} leads out of megatron; what else is patched is platform's"
    assert len(parts) > 1 and not isinstance(found, ModuleType), f"{patch.target} is a module, not an attribute of one"
    return _Spot(owner=owner, attribute=parts[-1], raw=found)


def _submodule(package: ModuleType, name: str) -> Any:
    full = f"{package.__name__}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise  # the module is there, and lacks something itself
        return _MISSING


def _raw(owner: Any, attribute: str) -> Any:
    """The attribute as it stands in a module or in the first class of the inheritance order, not bound."""
    for holder in inspect.getmro(owner) if _is_class(owner) else (owner,):
        if attribute in vars(holder):
            return vars(holder)[attribute]
    return _MISSING


def _replaced(raw: Any, patch: _Patch) -> Any:
    new = patch.new
    if isinstance(raw, staticmethod | classmethod) and not isinstance(new, type(raw)):
        return type(raw)(new)
    if isinstance(raw, property) and not isinstance(new, property):
        return raw.getter(new)
    return new


def _wrapped(raw: Any, patch: _Patch) -> Any:
    if isinstance(raw, staticmethod | classmethod):
        return type(raw)(_call_wrapper(patch, raw.__func__))
    if isinstance(raw, property):
        assert raw.fget is not None, f"{patch.target}: a property without a getter cannot be wrapped"
        return raw.getter(_call_wrapper(patch, raw.fget))
    return _call_wrapper(patch, raw)


def _call_wrapper(patch: _Patch, original: Any) -> Any:
    assert callable(original), f"{patch.target} is no function or class, but {original!r}: it can only be replaced"
    new = patch.new(original)
    assert callable(new) and new is not original, f"the wrapper of {patch.target} must return another callable"
    if _is_class(new):
        return new
    # A class's namespace is not copied into a function that makes its instances.
    return functools.update_wrapper(new, original, updated=() if _is_class(original) else functools.WRAPPER_UPDATES)


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def _is_of_megatron(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).split(".")[0] == ROOT


def _name_of(owner: Any, attribute: str) -> str:
    return (
        f"{owner.__module__}.{owner.__qualname__}.{attribute}" if _is_class(owner) else f"{owner.__name__}.{attribute}"
    )


def _modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == ROOT and isinstance(module, ModuleType):
            yield module


def _places(value: Any) -> list[tuple[ModuleType, str]]:
    """Every attribute of every megatron module that holds the object."""
    found = {}
    for module in _modules():
        for attribute, held in list(vars(module).items()):
            if held is value:
                found[id(module), attribute] = (module, attribute)
    return list(found.values())


def _set(owner: Any, attribute: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, value)
