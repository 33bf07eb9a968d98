"""Finds, in one walk over a graph, what the value of each node has to do with the samples of the batch.

What a value reaches ends in integers and masks, for experts and lengths are counted over a batch without a sample's
result depending on the others; and in parameters and buffers that forward changes by the samples: like batch
normalisation's, they change once a micro-batch. Other state plain PyTorch changes once a call (`steady_state`): the
vectors of spectral normalisation, counters of steps, averages of weights. A counter that weighs or corrects what
follows from samples, as one of how often an average of them has changed, must go together with that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna._torch import OpOverload
from autovaruna.graph.facts import Fact, KnownGraph, tensors_in
from autovaruna.graph.opaque.run import opaque_module_of
from autovaruna.graph.operators import (
    BatchShare,
    BatchValue,
    Dependence,
    Merge,
    Trait,
    ValueSource,
    aten,
    count_by_class,
    has,
    is_differentiable,
    is_of_batch,
    operator_of,
    reached,
)

_OF_NUMBERS = {math.__name__, operator.__name__, f"_{operator.__name__}", torch.sym_max.__module__}
"""Modules whose functions do arithmetic on sizes."""
_MOST_ELEMENTS = 65_536
Memory = frozenset[int]
_NONE: Memory = frozenset()
_Calls = Sequence[tuple[fx.Node, Fact]]
_Read = Mapping[fx.Node, tuple[Memory, bool]]
"""The memory of each node that reads state, and whether that is a parameter."""


class BatchAnalysis:
    """The values of a graph's nodes; those of nodes that have been added since are found when they are asked for.

    Totals are looked for among the nodes that are `chosen`, which follow from the inputs alone.
    """

    def __init__(self, graph: KnownGraph, chosen: Collection[fx.Node] = ()) -> None:
        nodes, facts = graph.module.graph, graph.facts
        self._facts, self._sizes, self._batch = facts, graph.sizes, graph.batch_inputs
        self._parameters, self._names_of_state = graph.parameters, graph.parameters.keys() | graph.buffers.keys()
        self._learned: set[fx.Node] = set()  # parameters, and what is made of them without samples
        self._known = set(chosen)
        self._picked = picked_symbols(nodes) if chosen else {}
        attributes = [node.name for node in nodes.find_nodes(op="get_attr") if node.name in facts]
        self._state = {storage for name in attributes for storage in facts[name].makes}
        self._becomes_state: set[Any] = set()  # what is copied into state, itself or a view of it
        for copy in nodes.find_nodes(op="call_function", target=aten.copy_.default):
            if facts[copy.name].writes & self._state:
                source: Any = copy.args[1]
                while isinstance(source, fx.Node) and source.name in facts and facts[source.name].is_view:
                    source = source.args[0]
                self._becomes_state.add(source)
        self._of: dict[fx.Node, BatchValue] = {}
        in_memory: dict[int, list[fx.Node]] = {}
        for node in nodes.nodes:
            self._of[node] = value = self._value(node)
            fact = facts.get(node.name)
            for storage in fact.writes - self._state if fact is not None else ():
                for each in in_memory.get(storage, ()):  # it is read by this name later
                    known, dependence = self._of[each], self._of_numbers(each, value.dependence)
                    self._of[each] = replace(
                        known, source=known.source | value.source, dependence=max(known.dependence, dependence)
                    )
            for storage in fact.makes if fact is not None else ():
                in_memory.setdefault(storage, []).append(node)

    def __getitem__(self, node: fx.Node) -> BatchValue:
        if node not in self._of:
            self._of[node] = self._value(node)
        return self._of[node]

    def is_whole(self, node: fx.Node) -> bool:
        """Whether a value follows from the inputs, and is that of the whole batch, or the same for any."""
        return self[node].share in (BatchShare.FIXED, BatchShare.WHOLE)

    def _value(self, node: fx.Node) -> BatchValue:
        source, dependence = self._source(node), self._dependence(node)
        is_parameter = node.op == "get_attr" and str(node.target) in self._parameters
        if is_parameter or (dependence is Dependence.NONE and not self._learned.isdisjoint(node.all_input_nodes)):
            self._learned.add(node)
        if node not in self._known:
            return BatchValue(source, dependence)
        share, merge = self._share(node)
        is_extreme = merge in (Merge.LARGEST, Merge.SMALLEST)
        if share is BatchShare.WHOLE and merge is None:
            is_extreme = all(
                self[each].is_extreme for each in node.all_input_nodes if self[each].share is BatchShare.WHOLE
            )
        return BatchValue(source, dependence, share, merge, is_extreme)

    def _source(self, node: fx.Node) -> ValueSource:
        if node.op == "placeholder":
            return ValueSource.SAMPLES | ValueSource.BATCH if node.name in self._batch else ValueSource.NONE
        if node.op == "get_attr":
            return ValueSource.STATE if str(node.target) in self._names_of_state else ValueSource.NONE
        found = ValueSource.NONE
        for each in node.all_input_nodes:
            found |= self[each].source
        if ValueSource.SAMPLES in found and self._sizes.is_given(node):
            return found & ~ValueSource.SAMPLES | (ValueSource.TOTAL if is_of_batch(node) else ValueSource.NONE)
        return found

    def _dependence(self, node: fx.Node) -> Dependence:
        if node.op == "placeholder":
            return self._of_numbers(node, Dependence.SAMPLES if node.name in self._batch else Dependence.NONE)
        fact = self._facts.get(node.name)
        if node.op != "call_function" or fact is None:
            return Dependence.NONE
        if fact.writes & fact.makes & self._state or node in self._becomes_state:  # it is a parameter or buffer now
            return Dependence.NONE
        if has(node, Trait.SHAPE_ALONE) or is_of_batch(node):
            return Dependence.NONE
        most = max((self[each].dependence for each in read(node)), default=Dependence.NONE)
        is_learned = fact.needs_gradient or not self._learned.isdisjoint(node.all_input_nodes)  # or under no_grad()
        if is_learned and Dependence.NONE < most < Dependence.SAMPLES:
            most = Dependence.SAMPLES
        return self._of_numbers(node, most)

    def _of_numbers(self, node: fx.Node, most: Dependence) -> Dependence:
        """Returns how a result depends on the batch, by its kind and shape; its arguments do by `most` at most."""
        tensors = tensors_in(node.meta.get("val"))
        if most is Dependence.NONE or not tensors:
            return Dependence.NONE
        if most >= Dependence.SAMPLES and any(map(is_differentiable, tensors)):
            return Dependence.SAMPLES if is_long(node) else Dependence.ALL
        if most is Dependence.ALL and not is_long(node):  # a truth or a place that real numbers of several decide
            return Dependence.ALL
        is_joint = any(self[each].dependence is Dependence.COUNTS_OF_SEVERAL or is_long(each) for each in read(node))
        return Dependence.COUNTS_OF_SEVERAL if is_joint and not is_long(node) else Dependence.COUNTS

    def _share(self, node: fx.Node) -> tuple[BatchShare, Merge | None]:
        if node.op == "placeholder":
            return BatchShare.SAMPLES if node.name in self._batch else BatchShare.FIXED, None
        if node.op == "get_attr" or self._sizes.is_given(node):
            return BatchShare.FIXED, None
        sources = {share for each in node.all_input_nodes if (share := self[each].share) is not None}
        most = max(sources, default=BatchShare.FIXED)
        if most is BatchShare.SAMPLES and BatchShare.WHOLE in sources:
            return BatchShare.AFTER, None
        if most is BatchShare.SAMPLES and (merge := self._merge(node)) is not None:
            return BatchShare.WHOLE, merge
        return (BatchShare.AFTER if most is BatchShare.WHOLE and not _is_small(node) else most), None

    def _merge(self, node: fx.Node) -> Merge | None:
        """Returns how the results of a node for several mini-batches are merged; None: no way is known."""
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return Merge.SUM if value.node.expr in self._picked and node.target is aten.sym_size.int else None
        made: Any = node.args[0] if node.target is getitem and node.args[1] == 0 else node
        merge = Merge.SUM if made.target is count_by_class else operator_of(made).merge
        source = made.args[0]
        if merge is None or not _is_small(node) or not isinstance(source, fx.Node):
            return None
        if not self._sizes.has_samples(source):
            return None
        return None if merge is Merge.MEAN and self._sizes.depends_on_data(source) else merge


def read(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose numbers a node takes."""
    row = operator_of(node)
    if row.not_read is not None:
        return [each for each in node.all_input_nodes if each is not node.args[row.not_read]]
    return node.all_input_nodes[:1] if Trait.AS_ANOTHER in row.traits else node.all_input_nodes


