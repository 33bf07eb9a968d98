"""Searches the plans of a problem: every candidate is ranked by its simulated step time under the memory limit.

    grids  ->  unequal replicas  ->  several stages a rank  ->  moves from the best  ->  the simplest  ->  its bound

Also decides whether the replicas of a stage share the optimizer's state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np

from autovaruna.config.settings import Sharing
from autovaruna.errors import PlanError
from autovaruna.planner.arrays import RangeTables
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator, Progress
from autovaruna.planner.infeasible import exceeds_all, explain_infeasible, splits_that_fit
from autovaruna.planner.local_search import improve, move_choices, move_counts, move_cuts, move_groups, move_ranks
from autovaruna.planner.problem import Problem, check_problem, forced_stages
from autovaruna.planner.proof import Proof
from autovaruna.planner.rank_memory import is_within
from autovaruna.planner.records import Plan, Simplicity, what_was_given_up
from autovaruna.planner.search_space import (
    cut_positions,
    micro_batch_counts,
    plan_with_cut_points,
    stages_per_rank,
    zoomed_positions,
)
from autovaruna.planner.shapes import (
    CELLS,
    Grid,
    Shape,
    candidates_of,
    cut_for_ranks,
    cut_grids,
    even_seconds,
    grids_of,
    groups_of,
    shapes_on,
    unequal_replicas,
    varied,
)

_log = logging.getLogger(__name__)

BUDGET = 2_000_000
"""Acts of the simulator that moves may take: a count, so that a search ends alike on every machine. An eighth is for
moves from one plan; several stages a rank may take half as many beside."""
_MOST_STARTS = 24
"""Moves begin from so many plans, at most: of tiny problems many are near the best."""
_MOST_OF_A_ROW = 60_000
"""Acts that the simulation of a choice may take that is far from the best, and only a row of the table."""
_NEAR, _NEAR_OF_A_FORMULA, _NEAR_OF_TINY = 1.06, 1.1, 1.25
"""What takes no more than so many times the least seconds is looked at: by a simulation; by a formula or a bound, or to
begin moves from it; to begin moves from it in a tiny problem."""
_MOST_GROUPS = 200
"""Groups of ranks, those of the fastest plans, that several stages a rank are tried on."""
_WORTH_SHARING = 0.98
"""State is shared for steps that take no more than this share: each replica has all gradients otherwise."""
_FULL = 0.5
"""Of its memory, more than which a rank holds where less state might give another plan."""


def make_plan(problem: Problem, progress: Progress | None = None) -> Plan:
    """Returns the simplest plan whose simulated step takes hardly longer than the least: `simplicity` says how much.

    Raises:
        PlanError: the settings contradict each other, or no plan fits; says what is missing.
    """
    return plan_and_choices(problem, progress, has_all_rows=False)[0]


def plan_and_choices(
    problem: Problem, progress: Progress | None = None, *, has_all_rows: bool = True
) -> tuple[Plan, list[Plan]]:
    """Returns the plan, and beside it the best plan of every regular grid that fits, the fastest first.

    With `has_all_rows` grids are simulated, too, that are far from the best. Errors are those of `make_plan`.
    """
    check_problem(problem)
    searches = list[_Search]()

    def search(each: Problem) -> Plan:
        searches.append(_Search(each, progress, has_all_rows=has_all_rows))
        return searches[-1].run()

    plan = plan_with_cut_points(problem, search)
    return plan, next(each.choices() for each in searches if each.plan and each.plan.stages == plan.stages)


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
    """One search: regular grids, several stages a rank, moves from the best of them, and the simplest of all."""

    def __init__(self, problem: Problem, progress: Progress | None = None, *, has_all_rows: bool = False) -> None:
        self.problem, self.has_all_rows = problem, has_all_rows
        self.progress = progress or (lambda what, share: None)
        self.counts = micro_batch_counts(problem)
        self.tables = RangeTables(problem.graph, cut_positions(problem))
        self.planner = Planner(problem, self.tables)
        self.most_each = stages_per_rank(problem)
        self.evaluator = Evaluator(self.planner)
        self.proof = Proof(self.planner, self.counts, self.most_each)
        self.rows = set[Grid]()
        self.plan: Plan | None = None

    def run(self) -> Plan:
        """Returns the plan; raises PlanError if none fits."""
        if exceeds_all(self.planner.sized(max(self.counts))):
            raise explain_infeasible(self.problem, self.tables, self.counts)
        self._try_grids()
        self._try_unequal_replicas()
        self._try_several_stages_a_rank()
        if self.evaluator.best is None:  # Of some splits alone is known which ranks have the bytes for them.
            for candidate in splits_that_fit(self.problem, self.tables, self.counts):
                self.evaluator.attempt(candidate)
        if self.evaluator.best is None:
            raise explain_infeasible(self.problem, self.tables, self.counts)
        self._improve()
        if self.has_all_rows and not self.problem.constraints.stage_ranks:
            grids = grids_of(self.problem, self.tables.num_segments)
            self._simulate([grid for grid in grids if grid not in self.rows], math.inf, _MOST_OF_A_ROW)
        self.plan = self._proven(self._with_finer_cuts(*self._simplest()))
        return self.plan

    def choices(self) -> list[Plan]:
        """Returns the best plan of every regular grid, the fastest first."""
        best: dict[Grid, Plan] = {}
        for plan in self.evaluator.plans.values():
            grid = Grid(plan.num_stages, len(plan.stages[0].ranks), plan.num_micro_batches)
            is_regular = grid in self.rows and len({len(stage.ranks) for stage in plan.stages}) == 1
            if is_regular and not plan.is_shared:
                best[grid] = min(best.get(grid, plan), plan, key=lambda each: each.predicted_seconds)
        for grid, plan in best.items():
            if not is_within(plan, self.planner.limits):  # by its depths, which say more than its instructions
                best[grid] = self.planner.predict_whole(plan, is_quick=True)
        return sorted(best.values(), key=lambda plan: (plan.predicted_seconds, plan.num_stages))

    def _try_grids(self) -> None:
        """Simulates regular grids that may be near the best, or the stages on the ranks that they are to have."""
        if not self.problem.constraints.stage_ranks:
            near = max(_NEAR, 1.0 + self.problem.constraints.simplicity)  # a simpler one may be chosen
            self._simulate(grids_of(self.problem, self.tables.num_segments), near)
        for count in self.counts if self.problem.constraints.stage_ranks else ():
            candidate = cut_for_ranks(self.planner, count, self.problem.constraints.stage_ranks)
            if candidate:
                self.evaluator.attempt(candidate)

    def _simulate(self, grids: Sequence[Grid], near: float, most_acts: float = math.inf) -> None:
        """Simulates regular grids, but those far slower than the best, and those that take too long to simulate."""
        evaluator, num_long = self.evaluator, 0

        def is_open(grid: Grid) -> bool:
            return even_seconds(self.planner, grid) < evaluator.least_seconds * near

        for done, (grid, candidates) in enumerate(cut_grids(self.planner, grids, is_open)):
            self.progress("simulating grids", done / len(grids))
            if candidates and self.planner.acts_of(candidates[0]) > most_acts:
                num_long += 1
                continue
            least = evaluator.least_seconds * near
            for candidate in evaluator.few_if_long(candidates):
                seconds = evaluator.attempt(candidate, least)
                if seconds < least:
                    least = seconds
                    self.rows.add(grid)
        if num_long:
            _log.warning("the table is without %d slow choices that take too long to simulate", num_long)

    def _try_unequal_replicas(self) -> None:
        """Simulates splits with other replicas: for the numbers of micro-batches of the best grids, or for all."""
        constraints, evaluator = self.problem.constraints, self.evaluator
        if constraints.num_replicas or constraints.stage_ranks or not (evaluator.best or self.planner.is_tiny):
            return
        known = evaluator.best_of_each(lambda each: each.num_micro_batches, _NEAR_OF_A_FORMULA)[:2]
        cells = self.problem.cluster.num_ranks**3 * self.tables.num_segments**2
        counts = list(dict.fromkeys([*(each.num_micro_batches for each in known), *self.counts]))
        for done, count in enumerate(counts[: max(len(known), CELLS // cells)]):
            self.progress("trying unequal replicas", done / len(counts))
            limit = evaluator.least_seconds * _NEAR_OF_A_FORMULA
            for candidate in unequal_replicas(self.planner, count, limit):
                evaluator.attempt(candidate, limit)

    def _try_several_stages_a_rank(self) -> None:
        """Simulates plans with several stages a rank, those that promise most first, if one may be better."""
        evaluator, planner, forced = self.evaluator, self.planner, forced_stages(self.problem)
        if self.most_each == 1 or self.problem.constraints.stage_ranks or not self.proof.leaves_room(evaluator.best):
            return
        shapes = list[Shape]()
        if not forced:
            plans = evaluator.best_of_each(lambda each: (each.ranks, each.num_micro_batches), math.inf)
            groups = [(evaluator.plans[each].predicted_seconds, each.ranks, each.num_micro_batches) for each in plans]
            shapes += shapes_on(planner, self.most_each, groups[:_MOST_GROUPS])
        if forced or planner.is_tiny:
            shapes += shapes_on(planner, self.most_each, groups_of(planner))
        shapes = self._by_bound(shapes)
        begun = planner.num_acts
        for shape in shapes:
            spent = (planner.num_acts - begun) / (BUDGET / 2)
            self.progress("interleaving stages", min(spent, 1.0))
            if spent > 1.0 and evaluator.best:
                evaluator.was_cut_short = True
                break
            if shape.seconds >= evaluator.least_seconds * _NEAR_OF_A_FORMULA:  # other cuts may have a lesser bound
                continue
            for candidate in candidates_of(planner, shape):
                found = evaluator.attempt(candidate, evaluator.least_seconds * _NEAR)
                if found == math.inf and evaluator.is_long(candidate):
                    break

    def _by_bound(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Returns shapes with what no schedule of their first cuts beats, which says more than a formula.

        The best of each number of groups and stages come first, then the next best of each.
        """
        planner, bounded, free = self.planner, list[Shape](), (math.inf,) * self.problem.cluster.num_ranks
        end = planner.num_acts + BUDGET / 4
        for shape in shapes:
            if planner.count_candidate() > end and bounded and self.evaluator.best:
                break
            some = list(islice(candidates_of(planner, shape), None if planner.is_tiny else 1))
            # What fits by its depths alone may recompute for no need.
            tight = [] if planner.is_tiny else [plan for each in some if (plan := planner.build(each))]
            plans = tight or [plan for each in some if (plan := planner.build(each, free))]
            bounded.append(shape._replace(seconds=min(map(planner.bound, plans), default=math.inf)))
        return varied(bounded)

    def _improve(self) -> None:
        """Changes the best plans of each number of stages by moves: the simulated optimum is not that of a formula."""
        evaluator, planner, begun = self.evaluator, self.planner, set[Hashable]()
        moves = (move_cuts, move_counts, move_groups, move_ranks, move_choices(evaluator))
        start, near = planner.num_acts, _NEAR_OF_TINY if planner.is_tiny else _NEAR_OF_A_FORMULA

        def kind(each: Candidate) -> Hashable:
            return each.num_micro_batches, each.ranks, each.starts if planner.is_tiny else ()

        for done in range(_MOST_STARTS):
            self.progress("improving plans", done / _MOST_STARTS)
            left = start + BUDGET - planner.num_acts
            starts = evaluator.best_of_each(kind, near)
            candidate = next((each for each in starts if kind(each) not in begun), None)
            if candidate is None or left <= 0:
                break
            improve(evaluator, candidate, min(BUDGET / 8, left), moves, lambda other: kind(other) not in begun)
            begun.add(kind(candidate))

    def _simplest(self) -> tuple[Candidate, Plan]:
        """Returns the simplest plan that takes hardly longer than the fastest, and what was given up for it."""
        best, simplicity = self.evaluator.best, self.problem.constraints.simplicity
        assert best is not None
        limit = best.predicted_seconds * (1.0 + simplicity)
        ordered = sorted(self.evaluator.plans.items(), key=lambda each: each[1].predicted_seconds)
        near = [each for each in ordered if each[1].predicted_seconds <= limit]
        simplest = sorted(near, key=lambda each: Simplicity.of(each[1])) if simplicity else near
        for candidate, plan in (*simplest, *ordered[len(near) :]):
            whole = self.planner.predict_whole(plan)
            if is_within(whole, self.planner.limits):  # So far, of many ranks only some were asked.
                return candidate, replace(whole, given_up=what_was_given_up(whole, best))
        raise explain_infeasible(self.problem, self.tables, self.counts)

    def _with_finer_cuts(self, candidate: Candidate, plan: Plan) -> Plan:
        """Lets the cuts of a plan move to any block near them, where the segments of a large graph have several."""
        problem = self.problem
        if self.tables.num_segments == len(problem.graph.blocks) or problem.constraints.has_fixed_places:
            return plan
        cuts = [int(self.tables.positions[start]) for start in candidate.starts]
        tables = RangeTables(problem.graph, zoomed_positions(problem, cuts, self.tables.num_segments))
        fine = Evaluator(Planner(problem, tables))
        start = replace(candidate, starts=tuple(int(np.searchsorted(tables.positions, cut)) for cut in cuts))
        suited = None if candidate.is_interleaved else cut_for_ranks(fine.planner, start.num_micro_batches, start.ranks)
        for each in (start, suited) if suited else (start,):
            if fine.attempt(each) < math.inf:
                improve(fine, each, BUDGET / 50, (move_cuts, move_choices(fine)))
        if fine.best is None or fine.best.predicted_seconds >= plan.predicted_seconds:
            return plan
        whole = fine.planner.predict_whole(fine.best)
        return replace(whole, given_up=plan.given_up) if is_within(whole, self.planner.limits) else plan

    def _proven(self, plan: Plan) -> Plan:
        self.progress("proving how good the plan is", 1.0)
        plan = self.planner.with_block_bytes(plan)
        singles = (each for each in self.evaluator.plans.values() if not each.is_shared)
        single = min(singles, key=lambda each: each.predicted_seconds, default=None)
        return self.proof.put_into(plan, single, was_cut_short=self.evaluator.was_cut_short)
