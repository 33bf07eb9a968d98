"""Guards a trace by what it depends on besides tensors: attributes, hooks, training flags, grad mode, autocast.

A trace fixes what modules hold, and the objects in them: another value that a script has set is another trace; what a
forward has set does not count, for it differs between ranks. Where an attribute has changed, the model is traced
without it, and with something unusable in its place: if neither makes a difference, it does not count any more.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from operator import itemgetter, methodcaller
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autovaruna._torch import (
    GLOBAL_HOOKS,
    HOOKS,
    DisableTorchFunctionSubclass,
    buffer_table,
    module_table,
    parameter_table,
    version_of,
)
from autovaruna.graph.outside import (
    CONTAINERS,
    MOST_DEPTH,
    MOST_ENTRIES,
    OutsidePlace,
    is_record,
    items_of,
    read_outside,
)
from autovaruna.graph.precision import current_precision
from autovaruna.graph.tree import is_array, words

HAS_UNFINISHED = "_has_unfinished_sequences"  # of models of transformers, in whose generate ranks agree on it
OF_MODULES = frozenset({*vars(nn.Module()), HAS_UNFINISHED})
"""What torch itself keeps in every module, and what no forward reads."""
_OF_OPTIMIZERS = frozenset({"state"})
"""What an optimizer that a module holds keeps by parameter: on each rank another part of it."""
_OF_TENSORS = frozenset({"_is_param", "home", "gradient"})
"""What torch and the library itself keep in parameters."""
_VALUES = methodcaller("values")
_KEYS = methodcaller("keys")
_PLAIN = (bool, int, float, str, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_NO_CONFIGURATIONS = ("logging", "threading", "concurrent", "multiprocessing", "functools", "weakref")
_RECORDS_DEPTH = 2
_MODES = torch.get_default_dtype, torch.get_float32_matmul_precision, torch.are_deterministic_algorithms_enabled
"""What torch goes by besides autocast, and a forward may."""
_MOST_TRIES = 3
"""Trials after which an attribute counts for good."""
NUMBERS = " in place"
"""Follows the name of a tensor, where the numbers in it count."""
GONE = object()
"""Stands for an attribute that is not there."""
_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "contains", "getitem", "setitem"),
)
_UNARY = ("bool", "int", "float", "index", "str", "repr", "format", "len", "iter", "next", "call", "hash", "neg", "abs")


def hooks_of(model: nn.Module) -> list[Any]:
    """Returns the hooks of modules, which copies share: they may hold what cannot be copied."""
    tables = [vars(module).get(table, {}) for module in model.modules() for table in HOOKS]
    return [hook for table in tables for hook in table.values()]


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Returns what a script, or forward, has set on a parameter or buffer."""
    return {name: value for name, value in vars(tensor).items() if name not in _OF_TENSORS}


def is_constant(value: object) -> bool:
    """Says whether an object is a number, a text or the like, or a tuple of such: nothing in it can change."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))


class _Many:
    """What a container of many entries holds; equal to another that holds the same."""

    __slots__ = ("held",)

    def __init__(self, held: tuple[Any, ...]) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Many) and self.held == other.held
        except Exception:  # tensors that are not the same have no one answer
            return False

    __hash__ = None  # type: ignore[assignment]


_BY_VALUE = (*_PLAIN, _Many)


def entries(
    path: str, value: Any, depth: int = MOST_DEPTH, *, with_code: bool = False, seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields the plain values, tensors and numbers out of them in a container with their paths, and arrays in words.

    `with_code`, also functions, classes and modules, and containers of many entries as one; `seen` are those that were
    met.
    """
    seen = set() if seen is None else seen
    is_code = with_code and callable(value) and not isinstance(value, nn.Module)
    if is_code or is_constant(value) or isinstance(value, Tensor | torch.SymInt | torch.SymFloat):
        yield path, value
    elif isinstance(value, nn.Module):
        yield from [(path, value)] * with_code
    elif is_array(type(value)):
        yield path, words(value)
    elif depth and isinstance(value, CONTAINERS) and id(value) not in seen:
        seen.add(id(value))
        held = items_of(value, MOST_ENTRIES)
        yield path, len(held)
        if with_code and not held:
            yield path, _Many(tuple(items_of(value)))
        if isinstance(value, set | frozenset):
            held = list(enumerate(sorted([inner for _, inner in held], key=repr)))
        for name, inner in held:
            yield from entries(f"{path}.{name}", inner, depth - 1, with_code=with_code, seen=seen)