def is_long(node: fx.Node) -> bool:
    """Whether a dimension is no plain number: it grows with the batch, or with what was counted in it."""
    return any(isinstance(length, torch.SymInt) for each in tensors_in(node.meta.get("val")) for length in each.shape)


def is_number(node: fx.Node) -> bool:
    """Whether a node gives a tensor without dimensions."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0


def _is_small(node: fx.Node) -> bool:
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return all(isinstance(length, int) for length in value.shape) and value.numel() <= _MOST_ELEMENTS
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def picked_symbols(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Returns the sizes that are numbers of picked elements, each with the tensor that says which those are."""
    found: dict[Any, fx.Node] = {}
    seen: set[Any] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        lengths = value.shape if isinstance(value, Tensor) else (value,)
        sizes = [each for each in lengths if isinstance(each, torch.SymInt)]
        new = {symbol for each in sizes for symbol in each.node.expr.free_symbols} - seen
        seen |= new
        mask = _mask(node)
        if isinstance(value, Tensor) and len(new) == 1 and mask is not None:
            found |= dict.fromkeys(new, mask)
    return found


def _mask(node: fx.Node) -> fx.Node | None:
    """Returns the tensor whose elements other than zero a node picks, or finds."""
    place = operator_of(node).picks_by
    if place is not None:
        return node.args[place]  # type: ignore[return-value]
    if node.target is aten.index.Tensor:
        masks: list[Any] = [each for each in node.args[1] if each is not None]  # type: ignore[union-attr]
        return masks[0] if len(masks) == 1 and masks[0].meta["val"].dtype is torch.bool else None
    return None


