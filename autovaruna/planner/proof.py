"""Proves lower bounds on the step, over plans with one stage a rank and over all; says how good a plan is."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from autovaruna.planner.arrays import Array
from autovaruna.planner.candidate import Planner
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.problem import forced_stages
from autovaruna.planner.records import Plan
from autovaruna.planner.stage_memory import ROUNDING, state_of_ranges

WORTH = 0.995
"""A plan with several stages a rank has to take less than this share of the best seconds with one."""
_PRECISION = 1e-5
"""Of a bound that is found by halving: it is shown with fewer digits."""


def bound_of_all(sized: SizedProblem) -> float:
    """Returns seconds that no plan with so many micro-batches beats: all work, and the path of one micro-batch."""
    return max(_work(sized), _longest_path(sized)) * (1.0 - ROUNDING)


def _work(sized: SizedProblem) -> float:
    cluster, count = sized.problem.cluster, sized.num_micro_batches
    ranks = {rank for ranks in sized.problem.constraints.stage_ranks for rank in ranks} or range(cluster.num_ranks)
    speeds = [cluster.speeds[rank] for rank in ranks]
    each = float(sized.step_seconds.sum()) + sized.overhead_seconds * min(speeds)
    return (count * each + float(sized.optimizer_seconds_at((0, sized.tables.num_segments)))) / sum(speeds)


def _longest_path(sized: SizedProblem) -> float:
    """Returns what one micro-batch takes there and back, with its share of the others at the path's longest block."""
    problem, costs, backward = sized.problem, sized.costs, sized.backward_seconds
    flow = problem.gradient_flow if problem.needs_gradient else problem.flow
    path = flow.longest_path(sized.step_seconds)
    longest = max(float(np.maximum(costs.forward_seconds, backward)[path].max()), 0.0)
    share = -(-sized.num_micro_batches // problem.cluster.num_ranks)
    seconds = float(sized.step_seconds[path].sum()) + (share - 1) * longest
    return (seconds / max(problem.cluster.speeds)) + sized.overhead_seconds


def bound_of_single(sized: SizedProblem, upper: float = math.inf) -> float:
    """Returns seconds that no plan with one stage a rank and so many micro-batches beats, by halving; `upper` at most.

    Nothing is gained by proving more than the best plan takes.
    """
    low = min(bound_of_all(sized), upper)
    needs = _StageNeeds(sized)
    high = min(upper, 2 * max(low, needs.seconds_alone))
    if not needs.are_met(high * (1.0 - _PRECISION)):
        return max(low, high * (1.0 - _PRECISION))
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if needs.are_met(middle) else (middle, high)
    return low * (1.0 - ROUNDING)


class _StageNeeds:
    """How many ranks each range of segments needs as a stage, to end a step in some seconds on the fastest ranks.

      first forward     last backward
    |------|-----------------|-------|
     before       work        after, or all-reduce and optimizer
    """

    def __init__(self, sized: SizedProblem) -> None:
        problem, tables, waits = sized.problem, sized.tables, sized.waits
        speed, starts = max(problem.cluster.speeds), tables.positions[:-1]
        self.num_ranks, self.num_micro_batches = problem.cluster.num_ranks, sized.num_micro_batches
        self.num_stages = forced_stages(problem) if sized.is_exact else 0
        self.num_replicas = problem.constraints.num_replicas
        n, self._is_exact = tables.num_segments, sized.is_exact
        before, after = (np.minimum.reduceat(each[:-1], starts) for each in (waits.before, waits.after))
        if sized.is_exact:
            before, after = waits.before[starts], waits.after[starts]
        self._work = self._inside(tables.add_up(sized.step_seconds)) / speed + sized.overhead_seconds
        self._before, self._after = before[:, None], after[:, None]
        optimizer = self._inside(sized.optimizer_seconds) / speed
        trained = self._inside(tables.trained_bytes)
        self._end_alone = optimizer
        hosts = problem.cluster.hosts
        reduce = sized.reduce_seconds(2, trained, is_local=len(set(hosts)) < len(hosts))
        self._end = optimizer * sized.owned_share(self.num_ranks) + reduce
        self._has_room = self._inside(sized.model.fixed(state_of_ranges(tables))) <= max(problem.cluster.memory_bytes)
        self._is_range = np.arange(n)[:, None] < np.arange(n + 1)
        self.seconds_alone = float(self._seconds_alone[0, n])

    def _inside(self, table: Array) -> Array:
        """Returns what the stage of each range has in any case: cuts may lie inside of its first segment and behind."""
        return table[:-1] if self._is_exact else table[1:]

    @property
    def _seconds_alone(self) -> Array:
        """What each range takes on one rank."""
        return self._before + self.num_micro_batches * self._work + np.maximum(self._after, self._end_alone)

    def are_met(self, seconds: float) -> bool:
        """Returns whether there are ranks enough for a split of which every stage ends in so many seconds."""
        spare = seconds - self._before
        with np.errstate(divide="ignore"):
            share = (spare - np.maximum(self._after, self._end)) / self._work
            several = np.ceil(self.num_micro_batches / np.floor(share.clip(0.0) + ROUNDING)).clip(2.0)
        needed = np.where(self._seconds_alone <= seconds, 1.0, several)
        needed[~(self._has_room & self._is_range)] = np.inf
        if self.num_replicas:
            needed = np.where(needed <= self.num_replicas, self.num_replicas, np.inf)
        return self._fewest(needed) <= self.num_ranks

    def _fewest(self, needed: Array) -> float:
        """Returns the fewest ranks of a split into the forced number of stages, or any number where there is none."""
        n = len(needed)
        best = np.zeros(n + 1)
        if not self.num_stages:
            for i in range(n - 1, -1, -1):
                best[i] = (needed[i, i + 1 :] + best[i + 1 :]).min()
            return float(best[0])
        best[:n] = np.inf
        for _ in range(self.num_stages):
            best = np.append((needed + best).min(axis=1), np.inf)
        return float(best[0])


class Proof:
    """What is proved of a search over some numbers of micro-batches, with at most so many stages a rank."""

    def __init__(self, planner: Planner, counts: list[int], most_each: int) -> None:
        self.planner, self.counts, self.most_each = planner, counts, most_each
        self.of_all = cache(lambda count: bound_of_all(planner.sized(count)))

    def leaves_room(self, best: Plan | None) -> bool:
        """Returns whether a plan with several stages a rank may be better than the best with one."""
        return best is None or min(map(self.of_all, self.counts)) < best.predicted_seconds * WORTH

    def put_into(self, plan: Plan, single: Plan | None, *, was_cut_short: bool) -> Plan:
        """Returns the plan with its bound and the proof; `single` is the fastest one with one stage a rank."""
        low, high = self.counts[0], self.counts[-1]
        proof = "no plan takes less than all work and the optimizer's over the sum of speeds, nor than one micro-batch "
        proof += "there and back with its share of the others at one block"
        seconds, single_seconds = min(plan.predicted_seconds, *map(self.of_all, self.counts)), 0.0
        if single:
            single_seconds = self._of_single(single)
            proof += (
                f"; with one stage a rank no plan takes less than {single_seconds:.6g} s: no cuts and replicas let "
                "every stage end in less: wait before its first forward, its micro-batches, then all-reduce or wait "
                "after its last backward"
            )
            seconds = seconds if self.most_each > 1 else single_seconds
        proof += f"; for {len(self.counts)} numbers of micro-batches from {low} to {high}"
        if was_cut_short:
            proof += "; the search ended early, by its limit of simulations, so that better plans may be left"
        return replace(plan, bound_seconds=seconds, single_bound_seconds=single_seconds, bound_proof=proof)

    def _of_single(self, single: Plan) -> float:
        lowest = single.predicted_seconds
        for count in sorted(self.counts, key=lambda count: abs(count - single.num_micro_batches)):
            if self.of_all(count) < lowest:
                lowest = min(lowest, bound_of_single(self.planner.sized(count), lowest))
        return lowest