def records(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the objects with attributes of their own that modules hold, each once, with their path."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        _collect(path, module, _RECORDS_DEPTH, found)
    return list(found.values())


def _collect(path: str, owner: Any, depth: int, found: dict[int, tuple[str, Any]]) -> None:
    for name, value in list(vars(owner).items()):
        library = type(value).__module__.partition(".")[0]
        is_known = id(value) in found or len(found) >= MOST_ENTRIES
        if is_record(value) and not is_known and library not in _NO_CONFIGURATIONS:
            found[id(value)] = full_name(path, name), value
            inner = depth if is_dataclass(value) or isinstance(value, SimpleNamespace | Namespace) else depth - 1
            if inner:
                _collect(full_name(path, name), value, inner, found)


def full_name(path: str, name: str) -> str:
    """Returns the name of an attribute, as ``path.of.module.attribute``."""
    return f"{path}.{name}" if path else name


@contextmanager
def restored(containers: Iterable[Any]) -> Iterator[None]:
    """Puts back what lists, dicts and sets hold when the context ends."""
    before = [(each, copy(each)) for each in containers]
    try:
        yield
    finally:
        for container, content in before:
            if _held_by(container) != _held_by(content):
                container.clear()
                container.extend(content) if isinstance(container, list | deque) else container.update(content)


def _held_by(container: Any) -> list[int]:
    return [id(each) for each in (chain.from_iterable(container.items()) if isinstance(container, dict) else container)]


class Guards:
    """What the traces of a model depend on besides inputs, read anew at every call.

    Walking a deep model takes PyTorch milliseconds, so a snapshot of plain values is compared, and the model is walked
    again where it differs. Of tensors and other objects counts how often the script has replaced them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ignored: set[str] = set()
        self._tries: Counter[str] = Counter()
        self._counts: dict[str, tuple[Any, Any, int]] = {}
        self._codes: dict[Any, int] = {}
        self._is_started = False
        self._methods = {"forward"}
        self._outside: list[OutsidePlace] = []
        self._there: dict[str, frozenset[str]] = {}  # the names that each of these held when it was looked at
        self._where: dict[str, tuple[Any, str]] = {}  # dicts and tensors in which others may stand for a trial
        self._device = next((each.device for each in model.parameters()), None)
        self._set: dict[str, Any] = {}
        self._new: set[str] = set()
        self.filled: set[str] = set()  # in which hooks, on this rank, keep what they see
        self._latest: tuple[Any, ...] = ()
        self._latest_words = ""
        self._learn()
        self._slots, self._settled = self._slots_now(), self._ids()
        self._first, self._first_kinds = dict(self._last), self._kinds

    def words(self, method: str = "forward") -> str:
        """Returns all of it as a text that is equal for calls of a method that one trace serves."""
        self._methods |= {*method.split(".")}
        if self._read() != self._values:
            self._record_changes()
        mode = (
            self._changed_words(),
            *self._flags(),
            torch.is_grad_enabled(),
            current_precision(),
            [each() for each in _MODES],
        )
        if mode != self._latest:
            self._latest, self._latest_words = mode, _in_words(*mode)
        return self._latest_words

    def counted(self) -> dict[str, str]:
        """Returns the words of what counts by its value, by name; of the rest, in brackets, how often it changed."""
        return {name: repr(value if name in self._plain else [value]) for name, value in self._last.items()}

    def snapshot(self) -> Any:
        """Returns what is equal on this rank while nothing guarded changes in the model; records nothing."""
        return self._read(), self._flags()

    def start(self, kept: Collection[int] = ()) -> None:
        """Records everything as it is now: the model has been traced, for the first time or once more.

        `kept` are the identities of the containers that hooks write into.
        """
        self._new.clear()
        self._look_outside()
        self._learn_filled(kept)
        if not self._is_started:
            self._is_started = True
            self._set = {}
            self._first, self._first_kinds = dict(self._last), self._kinds

    def settle(self, kept: Collection[int] = ()) -> None:
        """Records attributes and parameters as they are now: a call of the library's own has ended."""
        if self._read() != self._values or self._ids() != self._settled:
            self._learn_filled(kept)
            self._slots, self._settled = self._slots_now(), self._ids()

    def _learn_filled(self, kept: Collection[int]) -> None:
        """Learns all anew; a container that has changed meanwhile is where a hook on this rank keeps its notes."""
        before = self._last
        self._learn()
        for full, place, name in self._containers:
            if id(place.get(name)) in kept and self._last[full] != before.get(full):
                self.filled.add(full)

    def replaced(self) -> list[str]:
        """Returns the names of parameters that are other tensors than when `settle` was called; call `words` before."""
        if self._ids() == self._settled:
            return []
        before, now = self._slots, self._slots_now()
        return sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))

    def doubtful(self) -> set[str]:
        """Returns what the script has set since the latest trace, can be tried, and may never be read by forward."""
        return {name for name in self._new if name in self._where and self._tries[name] < _MOST_TRIES}

    def record_trial(self, names: Collection[str], unread: Collection[str], read: Collection[str]) -> None:
        """Takes what a trial has shown of attributes: those that no trace depends on do not count any more."""
        self._tries.update(names)
        self._tries.update(dict.fromkeys(read, _MOST_TRIES))
        self._ignored |= {*unread}
        self._new -= self._ignored
        self._set = {name: value for name, value in self._set.items() if name not in self._ignored}
        self._learn()

    @contextmanager
    def with_others(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Lets attributes have other values while the context lasts; `GONE` takes one away."""
        with ExitStack() as stack:
            for held, name, value in [
                (*self._where[full], value) for full, value in values.items() if full in self._where
            ]:
                own = held.data if isinstance(held, Tensor) else held.get(name, GONE)
                stack.callback(_put, held, name, own)
                _put(held, name, value)
            yield

    def _look_outside(self) -> set[str]:
        """Finds anew what the model reads from outside of it; returns the names that were there, but were not read."""
        read, there = {place.path: place.names for place in self._outside}, self._there
        owners = [each for _, each in (*self._model.named_modules(), *records(self._model))]
        self._outside = read_outside(owners, self._methods)
        self._there = {place.path: frozenset(place.held) for place in self._outside}
        return {
            place.path + name
            for place in self._outside
            for name in place.names - read.get(place.path, set())
            if name in there.get(place.path, place.names)
        }

    def _record_changes(self) -> None:
        before, met = self._last, self._look_outside()
        self._learn()
        self._first = {name: self._last[name] for name in met & self._last.keys()} | self._first
        names = {*before, *self._last} - met
        changed = {name for name in names if before.get(name, GONE) != self._last.get(name, GONE)}
        self._set |= {name: self._last.get(name, GONE) for name in changed}
        self._set = {name: value for name, value in self._set.items() if value != self._first.get(name, GONE)}
        self._new |= {name for name in changed if not name.endswith(HOOKS)}

    def _changed_words(self) -> str:
        """Returns, without spaces, what the script has set to another value than when the model was traced first."""
        if not self._is_started or (not self._set and self._kinds == self._first_kinds):
            return ""
        found = [f"{name}:{'gone' if each is GONE else repr(each)}" for name, each in sorted(self._set.items())]
        found += [self._kinds] if self._kinds != self._first_kinds else []
        return "".join(",".join(found).split())

    def _learn(self) -> None:
        named = list(self._model.named_modules())
        self._modules = [module for _, module in named]
        own = [vars(module) for module in self._modules]
        self._hooks = [place[kind] for place in own for kind in HOOKS if kind in place] + [*GLOBAL_HOOKS]
        self._tables = [parameter_table(each) for each in self._modules]
        self._holders = [module_table(each) for each in self._modules]
        self._buffers = [buffer_table(each) for each in self._modules]
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        tensors = [(path, each) for path, each in held if attributes_of(each)]
        places = [_place_of(path, each) for path, each in [*named, *records(self._model), *tensors]]
        self._places = [place.held for place in places]
        inner = {id(held) for held in self._places}
        self._places += [place.held for place in self._outside if place.is_open]
        self._getters: list[tuple[Any, Mapping[str, Any]]] = []
        self._containers: list[tuple[str, Mapping[str, Any], str]] = []
        self._objects: list[tuple[Mapping[str, Any], str]] = []
        self._tensors: list[Tensor] = []
        self._last: dict[str, Any] = {}
        self._plain = set[str]()
        for place in chain(places, [each for each in self._outside if id(each.held) not in inner]):
            self._add(place, inner)
        hooks = [(path, kind, vars(module).get(kind, {})) for path, module in named for kind in HOOKS]
        hooks += [("torch.nn.Module", kind, table) for kind, table in zip(HOOKS, GLOBAL_HOOKS, strict=True)]
        for path, kind, table in hooks:
            counted = [each for each in table.values() if not _is_own(each)]
            self._last[full_name(path, kind)] = [*map(self._number_of, counted)]
        self._kinds = ",".join(f"{path}={_kind(module)}" for path, module in named)
        self._values = self._read()

    def _add(self, place: OutsidePlace, inner: set[int]) -> None:
        own = place.held
        counted = [name for name in place.names if name in own and place.path + name not in self._ignored]
        plain = [name for name in counted if is_constant(own[name])]
        if plain:
            self._getters.append((itemgetter(*plain), own))
        self._last |= {place.path + name: own[name] for name in plain}
        self._plain |= {place.path + name for name in plain}
        self._where |= {place.path + name: (own, name) for name in counted if isinstance(own, dict)}
        for name in counted:
            if not is_constant(own[name]):
                self._add_other(place.path + name, own, name, inner)

    def _add_other(self, full: str, place: Mapping[str, Any], name: str, inner: set[int]) -> None:
        """Adds an attribute that is no plain value; the attributes of a configuration count by themselves."""
        value = place[name]
        found = [(full, value)]
        if isinstance(value, CONTAINERS) or is_array(type(value)):
            self._containers.append((full, place, name))
            found = list(entries(full, value, with_code=True))
            self._last[full] = [(path, self._count(path, each)) for path, each in found]
        else:
            self._objects.append((place, name))
            if id(getattr(value, "__dict__", None)) not in inner:
                self._last[full] = self._count(full, value)
        for path, each in found:
            if isinstance(each, nn.Module) and id(vars(each)) not in inner:
                self._add_hidden(path, each, inner)
            if type(each) is Tensor and path + NUMBERS not in self._ignored and not each.is_inference():
                self._tensors.append(each)
                self._last[path + NUMBERS] = self._count(path + NUMBERS, each, _writes_of(each))
                self._where |= {path + NUMBERS: (each, "")} if each.device == self._device else {}

    def _add_hidden(self, path: str, module: nn.Module, inner: set[int]) -> None:
        """Adds a module that is none of the model's: its mode, its attributes, and which parameters it has.

        The numbers of these are not fixed in a trace.
        """
        if _is_own(type(module)) or isinstance(module, torch.jit.ScriptModule):  # that is refused
            return
        inner.add(id(vars(module)))
        place = _place_of(path, module)
        place.names |= {"training"}
        self._add(place, inner)
        for table in (module_table(module), parameter_table(module), buffer_table(module)):
            for name, each in table.items():
                full = full_name(path, name)
                self._objects.append((table, name))
                self._last[full] = self._count(full, each)
                if isinstance(each, nn.Module) and id(vars(each)) not in inner:
                    self._add_hidden(full, each, inner)

    def _count(self, name: str, value: Any, version: Any = 0) -> Any:
        """Returns a value that is equal on every rank: how often an object was replaced, or written into."""
        if is_constant(value):
            return value
        known, before, count = self._counts.get(name, (value, version, 0))
        is_other = known != value if isinstance(value, _Many) else known is not value
        self._counts[name] = value, version, count + (is_other or before != version)
        return self._counts[name][2]

    def _number_of(self, hook: Any) -> int:
        """Returns a number that is equal for hooks of the same code; what they hold counts by itself."""
        function, given = (hook.func, hook.args) if isinstance(hook, partial) else (hook, ())
        code = getattr(function, "__code__", type(function)), *map(repr, filter(is_constant, given))
        return self._codes.setdefault(code, len(self._codes))

    def _read(self) -> list[Any]:
        """Returns everything that is guarded; cheap, for every call."""
        try:
            values: list[Any] = [getter(place) for getter, place in self._getters]
            held = [[*entries(full, place[name], with_code=True)] for full, place, name in self._containers]
        except KeyError:  # one is gone
            return []
        values += [
            [(path, each if isinstance(each, _BY_VALUE) else id(each)) for path, each in found] for found in held
        ]
        values += [id(place.get(name)) for place, name in self._objects]
        values += map(_writes_of, self._tensors)
        values += chain(map(type, self._modules), *map(_VALUES, chain(self._holders, self._hooks)))
        values += [each is None for each in chain.from_iterable(map(_VALUES, self._buffers))]
        values += map(len, chain(self._places, self._hooks, self._tables, self._buffers))
        return values

    def _flags(self) -> tuple[list[bool], list[bool]]:
        """Returns which modules are in training, and which parameters are trained."""
        training = [module.training for module in self._modules]
        parameters = [each for each in self._parameters() if each is not None]
        with DisableTorchFunctionSubclass():  # those that other ranks hold answer through Python otherwise
            return training, [each.requires_grad for each in parameters]

    def _parameters(self) -> Iterator[Any]:
        """Yields what is in the place of each parameter, None where there is none."""
        return chain.from_iterable(map(_VALUES, self._tables))

    def _ids(self) -> list[Any]:
        return [*chain.from_iterable(map(_KEYS, self._tables)), *map(id, self._parameters())]

    def _slots_now(self) -> dict[str, int]:
        return {
            full_name(path, name): id(tensor)
            for path, module in self._model.named_modules()
            for name, tensor in parameter_table(module).items()
        }


def _place_of(path: str, owner: Any) -> OutsidePlace:
    """Returns the attributes of a module or an object that count."""
    place = OutsidePlace(full_name(path, ""), vars(owner))
    kinds = (Optimizer, _OF_OPTIMIZERS), (Tensor, _OF_TENSORS)
    place.names = place.held.keys() - next((names for kind, names in kinds if isinstance(owner, kind)), OF_MODULES)
    return place


def _is_own(code: Any) -> bool:
    """Whether a function or class is the library's own."""
    return str(getattr(code, "__module__", "")).startswith("autovaruna.")


def _put(held: Any, name: str, value: Any) -> None:
    if isinstance(held, Tensor):
        held.data = value if isinstance(value, Tensor) else torch.full_like(held, 0 if value is GONE else 113)
    elif value is GONE:
        held.pop(name, None)
    else:
        held[name] = value


def _writes_of(tensor: Tensor) -> tuple[int, int]:
    """Returns what changes where numbers are written into a tensor, or others are put into its ``data``."""
    return version_of(tensor), tensor.data_ptr() if tensor.layout is torch.strided else 0


def _kind(module: nn.Module) -> str:
    buffers = ",".join(name for name, each in buffer_table(module).items() if each is not None)
    return f"{type(module).__qualname__}({buffers})" if buffers else type(module).__qualname__


def _in_words(
    changed: str, training: list[bool], trained: list[bool], is_grad: bool, precision: Any, modes: list[Any]
) -> str:
    flags = "".join(["t" if each else "e" for each in training])
    frozen = "".join(["g" if each else "f" for each in trained])
    autocast = ",".join(map(str, precision)) or "off"
    mode = f"training={flags} gradient={is_grad} autocast={autocast} torch={','.join(map(str, modes))}"
    mode += f" parameters={frozen}"
    return f"{mode} attributes={changed}" if changed else mode


class UsedError(BaseException):
    """Says which attribute a model uses while it must not; no model's own handlers catch it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Unusable:
    """Stands for the value of an attribute that a model is thought not to read: whatever is done with it raises."""

    __slots__ = ("_attribute",)

    def __init__(self, name: str) -> None:
        self._attribute = name

    def __copy__(self, memo: Any = None) -> Any:
        return self

    __deepcopy__ = __copy__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and libraries ask every object for some
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsedError(self._attribute)


def _use(self: Unusable, *args: Any, **kwargs: Any) -> NoReturn:
    self._refuse()


for _name in [*_UNARY, *_BINARY, *(f"r{each}" for each in _BINARY)]:
    setattr(Unusable, f"__{_name}__", _use)
