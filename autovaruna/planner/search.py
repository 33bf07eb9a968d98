"""Searches the plans of a problem: every candidate is ranked by its simulated step time under the memory limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import merge
from itertools import combinations
from math import comb

import numpy as np

from autovaruna.errors import PlanError
from autovaruna.planner.bound import StepBound
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.climb import climb
from autovaruna.planner.groups import GroupSearch, is_small
from autovaruna.planner.infeasible import explain_infeasible
from autovaruna.planner.marks import plan_with_marks
from autovaruna.planner.options import (
    MAX_UNITS,
    cut_positions,
    micro_batch_counts,
    stage_limit,
    variants,
    zoomed_positions,
)
from autovaruna.planner.prediction import SECONDS_OF_AN_ACT
from autovaruna.planner.problem import Problem, check_problem
from autovaruna.planner.ranges import RangeTables
from autovaruna.planner.records import Plan
from autovaruna.planner.splits import Splitter

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Is told what is being done and the share of it that is done (0 to 1)."""

_SMALL = 3000
_SPLIT_SECONDS, _CLIMB_SECONDS, _REST_SECONDS = 2.0, 2.0, 2.0
"""What simulations may take, by the count of `Planner.spent_seconds`, so that a search ends alike on every machine."""
_LONG_SECONDS = 0.2
_STARTS = 4
_NEAR, _NEAR_OF_FEW_RANKS = 1.03, 1.1
_REACHED = 0.999
_PROVEN = 0.998
"""No plan that a finished search left out takes less than this share of the best one's seconds."""


def make_plan(problem: Problem, progress: Progress | None = None) -> Plan:
    """Returns the plan with the least simulated step time.

    Args:
        problem: what to plan, and what the user has already decided.
        progress: is told how far the search is.

    Raises:
        PlanError: the settings contradict each other, or no plan fits; says what is missing.
    """
    check_problem(problem)
    plan = plan_with_marks(problem, lambda each: _Search(each, progress or (lambda what, share: None)).run())
    _log.info(
        "planned %d stages, %d micro-batches: %.6g s a step, at most %.1f %% above the best possible",
        plan.num_stages,
        plan.num_micro_batches,
        plan.predicted_seconds,
        100 * plan.gap,
    )
    return plan


