"""Searches the plans of a problem: every candidate is ranked by its simulated step time under the memory limit.

Also decides whether the replicas of a stage share the optimizer's state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from autovaruna.config.settings import Sharing
from autovaruna.errors import PlanError
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import SHORT_SECONDS, Evaluator, Progress
from autovaruna.planner.grids import (
    Choice,
    Grid,
    choice_of,
    cut_for_ranks,
    cut_grids,
    even_counts,
    even_seconds,
    grids_of,
    groups_of_few,
    unequal_replicas,
)
from autovaruna.planner.infeasible import exceeds_all, explain_infeasible, splits_that_fit
from autovaruna.planner.interleaved import Shape, candidates_of, forced_shapes, shapes_of_grids, varied
from autovaruna.planner.local_search import improve, move_choices, move_counts, move_cuts, move_groups, move_ranks
from autovaruna.planner.prediction import least_seconds
from autovaruna.planner.problem import Problem, check_problem, forced_stages
from autovaruna.planner.proof import WORTH, Proof
from autovaruna.planner.range_tables import RangeTables
from autovaruna.planner.rank_memory import is_within
from autovaruna.planner.records import Plan, Simplicity, what_was_given_up
from autovaruna.planner.search_space import (
    cut_positions,
    micro_batch_counts,
    plan_with_cut_points,
    stages_per_rank,
    zoomed_positions,
)

_log = logging.getLogger(__name__)

_QUICK_SECONDS, _SHARED_SECONDS, _IMPROVING_SECONDS = 2.0, 2.0, 8.0
"""What simulations may take, by the count of `Planner.spent_seconds`, so that a search ends alike on every machine."""
_STARTS, _MORE_STARTS = 4, 24
"""From so many regular and other plans moves begin, and from so many in all where there is time left."""
_MOST_OF_A_ROW = 0.25
"""What the simulation of a choice may take that is far from the best, and only a row of the table."""
_SHARE_OF_CHOICES = 0.1
_NEAR = 1.06
_BOUNDING_SECONDS = 2.0
"""In which bounds say what to simulate of several stages a rank."""
_FINE_SECONDS = 1.0
"""For cuts between the segments of a large graph."""
_COUNTS, _NEAR_OF_A_FORMULA, _NEAR_OF_TINY = 2, 1.1, 1.25
_MOST_GROUPS, _NEAR_OF_SHAPES = 200, 2.0
_WORTH_SHARING = 0.98
"""State is shared for steps that take no more than this share: each replica has all gradients otherwise."""
_GAIN_OF_GRIDS = 0.99
"""Where not even the best regular grid gains so much by shared state, no plan is looked for."""
_FULL = 0.5
"""Of its memory, more than which a rank holds where less state might give another plan."""
_CELLS = 10**6
"""With few enough cells of the dynamic program every number of micro-batches is tried."""


def make_plan(problem: Problem, progress: Progress | None = None) -> Plan:
    """Returns the simplest plan whose simulated step takes hardly longer than the least: `simplicity` says how much.

    Raises:
        PlanError: the settings contradict each other, or no plan fits; says what is missing.
    """
    return plan_and_choices(problem, progress, has_all_rows=False)[0]


def plan_and_choices(
    problem: Problem, progress: Progress | None = None, *, has_all_rows: bool = True
) -> tuple[Plan, list[Choice]]:
    """Returns the plan, and beside it the best plan of every regular grid that fits, the fastest first.

    With `has_all_rows` grids are simulated, too, that are far from the best. Errors are those of `make_plan`.
    """
    check_problem(problem)
    searches = list[_Search]()

    def search(each: Problem) -> Plan:
        searches.append(_Search(each, progress, has_all_rows=has_all_rows))
        return searches[-1].run()

    plan = plan_with_cut_points(problem, search)
    _log.info(
        "planned %d stages, %d micro-batches: %.6g s a step, at most %.1f %% above the best possible",
        plan.num_stages,
        plan.num_micro_batches,
        plan.predicted_seconds,
        100 * plan.gap,
    )
    return plan, next(each.choices() for each in searches if each.found and each.found.stages == plan.stages)


def least_grid_seconds(problem: Problem, below: float = math.inf) -> float:
    """Returns the least seconds of the regular grids of a problem, infinite if none fits and takes less than `below`.

    It is known much sooner than a plan, and soonest where there is none.
    """
    search = _Search(problem, below=below)
    search.try_grids(1.0)
    return search.trials.best.predicted_seconds if search.trials.best else math.inf


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
        try:
            return make(with_shares)
        except PlanError as error:
            _log.debug("nor is there a plan with shared state: %s", error)
        raise
    pairs = zip(plan.rank_bytes(), problem.cluster.memory_bytes, strict=True)
    is_short = any(stage.needs_recompute for stage in plan.stages) or any(held > _FULL * limit for held, limit in pairs)
    if not is_short:
        return plan
    worth = _GAIN_OF_GRIDS * least_grid_seconds(problem)
    if least_grid_seconds(with_shares, worth) > worth:
        return plan
    shared = make(with_shares)
    return shared if shared.predicted_seconds <= _WORTH_SHARING * plan.predicted_seconds else plan


class _Search:
    """One search: regular grids, several stages a rank, moves from the best of them, and the simplest of all."""

    def __init__(
        self, problem: Problem, progress: Progress | None = None, *, has_all_rows: bool = False, below: float = math.inf
    ) -> None:
        self.problem, self.has_all_rows = problem, has_all_rows
        self.progress = progress or (lambda what, share: None)
        self.counts = micro_batch_counts(problem)
        self.tables = RangeTables(problem.graph, cut_positions(problem))
        self.planner = Planner(problem, self.tables)
        self.most_each = stages_per_rank(problem)
        self.trials = Evaluator(self.planner, below)
        self.proof = Proof(self.planner, self.counts, self.most_each)
        self.rows = set[Grid]()
        self.found: Plan | None = None

    def run(self) -> Plan:
        """Returns the plan; raises PlanError if none fits."""
        if exceeds_all(self.planner.sized(max(self.counts))):
            raise explain_infeasible(self.problem, self.tables, self.counts)
        self._try_all()
        if self.trials.best is None:  # Of some splits alone is known which ranks have the bytes for them.
            for candidate in splits_that_fit(self.problem, self.tables, self.counts):
                self.trials.attempt(candidate)
        if self.trials.best is None:
            self.trials.loosen()
            self._try_all()
        if self.trials.best is None:
            raise explain_infeasible(self.problem, self.tables, self.counts)
        self._improve()
        if self.has_all_rows and not self.problem.constraints.stage_ranks:
            grids = grids_of(self.problem, self.tables.num_segments)
            self._simulate([grid for grid in grids if grid not in self.rows], math.inf, _MOST_OF_A_ROW)
        self.found = self._proven(self._with_finer_cuts(*self._simplest()))
        return self.found

    def _try_all(self) -> None:
        self.try_grids()
        self._try_unequal_replicas()
        self._try_several_stages_a_rank()

    def choices(self) -> list[Choice]:
        """Returns the best plan of every regular grid, the fastest first."""
        best: dict[Grid, Plan] = {}
        for plan in self.trials.plans.values():
            grid = Grid(plan.num_stages, len(plan.stages[0].ranks), plan.num_micro_batches)
            is_regular = grid in self.rows and len({len(stage.ranks) for stage in plan.stages}) == 1
            if is_regular and not plan.is_shared:
                best[grid] = min(best.get(grid, plan), plan, key=lambda each: each.predicted_seconds)
        rows = [choice_of(self._with_true_bytes(plan), self.problem.global_batch_size) for plan in best.values()]
        return sorted(rows, key=lambda choice: (choice.step_seconds, choice.num_stages))

    def _with_true_bytes(self, plan: Plan) -> Plan:
        """Returns a plan with the memory of its instructions if it does not fit by its depths, which say more."""
        return plan if is_within(plan, self.planner.limits) else self.planner.predict_whole(plan, is_quick=True)

    def try_grids(self, near: float = _NEAR) -> None:
        """Simulates regular grids that may be `near` the best, or the stages on the ranks that they are to have."""
        if self.problem.constraints.stage_ranks:
            for count in self.counts:
                candidate = cut_for_ranks(self.planner, count, self.problem.constraints.stage_ranks)
                if candidate:
                    self.trials.attempt(candidate, self.trials.below)
            return
        self._simulate(grids_of(self.problem, self.tables.num_segments), near)

    def _simulate(self, grids: Sequence[Grid], near: float, most_each: float = math.inf) -> None:
        """Simulates regular grids, but those far slower than the best, and those that take too long to simulate."""
        trials, num_long = self.trials, 0

        def is_open(grid: Grid) -> bool:
            return even_seconds(self.planner, grid) < trials.least_seconds * near

        for done, (grid, candidates) in enumerate(cut_grids(self.planner, grids, is_open)):
            self.progress("simulating grids", done / len(grids))
            if candidates and self.planner.step_costs(candidates[0]) > most_each:
                num_long += 1
                continue
            least = trials.least_seconds * near
            for candidate in trials.few_if_long(candidates):
                seconds = trials.attempt(candidate, least)
                if seconds < least:
                    least = seconds
                    self.rows.add(grid)
        if num_long:
            _log.warning("the table is without %d slow choices that take too long to simulate", num_long)

    def _try_unequal_replicas(self) -> None:
        """Simulates splits with other replicas: for the numbers of micro-batches of the best grids, or for all."""
        constraints, trials = self.problem.constraints, self.trials
        if constraints.num_replicas or constraints.stage_ranks or not (trials.best or self.planner.is_tiny):
            return
        known = trials.best_of_each(lambda each: each.num_micro_batches, _COUNTS, _NEAR_OF_A_FORMULA)
        cells = (self.problem.cluster.num_ranks * self.tables.num_segments) ** 2
        counts = list(dict.fromkeys([*(each.num_micro_batches for each in known), *self.counts]))
        for done, count in enumerate(counts[: max(len(known), _CELLS // cells)]):
            self.progress("trying unequal replicas", done / len(counts))
            limit = trials.least_seconds * _NEAR_OF_A_FORMULA
            for candidate in unequal_replicas(self.planner, count, limit):
                trials.attempt(candidate, limit)

    def _try_several_stages_a_rank(self) -> None:
        """Simulates plans with several stages a rank, those that promise most first, if one may be better."""
        trials, planner, forced = self.trials, self.planner, forced_stages(self.problem)
        if self.most_each == 1 or self.problem.constraints.stage_ranks or not self.proof.leaves_room(trials.best):
            return
        may_differ = trials.best is not None or forced > 0 or trials.is_loose  # tried last where nothing fits
        few = groups_of_few(planner, self.counts, may_differ=may_differ) if self.planner.is_tiny else ()
        if forced:
            shapes = forced_shapes(planner, self.most_each, forced, even_counts(self.problem))
        else:
            grids = trials.best_of_each(
                lambda each: (each.ranks, each.num_micro_batches), _MOST_GROUPS, _NEAR_OF_SHAPES
            )
            known = ((trials.plans[each].predicted_seconds, each.ranks, each.num_micro_batches) for each in grids)
            shapes = shapes_of_grids(planner, self.most_each, known)
        shapes += shapes_of_grids(planner, self.most_each, few, forced, has_any_order=True)
        shapes = self._by_bound(shapes, planner.spent_seconds + _BOUNDING_SECONDS)
        made = dict[tuple[int, bool], list[Candidate]]()
        for is_quick, seconds in ((True, _QUICK_SECONDS), (False, _SHARED_SECONDS)):
            self._simulate_shapes(shapes, made, seconds, is_quick=is_quick)

    def _simulate_shapes(
        self, shapes: Sequence[Shape], made: dict[tuple[int, bool], list[Candidate]], seconds: float, *, is_quick: bool
    ) -> None:
        """Simulates shapes for so many of `spent_seconds`: quickly, or those fully that were best before.

        Their candidates are made when it is their turn: that takes longer than to simulate some.
        """
        trials, planner, near = self.trials, self.planner, _NEAR if is_quick else WORTH
        end = planner.spent_seconds + seconds

        def seconds_of(place: int) -> float:
            candidates = (each for has_all in (False, True) for each in made.get((place, has_all), ()))
            return min(map(trials.seconds_of, candidates), default=math.inf)

        has_any, places = trials.best is not None, range(len(shapes))
        for place in places if is_quick else sorted(places, key=seconds_of):
            shape, left = shapes[place], (end - planner.spent_seconds) / seconds
            self.progress("interleaving stages", 1.0 - min(max(left, 0.0), 1.0))
            if shape.seconds >= trials.least_seconds * _NEAR_OF_A_FORMULA:  # other cuts may have a lesser bound
                continue
            if planner.spent_seconds > end and trials.best:
                trials.was_cut_short = True
                break
            if (place, has_any) not in made:
                made[place, has_any] = list(candidates_of(planner, shape, has_all_cuts=has_any))
            for candidate in made[place, has_any]:
                found = trials.attempt(candidate, trials.least_seconds * near, is_quick=is_quick)
                if found == math.inf and trials.is_long(candidate):
                    break
                for move in (move_groups, move_cuts) if trials.best is None and trials.is_loose else ():
                    for other in move(planner, candidate):
                        trials.attempt(other)

    def _by_bound(self, shapes: Sequence[Shape], end: float) -> list[Shape]:
        """Returns shapes with what no schedule of their first cuts beats, which says more than a formula, until `end`.

        The best of each number of groups and stages come first, then the next best of each.
        """
        bounded, free = list[Shape](), (math.inf,) * self.problem.cluster.num_ranks
        for shape in shapes:
            if self.planner.count_candidate() > end and bounded and self.trials.best:
                break
            counts = [len(shape.groups[group]) for group in shape.pattern]
            is_slow = least_seconds(counts, shape.num_micro_batches) > SHORT_SECONDS
            every = candidates_of(self.planner, shape, has_all_cuts=self.planner.is_tiny)
            some = list(islice(every, 1 if is_slow else None))  # The first cuts have to stand for all.
            # What fits by its depths alone may recompute for no need.
            tight = [plan for each in some if is_slow and (plan := self.planner.build(each))]
            plans = tight or [plan for each in some if (plan := self.planner.build(each, free))]
            bounded.append(shape._replace(seconds=min(map(self.planner.bound, plans), default=math.inf)))
        return varied(bounded)

    def _improve(self) -> None:
        """Changes the best plans of each number of stages by moves: the simulated optimum is not that of a formula."""
        moves = (move_cuts, move_counts, move_groups, move_ranks, move_choices(self.trials, _IMPROVING_SECONDS))
        every = self.trials.best_of_each(_kind, len(self.trials.plans), _NEAR)
        regular = [each for each in every if _kind(each)[1:] == (False, True)][:_STARTS]
        starts = regular + [each for each in every if each not in regular][:_STARTS]
        end, begun = self.planner.spent_seconds + _IMPROVING_SECONDS, set[Hashable]()
        kind, near = (_place, _NEAR_OF_TINY) if self.planner.is_tiny else (_finer_kind, _NEAR_OF_A_FORMULA)

        def is_news(other: Candidate) -> bool:
            return kind(other) not in begun

        for done in range(_MORE_STARTS):
            self.progress("improving plans", done / _MORE_STARTS)
            others = self.trials.best_of_each(kind, len(self.trials.plans), near)
            candidate = next((each for each in [*starts, *others] if kind(each) not in begun), None)
            left = end - self.planner.spent_seconds
            if candidate is None or left <= 0:
                break
            if self.planner.step_costs(candidate) <= SHORT_SECONDS:  # or moves lead away before it is tried
                improve(self.trials, candidate, left * _SHARE_OF_CHOICES, moves[-1:])
            improve(self.trials, candidate, min(_IMPROVING_SECONDS / len(starts), left), moves, is_news)
            begun.add(kind(candidate))

    def _simplest(self) -> tuple[Candidate, Plan]:
        """Returns the simplest plan that takes hardly longer than the fastest, and what was given up for it."""
        best, simplicity = self.trials.best, self.problem.constraints.simplicity
        assert best is not None
        limit = best.predicted_seconds * (1.0 + simplicity)
        ordered = sorted(self.trials.plans.items(), key=lambda each: each[1].predicted_seconds)
        near = [each for each in ordered if each[1].predicted_seconds <= limit]
        simplest = sorted(near, key=lambda each: Simplicity.of(each[1])) if simplicity else near
        for candidate, plan in (*simplest, *ordered[len(near) :]):
            whole = self.planner.predict_whole(plan)
            if is_within(whole, self.planner.limits):  # So far, of many ranks only some were asked.
                return candidate, replace(whole, given_up=what_was_given_up(whole, best))
        raise explain_infeasible(self.problem, self.tables, self.counts)

    def _with_finer_cuts(self, candidate: Candidate, plan: Plan) -> Plan:
        """Lets the cuts of a plan move between the segments of a large graph, and again from where they came to."""
        if self.tables.num_segments == len(self.problem.graph.blocks) or self.problem.constraints.has_fixed_places:
            return plan
        cuts = [int(self.tables.positions[start]) for start in candidate.starts]
        spent = 0.0
        while spent < _FINE_SECONDS:
            fine, starts = self._near(candidate, cuts)
            spent += fine.planner.spent_seconds
            best = fine.best
            if best is None or best.predicted_seconds >= plan.predicted_seconds:
                break
            whole = fine.planner.predict_whole(best)
            if not is_within(whole, self.planner.limits):
                break
            plan, cuts = replace(whole, given_up=plan.given_up), starts
        return plan

    def _near(self, candidate: Candidate, cuts: Sequence[int]) -> tuple[Evaluator, list[int]]:
        """Simulates plans with cuts at any block near those of a candidate; returns them, and the cuts of the best."""
        tables = RangeTables(self.problem.graph, zoomed_positions(self.problem, cuts, self.tables.num_segments))
        fine = Evaluator(Planner(self.problem, tables))
        start = replace(candidate, starts=tuple(int(np.searchsorted(tables.positions, cut)) for cut in cuts))
        fine.attempt(start)
        if not candidate.is_interleaved and (cut := cut_for_ranks(fine.planner, start.num_micro_batches, start.ranks)):
            fine.attempt(cut)
        for best in fine.best_of_each(lambda each: each, 2, _NEAR):
            improve(fine, best, _FINE_SECONDS / 4, (move_cuts, move_choices(fine, _FINE_SECONDS / 4)))
        found = next(iter(fine.best_of_each(lambda each: each, 1, math.inf)), start)
        return fine, [int(tables.positions[place]) for place in found.starts]

    def _proven(self, plan: Plan) -> Plan:
        self.progress("proving how good the plan is", 1.0)
        plan = self.planner.with_block_bytes(plan)
        singles = (each for each in self.trials.plans.values() if not each.is_shared)
        single = min(singles, key=lambda each: each.predicted_seconds, default=None)
        return self.proof.put_into(plan, single, was_cut_short=self.trials.was_cut_short)


def _kind(candidate: Candidate) -> tuple[int, bool, bool]:
    """Returns what moves seldom change: the number of stages, and whether these are regular."""
    return len(candidate.starts), candidate.is_interleaved, len(set(map(len, candidate.ranks))) == 1


def _finer_kind(candidate: Candidate) -> tuple[int, bool, tuple[tuple[int, ...], ...]]:
    """Returns what few moves change: the ranks of the stages, and the number of micro-batches."""
    return candidate.num_micro_batches, candidate.is_interleaved, candidate.ranks


def _place(candidate: Candidate) -> tuple[Hashable, ...]:
    """Returns all but what the stages hold."""
    return *_finer_kind(candidate), candidate.starts
