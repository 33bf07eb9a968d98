"""Says how good a plan is: a lower bound on the step over all plans of the searched kind, and how it was proved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autovaruna.planner.bounds.bound import step_bounds
from autovaruna.planner.bounds.bound_of_all import bound_of_all, reason
from autovaruna.planner.candidate import Planner
from autovaruna.planner.groups import GroupSearch
from autovaruna.planner.records import Plan

PROVEN = 0.998
"""No plan with one stage a rank that a finished search left out takes less than this share of the best seconds."""
WORTH = 0.995
"""A plan with several stages a rank is chosen if it takes less than this share of the best seconds with one."""
_BY_RULE = "with depths and recompute by the rules of the search, and tuned where that seemed worth it"


class Proof:
    """What is proved of a search.

    Args:
        planner: of the problem.
        counts: the numbers of micro-batches that are searched.
        most_each: the most stages of a rank.

    Attributes:
        groups: by number of micro-batches, what the groups of uneven ranks prove for one stage a rank.
        is_complete: whether every plan with one stage a rank that the bounds leave was simulated.
        is_all_complete: whether every other plan was so too.
        of_all: says what no plan with so many micro-batches beats, however many stages a rank has.
    """

    def __init__(self, planner: Planner, counts: list[int], most_each: int) -> None:
        self.planner, self.counts, self.most_each = planner, counts, most_each
        self.groups: dict[int, GroupSearch] = {}
        self.is_complete = self.is_all_complete = False
        self.of_all = cache(lambda count: bound_of_all(planner.sized(count)))

    def leaves_room(self, best: Plan | None) -> bool:
        """Returns whether a plan with several stages a rank may be better than the best with one."""
        least = min(map(self.of_all, self.counts))
        self.is_all_complete = best is not None and least >= best.predicted_seconds * WORTH
        return not self.is_all_complete

    def put_into(self, plan: Plan, single: Plan | None, *, was_cut_short: bool) -> Plan:
        """Returns the plan with its bound and the proof.

        Args:
            plan: the best plan.
            single: the best plan with one stage a rank, if there is one.
            was_cut_short: whether the search left out what may be better.
        """
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
            parts = [
                f"with up to {self.most_each} stages a rank, no plan takes less than all work and the optimizer's over "
                "the sum of speeds, nor than that and what ranks, for want of memory, run again or are idle for until "
                "a first backward can come, nor than one micro-batch there and back with its share of the others at "
                "one block",
                self._what_binds(),
                proof,
            ]
            proof = "; ".join(filter(None, parts))
        proof += self._end(was_cut_short)
        return replace(plan, bound_seconds=seconds, single_bound_seconds=single_seconds, bound_proof=proof)

    def _what_binds(self) -> str:
        """Returns what part of a step with several stages a rank the bound consists of."""
        least = min(self.counts, key=self.of_all)
        return (
            f"with {least} micro-batches that is least, and is {reason(self.planner.sized(least))}: whatever else "
            "ranks wait for, run again or send is left out"
        )

    def _of_single(self, single: Plan) -> float:
        lowest = single.predicted_seconds
        of_all = {count: self.of_all(count) for count in self.counts}
        counts = [count for count in self.counts if of_all[count] < lowest]
        counts.sort(key=lambda count: abs(count - single.num_micro_batches))
        for count, bound in zip(counts, step_bounds(self.planner.sized, counts), strict=True):
            by_groups = self.groups[count].least_seconds if self.groups else 0.0
            if of_all[count] < lowest:
                lowest = min(lowest, max(bound.seconds(lowest), by_groups, of_all[count]))
        return lowest

    def _end(self, was_cut_short: bool) -> str:
        if self.is_complete and self.most_each == 1:
            return (
                f"; and every plan that these leave was simulated, {_BY_RULE}: none takes less than {PROVEN:.1%} of "
                "this one"
            )
        if self.is_complete and self.is_all_complete:
            return (
                f"; and every plan that these leave was simulated, {_BY_RULE}: with one stage a rank none takes less "
                f"than {PROVEN:.1%} of this one, with several none less than {WORTH:.1%}"
            )
        if self.is_complete:
            return (
                f"; every plan with one stage a rank that these leave was simulated, {_BY_RULE}, not every one with "
                "several"
            )
        ended = "; the search ended early, by its limit of simulations, so that better plans may be left"
        return ended if was_cut_short else ""