class _Search:
    """One search; `best` is the fastest plan so far, and `candidate` what it was made from."""

    def __init__(self, problem: Problem, progress: Progress) -> None:
        self.problem, self.progress = problem, progress
        self.counts = micro_batch_counts(problem)
        self.tables = RangeTables(problem.graph, cut_positions(problem))
        self.planner = Planner(problem, self.tables)
        self.max_stages = stage_limit(problem, self.tables.num_segments)
        self.forced_stages = len(problem.constraints.stage_ranks) or problem.constraints.num_stages
        if problem.constraints.cuts:
            self.forced_stages = len(problem.constraints.cuts) + 1
        self.is_small = is_small(problem, self.tables.num_segments)
        self.best: Plan | None = None
        self.ranked: dict[Candidate, float] = {}
        self.seen: dict[Candidate, float] = {}
        self.groups: dict[int, GroupSearch] = {}
        self.was_cut_short = self.is_complete = False

    def run(self) -> Plan:
        if self.problem.constraints.stage_ranks and self._num_cuts() <= _SMALL:
            self._try_all(self._all_cuts(), "trying all cuts")
        else:
            self._try_promising()
            self._climb()
            self._zoom()
            self._try_rest()
        if self.best is None:
            raise PlanError(explain_infeasible(self.problem, self.tables, self.counts))
        self.progress("proving how good the plan is", 1.0)
        return self._with_bound(self.planner.with_block_bytes(self.planner.predict_whole(self.best)))

    def _try(self, candidate: Candidate, below: float) -> float:
        """Simulates a candidate in every variant; returns its least seconds, infinite if they are not below `below`."""
        if candidate in self.seen:
            return self.seen[candidate]
        found, bounds = float("inf"), dict[tuple[bool, ...], float]()
        is_long = self._is_long(candidate)
        for plan in self._plans(candidate):
            if is_long and found < float("inf"):
                self.was_cut_short = True
                break
            recomputed = tuple(stage.needs_recompute for stage in plan.stages)
            if recomputed not in bounds:
                bounds[recomputed] = self.planner.bound(plan)  # It knows nothing of depths and schedules.
            if bounds[recomputed] >= min(below, found * _REACHED):
                continue
            predicted = self.planner.predict(plan, min(below, found))
            if predicted:
                found = predicted.predicted_seconds
                self.best = predicted if found < self._least_seconds else self.best
        self.seen[candidate] = found
        if found < float("inf"):
            self.ranked[candidate] = found
        return found

    @property
    def _least_seconds(self) -> float:
        return self.best.predicted_seconds if self.best else float("inf")

    def _plans(self, candidate: Candidate) -> Iterator[Plan]:
        """Yields the plans of a candidate that fit into memory, in every variant worth a simulation."""
        is_free = self.problem.constraints.schedule == "auto" and not self.is_small
        for depth, schedule in variants(self.problem, len(candidate.starts)):
            plan = self.planner.build(replace(candidate, depth=depth, schedule=schedule))
            is_like_1f1b = is_free and schedule == "varuna" and plan and not any(s.needs_recompute for s in plan.stages)
            if plan and not is_like_1f1b:
                yield plan

    def _try_all(self, candidates: Iterable[Candidate], what: str) -> None:
        everything = list(candidates)
        for k, candidate in enumerate(everything):
            self.progress(what, k / len(everything))
            self._try(candidate, self._least_seconds)

    def _try_promising(self) -> None:
        splitter = Splitter(self.planner, self.max_stages, self.forced_stages, len(self.counts))
        if splitter.has_many_ranks and not self.problem.constraints.stage_ranks:
            self._try_many(splitter)
            return
        promising: list[tuple[float, Candidate]] = []
        for k, count in enumerate(self.counts):
            self.progress("splitting the model", k / len(self.counts))
            promising += splitter.splits(count)
        self._try_best_first(promising, "simulating plans")

    def _try_many(self, splitter: Splitter) -> None:
        """Goes through (stages, micro-batches) in the order of what even splits take, till none can be better."""
        pairs = splitter.even_splits(self.counts)
        if _simulation_seconds(*pairs[0][1:], splitter.replicas(pairs[0][1])) > _LONG_SECONDS:
            pairs = _varied(pairs)
        for k, (seconds, num_stages, count) in enumerate(pairs):
            self.progress("splitting the model", k / len(pairs))
            if self._is_over(seconds, _SPLIT_SECONDS):
                if seconds >= self._least_seconds:
                    continue  # The order may be another than that of the seconds.
                break
            for candidate in self._few_if_long([each for _, each in splitter.equal_replicas(num_stages, count)]):
                self._try(candidate, self._least_seconds * _NEAR)
        for count in sorted({candidate.num_micro_batches for candidate in self._best_few()}):
            self._try_best_first(splitter.unequal_replicas(count), "trying unequal replicas")

    def _few_if_long(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates, or, if their simulations are long, the one whose stages have the least bound."""
        if len(candidates) < 2 or not self._is_long(candidates[0]):
            return candidates
        plans = [(candidate, self.planner.build(candidate)) for candidate in candidates]
        bounds = {candidate: self.planner.bound(plan) for candidate, plan in plans if plan}
        return [min(bounds, key=bounds.__getitem__)] if bounds else []

    def _is_long(self, candidate: Candidate) -> bool:
        replicas = min(len(ranks) for ranks in candidate.ranks)
        return _simulation_seconds(len(candidate.starts), candidate.num_micro_batches, replicas) > _LONG_SECONDS

    def _try_best_first(self, promising: Iterable[tuple[float, Candidate]], what: str) -> None:
        ordered = sorted(promising, key=lambda pair: pair[0])
        for k, (seconds, candidate) in enumerate(ordered):
            self.progress(what, k / len(ordered))
            if self._is_over(seconds * 0.98, _SPLIT_SECONDS):
                break
            is_small = self.problem.cluster.num_ranks <= MAX_UNITS
            self._try(candidate, self._least_seconds * (_NEAR_OF_FEW_RANKS if is_small else _NEAR))

    def _is_over(self, seconds: float, budget_seconds: float) -> bool:
        """Returns whether plans of so many seconds and more are not worth a try, or time is up."""
        if self.best is None or seconds >= self.best.predicted_seconds:
            return self.best is not None
        is_late = self.planner.spent_seconds > budget_seconds
        self.was_cut_short = self.was_cut_short or is_late
        return is_late

    def _best_few(self) -> list[Candidate]:
        """Returns the best candidates: first of each number of stages, then of other ranks and micro-batches."""
        ordered = sorted(self.ranked, key=self.ranked.__getitem__)
        kinds: tuple[Callable[[Candidate], object], ...] = (
            lambda c: len(c.starts),
            lambda c: (c.num_micro_batches, c.ranks),
        )
        chosen: dict[Candidate, None] = {}
        for kind in kinds:
            chosen.update(dict.fromkeys({kind(candidate): candidate for candidate in reversed(ordered)}.values()))
        first = sorted(list(chosen)[:_STARTS], key=self.ranked.__getitem__)
        return [ordered[0], *(candidate for candidate in first if candidate != ordered[0])] if ordered else []

    def _climb(self) -> None:
        """Changes the best plans by small steps: the simulated optimum is not quite that of the splits."""
        starts = self._best_few()
        for k, candidate in enumerate(starts):
            self.progress("improving plans", k / len(starts))
            limit = self.planner.spent_seconds + _CLIMB_SECONDS / len(starts)
            if self.planner.spent_seconds + self.planner.step_costs(candidate) > limit:
                self.was_cut_short = True
                break

            def has_time(limit: float = limit) -> bool:
                is_late = self.planner.spent_seconds > limit
                self.was_cut_short = self.was_cut_short or is_late
                return not is_late

            seconds, segments = self.ranked[candidate], self.tables.num_segments
            climb(self.problem, segments, candidate, seconds, self._try, self._recut, has_time)

    def _recut(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with the cuts that suit its ranks by the formula of the splits, if that is quick."""
        if self.problem.cluster.num_ranks <= MAX_UNITS:
            splitter = Splitter(self.planner, self.max_stages, self.forced_stages, len(self.counts))
            for _, other in splitter.for_ranks(candidate.num_micro_batches, candidate.ranks):
                yield other

    # The candidates.

    def _num_cuts(self) -> int:
        return comb(self.tables.num_segments - 1, self.forced_stages - 1) * len(self.counts)

    def _all_cuts(self) -> Iterator[Candidate]:
        for count in self.counts:
            for inner in combinations(range(1, self.tables.num_segments), self.forced_stages - 1):
                yield Candidate((0, *inner), self.problem.constraints.stage_ranks, count)

    def _try_rest(self) -> None:
        """Tries all plans of a small problem whose bound leaves room for something better, the least bound first."""
        if not self.is_small:
            return
        self.groups = {count: GroupSearch(self.planner.sized(count), self.forced_stages) for count in self.counts}
        limit, first = self.planner.spent_seconds + _REST_SECONDS, self._least_seconds
        open_counts = [each for each in self.groups.values() if each.least_seconds < first * _PROVEN]
        for seconds, candidate in merge(*(each.in_order() for each in open_counts), key=lambda pair: pair[0]):
            if seconds >= self._least_seconds * _PROVEN:
                break
            spent = self.planner.count_candidate()
            if spent > limit:
                return
            self.progress("trying all other plans", 1.0 - (limit - spent) / _REST_SECONDS)
            self._try(candidate, self._least_seconds * _PROVEN)
        self.is_complete = True

    def _zoom(self) -> None:
        """Lets the cuts of the best plan move between the segments of a large graph."""
        is_whole = self.tables.num_segments == len(self.problem.graph.blocks)
        if self.best is None or is_whole or self.problem.constraints.has_fixed_places:
            return
        candidate = self._best_few()[0]
        cuts = [int(self.tables.positions[start]) for start in candidate.starts]
        positions = zoomed_positions(self.problem, cuts, self.tables.num_segments)
        coarse, self.tables = self.tables, RangeTables(self.problem.graph, positions)
        self.planner, self.seen = Planner(self.problem, self.tables), {}
        starts = tuple(int(np.searchsorted(self.tables.positions, cut)) for cut in cuts)
        self.ranked = {replace(candidate, starts=starts): self.best.predicted_seconds}
        self._climb()
        self.tables, self.planner = coarse, Planner(self.problem, coarse)

    # The bound.

    def _with_bound(self, plan: Plan) -> Plan:
        lowest = plan.predicted_seconds
        for count in sorted(self.counts, key=lambda count: abs(count - plan.num_micro_batches)):
            lowest = min(lowest, max(StepBound(self.planner.sized(count)).seconds(lowest), self._group_bound(count)))
        low, high = self.counts[0], self.counts[-1]
        proof = (
            f"for {len(self.counts)} numbers of micro-batches from {low} to {high}, no cuts and replicas let every "
            "stage end in less: wait before its first forward, its micro-batches, then all-reduce or wait after its "
            "last backward; nor is the total work over all ranks less"
        )
        if self.is_complete:
            proof += f"; and every plan that these leave was simulated: none takes less than {_PROVEN:.1%} of this one"
        elif self.was_cut_short:
            proof += "; the search ended early, by its limit of simulations, so that better plans may be left"
        return replace(plan, bound_seconds=lowest, bound_proof=proof)

    def _group_bound(self, num_micro_batches: int) -> float:
        """Returns what the groups of uneven ranks prove; 0 if the problem is too large for that."""
        return self.groups[num_micro_batches].least_seconds if self.groups else 0.0


def _simulation_seconds(num_stages: int, num_micro_batches: int, num_replicas: int) -> float:
    """Returns about what a simulation of one replica of each stage takes."""
    return 2 * num_micro_batches / num_replicas * num_stages * SECONDS_OF_AN_ACT


def _varied(pairs: Iterable[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Returns (seconds, stages, M) so that each number of stages comes once before any comes twice."""
    turns: dict[int, int] = {}
    keyed = []
    for pair in sorted(pairs):
        turns[pair[1]] = turns.get(pair[1], -1) + 1
        keyed.append((turns[pair[1]], pair))
    return [pair for _, pair in sorted(keyed)]
