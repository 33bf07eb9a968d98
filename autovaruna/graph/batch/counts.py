"""Finds what numbers that a model takes out of tensors (``counts.tolist()``) were counted from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from autovaruna.graph.facts import Fact, tensors_in

_aten = torch.ops.aten
_FILLED = {
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
}
"""What has no numbers of its argument."""


def counted(
    numbers: Sequence[fx.Node], facts: Mapping[str, Fact], parameters: Collection[str]
) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yields each number with the nodes that it was counted from, back to where integers came from floating point.

    Random floating point numbers are sorted, compared and counted as a step's are; integers are not drawn at all. What
    follows from the inputs alone is left out: it is there with a step's own numbers.

    Args:
        numbers: Nodes of one graph whose values are numbers that depend on data.
        facts: What is known of each node.
        parameters: Names of the attributes that are parameters.
    """
    if not numbers:
        return
    graph = numbers[0].graph
    computed = _whole(graph, facts) - _given(graph, facts, parameters)
    for number in numbers:
        found: dict[fx.Node, None] = {}
        waiting = [number]
        while waiting:
            sources = [each for each in waiting.pop().all_input_nodes if each in computed and each not in found]
            waiting += sources
            found |= dict.fromkeys(sources)
        yield number, list(found)


def _whole(graph: fx.Graph, facts: Mapping[str, Fact]) -> set[fx.Node]:
    """Returns the nodes whose values are integers, or are made of integers alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            break
        fact = facts[node.name]
        is_made = node.op == "call_function" and not fact.is_random and found.issuperset(node.all_input_nodes)
        if is_made or node.target in _FILLED or not any(leaf.is_floating_point() for leaf in tensors_in(fact.value)):
            found.add(node)
    return found


def _given(graph: fx.Graph, facts: Mapping[str, Fact], parameters: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that follow from inputs, buffers and constants alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_parameter = node.op == "get_attr" and str(node.target) in parameters
        if node.op != "output" and not is_parameter and not facts[node.name].is_random:
            found |= {node} if found.issuperset(node.all_input_nodes) else set()
    return found
