"""Proves lower bounds on the step, over plans with one stage a rank and over all; says how good a plan is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.candidate import Planner
from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.cuts import partition_chain
from autovaruna.planner.range_bounds import RangeSeconds, RangeWaits, range_waits_of
from autovaruna.planner.records import Plan
from autovaruna.planner.stage_memory import ROUNDING

_PRECISION = 1e-5
_AT_ONCE = 8
_ENDLESS = 1e30
"""More seconds than any step takes."""


def step_bound(sized: SizedProblem, upper: float = math.inf, waits: RangeWaits | None = None) -> float:
    """Returns seconds that no plan with one stage a rank beats, at one number of micro-batches.

    `upper` at most: nothing is gained by proving more than the best plan takes. Where the user has ranks hold several
    stages, it is all work over all ranks.
    """
    stage_ranks = sized.problem.constraints.stage_ranks
    is_shared = len({rank for ranks in stage_ranks for rank in ranks}) < sum(map(len, stage_ranks))
    low = min(_work(sized), upper)
    if low < upper and not is_shared:
        low = max(low, min(_stage_bound(RangeSeconds(sized, waits), low, upper), upper))
    return low * (1.0 - ROUNDING)


def _stage_bound(ranges: RangeSeconds, low: float, upper: float) -> float:
    if ranges.constraints.stage_ranks:
        split = partition_chain([ranges.stage_seconds(len(ranks)) for ranks in ranges.constraints.stage_ranks])
        return split.objective if split else math.inf
    high = min(upper * (1.0 - _PRECISION), _ENDLESS)
    if not ranges.is_met(high):
        return upper * (1.0 - _PRECISION)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if ranges.is_met(middle) else (middle, high)
    return low


def bound_of_all(sized: SizedProblem) -> float:
    """Returns seconds that no plan with so many micro-batches beats."""
    return max(bound(sized) for bound in _BOUNDS.values()) * (1.0 - ROUNDING)


def _work(sized: SizedProblem) -> float:
    cluster, count = sized.problem.cluster, sized.num_micro_batches
    ranks = {rank for ranks in sized.problem.constraints.stage_ranks for rank in ranks} or range(cluster.num_ranks)
    speeds = [cluster.speeds[rank] for rank in ranks]
    each = float(sized.step_seconds.sum()) + sized.overhead_seconds * min(speeds)
    return (count * each + sized.whole_optimizer_seconds) / sum(speeds)


def _room(sized: SizedProblem) -> float:
    work = sized.num_micro_batches * float(sized.step_seconds.sum()) + sized.whole_optimizer_seconds
    return (work + lost_seconds(sized)) / sum(sized.problem.cluster.speeds)


def _way(sized: SizedProblem) -> float:
    problem, costs, backward = sized.problem, sized.costs, sized.backward_seconds
    flow = problem.gradient_flow if problem.needs_gradient else problem.flow
    path = flow.longest_path(costs.forward_seconds + backward)
    longest = max(float(np.maximum(costs.forward_seconds, backward)[path].max()), 0.0)
    share = -(-sized.num_micro_batches // problem.cluster.num_ranks)
    seconds = float((costs.forward_seconds + backward)[path].sum()) + (share - 1) * longest
    return (seconds / max(problem.cluster.speeds)) + sized.overhead_seconds


_BOUNDS: dict[str, Callable[[SizedProblem], float]] = {
    "all work over all ranks": _work,
    "all work over all ranks, with what runs again or is idle since memory does not hold all forwards": _room,
    "the way of one micro-batch": _way,
}


WORTH = 0.995
"""A plan with several stages a rank has to take less than this share of the best seconds with one."""


class Proof:
    """What is proved of a search over some numbers of micro-batches, with at most so many stages a rank."""

    def __init__(self, planner: Planner, counts: list[int], most_each: int) -> None:
        self.planner, self.counts, self.most_each = planner, counts, most_each
        self.of_all = cache(lambda count: bound_of_all(self.sized(count)))

    def sized(self, count: int) -> SizedProblem:
        """Returns the problem at M micro-batches, with weight gradients apart if plans may compute them so."""
        problem = self.planner.problem
        return (
            SizedProblem(problem, self.planner.tables, count, True) if problem.may_split else self.planner.sized(count)
        )

    def leaves_room(self, best: Plan | None) -> bool:
        """Returns whether a plan with several stages a rank may be better than the best with one."""
        return best is None or min(map(self.of_all, self.counts)) < best.predicted_seconds * WORTH

    def put_into(self, plan: Plan, single: Plan | None, *, was_cut_short: bool) -> Plan:
        """Returns the plan with its bound and the proof; `single` is the fastest one with one stage a rank."""
        low, high = self.counts[0], self.counts[-1]
        proof = (
            f"for {len(self.counts)} numbers of micro-batches from {low} to {high}, no cuts and replicas let every "
            "stage end in less: wait before its first forward, its micro-batches, then all-reduce or wait after its "
            "last backward; nor is all work and the optimizer's over all ranks less"
        )
        seconds = single_seconds = self._of_single(single) if single else 0.0
        if self.most_each > 1:
            proof = f"with one stage a rank no plan takes less than {single_seconds:.6g} s: {proof}" if single else ""
            seconds = min(plan.predicted_seconds, *map(self.of_all, self.counts))
            least = min(self.counts, key=self.of_all)
            binds = max(_BOUNDS, key=lambda name: _BOUNDS[name](self.sized(least)))
            parts = [
                f"with up to {self.most_each} stages a rank, no plan takes less than all work and the optimizer's over "
                "the sum of speeds, nor than that and what ranks, for want of memory, run again or are idle for until "
                "a first backward can come, nor than one micro-batch there and back with its share of the others at "
                "one block",
                f"with {least} micro-batches that is least, and is {binds}: whatever else ranks wait for, run again or "
                "send is left out",
                proof,
            ]
            proof = "; ".join(filter(None, parts))
        if self.planner.problem.may_split:
            proof += "; nor with weight gradients computed apart from backward, with one stage a rank"
        if was_cut_short:
            proof += "; the search ended early, by its limit of simulations, so that better plans may be left"
        return replace(plan, bound_seconds=seconds, single_bound_seconds=single_seconds, bound_proof=proof)

    def _of_single(self, single: Plan) -> float:
        lowest = single.predicted_seconds
        of_all = {count: self.of_all(count) for count in self.counts}
        counts = [count for count in self.counts if of_all[count] < lowest]
        counts.sort(key=lambda count: abs(count - single.num_micro_batches))
        for first in range(0, len(counts), _AT_ONCE):
            some = counts[first : first + _AT_ONCE]
            # Waits are found for many at once; their tables are large, and let go of.
            found = range_waits_of([self.sized(count) for count in some])
            for count, waits in zip(some, found, strict=True):
                if of_all[count] < lowest:
                    lowest = min(lowest, max(step_bound(self.sized(count), lowest, waits), of_all[count]))
        return lowest


_PRICES = np.geomspace(0.1, 10.0, 41)
"""Of a byte, as shares of what all forwards take over what they keep."""


def lost_seconds(sized: SizedProblem) -> float:
    """Returns seconds, summed over ranks of speed 1, that every plan is idle or recomputes; 0 if that is not known.

    No backward can start before a micro-batch has gone through the whole graph, t seconds say. Until then ranks run
    forwards, recompute, or are idle; each forward's activations are still there, or its stage recomputes. What can be
    there is what memory leaves beside parameters and the optimizer's state, on every rank. So of the work that ranks do
    in t seconds, all beyond what it has room for is idle time or forwards that run again.

    A stage has recomputed one micro-batch at most whose backward has not begun, and recomputes all of them in the end:
    with m micro-batches on a rank, m / (m + 1) of that work is lost. A rank that shares its stages with so many others
    that it has fewer micro-batches loses more than that, for it has too little work: memory limits its stages.

    How much work there is room for is a linear program over (block, share of the micro-batches that have passed it),
    where no micro-batch passes a block of a path before the one that it needs; any price of a byte gives a bound of it.
    """
    problem = sized.problem
    if not problem.needs_gradient:
        return 0.0
    speeds, state = problem.cluster.speeds, _state_bytes(sized)
    starts, fill = _backward_starts(sized)
    room = sum(map(max, _free_bytes(sized), [0.0] * len(speeds))) - float(state.sum())
    done = sum(speeds) * fill / max(speeds)
    lost = done - _most_held(sized, starts < fill * (1.0 - ROUNDING), max(room, 0.0))
    of_rank = _state_bytes(sized, 1.0 / problem.most_owners)
    return max(lost, 0.0) * _share_lost(sized, fill / max(speeds), of_rank)


def _free_bytes(sized: SizedProblem) -> list[float]:
    cluster = sized.problem.cluster
    own = cluster.own_process_bytes or [cluster.process_bytes] * cluster.num_ranks
    pairs = zip(cluster.memory_bytes, own, strict=True)
    return [limit - min(process, cluster.process_bytes) for limit, process in pairs]


def _state_bytes(sized: SizedProblem, owned: float = 1.0) -> Array:
    """Returns, for each block, what lasts, with a share of the optimizer's state; what several blocks use is parted."""
    graph, state = sized.problem.graph, np.zeros(len(sized.problem.graph.blocks))
    for parameter in graph.parameters:
        more = sized.problem.optimizer_bytes_factor * owned if parameter.needs_gradient else 0.0
        for block in parameter.blocks:
            state[block] += parameter.num_bytes * (1.0 + more) / len(parameter.blocks)
    return state


