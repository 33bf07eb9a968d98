"""Learns of the nodes that a recalled submodule has left from those of the first one like it, without running them.

The copies of a node have its operation and its constants. If what comes from outside looks alike too, they give the
same, in other memory. What only nodes of the copy use is never touched again, so it needs no tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna.graph.layout import Layout, NotPlainError, layout_of, lengths_of
from autovaruna.graph.precision import precision_of
from autovaruna.graph.recalling.recall import Call, make_all

if TYPE_CHECKING:
    from autovaruna.graph.facts import Fact

_ORIGIN = "autovaruna_origin"


@dataclass(frozen=True, slots=True)
class Origin:
    """Says of which recorded call a node is, the how manieth, and in which copy of it; copy 0 is the call itself."""

    call: str
    place: int
    copy: int


def tell_origin(node: fx.Node, origin: Origin) -> None:
    """Notes where a node comes from."""
    node.meta[_ORIGIN] = origin


class _UnlikeError(Exception):
    """Says that nodes may give something else than those that they were copied from."""


@dataclass
class CopiedFacts:
    """What follows for the copies in a graph from the facts of their originals.

    Args:
        graph: The graph.
        mode: The mode of the facts' values.
    """

    graph: fx.Graph
    mode: FakeTensorMode
    _originals: dict[tuple[str, int], fx.Node] = field(default_factory=dict)
    _copies: dict[tuple[str, int], list[fx.Node]] = field(default_factory=dict)
    _layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    _new_storages: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            origin: Origin | None = node.meta.get(_ORIGIN)
            if origin and origin.copy:
                self._copies.setdefault((origin.call, origin.copy), []).append(node)
            elif origin:
                self._originals[origin.call, origin.place] = node

    def beginning_at(self, node: fx.Node, facts: Mapping[str, Fact]) -> dict[fx.Node, Fact]:
        """Returns the facts of all nodes of a copy that begins at a node; empty: it does not, or has to be run."""
        origin: Origin | None = node.meta.get(_ORIGIN)
        copies = self._copies.get((origin.call, origin.copy), ()) if origin else ()
        if not copies or copies[0] is not node:
            return {}
        try:
            return self._of(copies, facts)
        except (_UnlikeError, NotPlainError):
            return {}

    def _of(self, copies: Sequence[fx.Node], facts: Mapping[str, Fact]) -> dict[fx.Node, Fact]:
        originals = [self._original(each) for each in copies]
        twins = _twins(originals, copies)
        known = {first: facts[first.name] for first in originals}
        given = {first: twin for first, twin in twins.items() if first not in known}
        storages = _storages_given(given, facts)
        if any(not storages.keys().isdisjoint(fact.writes) for fact in known.values()):
            raise _UnlikeError  # What others see then changes, too.
        ends = [first for first in originals if not {*copies}.issuperset(twins[first].users)]
        values = self._made(ends, known, [facts[each.name].value for each in given.values()])
        for first, value in values.items():
            _put_new(storages, known, first, int(value.untyped_storage()._cdata))
        for fact in known.values():
            for storage in fact.makes - storages.keys():
                storages[storage] = next(self._new_storages)
        return {twins[first]: _renamed(fact, values.get(first), storages) for first, fact in known.items()}

    def _original(self, node: fx.Node) -> fx.Node:
        origin: Origin = node.meta[_ORIGIN]
        first = self._originals.get((origin.call, origin.place))
        if first is None or first.target is not node.target or precision_of(first) != precision_of(node):
            raise _UnlikeError
        return first

    def _made(
        self, ends: Sequence[fx.Node], known: Mapping[fx.Node, Fact], given: Sequence[Any]
    ) -> dict[fx.Node, Tensor]:
        """Returns new tensors for what is used outside of a copy, like those of the originals."""
        for first in ends:
            if not isinstance(known[first].value, Tensor):
                raise _UnlikeError
            if first not in self._layouts:
                self._layouts[first] = layout_of(known[first].value, self.mode, ())
        call = Call(self.mode, lambda tensor: False, tensors=[each for each in given if isinstance(each, Tensor)])
        return dict(zip(ends, make_all([self._layouts[first] for first in ends], call), strict=True))


def _twins(originals: Sequence[fx.Node], copies: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns what stands in the copy for each node that the originals are or use."""
    twins = dict(zip(originals, copies, strict=True))
    for first, node in zip(originals, copies, strict=True):
        for own, its in zip(first.all_input_nodes, node.all_input_nodes, strict=False):
            if twins.setdefault(own, its) is not its:
                raise _UnlikeError
        if fx.map_arg((first.args, first.kwargs), lambda each: twins.get(each, each)) != (node.args, node.kwargs):
            raise _UnlikeError
    if len({*twins.values()}) < len(twins):
        raise _UnlikeError
    return twins


def _storages_given(given: Mapping[fx.Node, fx.Node], facts: Mapping[str, Fact]) -> dict[int, int]:
    """Returns which memory from outside stands in the copy for which of the originals."""
    storages: dict[int, int] = {}
    for first, twin in given.items():
        if first.name not in facts or twin.name not in facts:
            raise _UnlikeError
        own, its = facts[first.name], facts[twin.name]
        if first is not twin and _look(own.value) != _look(its.value):
            raise _UnlikeError
        for storage, other in zip(own.makes, its.makes, strict=True):
            if storages.setdefault(storage, other) != other:
                raise _UnlikeError
    if len({*storages.values()}) < len(storages):
        raise _UnlikeError
    return storages


def _look(value: Any) -> tuple[Any, ...]:
    """Returns all by which an operation tells a tensor from another one."""
    if not isinstance(value, Tensor):
        raise _UnlikeError
    keys = torch._C._dispatch_keys(value).raw_repr()
    lengths = *lengths_of(value), value.storage_offset(), value.untyped_storage().nbytes()
    return (*lengths, value.dtype, value.device, value.requires_grad, value.is_leaf, keys)


def _put_new(storages: dict[int, int], known: Mapping[fx.Node, Fact], end: fx.Node, new: int) -> None:
    """Notes the memory of what is used outside of a copy.

    Raises:
        _UnlikeError: It is given, or other memory; or writing into it changes what else is known of the copy.
    """
    (storage,) = known[end].makes
    is_shared = any(storage in fact.makes for each, fact in known.items() if each is not end)
    if storage in storages or (is_shared and not known[end].needs_gradient):
        raise _UnlikeError
    storages[storage] = new


def _renamed(fact: Fact, value: Tensor | None, storages: Mapping[int, int]) -> Fact:
    reads, writes, makes = (frozenset(storages[each] for each in old) for old in (fact.reads, fact.writes, fact.makes))
    return replace(fact, value=fact.value if value is None else value, reads=reads, writes=writes, makes=makes)
