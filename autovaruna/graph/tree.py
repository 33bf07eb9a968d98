"""Takes structures of tensors apart and puts them together again; says values that are no tensors in words."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any, NoReturn

import numpy
import torch

from autovaruna._torch import pytree
from autovaruna.errors import InputError
from autovaruna.graph.key_values import is_cache, refuse_other_layers

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH = 3
_NUMBER = (bool, int, float, str)
_PLAIN, _PLAIN_DICT = (type("", (base,), {}).__basicsize__ for base in (object, dict))
"""What objects of these sizes have is in their attributes or items alone."""


def words(value: Any, depth: int = _DEPTH) -> str:
    """Returns what tells an object from others, the same in every process.

    That is its own text, or its attributes if the text only says where it lies in memory. Of arrays a digest of their
    numbers comes with it, of functions one of their code and what they hold.
    """
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(words(each, depth) for each in value))}}}"
    if isinstance(value, FunctionType):
        return _of_function(value, depth)
    if is_array(type(value)):
        return f"{_text(value)} {_digest_of_numbers(value)}"
    if getattr(type(value), "__repr__", None) != object.__repr__ or depth == 0:
        return _text(value)
    own = sorted(getattr(value, "__dict__", {}).items())
    return f"{type(value).__qualname__}({', '.join(f'{name}={words(each, depth - 1)}' for name, each in own)})"


def is_array(kind: type) -> bool:
    return hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def _digest_of_numbers(value: Any) -> str:
    array = numpy.asarray(value)
    data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def _of_function(value: FunctionType, depth: int) -> str:
    """Returns the name of a function and a digest of its code; with what it holds, for two may share one code."""
    held = [cell.cell_contents for cell in value.__closure__ or ()] if depth else []
    parts = ", ".join(words(each, depth - 1) for each in [*held, *(value.__defaults__ or ())]) if depth else ""
    return f"{value.__module__}.{value.__qualname__}({parts}) {_digest_of_code(value.__code__)}"


def _digest_of_code(code: CodeType) -> str:
    constants = [each for each in code.co_consts if not isinstance(each, CodeType | frozenset)]
    inner = [_digest_of_code(each) for each in code.co_consts if isinstance(each, CodeType)]
    text = f"{code.co_code!r}{constants!r}{code.co_names!r}{inner}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Constant:
    """A leaf that is not a tensor."""

    value: Any


@dataclasses.dataclass(frozen=True)
class TensorLeaf:
    """The place of one tensor; `path` is how a person would write it (``batch['x'][0]``)."""

    path: str


@dataclasses.dataclass(frozen=True)
class HidingLeaf:
    """A leaf whose class hides tensors (a key-value cache): it is not taken apart."""

    path: str
    type_name: str


@dataclasses.dataclass(frozen=True)
class Record:
    """An object that is walked by attribute, or a dict of a class of its own, walked by key."""

    cls: type
    fields: tuple[Any, ...]
    trees: tuple[Tree, ...]


class CacheRecord(Record):
    """A key-value cache, or a layer of one, whose tensors stay on the stages."""


Leaf = Constant | TensorLeaf | HidingLeaf | Record


@dataclasses.dataclass(frozen=True)
class Tree:
    """The structure of a value without its tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Leaf, ...]

    def tensor_paths(self) -> list[str]:
        return [leaf.path for leaf in self.walk() if isinstance(leaf, TensorLeaf)]

    @cached_property
    def cache_paths(self) -> frozenset[str]:
        """The paths of the tensors in key-value caches."""
        found = set[str]()
        for leaf in self.leaves:
            for tree in leaf.trees if isinstance(leaf, Record) else ():
                found |= set(tree.tensor_paths()) if isinstance(leaf, CacheRecord) else tree.cache_paths
        return frozenset(found)

    @cached_property
    def has_caches(self) -> bool:
        """Whether there is a key-value cache in it, with tensors or still without."""
        records = [leaf for leaf in self.leaves if isinstance(leaf, Record)]
        return any(isinstance(leaf, CacheRecord) or any(each.has_caches for each in leaf.trees) for leaf in records)

    def constants(self) -> list[tuple[str, str]]:
        """Returns the path and the words of each leaf that is no tensor; those inside dataclasses are left out."""
        places, _ = _with_paths(pytree.tree_unflatten(list(self.leaves), self.spec))
        return [(pytree.keystr(keys), words(leaf.value)) for keys, leaf in places if isinstance(leaf, Constant)]

    def arrays(self) -> list[str]:
        """Returns the kinds of the leaves that are arrays of another library, once each."""
        kinds = (type(leaf.value) for leaf in self.walk() if isinstance(leaf, Constant))
        return list(dict.fromkeys(f"{each.__module__}.{each.__qualname__}" for each in kinds if is_array(each)))

    def key(self) -> str:
        parts = [_leaf_key(leaf) for leaf in self.leaves]
        return f"{self.spec}|{';'.join(parts)}"

    def walk(self) -> Iterator[Leaf]:
        """Yields the leaves, those inside dataclasses one by one."""
        for leaf in self.leaves:
            if isinstance(leaf, Record):
                for tree in leaf.trees:
                    yield from tree.walk()
            else:
                yield leaf

    def unflatten(self, tensors: Iterable[Any], stand_in: Callable[[HidingLeaf | Constant], Any] | None = None) -> Any:
        """Puts the structure together again around `tensors`, in order; `stand_in` makes what hides some, and sizes."""
        tensors = iter(tensors)
        values = [_value(leaf, tensors, stand_in) for leaf in self.leaves]
        return values[0] if self.spec.is_leaf() else pytree.tree_unflatten(values, self.spec)


