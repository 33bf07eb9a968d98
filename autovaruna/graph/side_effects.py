"""Undoes, names and refuses the side effects of a forward: attributes of modules, Python numbers, submodules."""

from __future__ import annotations

import copy
import dis
import logging
import random
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
from torch import Tensor, nn

from autovaruna._torch import FakeTensor, pytree
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.constant_values import is_known
from autovaruna.graph.guards import (
    GONE,
    OF_MODULES,
    Unusable,
    UsedError,
    entries,
    full_name,
    is_constant,
    records,
    restored,
)
from autovaruna.graph.outside import CONTAINERS, OutsidePlace, is_installed, items_of, read_outside
from autovaruna.graph.source_lines import line_with, where_raised
from autovaruna.log import warn_once

logger = logging.getLogger(__name__)

_CONTAINERS = (list, dict, OrderedDict, set, deque)
_Cache: Any = type(cache(len))
_MOST_NAMES = 5
_STATES: dict[type, Callable[[Any], Any]] = {
    random.Random: lambda each: each.getstate(),
    numpy.random.RandomState: lambda each: (each.get_state()[1].tolist(), *each.get_state()[2:]),
    numpy.random.Generator: lambda each: each.bit_generator.state,
}
"""Generators that a script makes, and what changes as each draws."""


@contextmanager
def restored_attributes(model: nn.Module) -> Iterator[list[OutsidePlace]]:
    """Puts back the attributes of modules and of their objects when the context ends; new ones are taken away.

    A model that is run on fake tensors may keep some of them, or of what they are made into, in a table outside of it.
    Yields what the forward reads from outside, but for what is installed.
    """
    owners = [*model.modules(), *(each for _, each in records(model))]
    places = [vars(owner) for owner in owners]
    outside = read_outside(owners, ("forward",))
    outside = [each for each in outside if not is_installed(each.path.partition(":")[0])]
    held = [value for place in places for value in place.values()]
    held += [place.held.get(name) for place in outside for name in place.names]
    held += [inner for value in held if type(value) is tuple for inner in value]  # defaults of arguments, say
    caches = [(value, value.cache_info()) for value in held if isinstance(value, _Cache)]
    held = [value for value in held if type(value) in _CONTAINERS]
    named = [(each, each.values()) for each in outside]
    try:
        with restored([*places, *held]):
            yield outside
    finally:
        for place, before in named:
            place.put_back(before)
        for cached, before in caches:
            if cached.cache_info() != before:  # it may hold what has no numbers
                cached.cache_clear()


def changed_attributes(model: nn.Module, own: nn.Module) -> list[str]:
    """Returns the attributes of modules and objects that a forward of `own`, a copy of the model, has changed."""
    before, after = dict(_attributes(model)), dict(_attributes(own))
    return sorted(name for name in before | after if not _same(before.get(name), after.get(name)))


