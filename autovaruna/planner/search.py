"""Searches the plans of a problem: every candidate is ranked by its simulated step time under the memory limit.

    grids  ->  unequal replicas  ->  several stages a rank  ->  all, if tiny  ->  moves from the best  ->  the simplest

Also decides whether the replicas of a stage share the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from autovaruna.config.settings import Sharing
from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.bound import bound_of_all
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cut_points import plan_with_cut_points
from autovaruna.planner.evaluator import NEAR, NEAR_OF_A_FORMULA, Evaluator, Trial
from autovaruna.planner.infeasible import exceeds_all, explain_infeasible, splits_that_fit
from autovaruna.planner.local_search import climbs
from autovaruna.planner.one_a_rank import Grid, grids, grids_of, on_given_ranks, unequal_replicas
from autovaruna.planner.problem import Problem, check_problem
from autovaruna.planner.rank_memory import is_within
from autovaruna.planner.records import Plan, Simplicity, what_was_given_up
from autovaruna.planner.search_space import cut_positions, micro_batch_counts
from autovaruna.planner.several_a_rank import several_a_rank
from autovaruna.planner.tiny import NEAR_TO_BEGIN, every_order, every_place, every_split, is_tiny

Progress = Callable[[str, float], None]
"""Is told what is being done and the share of it that is done (0 to 1)."""
BUDGET = 2_500_000
"""Acts of the simulator that a search may take: a count, so that a search ends alike on every machine."""
_OF_WHAT_IS_LEFT, _WITH_NO_PLAN = 0.125, 0.5
"""Of the budget that is left, what each stream of candidates may take: once a plan fits, and before."""
_MOST_OF_A_ROW = 60_000
"""Acts that the simulation of a choice may take that is far from the best, and only a row of the table."""
_WORTH_SHARING = 0.98
"""State is shared for steps that take no more than this share: each replica has all gradients otherwise."""
_FULL = 0.5
"""Of its memory, more than which a rank holds where less state might give another plan."""


def make_plan(problem: Problem, progress: Progress | None = None) -> Plan:
    """Returns the simplest plan whose simulated step takes hardly longer than the least: `simplicity` says how much.

    Raises:
        PlanError: the settings contradict each other, or no plan fits; says what is missing.
    """
    check_problem(problem)
    return plan_with_cut_points(problem, lambda each: _Search(each, progress).run())


def plan_and_choices(
    problem: Problem, progress: Progress | None = None, *, has_all_rows: bool = True
) -> tuple[Plan, list[Plan]]:
    """Returns the plan, and beside it the best plan of every regular grid that fits, the fastest first.

    With `has_all_rows` grids are simulated, too, that are far from the best. Errors are those of `make_plan`.
    """
    check_problem(problem)
    searches = list[_Search]()

    def search(each: Problem) -> Plan:
        searches.append(_Search(each, progress))
        return searches[-1].run()

    plan = plan_with_cut_points(problem, search)
    of_plan = next(each for each in searches if each.plan and each.plan.stages == plan.stages)
    return plan, of_plan.choices(has_all_rows=has_all_rows)


def plan_with_sharing(problem: Problem, sharing: Sharing, make: Callable[[Problem], Plan]) -> Plan:
    """Returns the plan of a problem whose replicas share the optimizer's state, or not; auto: where memory is short.

    With shared state a script finds gradients of other replicas' parameters elsewhere: a price too high for time alone.

    Raises:
        PlanError: no plan fits; says what is missing without sharing.
    """
    has_choice = problem.cluster.num_ranks > 1 and problem.constraints.num_replicas != 1 and problem.needs_gradient
    if sharing != "auto" or not has_choice:
        return make(replace(problem, shares_state=sharing is True))
    with_shares = replace(problem, shares_state=True)
    try:
        plan = make(problem)
    except PlanError:
        with suppress(PlanError):
            return make(with_shares)
        raise
    pairs = zip(plan.rank_bytes(), problem.cluster.memory_bytes, strict=True)
    if not any(stage.needs_recompute for stage in plan.stages) and all(held <= _FULL * limit for held, limit in pairs):
        return plan
    shared = make(with_shares)
    return shared if shared.predicted_seconds <= _WORTH_SHARING * plan.predicted_seconds else plan


class _Search:
    """One search: streams of candidates under one budget, the fastest of them, and the simplest near it."""

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem, self.progress = problem, progress or (lambda what, share: None)
        self.counts = micro_batch_counts(problem)
        self.tables = RangeTables(problem.graph, cut_positions(problem))
        self.planner = Planner(problem, self.tables)
        self.grids = [] if problem.constraints.stage_ranks else grids_of(problem, self.tables.num_segments)
        self.is_tiny = is_tiny(self.planner)
        self.evaluator = Evaluator(self.planner, has_every_variant=self.is_tiny)
        self.plan: Plan | None = None

    def run(self) -> Plan:
        """Returns the plan; raises PlanError if none fits."""
        if not exceeds_all(self.planner.sized(max(self.counts))):
            for what, trials in chain(self._first(), self._improvements()):
                self._try(what, trials)
        if self.evaluator.best is None:
            raise explain_infeasible(self.problem, self.tables, self.counts)
        plan = self.planner.with_block_bytes(self._simplest())
        bounds = (bound_of_all(self.planner.sized(count)) for count in self.counts)
        self.plan = replace(plan, bound_seconds=min(plan.predicted_seconds, *bounds))
        return self.plan

    def _first(self) -> Iterator[tuple[str, Iterator[Trial]]]:
        """Yields streams of candidates, and what each does, in words."""
        evaluator, constraints = self.evaluator, self.problem.constraints
        if constraints.stage_ranks:
            yield "cutting for the ranks", on_given_ranks(evaluator)
        else:
            near = max(NEAR, 1.0 + constraints.simplicity)  # a simpler one may be chosen
            yield "simulating grids", grids(evaluator, self.grids, near)
            yield "trying unequal replicas", unequal_replicas(evaluator)
            yield "interleaving stages", several_a_rank(evaluator)
            if self.is_tiny:
                yield "trying all splits", every_split(evaluator)
                yield "trying all orders", every_order(evaluator)
        if evaluator.best is None:  # Of some splits alone is known which ranks have the bytes for them.
            splits = splits_that_fit(self.problem, self.tables, self.counts)
            yield "trying what fits", ((candidate, math.inf) for candidate in splits)

    def _improvements(self) -> Iterator[tuple[str, Iterator[Trial]]]:
        """Yields moves from the best plans: the simulated optimum is not that of a formula."""

        def each_shape(candidate: Candidate) -> Hashable:
            return candidate.num_micro_batches, candidate.ranks

        kind, near = (every_place, NEAR_TO_BEGIN) if self.is_tiny else (each_shape, NEAR_OF_A_FORMULA)
        return (("improving plans", moves) for moves in climbs(self.evaluator, kind, near))

    def _try(self, what: str, trials: Iterator[Trial]) -> None:
        """Simulates candidates of a stream, which ends with its part of the budget."""
        left, spent = BUDGET - self.planner.num_acts, 0.0
        for candidate, below in trials:
            begun = self.planner.num_acts
            if spent > left * (_OF_WHAT_IS_LEFT if self.evaluator.best else _WITH_NO_PLAN):
                break
            self.planner.count_candidate()
            self.progress(what, min(begun / BUDGET, 1.0))
            self.evaluator.attempt(candidate, below)
            spent += self.planner.num_acts - begun

    def _simplest(self) -> Plan:
        """Returns the simplest plan that takes hardly longer than the fastest, and what was given up for it."""
        best, simplicity = self.evaluator.best, self.problem.constraints.simplicity
        assert best is not None
        limit = best.predicted_seconds * (1.0 + simplicity)
        ordered = sorted(self.evaluator.plans.values(), key=lambda each: each.predicted_seconds)
        near = [each for each in ordered if each.predicted_seconds <= limit]
        simplest = sorted(near, key=Simplicity.of) if simplicity else near
        for plan in (*simplest, *ordered[len(near) :]):
            whole = self.planner.predict_whole(plan)
            if is_within(whole, self.planner.limits):  # So far, of many ranks only some were asked.
                return replace(whole, given_up=what_was_given_up(whole, best))
        raise explain_infeasible(self.problem, self.tables, self.counts)

    def choices(self, *, has_all_rows: bool) -> list[Plan]:
        """Returns the best plan of every regular grid, the fastest first."""
        best = self._rows()
        if has_all_rows:
            missing = [grid for grid in self.grids if grid not in best]
            for candidate, below in grids(self.evaluator, missing, math.inf, _MOST_OF_A_ROW):
                self.progress("simulating slow grids", 1.0)
                self.evaluator.attempt(candidate, below)
            best = self._rows()
        for grid, plan in best.items():
            if not is_within(plan, self.planner.limits):  # by its depths, which say more than its instructions
                best[grid] = self.planner.predict_whole(plan, is_quick=True)
        return sorted(best.values(), key=lambda plan: (plan.predicted_seconds, plan.num_stages))

    def _rows(self) -> dict[Grid, Plan]:
        best, regular = dict[Grid, Plan](), set(self.grids)
        for plan in self.evaluator.plans.values():
            grid = Grid(plan.num_stages, len(plan.stages[0].ranks), plan.num_micro_batches)
            if grid in regular and len({len(stage.ranks) for stage in plan.stages}) == 1 and not plan.is_shared:
                best[grid] = min(best.get(grid, plan), plan, key=lambda each: each.predicted_seconds)
        return best
