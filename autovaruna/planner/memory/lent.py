"""Predicts the memory that ranks of a host share: messages lie there until nobody needs them, and in no rank's heap.

A rank that sends has touched what it has sent, so that it counts for both. Messages of other sizes, and between hosts,
are received into the heap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autovaruna.graph.records import Graph
from autovaruna.planner.memory.stage_tensors import StageTensors
from autovaruna.planner.records import Plan

COPIED_BYTES = 64 << 10
"""Tensors of so many bytes are copied into the receiver's own memory when it takes them."""
MAX_BYTES = 8 << 20
"""Larger tensors go another way, and are received into memory that was posted for them."""
LENT_BYTES = 16 << 20
"""So much one rank lends another at once."""
_GRADIENTS = 2
"""Gradients of a cut that are there at once: one in a backward, one that has come meanwhile."""


def is_lent(num_bytes: float) -> bool:
    """Returns whether a tensor that comes from another rank of the host lies in memory that both see."""
    return COPIED_BYTES < num_bytes <= MAX_BYTES


@dataclass(slots=True)
class SharedBytes:
    """What a rank shares with others for one stage: what it has sent, and what it has received."""

    sent: float = 0.0
    received: float = 0.0


def shared_bytes(graph: Graph, plan: Plan, tensors: Sequence[StageTensors]) -> list[SharedBytes]:
    """Returns what a rank shares with others for each stage of a plan whose ranks are all on one host.

    Args:
        graph: what was planned.
        plan: the plan.
        tensors: of its stages.
    """
    stage_of = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    shared = [SharedBytes() for _ in plan.stages]
    for stage, own in enumerate(tensors):
        come: dict[int, dict[int, float]] = {}
        for v, num_bytes in own.received.items():
            if v >= 0 and is_lent(num_bytes):
                come.setdefault(stage_of[graph.values[v].producer], {})[v] = num_bytes
        deepest = min(plan.stages[stage].in_flight + 1, plan.num_micro_batches)
        for source, forward in come.items():
            if set(plan.stages[source].ranks) != set(plan.stages[stage].ranks):
                back = {v: num_bytes for v, num_bytes in forward.items() if graph.values[v].needs_gradient}
                there, here = _at_once(forward, deepest), _at_once(back, _GRADIENTS)
                shared[source].sent += there
                shared[source].received += here
                shared[stage].sent += here
                shared[stage].received += there
    return shared


def _at_once(tensors: Mapping[int, float], count: int) -> float:
    return min(float(LENT_BYTES), count * sum(tensors.values()))
