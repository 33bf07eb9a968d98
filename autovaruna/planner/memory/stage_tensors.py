"""Defines `StageTensors`: the tensors that a stage makes for one micro-batch, one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from dataclasses import dataclass, field

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Costs
from autovaruna.planner.memory.block_steps import BlockSteps, steps_of_block


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """The tensors of one block, in bytes; values by their place in the graph.

    Attributes:
        made: values that it makes; `kept` are those that stay until its backward.
        unused: values that no later block of the stage reads.
        rest: what forward keeps besides.
        read: values that it reads and whose gradients it makes.
        weights: gradients of its parameters; `stepped` those that no earlier block of the stage uses.
        work: what its backward needs besides; `forward_work` the same of its forward.
        deferred: what it keeps, if its backward is split, until its weight gradients are computed.
        steps: what it takes and gives back, one after the other; in place of `rest` and both works, if it is known.
    """

    made: dict[int, float]
    kept: frozenset[int]
    unused: tuple[int, ...]
    rest: float
    read: dict[int, float]
    weights: tuple[float, ...]
    work: float
    stepped: tuple[float, ...]
    forward_work: float = 0.0
    steps: BlockSteps | None = None
    deferred: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The tensors of a stage: of its blocks in order, and what it receives, forward and back, by value.

    The inputs of the model that it uses are received as well, unless they are the rank's own; keys are below zero.
    Gradients with holes, slices of one that was joined, take `gradient_spans` where they are received.
    """

    blocks: tuple[BlockTensors, ...]
    received: dict[int, float]
    gradients_received: dict[int, float]
    gradient_spans: dict[int, float] = field(default_factory=dict)


def tensors_of_stage(graph: Graph, costs: Costs, blocks: Collection[int]) -> StageTensors:
    """Returns the tensors of a stage at the micro-batch size of `costs`.

    What a block saves are the values that it makes, as far as they fit into that, and one tensor for the rest.
    """
    inside, values = set(blocks), graph.values
    num_bytes = [value.size.at(math.ceil(costs.micro_batch_size)) for value in values]
    made: dict[int, list[int]] = {k: [] for k in inside}
    read: dict[int, list[int]] = {k: [] for k in inside}
    last: dict[int, list[int]] = {k: [] for k in inside}
    weights: dict[int, list[float]] = {k: [] for k in inside}
    stepped: dict[int, list[float]] = {k: [] for k in inside}
    of_inputs = {-1 - i: each for i, each in enumerate(graph.inputs) if not inside.isdisjoint(each.consumers)}
    received = {i: each.size.at(math.ceil(costs.micro_batch_size)) for i, each in of_inputs.items()}
    sent = {}
    for v, value in enumerate(values):
        readers = inside.intersection(value.consumers)
        for k in readers:
            read[k].append(v)
        if value.producer not in inside:
            if readers:
                received[v] = num_bytes[v]
            continue
        made[value.producer].append(v)
        if len(readers) < len(value.consumers):
            sent[v] = num_bytes[v]
        else:
            last[max(readers)].append(v)
    for parameter in graph.parameters:
        users = sorted(inside.intersection(parameter.blocks)) if parameter.needs_gradient else []
        for k in users:
            weights[k].append(float(parameter.num_bytes))
        for k in users[:1]:
            stepped[k].append(float(parameter.num_bytes))

    def tensors(k: int) -> BlockTensors:
        left, kept = float(costs.saved_bytes[k]), set(sent.keys() & made[k])
        for v in made[k]:
            if num_bytes[v] <= left * _NEARLY:
                left -= num_bytes[v]
                kept.add(v)
        back = {v: num_bytes[v] for v in read[k] if values[v].needs_gradient}
        come = sum(num_bytes[v] for v in made[k] if values[v].needs_gradient)
        work = float(costs.work_bytes[k]) - come - sum(back.values()) - sum(weights[k])
        own, sizes = {v: num_bytes[v] for v in made[k]}, tuple(weights[k])
        then, needed = tuple(stepped[k]), float(costs.forward_work_bytes[k])
        steps = steps_of_block(costs.sequences_of(k), own, back, sizes)
        later = float(costs.deferred_bytes[k])
        return BlockTensors(own, frozenset(kept), tuple(last[k]), left, back, sizes, work, then, needed, steps, later)

    back = {v: size for v, size in sent.items() if values[v].needs_gradient}
    return StageTensors(tuple(tensors(k) for k in sorted(inside)), received, back, _spans(graph, costs, inside, back))


def _spans(graph: Graph, costs: Costs, inside: Set[int], sent: Collection[int]) -> dict[int, float]:
    """Returns the spans of gradients with holes of what a stage sends: where one block reads it, none are added up."""
    readers = {v: set(graph.values[v].consumers) - inside for v in sent}
    lone = {v: next(iter(blocks)) for v, blocks in readers.items() if len(blocks) == 1}
    spans = {k: iter(costs.sequences_of(k).spans) for k in set(lone.values())}
    found: dict[int, float] = {}
    for v, value in enumerate(graph.values if spans else ()):
        for k in value.consumers if value.needs_gradient else ():
            span = next(spans[k], 0) if k in spans else 0
            if span and lone.get(v) == k:
                found[v] = float(span)
    return found


_NEARLY = 1.02
"""Sizes of values are exact, saved bytes are interpolated."""