def _backward_starts(sized: SizedProblem) -> tuple[Array, float]:
    """Returns when each block's backward can start at the earliest on ranks of speed 1, and when all forwards can."""
    problem, backward = sized.problem, sized.backward_seconds.tolist()
    ends = sized.costs.forward_seconds.tolist()
    for user, producers in problem.flow.producers.items():
        ends[user] += max([ends[producer] for producer in producers])
    starts = ends.copy()
    for user, producers in reversed(problem.gradient_flow.producers.items()):
        end = starts[user] + backward[user]
        for producer in producers:
            starts[producer] = max(starts[producer], end)
    early = np.array(starts)
    early[problem.gradient_flow.is_apart & (sized.backward_seconds == 0)] = 0.0  # No gradient comes to them.
    return early, max(ends)


def _most_held(sized: SizedProblem, is_free: NDArray[np.bool_], room: float) -> float:
    """Returns the most seconds of work, on ranks of speed 1, whose activations fit into so many bytes.

    Blocks are free whose backward may come in time: they need no room.
    """
    forward, saved = sized.costs.forward_seconds, np.where(is_free, 0.0, sized.greatest_costs.saved_bytes)
    saved = saved * sized.model.fragmentation
    seconds = np.where(is_free, sized.step_seconds, forward)
    prices = _PRICES[:, None] * (seconds.sum() / max(float(saved.sum()), 1.0))
    gains = seconds - prices * saved
    path = [block for block in sized.problem.flow.longest_path(forward) if not is_free[block]]
    along = np.maximum(gains[:, path].cumsum(axis=1).max(axis=1, initial=0.0), 0.0)
    gains[:, path] = 0.0
    most = prices[:, 0] * room + sized.num_micro_batches * (along + np.maximum(gains, 0.0).sum(axis=1))
    return float(most.min())


