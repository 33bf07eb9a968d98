"""Puts the nodes of a traced graph to stages, and takes the stages out of it.

A value that is made at stage a and used at later stages b < c goes from a to b and from b on to c. On the way back
b adds its own gradients to what comes from c. So the gradients of a value are summed in the order of one process, and
each stage gets a value once. Every graph of a model but the one that was planned follows that one's assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import fx

from autovaruna.errors import PlanError
from autovaruna.graph.export.watchers import WatchedCall
from autovaruna.graph.pieces import Piece, extract, reads
from autovaruna.graph.traced import TracedModel


@dataclass(frozen=True)
class Assignment:
    """The stage of each node that is in a block, and the stages that hold each parameter and buffer."""

    num_stages: int
    stage_of: dict[str, int]
    holders: dict[str, tuple[int, ...]]


def assign(traced: TracedModel, stages: Sequence[Sequence[int]]) -> Assignment:
    """Puts the blocks of each stage of a plan, by their indices, to their nodes."""
    stage_of = {
        name: stage
        for stage, blocks in enumerate(stages)
        for block in blocks
        for name in traced.graph.blocks[block].nodes
    }
    return Assignment(len(stages), stage_of, _holders(traced, stage_of))


def carry_over(planned: Assignment, traced: TracedModel) -> Assignment:
    """Puts the nodes of another graph of the same model (other shapes, eval mode) to the same stages.

    A block that uses parameters or buffers goes to the stage that holds them; the others go where nodes of the same
    name went, or stay with what they use. An order that no pipeline can follow is a PlanError.
    """
    block_stage: dict[int, int] = {}
    latest = _latest(planned, traced)
    for block in traced.graph.blocks:
        nodes = [traced.nodes[name] for name in block.nodes]
        earliest = max((block_stage[source] for source in _sources(traced, nodes, block.index)), default=0)
        fixed = _fixed_stages(planned, traced, nodes)
        wanted = [planned.stage_of[name] for name in block.nodes if name in planned.stage_of]
        if fixed:
            possible = [option for option in fixed if earliest <= option <= latest[block.index]]
            stage = next((option for option in wanted if option in possible), possible[0] if possible else -1)
            if stage < 0:
                last = latest[block.index]
                where = f"at stages {earliest} to {last} alone" if earliest <= last else "at no stage"
                raise PlanError(
                    f"{block.name} uses parameters of stage {fixed[0]}, but can run {where}. "
                    "The model runs its modules in another order than in the call that was planned. Expected one "
                    "order of modules; wrap the model anew, or run this call on the unwrapped model."
                )
        else:
            stage = min(max(wanted[0] if wanted else earliest, earliest), latest[block.index])
        block_stage[block.index] = stage
    stage_of = {name: block_stage[block.index] for block in traced.graph.blocks for name in block.nodes}
    return Assignment(planned.num_stages, stage_of, _holders(traced, stage_of))


def _latest(planned: Assignment, traced: TracedModel) -> dict[int, int]:
    """Returns, for each block, the last stage at which those that need it can still run."""
    latest = {block.index: planned.num_stages - 1 for block in traced.graph.blocks}
    for block in reversed(traced.graph.blocks):
        nodes = [traced.nodes[name] for name in block.nodes]
        limit = min([latest[block.index], *_fixed_stages(planned, traced, nodes)[-1:]])
        latest[block.index] = limit
        for source in _sources(traced, nodes, block.index):
            latest[source] = min(latest[source], limit)
    return latest


def _sources(traced: TracedModel, nodes: Sequence[fx.Node], block: int) -> set[int]:
    names = {source.name for node in nodes for source in node.all_input_nodes}
    return {traced.block_of[name] for name in names if name in traced.block_of} - {block}


def _fixed_stages(planned: Assignment, traced: TracedModel, nodes: Sequence[fx.Node]) -> list[int]:
    """Returns the stages that hold every parameter and changed buffer that a block uses; empty: it uses none."""
    used = [name for node in nodes for name in _state_of(traced, node) if name in planned.holders]
    options = set.intersection(*(set(planned.holders[name]) for name in used)) if used else set()
    if used and not options:
        raise PlanError(
            f"The operation {nodes[0].name} uses parameters that the plan puts to different stages. The model uses "
            "them in another way than in the call that was planned; wrap the model anew."
        )
    return sorted(options)


def _state_of(traced: TracedModel, node: fx.Node) -> list[str]:
    sources = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    names = [traced.parameters.get(source, traced.buffers.get(source)) for source in sources]
    return [name for name in names if name is not None]


def _holders(traced: TracedModel, stage_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter and each buffer that a step changes."""
    found: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        for state in _state_of(traced, traced.nodes[name]):
            if state in traced.parameters.values() or state in traced.changed_state:
                found.setdefault(state, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


@dataclass(frozen=True)
class StageEdge:
    """What one stage sends to another for each micro-batch: tensors by name, of which some get a gradient back."""

    index: int
    source: int
    destination: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True)
