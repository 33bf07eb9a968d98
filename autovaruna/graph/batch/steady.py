"""Finds the state that a forward changes whatever the samples are: plain PyTorch changes it once a call.

Such are the vectors of spectral normalisation, counters of steps, and averages of weights. What follows from samples,
as the statistics of a batch normalisation do, changes with each micro-batch, and with it a counter that weighs it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from autovaruna.graph.arguments import written
from autovaruna.graph.batch.counters import counters_of_samples
from autovaruna.graph.batch.of_batch import is_of_batch
from autovaruna.graph.facts import Fact
from autovaruna.graph.kept_whole.kept import KeptModule, kept_by
from autovaruna.graph.regions import REGION, inside
from autovaruna.graph.unsaid import changed_statistics, is_random

_STATE = 3
"""Place of the state among the arguments of a node that runs a kept module."""


def steady_state(
    module: fx.GraphModule,
    facts: Mapping[str, Fact],
    batch: Collection[str],
    parameters: Collection[str],
    changed: Collection[str],
) -> frozenset[str]:
    """Returns the names of parameters and buffers that change alike in all micro-batches that find them alike.

    Args:
        module: The graph.
        facts: What is known of each node.
        batch: Names of the inputs whose first dimension is the batch.
        parameters: Names of the attributes that are parameters.
        changed: The attributes that forward changes.
    """
    if not changed:
        return frozenset()
    places = {
        str(node.target): facts[node.name].makes
        for node in module.graph.find_nodes(op="get_attr")
        if str(node.target) in changed
    }
    every = frozenset[int]().union(*places.values())
    varied: set[int] = set()
    while True:  # what comes first finds what the micro-batch before has left
        known = len(varied)
        _follow(module, facts, batch, varied)
        if varied and every - varied:
            varied |= counters_of_samples(module, facts, batch, parameters, every - varied, varied)
        if len(varied) == known:
            return frozenset(name for name, memory in places.items() if not memory & varied)


def _follow(module: fx.GraphModule, facts: Mapping[str, Fact], batch: Collection[str], varied: set[int]) -> None:
    """Adds to `varied` the memory into which something is written that follows from samples, or from chance."""
    nodes = {node for node in module.graph.find_nodes(op="placeholder") if node.name in batch}
    for node in module.graph.find_nodes(op="get_attr"):
        nodes |= {node} if node.name in facts and facts[node.name].makes & varied else set()
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        fact = facts[node.name]
        if not (fact.is_random or fact.reads & varied or is_of_batch(node) or _meets(node, nodes)):
            continue
        nodes.add(node)
        memory = {each: facts[each.name].makes for each in node.all_input_nodes if each.name in facts}
        if node.target is REGION:
            _follow_inside(module, node, memory, nodes, varied)
        elif (kept := kept_by(node)) is not None:
            varied |= _followed(kept, node, memory, varied)
        else:
            varied |= fact.writes


def _follow_inside(
    module: fx.GraphModule,
    region: fx.Node,
    memory: Mapping[fx.Node, frozenset[int]],
    nodes: Collection[fx.Node],
    varied: set[int],
) -> None:
    """Does the same in a region, where any result may share the memory of its arguments."""
    inner, given = inside(module, region)
    shared = {place: memory.get(argument, frozenset()) for place, argument in given.items()}
    varying = {place for place, argument in given.items() if argument in nodes}
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            continue
        shared[node] = frozenset[int]().union(*(shared[each] for each in node.all_input_nodes))
        if (kept := kept_by(node)) is not None:
            varying.add(node)
            varied |= _followed(kept, node, shared, varied)
        elif node.op == "get_attr" or is_random(inner, node) or _meets(node, varying) or shared[node] & varied:
            varying.add(node)
            varied |= _written(node, shared)
            varied |= {storage for each in changed_statistics(inner, node) for storage in shared[each]}


def _followed(
    kept: KeptModule, node: fx.Node, memory: Mapping[fx.Node, frozenset[int]], varied: Collection[int]
) -> set[int]:
    """Returns the memory that a kept module changes by its samples; of all its buffers, if it finds other such memory.

    Args:
        kept: The module.
        node: It runs it.
        memory: Of the arguments of the node.
        varied: What is known of such memory.
    """
    state: Any = node.args[_STATE]
    found = {place: memory[each] for place, each in enumerate(state)}
    buffers = {place for place in found if place >= kept.num_parameters}
    own = {storage for place in buffers - kept.steady for storage in found[place]}
    foreign = {storage for storages in found.values() for storage in storages} & set(varied) - own
    return {storage for place in buffers for storage in found[place]} if foreign else own


def _meets(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    return any(each in nodes for each in node.all_input_nodes)


def _written(node: fx.Node, shared: Mapping[fx.Node, frozenset[int]]) -> set[int]:
    """Returns the memory that an operation of a region changes; all that it could, if it does not say."""
    if node.target is getitem or node.op != "call_function":
        return set()
    if not isinstance(node.target, torch._ops.OpOverload):
        return set(shared[node])
    return {storage for each in written(node) for storage in shared[each]}
