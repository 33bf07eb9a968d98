"""Predicts where inputs of the model lie that come from other ranks of the host.

A step begins with them: each rank sends its own samples to all stages that use them, and these are there before the
first activation is, since messages between two ranks come in their order. Those that find room lie in the memory that
both share, until nobody needs them; the others are copied, and wait in the heap of the rank that they are for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autovaruna.planner.memory.lent import LENT_BYTES, MAX_BYTES, is_lent
from autovaruna.planner.memory.stage_tensors import StageTensors
from autovaruna.planner.records import Plan

InputKey = tuple[int, int, int]
"""A stage, a micro-batch, and the key of an input in what the stage receives."""


@dataclass
class HandedOut:
    """Inputs of other ranks, as one rank sees them.

    Attributes:
        shared_bytes: what it has touched of the memory that it shares with them, for samples of its own and of theirs.
        lent: inputs that lie there.
        copied: bytes of those that wait in the heap.
    """

    shared_bytes: float = 0.0
    lent: set[InputKey] = field(default_factory=set)
    copied: dict[InputKey, float] = field(default_factory=dict)


def handed_out(plan: Plan, tensors: Sequence[StageTensors], rank: int) -> HandedOut:
    """Returns where inputs lie whose samples are not a rank's own, on one host.

    Args:
        plan: the plan; rank r passes the samples of the micro-batches r, r + N, ...
        tensors: of its stages.
        rank: the rank.
    """
    come, gone = HandedOut(), HandedOut()
    for other in range(plan.num_ranks):
        if other != rank:
            _send(plan, tensors, other, rank, come)
            _send(plan, tensors, rank, other, gone)
    come.shared_bytes += gone.shared_bytes
    return come


def _send(plan: Plan, tensors: Sequence[StageTensors], source: int, there: int, found: HandedOut) -> None:
    """Sends all inputs from one rank to another, and notes where they lie."""
    used = waiting = 0.0
    for m in range(source, plan.num_micro_batches, plan.num_ranks):
        for stage, own in enumerate(tensors):
            inputs = {v: num_bytes for v, num_bytes in own.received.items() if v < 0}
            if plan.rank_of(stage, m) != there or not _come_by_themselves(inputs.values()):
                continue
            for v, num_bytes in inputs.items():
                if used + num_bytes < LENT_BYTES:
                    used += num_bytes
                    found.lent.add((stage, m, v))
                else:
                    waiting += num_bytes
                    found.copied[stage, m, v] = num_bytes
    found.shared_bytes += used + min(waiting, MAX_BYTES)


def _come_by_themselves(sizes: Collection[float]) -> bool:
    return any(map(is_lent, sizes)) and max(sizes) <= MAX_BYTES