def _same(one: Any, other: Any) -> bool:
    """Whether two values, or the values in two lists, are the same to the bit."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return is_constant(one) and is_constant(other) and type(one) is type(other) and one == other


def left_tensors(model: nn.Module) -> list[str]:
    """Returns the attributes in which a traced forward has left tensors, or numbers or sizes of such, no constants."""
    return list(dict.fromkeys(name for name, values in _attributes(model) if any(map(_is_left, values))))


def left_outside(places: Iterable[OutsidePlace]) -> list[str]:
    """Returns the names outside of the model, as of a global table, under which a traced forward has left the same."""
    found = ((place.path + name, value) for place in places for name, value in place.values().items())
    return [name for name, value in found if any(_is_left(each) for _, each in entries("", value, 2))]


def python_state(model: nn.Module, places: Iterable[OutsidePlace]) -> dict[str, Any]:
    """Returns numbers, texts and lengths of containers that modules, their objects and tensors, and `places` hold."""
    owners: list[tuple[str, Any]] = [*model.named_modules(), *records(model)]
    owners += [*model.named_parameters(), *model.named_buffers()]
    held = [(full_name(path, name), value) for path, own in owners for name, value in list(vars(own).items())]
    held += [(f"attributes of {path or 'the model'}", len(vars(own))) for path, own in owners]
    held += [(place.path + name, value) for place in places for name, value in place.values().items()]
    found = (each for name, value in held for each in entries(name, value))
    return {name: value for name, value in found if is_constant(value)}


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name, value in after.items() if before.get(name, GONE) != value}


def warn_of_running(names: Sequence[str], model: nn.Module) -> None:
    """Warns of Python state that each call of plain PyTorch changes."""
    text = (
        f"each call of forward changes {', '.join(names[:_MOST_NAMES])}{' and more' * (len(names) > _MOST_NAMES)}, "
        "which no call here does: a trace goes by what was there at first. Where forward goes by it, make it a buffer "
        "(register_buffer()), or let the script count and pass the number as a tensor."
    )
    warn_once(logger, model, text)


def warn_of_left(names: Sequence[str], model: nn.Module) -> None:
    """Warns of attributes with tensors, which plain PyTorch would have after a call, and ranks have not."""
    if names:
        text = (
            f"forward leaves tensors, or numbers out of them (item(), size(0)), in {', '.join(names[:_MOST_NAMES])}"
            f"{' and more' * (len(names) > _MOST_NAMES)}. "
            "They stay where they are made, on a rank and in a micro-batch: after a call nothing new is there, and "
            "what uses it is refused. Return them if the script goes on from them."
        )
        warn_once(logger, model, text)


class Left(Unusable):
    """Stands between calls for what forward leaves in an attribute; a copy, or a pickle, has what was there before."""

    __slots__ = ("_before",)

    def __init__(self, name: str, before: Any) -> None:
        super().__init__(name)
        self._before = before

    def __deepcopy__(self, memo: Any = None) -> Any:
        return copy.deepcopy(self._before, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _given, (self._before,)

    def __repr__(self) -> str:
        return f"Left({self._attribute})"

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"The script uses {self._attribute} of the model, in which forward leaves tensors, or numbers out of them: "
            "they stay where they are made, on a rank and in a micro-batch, and have no gradient here. Expected a "
            "loss, and whatever else the script goes on from, made of what forward returns; return it, too."
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))._refuse()


def _given(value: Any) -> Any:
    return value


def put_left(model: nn.Module, names: Iterable[str]) -> list[Callable[[], None]]:
    """Puts a `Left` into each of the attributes of modules in which forward leaves something; returns what undoes it.

    A list gets one more entry, so that it may be cleared.
    """
    undo = list[Callable[[], None]]()
    for full in names:
        path, _, name = full.rpartition(".")
        try:
            held = vars(model.get_submodule(path))
        except AttributeError:  # of an object that a module holds
            continue
        if ":" in name:  # outside of the model
            continue
        before = held.get(name)
        stand_in = Left(full, before)
        if type(before) is list:
            before.append(stand_in)
            undo.append(partial(_take_from, before, stand_in))
        elif not isinstance(before, _CONTAINERS):
            undo.append(partial(_take_back, held, name, stand_in, held.get(name, GONE)))
            held[name] = stand_in
    return undo


def _take_from(held: list[Any], stand_in: Left) -> None:
    held[:] = [each for each in held if each is not stand_in]


def _take_back(held: dict[str, Any], name: str, stand_in: Left, before: Any) -> None:
    if held.get(name) is not stand_in:  # the script has set it
        return
    if before is GONE:
        del held[name]
    else:
        held[name] = before


def _attributes(model: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Yields what is in attributes of modules and their objects; torch's own modules keep weights that they make."""
    for path, owner in [*model.named_modules(), *records(model)]:
        for name, value in list(vars(owner).items()):
            if name not in OF_MODULES and not type(owner).__module__.startswith("torch."):
                yield full_name(path, name), [each for _, each in entries("", value, 2)]


