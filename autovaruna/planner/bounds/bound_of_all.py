"""Proves a lower bound on the step over all plans there are, however many stages a rank holds.

For M micro-batches it is the greatest of three:

- *Work.* Every micro-batch passes every block forward and backward on some rank, in one stage at least, and every
  trained parameter is stepped by some rank after its last instruction. So the step is no shorter than all work of the
  forwards, backwards and the optimizer, and M times the overhead of one stage, over the sum of speeds.
- *Room.* The same work without the overhead, and what memory has ranks lose besides (room.py).
- *Way.* A micro-batch goes forward along any path of values that need a gradient, and back along the same path, each
  block after the one before. With at most N replicas some rank has ``m = ceil(M / N)`` micro-batches or more at the
  stage of a block k of the path, one after another. The last of their forwards has the way on and back before it, the
  first of their backwards has had the way there: so the step is no shorter than the path, forward and backward, and
  ``m - 1`` times the longer of forward and backward of block k, on the fastest rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autovaruna.planner.bounds.room import lost_seconds
from autovaruna.planner.bounds.ways import ROUNDING
from autovaruna.planner.sized import Sized


def bound_of_all(sized: Sized) -> float:
    """Returns seconds that no plan with so many micro-batches beats."""
    return max(bound(sized) for bound in _BOUNDS.values()) * (1.0 - ROUNDING)


def reason(sized: Sized) -> str:
    """Returns in words which of them is greatest."""
    return max(_BOUNDS, key=lambda name: _BOUNDS[name](sized))


def _work(sized: Sized) -> float:
    speeds, count = sized.problem.cluster.speeds, sized.num_micro_batches
    each = float(sized.step_seconds.sum()) + sized.overhead_seconds * min(speeds)
    return (count * each + sized.whole_optimizer_seconds) / sum(speeds)


def _room(sized: Sized) -> float:
    work = sized.num_micro_batches * float(sized.step_seconds.sum()) + sized.whole_optimizer_seconds
    return (work + lost_seconds(sized)) / sum(sized.problem.cluster.speeds)


def _way(sized: Sized) -> float:
    problem, costs, backward = sized.problem, sized.costs, sized.backward_seconds
    flow = problem.gradient_flow if problem.needs_gradient else problem.flow
    path = flow.longest_path(costs.forward_seconds + backward)
    longest = max(float(np.maximum(costs.forward_seconds, backward)[path].max()), 0.0)
    share = -(-sized.num_micro_batches // problem.cluster.num_ranks)
    seconds = float((costs.forward_seconds + backward)[path].sum()) + (share - 1) * longest
    return (seconds / max(problem.cluster.speeds)) + sized.overhead_seconds


_BOUNDS: dict[str, Callable[[Sized], float]] = {
    "all work over all ranks": _work,
    "all work over all ranks, with what runs again or is idle since memory does not hold all forwards": _room,
    "the way of one micro-batch": _way,
}