def from_inputs(graph: KnownGraph) -> list[fx.Node]:
    """Returns the nodes that follow from inputs, buffers and constants alone, in order of execution.

    They can be computed before a step, without the model. None of them is random, needs a gradient or changes what
    outlives the step. Memory of their own they may change.
    """
    outliving = graph.outliving_storages()
    foreign: set[int] = set()  # memory that other nodes change
    while True:
        found: dict[fx.Node, None] = {}
        written: set[int] = set()
        for node in graph.module.graph.nodes:
            if node.op == "output":
                break
            fact = graph.facts[node.name]
            touched = fact.reads | fact.makes | fact.writes
            is_own = not fact.writes & outliving and not touched & foreign
            if is_own and _is_free(node, fact, graph.parameters) and found.keys() >= set(node.all_input_nodes):
                found[node] = None
            else:
                written |= fact.writes
        if written <= foreign:
            return list(found)
        foreign |= written


def _is_free(node: fx.Node, fact: Fact, parameters: Collection[str]) -> bool:
    """Whether a node may follow from inputs alone, if what it is made of does."""
    if fact.needs_gradient or fact.is_random or is_of_batch(node):
        return False
    if node.op == "get_attr":
        return str(node.target) not in parameters and isinstance(fact.value, Tensor)
    is_known = isinstance(node.target, OpOverload) or node.target is count_by_class
    return node.op == "placeholder" or is_known or getattr(node.target, "__module__", None) in _OF_NUMBERS