def _is_left(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return True
    return isinstance(value, FakeTensor) and not isinstance(value, nn.Parameter) and not is_known(value)


def numbers_in(places: Iterable[OutsidePlace]) -> dict[tuple[str, str], Any]:
    """Returns the numbers that are outside of a model, with no path, by name."""
    found = ((place.path + name, place.held.get(name)) for place in places for name in place.names)
    return {("", name): value for name, value in found if isinstance(value, int | float) and type(value) is not bool}


def plain_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers that are attributes of the model's modules, by module path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float) and name != "training"
    }


class StateError(TraceError):
    """Says that forward changes numbers or submodules, which neither a trace nor what is kept whole may do."""

    changed: frozenset[tuple[str, str]] = frozenset()  # the numbers, by path of the module and name


def check_state(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> None:
    """Refuses a forward that changes numbers of modules, or outside of the model: a trace would fix them."""
    changed = [key for key, value in after.items() if before.get(key) not in (None, value)]
    if changed:
        number = f"{full_name(*changed[0])} ({before[changed[0]]} -> {after[changed[0]]})"
        error = StateError(
            f"forward changes the Python number {number}, which a trace would fix for good. Expected a forward that "
            "changes buffers alone; make it a tensor with register_buffer(). If only the first call changes it, run "
            "one batch through the model before it is wrapped."
        )
        error.changed = frozenset(changed)
        raise error


@contextmanager
def refused_draws(model: nn.Module, outside: Iterable[OutsidePlace]) -> Iterator[None]:
    """Refuses a forward that draws from a generator of Python's or numpy's that the model, or a global, holds."""
    places = [(full_name(path, ""), vars(each)) for path, each in [*model.named_modules(), *records(model)]]
    held = [(path + name, value) for path, own in places for name, value in own.items() if name not in OF_MODULES]
    held += [(place.path + name, place.held.get(name)) for place in outside for name in place.names]
    held += [(name, each) for name, value in held if type(value) in CONTAINERS for _, each in items_of(value, 100)]
    before = [(name, each, _state_of(each)) for name, each in held if isinstance(each, tuple(_STATES))]
    yield
    for name, generator, state in before:
        if _state_of(generator) != state:
            word = re.compile(rf"\b{re.escape(re.split('[.:]', name)[-1])}\b")
            lines = (line_with(word, module) for module in model.modules())
            raise StateError(
                f"forward draws from {name}, a {type(generator).__qualname__} of {type(generator).__module__}"
                f"{next((line for line in lines if word.search(line)), '')}: a trace would fix what it drew. Expected "
                "draws from torch, as torch.rand(()) < 0.5 in torch.where; or draw in the script, and pass the number "
                "as a tensor."
            )


def _state_of(generator: Any) -> str:
    return next(repr(read(generator)) for kind, read in _STATES.items() if isinstance(generator, kind))


class NumberChange(NamedTuple):
    """What a forward does to a number of the module at `path`, which it does not read: sets it to `value`, or adds."""

    path: str
    name: str
    value: Any
    added: tuple[float, ...] = ()


def constants_set(held: Iterable[tuple[str, nn.Module, Mapping[str, Any]]]) -> list[NumberChange]:
    """Returns the lists, tuples, numbers and texts that modules with a path hold now, and not before.

    Left out is what has numbers out of a batch, and what a method of the model reads: what a script would not set.
    """
    kinds = {kind for _, module, _ in held for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")}
    loaded = set().union(*(_loaded_in(each.__code__) for kind in kinds for each in _functions_of(kind)))
    return [
        NumberChange(path, name, value)
        for path, module, before in held
        for name, value in vars(module).items()
        if before.get(name) is not value and name not in loaded | OF_MODULES and _holds_constants(value)
    ]


def _holds_constants(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_holds_constants, value))
    return is_constant(value) and value is not None


def _functions_of(kind: type) -> Iterator[FunctionType]:
    for value in vars(kind).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield function


def _loaded_in(code: CodeType) -> set[str]:
    """Returns the names of attributes that code may read: those that it does more than set, and its texts."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    found |= {each for each in code.co_consts if isinstance(each, str)}
    return found.union(*(_loaded_in(each) for each in code.co_consts if isinstance(each, CodeType)))


class _Tally(Unusable):
    """Stands for a number of a module that may be added to, and not read."""

    def __init__(self, name: str, added: tuple[float, ...] = ()) -> None:
        super().__init__(name)
        self.added = added

    def __add__(self, other: Any) -> _Tally:
        if not isinstance(other, int | float):
            raise UsedError(self._attribute)
        return _Tally(self._attribute, (*self.added, other))

    __radd__ = __add__


@contextmanager
def hidden_state(
    model: nn.Module, counted: Iterable[tuple[str, str]], outside: Iterable[OutsidePlace]
) -> Iterator[list[NumberChange]]:
    """Refuses a forward that reads a number that it changes, one of `counted`, or takes the next of an iterator.

    Yields a list that gets what it does to these numbers, by path of the module and name.
    """
    owners = dict(model.named_modules())
    places: list[Any] = [(full_name(path, ""), vars(owner), vars(owner)) for path, owner in owners.items()]
    places += [(each.path, each.held, each.names) for each in outside if isinstance(each.held, dict)]
    hidden: dict[str, Any] = {
        path + name: (held, name, Unusable(path + name))
        for path, held, names in places
        for name in names
        if isinstance(value := held.get(name), Iterator)
        and type(value).__module__ in ("builtins", "itertools")
        and not isinstance(value, count)  # whose next number is another one, as two calls show
    }
    tallies = {full_name(*each): each for each in counted}
    hidden |= {full: (vars(owners[path]), name, _Tally(full)) for full, (path, name) in tallies.items()}
    changes, before = list[NumberChange](), [(held, name, held[name]) for held, name, _ in hidden.values()]
    try:
        for held, name, stand_in in hidden.values():
            held[name] = stand_in
        yield changes
        changes += [_change_of(full, hidden[full][0].get(name), path, name) for full, (path, name) in tallies.items()]
    except UsedError as used:
        if used.name not in hidden:
            raise
        what = "changes the Python number" if used.name in tallies else "takes the next value of the iterator"
        raise StateError(
            f"forward {what} {used.name}, and goes by it{where_raised(used)}: a trace would fix what it was for good. "
            "Expected a forward that goes by its inputs and buffers: let the script count, or take the next value, and "
            "pass it to the model as a tensor; print and log behind the call. If only the first call changes it, run "
            "one batch through the model before it is wrapped."
        ) from used
    finally:
        for held, name, value in before:
            held[name] = value


def _change_of(full: str, value: Any, path: str, name: str) -> NumberChange:
    if isinstance(value, int | float):
        return NumberChange(path, name, value)
    if not isinstance(value, _Tally) or value._attribute != full:
        raise UsedError(full)
    return NumberChange(path, name, None, value.added)


def apply_changes(model: nn.Module, changes: Iterable[NumberChange]) -> None:
    """Does to numbers of modules what a forward of the model would have done."""
    for path, name, value, added in changes:
        held = vars(model.get_submodule(path))
        held[name] = sum(added, start=held[name]) if value is None else value


def put_constants(
    model: nn.Module, sets: Iterable[NumberChange], earlier: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Sets attributes as a forward would have, takes away those of `earlier` that it does not set; returns its own."""
    own = {(each.path, each.name) for each in sets}
    for path, name in {*earlier} - own:
        vars(model.get_submodule(path)).pop(name, None)
    apply_changes(model, sets)
    return own


def check_modules(before: dict[str, nn.Module], after: dict[str, nn.Module]) -> None:
    """Refuses a forward that replaces submodules, by path, of a module that is kept whole."""
    for path in before | after:
        old, new = before.get(path), after.get(path)
        if old is not new:
            kinds = " -> ".join("none" if each is None else type(each).__qualname__ for each in (old, new))
            raise StateError(
                f"forward replaces the submodule {path} ({kinds}) in a module that cannot be traced and is kept whole: "
                "the ranks that run it would have another model than the others. Expected submodules that stay as "
                "__init__ makes them. If only the first call replaces them, run one batch through the model before it "
                "is wrapped."
            )