def _leaf_key(leaf: Leaf) -> str:
    match leaf:
        case Constant(value):
            return f"{type(value).__qualname__}:{words(value)}"
        case TensorLeaf():
            return "tensor"
        case HidingLeaf(_, type_name):
            return f"opaque:{type_name}"
        case Record(cls, fields, trees):
            own = "" if dataclasses.is_dataclass(cls) else f"{fields!r}:"
            return f"{cls.__qualname__}({own}{','.join(tree.key() for tree in trees)})"


def _value(leaf: Leaf, tensors: Iterator[Any], stand_in: Callable[[HidingLeaf | Constant], Any] | None) -> Any:
    match leaf:
        case Constant(value):
            is_size = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
            return stand_in(leaf) if is_size and stand_in is not None else value
        case TensorLeaf():
            return next(tensors)
        case HidingLeaf():
            assert stand_in is not None
            return stand_in(leaf)
        case Record(cls, fields, trees):
            is_dict = issubclass(cls, dict)
            record: Any = (dict if is_dict else object).__new__(cls)
            for field, tree in zip(fields, trees, strict=True):
                (dict.__setitem__ if is_dict else object.__setattr__)(record, field, tree.unflatten(tensors, stand_in))
            return record


def flatten(
    value: Any, path: str = "", levels: int = 0, *, opens_caches: bool = False
) -> tuple[list[torch.Tensor], Tree]:
    """Takes a value apart: its tensors in order, and its `Tree`, whose paths start with `path`.

    Dataclasses are taken apart, so many `levels` of other objects that hold tensors, and, if asked for, caches.
    """
    with_paths, spec = _with_paths(value, _is_dataclass)
    tensors: list[torch.Tensor] = []
    leaves = [
        _flatten_leaf(leaf, path + pytree.keystr(keys), levels, tensors, opens_caches) for keys, leaf in with_paths
    ]
    return tensors, Tree(spec, tuple(leaves))


