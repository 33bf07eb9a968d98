"""Puts virtual cut points into a traced graph and takes the stages out of it.

A value that is made at stage a and used at later stages b < c goes from a to b and from b on to c. On the way back
b adds its own gradients to what comes from c. So the gradients of a value are summed in the order of one process, and
each stage gets a value once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autovaruna.graph.pieces.extract import Piece, extract, reads
from autovaruna.graph.traced import TracedModel
from autovaruna.stage.assignment import Assignment


@dataclass(frozen=True)
class Edge:
    """What one stage sends to another for each micro-batch.

    `values` are names of tensors; those in `gradients` get one back.
    """

    index: int
    source: int
    destination: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class StagePart:
    """One stage of a split.

    Attributes:
        traced: the graph that it is a part of.
        index: which stage.
        nodes: names of its operations.
        inputs: names of the caller's tensors that it gets straight from the caller.
        outputs: positions of the model's outputs that it makes, with the name of the node.
        arriving: edges from earlier stages.
        leaving: edges to later stages.
    """

    traced: TracedModel
    index: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[int, str], ...]
    arriving: tuple[Edge, ...]
    leaving: tuple[Edge, ...]

    @cached_property
    def piece(self) -> Piece:
        """The operations, as a callable; made on the ranks that run them."""
        return extract(self.traced, self.nodes, _returned(self.outputs, self.leaving))


@dataclass(frozen=True)
class Split:
    """All stages of a graph; `input_gradients` says which stage holds the whole gradient of an input."""

    traced: TracedModel
    assignment: Assignment
    stages: tuple[StagePart, ...]
    edges: tuple[Edge, ...]
    input_gradients: dict[str, int]

    @cached_property
    def makers(self) -> dict[int, int]:
        """The stage that makes each output of the model, by place."""
        return {place: stage.index for stage in self.stages for place, _ in stage.outputs}


def split(traced: TracedModel, assignment: Assignment) -> Split:
    """Takes the stages out of a traced graph.

    Args:
        traced: The graph.
        assignment: The stage of each node.
    """
    return _Splitter(traced, assignment).run()


class _Splitter:
    def __init__(self, traced: TracedModel, assignment: Assignment) -> None:
        self.traced = traced
        self.stage_of = assignment.stage_of
        self.assignment = assignment
        self.stages = range(assignment.num_stages)
        self.nodes: tuple[list[str], ...] = tuple([] for _ in self.stages)
        for name, stage in self.stage_of.items():
            self.nodes[stage].append(name)
        self.relayed_inputs = _relayed_inputs(traced)
        self.users = self._users()
        self.output_stage = [self._stage_of_output(spec.node) for spec in traced.outputs]

    def run(self) -> Split:
        routes = {name: self._route(name) for name in self.users}
        edges = self._edges(routes)
        parts = tuple(self._part(stage, edges) for stage in self.stages)
        first = {name: route[0] for name, route in routes.items() if name in self.relayed_inputs}
        return Split(self.traced, self.assignment, parts, edges, first)

    def _users(self) -> dict[str, set[int]]:
        """Returns the stages that use each value and each input with a gradient, as arguments of their pieces."""
        found: dict[str, set[int]] = {}
        for stage in self.stages:
            values, inputs = reads(self.traced, self.nodes[stage], self._own_outputs(stage))
            for name in [*values, *(name for name in inputs if name in self.relayed_inputs)]:
                found.setdefault(name, set()).add(stage)
        return found

    def _route(self, name: str) -> list[int]:
        """Returns the stages that hold a value, in the order in which it passes through them."""
        stages = set(self.users[name])
        if name in self.stage_of:
            stages.add(self.stage_of[name])
        stages |= {
            stage for spec, stage in zip(self.traced.outputs, self.output_stage, strict=True) if spec.node == name
        }
        return sorted(stages)

    def _edges(self, routes: dict[str, list[int]]) -> tuple[Edge, ...]:
        together: dict[tuple[int, int], list[str]] = {}
        for name in sorted(routes, key=self.traced.places.__getitem__):
            for pair in zip(routes[name], routes[name][1:], strict=False):
                together.setdefault(pair, []).append(name)
        return tuple(
            Edge(index, source, destination, tuple(names), tuple(filter(self._needs_gradient, names)))
            for index, ((source, destination), names) in enumerate(sorted(together.items()))
        )

    def _part(self, stage: int, edges: Sequence[Edge]) -> StagePart:
        arriving = tuple(edge for edge in edges if edge.destination == stage)
        leaving = tuple(edge for edge in edges if edge.source == stage)
        outputs = tuple(
            (place, spec.node) for place, spec in enumerate(self.traced.outputs) if self.output_stage[place] == stage
        )
        _, read = reads(self.traced, self.nodes[stage], _returned(outputs, leaving))
        arrived = {name for edge in arriving for name in edge.values}
        inputs = tuple(name for name in read if name not in arrived)
        return StagePart(self.traced, stage, tuple(self.nodes[stage]), inputs, outputs, arriving, leaving)

    def _needs_gradient(self, name: str) -> bool:
        return self.traced.facts[name].needs_gradient

    def _own_outputs(self, stage: int) -> list[str]:
        return [
            spec.node
            for spec, its in zip(self.traced.outputs, self._first_output_stages(), strict=True)
            if its == stage
        ]

    def _first_output_stages(self) -> list[int]:
        return [self.stage_of.get(spec.node, self.stages[-1]) for spec in self.traced.outputs]

    def _stage_of_output(self, name: str) -> int:
        """An output that later stages use leaves from the last of them: its own gradient is then added first."""
        stages: set[int] = {self.stage_of.get(name, self.stages[-1]), *self.users.get(name, ())}
        return max(stages)


def _relayed_inputs(traced: TracedModel) -> set[str]:
    """Returns the inputs that travel like values: those with a gradient, so that it is summed in order, too."""
    return {name for name, spec in traced.inputs.items() if spec.needs_gradient}


def _returned(outputs: Iterable[tuple[int, str]], leaving: Iterable[Edge]) -> tuple[str, ...]:
    """Returns the names of what a stage's piece returns."""
    sent = (name for edge in leaving for name in edge.values)
    return tuple(dict.fromkeys([*(name for _, name in outputs), *sent]))
