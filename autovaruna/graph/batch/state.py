"""Finds the state that a forward changes whatever the samples are: plain PyTorch changes it once a call.

Such are the vectors of spectral normalisation, counters of steps, and averages of weights. What follows from samples,
as the statistics of a batch normalisation do, changes with each micro-batch; and with it a counter that weighs or
corrects it: one that counts how often an average of samples has changed must go together with that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from autovaruna.errors import InputError
from autovaruna.graph.facts import Fact, KnownGraph
from autovaruna.graph.opaque.run import OpaqueModule, opaque_module_of
from autovaruna.graph.operators import changed_statistics, is_of_batch, is_random, written
from autovaruna.graph.precision import REGION, inside
from autovaruna.graph.traced import TracedModel

Memory = frozenset[int]
_NONE: Memory = frozenset()
_STATE = 3  # place of the state among the arguments of a node that runs a kept module
_TRAINING = 5  # place of the argument of ``aten.batch_norm`` that says whether it computes statistics


def steady_state(graph: KnownGraph, changed: Collection[str]) -> frozenset[str]:
    """Returns the names of parameters and buffers that change alike in all micro-batches that find them alike."""
    if not changed:
        return frozenset()
    module, facts = graph.module, graph.facts
    attributes = [node for node in module.graph.find_nodes(op="get_attr") if node.name in facts]
    places = {str(node.target): facts[node.name].makes for node in attributes if str(node.target) in changed}
    read = {node: (facts[node.name].makes, node.target in graph.parameters) for node in attributes}
    inputs = [node for node in module.graph.find_nodes(op="placeholder") if node.name in graph.batch_inputs]
    steps = list(_Steps(module, facts))
    every = _NONE.union(*places.values())
    varied: set[int] = set()
    while True:  # what comes first finds what the micro-batch before has left
        known = len(varied)
        _follow(steps, inputs, read, varied)
        if varied and every - varied:
            varied |= _counters_of_samples(steps, inputs, read, every - varied, varied)
        if len(varied) == known:
            return frozenset(name for name, memory in places.items() if not memory & varied)


@dataclass(frozen=True)
class _Step:
    """A call of a graph, or of a region in it; `state` is the memory of each tensor of the module that it keeps."""

    node: fx.Node
    sources: tuple[fx.Node, ...]
    reads: Memory
    writes: Memory
    is_random: bool
    kept: OpaqueModule | None
    state: tuple[Memory, ...]


class _Steps:
    """Yields the calls of a graph and of its regions, in which any result may share the memory of its arguments."""

    def __init__(self, module: fx.GraphModule, facts: Mapping[str, Fact]) -> None:
        self._module = module
        self._facts = facts
        self._memory = {node: facts[node.name].makes for node in module.graph.nodes if node.name in facts}
        self._outer: dict[fx.Node, Any] = {}
        self._returned: dict[fx.Node, tuple[Any, ...]] = {}

    def __iter__(self) -> Iterator[_Step]:
        for node in self._module.graph.nodes:
            if node.op == "call_function":
                fact = self._facts[node.name]
                yield from self._called(self._module, node, fact.writes, fact.is_random)

    def _called(self, module: fx.GraphModule, node: fx.Node, writes: Memory, draws: bool) -> Iterator[_Step]:
        if node.target is REGION:
            yield from self._entered(module, node)
            writes = _NONE
        sources: list[Any] = [self._outer.get(each, each) for each in node.all_input_nodes]
        if node.target is getitem and sources[0] in self._returned:
            sources.append(self._returned[sources[0]][node.args[1]])  # type: ignore[index]
        kept = opaque_module_of(node)
        state: Any = node.args[_STATE] if kept is not None else ()
        found = tuple(each for each in sources if isinstance(each, fx.Node))
        yield _Step(node, found, self._of(found), writes, draws, kept, tuple(self._of([each]) for each in state))

    def _entered(self, module: fx.GraphModule, region: fx.Node) -> Iterator[_Step]:
        inner, given = inside(module, region)
        self._outer |= {place: self._outer.get(each, each) for place, each in given.items()}
        for node in inner.graph.nodes:
            if node.op == "call_function":
                self._memory[node] = self._of(node.all_input_nodes)
                writes = self._of([*written(node), *changed_statistics(inner, node)])
                yield from self._called(inner, node, writes, is_random(inner, node))
        returned: Any = inner.graph.output_node().args[0]
        results = returned if isinstance(returned, tuple | list) else (returned,)
        self._returned[region] = tuple(self._outer.get(each, each) for each in results)

    def _of(self, nodes: Iterable[fx.Node]) -> Memory:
        return _NONE.union(*(self._memory.get(self._outer.get(each, each), _NONE) for each in nodes))


_Read = Mapping[fx.Node, tuple[Memory, bool]]
"""The memory of each node that reads state, and whether that is a parameter."""


def _follow(steps: Iterable[_Step], inputs: Iterable[fx.Node], read: _Read, varied: set[int]) -> None:
    """Adds to `varied` the memory into which something is written that follows from samples, or from chance."""
    nodes = {*inputs, *(node for node, (memory, _) in read.items() if memory & varied)}
    for step in steps:
        if step.is_random or step.reads & varied or is_of_batch(step.node) or not nodes.isdisjoint(step.sources):
            nodes.add(step.node)
            varied |= step.writes if step.kept is None else _NONE.union(*step.state[step.kept.num_parameters :])


def _counters_of_samples(
    steps: Iterable[_Step], inputs: Iterable[fx.Node], read: _Read, steady: Memory, varied: Collection[int]
) -> Memory:
    """Returns the memory of counters that decide, together with state of samples, what becomes of it or of a result.

    A counter changes by itself alone. What follows from weights (their averages, say) is no counter.
    """
    origins = {node: memory & steady for node, (memory, _) in read.items()}  # steady memory, until it meets weights
    held = {node for node, (memory, _) in read.items() if memory & set(varied)}  # values of varied state alone
    weighed = {node for node, (_, is_weight) in read.items() if is_weight and not origins[node]} - held
    sampled = set(inputs)  # values that have numbers of samples
    joined = following = _NONE  # steady memory that meets what is held, and that follows from weights
    for step in steps:
        if step.node.target is REGION:
            continue
        if step.kept is not None:  # it has been tried out
            sampled.add(step.node)
            continue
        changes = bool(step.writes & set(varied))
        is_held = changes or not held.isdisjoint(step.sources)
        origins[step.node] = _NONE.union(*(origins.get(each, _NONE) for each in step.sources))
        if is_held:
            joined |= origins[step.node]
        if not weighed.isdisjoint(step.sources):
            weighed.add(step.node)
            following |= step.writes & steady
            origins[step.node] = _NONE
        if not changes and not sampled.isdisjoint(step.sources):
            sampled.add(step.node)
        elif is_held:
            held.add(step.node)
    return joined - following


def batch_norms(traced: TracedModel) -> list[fx.Node]:
    """Returns the batch normalisations that go by the statistics of their samples."""
    nodes = traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    return [node for node in nodes if node.args[_TRAINING]]


def refuse_single_values(traced: TracedModel, sizes: Iterable[int]) -> None:
    """Refuses micro-batches that leave a batch normalisation one value a channel: PyTorch's check is not traced."""
    smallest = min(sizes)
    for node in batch_norms(traced):
        given: Any = node.args[0]
        batch, channels, *others = traced.sizes.shape(given.meta["val"], smallest)
        if batch * math.prod(others) == 1:
            raise InputError(
                f"A micro-batch has {smallest} sample, which leaves {node.name} one value for each of {channels} "
                "channels; in training a batch normalisation needs more. Pass larger mini-batches, ask for fewer "
                "micro-batches, or leave out the last batch of an epoch (drop_last=True)."
            )