class StagePart:
    """One stage of a split: `inputs` come straight from the caller, `outputs` have the place among the model's."""

    traced: TracedModel
    index: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[tuple[int, str], ...]
    arriving: tuple[StageEdge, ...]
    leaving: tuple[StageEdge, ...]

    @cached_property
    def watched(self) -> tuple[WatchedCall, ...]:
        """The calls of modules with hooks whose results are made here."""
        own = {*self.nodes, *self.inputs}
        made = [(call, [name for name in call.names[call.num_given :] if name]) for call in self.traced.watched]
        return tuple(call for call, names in made if names and names[-1] in own)

    @cached_property
    def piece(self) -> Piece:
        """The operations, as a callable; made on the ranks that run them."""
        arrived = {name for edge in self.arriving for name in edge.values}
        here = {*self.nodes, *self.inputs, *arrived}
        seen = [name for call in self.watched for name in call.names if name in here]
        return extract(self.traced, self.nodes, tuple(dict.fromkeys([*_returned(self.outputs, self.leaving), *seen])))


@dataclass(frozen=True)
class Split:
    """All stages of a graph; `input_gradients` says which stage holds the whole gradient of an input."""

    traced: TracedModel
    assignment: Assignment
    stages: tuple[StagePart, ...]
    edges: tuple[StageEdge, ...]
    input_gradients: dict[str, int]

    @cached_property
    def makers(self) -> dict[int, int]:
        """The stage that makes each output of the model, by place."""
        return {place: stage.index for stage in self.stages for place, _ in stage.outputs}


def split(traced: TracedModel, assignment: Assignment) -> Split:
    """Takes the stages out of a traced graph."""
    stage_of, stages = assignment.stage_of, range(assignment.num_stages)
    nodes: list[list[str]] = [[] for _ in stages]
    for name, stage in stage_of.items():
        nodes[stage].append(name)
    relayed_inputs = {name for name, spec in traced.inputs.items() if spec.needs_gradient}
    makers = {spec.node: stage_of.get(spec.node, stages[-1]) for spec in traced.outputs}
    users: dict[str, set[int]] = {}  # of each value and each input with a gradient, the stages that use it
    for stage in stages:
        values, inputs = reads(traced, nodes[stage], [name for name, maker in makers.items() if maker == stage])
        for name in [*values, *(name for name in inputs if name in relayed_inputs)]:
            users.setdefault(name, set()).add(stage)
    leaves_from = {  # the last stage that uses an output: its own gradient is then added first
        name: max([maker, *users.get(name, ())]) for name, maker in makers.items()
    }
    routes = {}  # the stages that hold a value, in the order in which it passes through them
    for name, using in users.items():
        known = [where[name] for where in (stage_of, leaves_from) if name in where]
        routes[name] = sorted({*using, *known})
    edges = _edges(traced, routes)
    parts = tuple(_part(traced, stage, nodes[stage], leaves_from, edges) for stage in stages)
    first = {name: route[0] for name, route in routes.items() if name in relayed_inputs}
    return Split(traced, assignment, parts, edges, first)


def _edges(traced: TracedModel, routes: Mapping[str, list[int]]) -> tuple[StageEdge, ...]:
    together: dict[tuple[int, int], list[str]] = {}
    for name in sorted(routes, key=traced.places.__getitem__):
        for pair in pairwise(routes[name]):
            together.setdefault(pair, []).append(name)
    return tuple(
        StageEdge(index, *ends, tuple(names), tuple(name for name in names if traced.facts[name].needs_gradient))
        for index, (ends, names) in enumerate(sorted(together.items()))
    )


def _part(
    traced: TracedModel, stage: int, nodes: Sequence[str], leaves_from: Mapping[str, int], edges: Sequence[StageEdge]
) -> StagePart:
    arriving = tuple(edge for edge in edges if edge.destination == stage)
    leaving = tuple(edge for edge in edges if edge.source == stage)
    places = enumerate(traced.outputs)
    outputs = tuple((place, spec.node) for place, spec in places if leaves_from[spec.node] == stage)
    _, read = reads(traced, nodes, _returned(outputs, leaving))
    arrived = {name for edge in arriving for name in edge.values}
    inputs = tuple(name for name in read if name not in arrived)
    return StagePart(traced, stage, tuple(nodes), inputs, outputs, arriving, leaving)


def _returned(outputs: Iterable[tuple[int, str]], leaving: Iterable[StageEdge]) -> tuple[str, ...]:
    sent = (name for edge in leaving for name in edge.values)
    return tuple(dict.fromkeys([*(name for _, name in outputs), *sent]))
