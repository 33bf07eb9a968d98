"""Finds the state that a forward changes whatever the samples are: plain PyTorch changes it once a call.

Such are the vectors of spectral normalisation, counters of steps, and averages of weights. What follows from samples,
as the statistics of a batch normalisation do, changes with each micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from autovaruna.graph.arguments import written
from autovaruna.graph.facts import Fact, changed_statistics
from autovaruna.graph.of_batch import is_of_batch

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled
_FIRST_OF_REGION = 2
"""Place of the first argument that goes into the graph of a region."""


def steady_state(
    module: fx.GraphModule, facts: Mapping[str, Fact], batch: Collection[str], changed: Collection[str]
) -> frozenset[str]:
    """Returns the names of parameters and buffers that change alike in all micro-batches that find them alike.

    Args:
        module: The graph.
        facts: What is known of each node.
        batch: Names of the inputs whose first dimension is the batch.
        changed: The attributes that forward changes.
    """
    if not changed:
        return frozenset()
    varied: set[int] = set()
    while True:  # what comes first finds what the micro-batch before has left
        known = len(varied)
        _follow(module, facts, batch, varied)
        if len(varied) == known:
            break
    attributes = [node for node in module.graph.find_nodes(op="get_attr") if str(node.target) in changed]
    return frozenset(str(node.target) for node in attributes if not facts[node.name].makes & varied)


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
        if node.target is _REGION and not fact.is_random:
            _follow_inside(module, node, {each: facts[each.name].makes for each in node.all_input_nodes}, nodes, varied)
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
    inner: Any = getattr(module, str(region.args[1].target))  # type: ignore[union-attr]
    given = dict(zip(inner.graph.find_nodes(op="placeholder"), region.args[_FIRST_OF_REGION:], strict=True))
    shared = {place: memory.get(argument, frozenset()) for place, argument in given.items()}
    varying = {place for place, argument in given.items() if argument in nodes}
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            continue
        shared[node] = frozenset[int]().union(*(shared[each] for each in node.all_input_nodes))
        if node.op == "get_attr" or _meets(node, varying) or shared[node] & varied:
            varying.add(node)
            varied |= _written(node, shared)
            varied |= {storage for each in changed_statistics(inner, node) for storage in shared[each]}


def _meets(node: fx.Node, nodes: Collection[fx.Node]) -> bool:
    return any(each in nodes for each in node.all_input_nodes)


def _written(node: fx.Node, shared: Mapping[fx.Node, frozenset[int]]) -> set[int]:
    """Returns the memory that an operation of a region changes; all that it could, if it does not say."""
    if node.target is getitem or node.op != "call_function":
        return set()
    if not isinstance(node.target, torch._ops.OpOverload):
        return set(shared[node])
    return {storage for each in written(node) for storage in shared[each]}
