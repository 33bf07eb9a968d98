"""Finds the counters that go with state of samples: one that weighs an average counts how often that has changed.

A counter changes by itself alone, whatever the samples are, so it would change once a call. But where an average of
samples, which changes with each micro-batch, is weighed by the count, or corrected by it, both must go together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx

from autovaruna.graph.arguments import written
from autovaruna.graph.facts import Fact
from autovaruna.graph.kept_whole.kept import kept_by
from autovaruna.graph.regions import REGION, inside
from autovaruna.graph.unsaid import changed_statistics

Memory = frozenset[int]
_NONE: Memory = frozenset()


def counters_of_samples(
    module: fx.GraphModule,
    facts: Mapping[str, Fact],
    batch: Collection[str],
    parameters: Collection[str],
    steady: Memory,
    varied: Set[int],
) -> Memory:
    """Returns the memory of counters that decide, together with state of samples, what becomes of it or of a result.

    What follows from weights (their averages, the vectors of a spectral normalisation) is no counter.

    Args:
        module: The graph.
        facts: What is known of each node.
        batch: Names of the inputs whose first dimension is the batch.
        parameters: Names of the attributes that are parameters.
        steady: The memory of state that changes alike whatever the samples are.
        varied: The memory of state that follows from samples.
    """
    walk = _Walk(steady, frozenset(varied))
    for node in module.graph.nodes:
        if node.op == "placeholder" and node.name in batch:
            walk.sampled.add(node)
        elif node.op == "get_attr" and node.name in facts:
            walk.read(node, facts[node.name].makes, node.target in parameters)
        elif node.op == "call_function":
            walk.memory[node] = facts[node.name].makes
            walk.call(module, node, facts[node.name].writes)
    return walk.joined - walk.following


@dataclass
class _Walk:
    """Goes through a graph, and notes what its values are made of.

    Attributes:
        origins: the steady memory that a value follows from, until it meets weights.
        memory: what a value may share.
        held: values of state alone that follows from samples.
        sampled: values that have numbers of samples.
        weighed: values that follow from weights.
        joined: steady memory that meets what is held.
        following: steady memory that follows from weights.
        returned: what regions return.
    """

    steady: Memory
    varied: Memory
    origins: dict[fx.Node, Memory] = field(default_factory=dict)
    memory: dict[fx.Node, Memory] = field(default_factory=dict)
    held: set[fx.Node] = field(default_factory=set)
    sampled: set[fx.Node] = field(default_factory=set)
    weighed: set[fx.Node] = field(default_factory=set)
    joined: Memory = _NONE
    following: Memory = _NONE
    returned: dict[fx.Node, Sequence[Any]] = field(default_factory=dict)

    def read(self, node: fx.Node, memory: Memory, is_parameter: bool) -> None:
        """Notes a node that reads state."""
        self.memory[node] = memory
        self.origins[node] = memory & self.steady
        if memory & self.varied:
            self.held.add(node)
        elif is_parameter and not self.origins[node]:
            self.weighed.add(node)

    def call(self, module: fx.GraphModule, node: fx.Node, writes: Memory) -> None:
        """Notes what a node makes of its arguments, and what it writes."""
        if node.target is REGION:
            self.returned[node] = self._enter(module, node)
        elif node.target is getitem and (returned := self.returned.get(node.args[0])):  # type: ignore[arg-type]
            self._take(node, returned[node.args[1]])  # type: ignore[index]
        elif kept_by(node) is not None:  # it has been tried out
            self.sampled.add(node)
        else:
            self._note(node, writes)

    def _note(self, node: fx.Node, writes: Memory) -> None:
        sources = node.all_input_nodes
        origins = _NONE.union(*(self.origins.get(each, _NONE) for each in sources))
        changes = bool(writes & self.varied)
        if changes or not self.held.isdisjoint(sources):
            self.joined |= origins
        if not self.weighed.isdisjoint(sources):
            self.weighed.add(node)
            self.following |= writes & self.steady
            origins = _NONE
        self.origins[node] = origins
        if not changes and not self.sampled.isdisjoint(sources):
            self.sampled.add(node)
        elif changes or not self.held.isdisjoint(sources):
            self.held.add(node)

    def _enter(self, module: fx.GraphModule, region: fx.Node) -> Sequence[Any]:
        """Goes through a region, where any result may share the memory of its arguments; returns its outputs."""
        inner, given = inside(module, region)
        for node in inner.graph.nodes:
            if node.op == "placeholder":
                self._take(node, given[node])
            elif node.op == "call_function":
                self.memory[node] = _NONE.union(*(self.memory.get(each, _NONE) for each in node.all_input_nodes))
                changed = [*written(node), *changed_statistics(inner, node)]
                self.call(inner, node, _NONE.union(*(self.memory.get(each, _NONE) for each in changed)))
        returned: Any = inner.graph.output_node().args[0]
        return returned if isinstance(returned, tuple | list) else [returned]

    def _take(self, node: fx.Node, argument: object) -> None:
        """Notes of a node what is known of another one, across the border of a region."""
        if isinstance(argument, fx.Node):
            self.memory[node] = self.memory.get(argument, _NONE)
            self.origins[node] = self.origins.get(argument, _NONE)
            for group in (self.held, self.sampled, self.weighed):
                if argument in group:
                    group.add(node)