def _share_lost(sized: SizedProblem, fill: float, state: Array) -> float:
    """Returns m / (m + 1) for the least micro-batches m of a rank that does not lose enough in any case."""
    problem, count = sized.problem, sized.num_micro_batches
    if True not in sized.recompute_choices:
        return 1.0
    replicas = problem.constraints.num_replicas or problem.cluster.num_ranks
    if not problem.constraints.stage_ranks:
        step = count * float(sized.step_seconds.sum()) / sum(problem.cluster.speeds)
        spare = min(problem.cluster.speeds) * (step - fill) - sized.whole_optimizer_seconds
        enough = int(spare / max(_most_work(sized, state), 1e-30)) if spare > 0 else 0
        if enough:  # With so many micro-batches or fewer, a rank is idle for as long as forwards fill.
            replicas = min(replicas, max(math.ceil(count / enough) - 1, 1))
    share = count // replicas
    return share / (share + 1)


def _most_work(sized: SizedProblem, state: Array) -> float:
    """Returns the most seconds of a micro-batch that one rank has room for, by blocks with little state first."""
    order = np.argsort(state / np.maximum(sized.step_seconds, 1e-30))
    before = np.append(0.0, state[order].cumsum())
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = (max(_free_bytes(sized)) - before[:-1]) / state[order]
    parts = np.where(state[order] > 0, parts.clip(0.0, 1.0), 1.0)
    return float((parts * sized.step_seconds[order]).sum())