def _with_paths(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """Returns the leaves of a value with the keys that lead to them; some libraries have types that give no keys."""
    try:
        return pytree.tree_flatten_with_path(value, is_leaf=is_leaf)
    except ValueError:
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
        is_flat = isinstance(value, Mapping) and len(value) == len(leaves)
        keys: list[Any] = [pytree.MappingKey(name) for name in value] if is_flat else []
        keys = keys or [pytree.SequenceKey(place) for place in range(len(leaves))]
        return [((key,), leaf) for key, leaf in zip(keys, leaves, strict=True)], spec


def _flatten_leaf(leaf: Any, path: str, levels: int, tensors: list[torch.Tensor], opens_caches: bool) -> Leaf:
    if isinstance(leaf, torch.Tensor):
        tensors.append(leaf)
        return TensorLeaf(path)
    is_dataclass, is_open = _is_dataclass(leaf), opens_caches and is_cache(leaf)
    if is_open:
        refuse_other_layers(leaf)
        levels = 1
    if not (is_dataclass or is_open) and not _hides_tensors(leaf, set()):
        return Constant(leaf)
    fields = {each.name: getattr(leaf, each.name) for each in dataclasses.fields(leaf)} if is_dataclass else None
    if fields is None and levels > 0:
        fields, levels = _attributes(leaf), levels - 1
    if fields is None:
        return HidingLeaf(path, type(leaf).__qualname__)
    parts = [
        flatten(each, path + _step(leaf, name), levels, opens_caches=opens_caches) for name, each in fields.items()
    ]
    for part, _ in parts:
        tensors.extend(part)
    made = CacheRecord if is_open else Record
    return made(type(leaf), tuple(fields), tuple(tree for _, tree in parts))


def _attributes(value: Any) -> dict[Any, Any] | None:
    """Returns what an object is made of; None: that is more than attributes, or items."""
    if isinstance(value, dict):
        return None if type(value).__basicsize__ != _PLAIN_DICT or vars(value) else dict(value)
    if type(value).__basicsize__ != _PLAIN or isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, UserDict):  # a tokenizer's has texts beside, which no model reads
        return {
            name: each if name == "data" or isinstance(each, _NUMBER) else None for name, each in vars(value).items()
        }
    return dict(vars(value))


def _step(value: Any, name: Any) -> str:
    """Returns how a person goes from an object to what it has by a name."""
    if isinstance(value, dict):
        return f"[{name!r}]"
    return "" if isinstance(value, UserDict) and name == "data" else f".{name}"


def _is_dataclass(value: Any) -> bool:
    registered = type(value) in pytree.SUPPORTED_NODES
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not registered


def _hides_tensors(value: Any, seen: set[int]) -> bool:
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple | set | dict):
        return any(_hides_tensors(item, seen) for item in (value.values() if isinstance(value, dict) else value))
    inner = getattr(value, "__dict__", None)
    return isinstance(inner, dict) and not isinstance(value, type) and _hides_tensors(inner, seen)


class UndeliveredError(InputError, AttributeError):
    """An InputError to who reads it; to `hasattr`, by which libraries look at outputs, there is nothing."""


class Undelivered:
    """Stands for an output that a pipeline does not deliver; any use of it raises and says so."""

    def __init__(self, leaf: HidingLeaf) -> None:
        self.__dict__["_leaf"] = leaf

    def __repr__(self) -> str:
        leaf: HidingLeaf = self.__dict__["_leaf"]
        return f"Undelivered({leaf.type_name} at {leaf.path})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: Any) -> NoReturn:
        leaf: HidingLeaf = self.__dict__["_leaf"]
        raise UndeliveredError(
            f"The output {leaf.path} is a {leaf.type_name}, whose tensors stay on the stages that made them. "
            "Expected outputs are tensors in tuples, lists, dicts or dataclasses; return those tensors, or turn the "
            "output off in the model (use_cache=False for a Hugging Face model; or pass past_key_values=DynamicCache() "
            "in torch.no_grad(), and the next call takes the cache from the stages)."
        )

    __getitem__ = __iter__ = __len__ = _refuse
