"""Says which stage runs each node: from the plan for the graph that was planned, carried over to every other graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autovaruna.errors import PlanError
from autovaruna.graph.traced import TracedModel


@dataclass(frozen=True)
class Assignment:
    """The stage of each node that is in a block, and the stages that hold each parameter and buffer."""

    num_stages: int
    stage_of: dict[str, int]
    holders: dict[str, tuple[int, ...]]


def assign(traced: TracedModel, stages: Sequence[Sequence[int]]) -> Assignment:
    """Puts the blocks of each stage of a plan to their nodes.

    Args:
        traced: The graph that was planned.
        stages: Block indices of each stage.
    """
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
    name went, or stay with what they use.

    Args:
        planned: The assignment of the graph that was planned.
        traced: The other graph.

    Raises:
        PlanError: the other graph uses the parameters in an order that no pipeline can follow.
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
                where = _between(earliest, latest[block.index])
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


def _between(earliest: int, latest: int) -> str:
    """Says at which stages a block can run, by what it needs and by what needs it."""
    return f"at stages {earliest} to {latest} alone" if earliest <= latest else "at no stage"


def _latest(planned: Assignment, traced: TracedModel) -> dict[int, int]:
    """Returns, for each block, the last stage at which those that need it can still run."""
    latest = {block.index: planned.num_stages - 1 for block in traced.graph.blocks}
    for block in reversed(traced.graph.blocks):
        nodes = [traced.nodes[name] for name in block.nodes]
        fixed = _fixed_stages(planned, traced, nodes)
        limit = min([latest[block.index], *([max(fixed)] if fixed else [])])
        latest[block.index] = limit
        for source in _sources(traced, nodes, block.index):
            latest[source] = min(latest[source], limit)
    return latest


def _sources(traced: TracedModel, nodes: Sequence[fx.Node], block: int) -> set[int]:
    found = {
        traced.block_of[source.name]
        for node in nodes
        for source in node.all_input_nodes
        if source.name in traced.block_of
    }
    return found - {block}


def _fixed_stages(planned: Assignment, traced: TracedModel, nodes: Sequence[fx.Node]) -> list[int]:
    """Returns the stages that hold every parameter and changed buffer that a block uses; empty: it uses none."""
    options: set[int] | None = None
    for node in nodes:
        for name in _state_of(traced, node):
            if name in planned.holders:
                holders = set(planned.holders[name])
                options = holders if options is None else options & holders
    if options is not None and not options:
        raise PlanError(
            f"The operation {nodes[0].name} uses parameters that the plan puts to different stages. The model uses "
            "them in another way than in the call that was planned; wrap the model anew."
        )
    return sorted(options or ())


def _state_of(traced: TracedModel, node: fx.Node) -> list[str]:
    names: Mapping[str, str] = traced.parameters
    state = [
        names[str(source.target)]
        for source in node.all_input_nodes
        if source.op == "get_attr" and str(source.target) in names
    ]
    buffers = [
        traced.buffers[str(source.target)]
        for source in node.all_input_nodes
        if source.op == "get_attr" and str(source.target) in traced.buffers
    ]
    return state + buffers


def _holders(traced: TracedModel, stage_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns the stages that use each parameter and each buffer that a step changes."""
    found: dict[str, set[int]] = {}
    for name, stage in stage_of.items():
        for state in _state_of(traced, traced.nodes[name]):
            if state in traced.parameters.values() or state in traced.changed_state:
                found.setdefault(state, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in found.items()}