def counted(numbers: Sequence[fx.Node], graph: KnownGraph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yields each number that a model takes out of tensors (``counts.tolist()``) with the nodes it was counted from.

    These go back to where integers came from floating point: drawn numbers are sorted and counted as a step's are;
    integers are not drawn. What follows from the inputs alone is left out: it is there with a step's own numbers.
    """
    if not numbers:
        return
    whole: set[fx.Node] = set()  # integers, or made of integers alone
    given: set[fx.Node] = set()  # of inputs, buffers and constants alone
    for node in graph.module.graph.nodes:
        if node.op == "output":
            break
        fact = graph.facts[node.name]
        is_made = node.op == "call_function" and not fact.is_random and whole.issuperset(node.all_input_nodes)
        if is_made or has(node, Trait.FILLS) or not any(leaf.is_floating_point() for leaf in tensors_in(fact.value)):
            whole.add(node)
        is_parameter = node.op == "get_attr" and str(node.target) in graph.parameters
        if not is_parameter and not fact.is_random and given.issuperset(node.all_input_nodes):
            given.add(node)
    computed = whole - given
    for number in numbers:
        _, *sources = reached([number], lambda node: filter(computed.__contains__, node.all_input_nodes))
        yield number, sources


def steady_state(graph: KnownGraph, changed: Collection[str]) -> frozenset[str]:
    """Returns the names of parameters and buffers that change alike in all micro-batches that find them alike."""
    if not changed:
        return frozenset()
    nodes, facts = graph.module.graph, graph.facts
    attributes = [node for node in nodes.find_nodes(op="get_attr") if node.name in facts]
    places = {str(node.target): facts[node.name].makes for node in attributes if str(node.target) in changed}
    read = {node: (facts[node.name].makes, node.target in graph.parameters) for node in attributes}
    inputs = [node for node in nodes.find_nodes(op="placeholder") if node.name in graph.batch_inputs]
    calls = [(node, facts[node.name]) for node in nodes.nodes if node.op == "call_function"]
    every = _NONE.union(*places.values())
    varied: set[int] = set()
    while True:  # what comes first finds what the micro-batch before has left
        known = len(varied)
        _follow(calls, inputs, read, varied)
        if varied and every - varied:
            varied |= _counters_of_samples(calls, inputs, read, every - varied, varied)
        if len(varied) == known:
            return frozenset(name for name, memory in places.items() if not memory & varied)


def _follow(calls: _Calls, inputs: Iterable[fx.Node], read: _Read, varied: set[int]) -> None:
    """Adds to `varied` the memory into which something is written that follows from samples, or from chance."""
    nodes = {*inputs, *(node for node, (memory, _) in read.items() if memory & varied)}
    for node, fact in calls:
        if fact.is_random or fact.reads & varied or is_of_batch(node) or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
            varied |= fact.writes


def _counters_of_samples(
    calls: _Calls, inputs: Iterable[fx.Node], read: _Read, steady: Memory, varied: Collection[int]
) -> Memory:
    """Returns the memory of counters that decide, together with state of samples, what becomes of it or of a result.

    A counter changes by itself alone. What follows from weights (their averages, say) is no counter. One that scales
    values of samples, as a schedule's does, decides nothing, unless they have met a state before and change it later.
    """
    counters = {node: memory & steady for node, (memory, _) in read.items()}  # until they meet weights or samples
    states = {node: memory & set(varied) for node, (memory, _) in read.items()}
    weighed = {node for node, (_, is_weight) in read.items() if is_weight and not counters[node] | states[node]}
    sampled = set(inputs)  # values that have numbers of samples
    met: dict[fx.Node, frozenset[tuple[int, int]]] = {}  # counters, each with a state that it has met on the way here
    joined = following = _NONE
    for node, fact in calls:
        sources, changed = node.all_input_nodes, fact.writes & set(varied)
        if opaque_module_of(node) is not None:  # it has been tried out
            sampled.add(node)
            continue
        own = _NONE.union(*(counters.get(each, _NONE) for each in sources if each not in sampled))
        state = changed.union(*(states.get(each, _NONE) for each in sources))
        met[node] = frozenset(product(own, state)).union(*(met.get(each, ()) for each in sources))
        is_of_samples = not sampled.isdisjoint(sources)
        joined |= {counter for counter, place in met[node] if place in changed or not is_of_samples}
        is_state = bool(fact.makes & changed)  # a batch normalisation returns samples, and changes state beside
        states[node] = state if is_state else state - changed
        counters[node] = own if weighed.isdisjoint(sources) else _NONE
        if not weighed.isdisjoint(sources):
            weighed.add(node)
            following |= fact.writes & steady
        if is_of_samples and not is_state:
            sampled.add(node)
    return joined - following
