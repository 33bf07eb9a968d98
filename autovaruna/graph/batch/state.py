"""Finds the state that a forward changes whatever the samples are: plain PyTorch changes it once a call.

Such are the vectors of spectral normalisation, counters of steps, and averages of weights. What follows from samples,
as the statistics of a batch normalisation do, changes with each micro-batch; and with it a counter that weighs or
corrects it: one that counts how often an average of samples has changed must go together with that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autovaruna.errors import InputError
from autovaruna.graph.facts import Fact, KnownGraph
from autovaruna.graph.opaque.run import opaque_module_of
from autovaruna.graph.operators import is_of_batch
from autovaruna.graph.traced import TracedModel

Memory = frozenset[int]
_NONE: Memory = frozenset()
_TRAINING = 5  # place of the argument of ``aten.batch_norm`` that says whether it computes statistics
_Calls = Sequence[tuple[fx.Node, Fact]]
_Read = Mapping[fx.Node, tuple[Memory, bool]]
"""The memory of each node that reads state, and whether that is a parameter."""


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

    A counter changes by itself alone. What follows from weights (their averages, say) is no counter.
    """
    origins = {node: memory & steady for node, (memory, _) in read.items()}  # steady memory, until it meets weights
    held = {node for node, (memory, _) in read.items() if memory & set(varied)}  # values of varied state alone
    weighed = {node for node, (_, is_weight) in read.items() if is_weight and not origins[node]} - held
    sampled = set(inputs)  # values that have numbers of samples
    joined = following = _NONE  # steady memory that meets what is held, and that follows from weights
    for node, fact in calls:
        sources = node.all_input_nodes
        if opaque_module_of(node) is not None:  # it has been tried out
            sampled.add(node)
            continue
        changes = bool(fact.writes & set(varied))
        is_held = changes or not held.isdisjoint(sources)
        origins[node] = _NONE.union(*(origins.get(each, _NONE) for each in sources))
        if is_held:
            joined |= origins[node]
        if not weighed.isdisjoint(sources):
            weighed.add(node)
            following |= fact.writes & steady
            origins[node] = _NONE
        if not changes and not sampled.isdisjoint(sources):
            sampled.add(node)
        elif is_held:
            held.add(node)
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
