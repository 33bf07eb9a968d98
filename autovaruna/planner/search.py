"""Searches the plans of a problem: every candidate is ranked by its simulated step time under the memory limit."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np

from autovaruna.planner.bounds.proof import PROVEN, WORTH, Proof
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.cut_points import plan_with_cut_points
from autovaruna.planner.evaluator import Evaluator, Progress
from autovaruna.planner.exhaustive import GroupSearch, PatternSearch, is_small
from autovaruna.planner.infeasible import explain_infeasible, splits_that_fit
from autovaruna.planner.interleaved import EVERY, Interleaving
from autovaruna.planner.local_search import (
    NEAR,
    changed_in_pairs,
    improve_best,
    is_shared,
    seconds_of,
    tuned,
    tuned_promising,
)
from autovaruna.planner.memory_fit import Found, that_fits, use_all_memory_of_best, with_all_memory_used
from autovaruna.planner.one_stage_a_rank import SingleSearch
from autovaruna.planner.placement import order_of
from autovaruna.planner.prediction import ACTS_OF_A_SHARED_ACT
from autovaruna.planner.problem import SPLIT_SCHEDULE, Problem, check_problem, forced_stages
from autovaruna.planner.ranges import RangeTables, TablesOfGraph
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import (
    cut_positions,
    micro_batch_counts,
    plan_with_more,
    stages_per_rank,
    zoomed_positions,
)
from autovaruna.planner.split_backward import plan_with_split_backward

_log = logging.getLogger(__name__)

_SHAPES_SECONDS, _MORE_ROUNDS_SECONDS, _SHAPES_CLIMB_SECONDS, _PATTERNS_SECONDS = 1.5, 0.75, 1.0, 1.0
_FINE_SECONDS, _TUNING_SECONDS = 2.0, 0.5
"""What simulations may take, by the count of `Planner.spent_seconds`, so that a search ends alike on every machine."""
_SHAPES_STARTS = 2


def make_plan(problem: Problem, progress: Progress | None = None) -> Plan:
    """Returns the plan with the least simulated step time.

    Args:
        problem: what to plan, and what the user has already decided.
        progress: is told how far the search is.

    Raises:
        PlanError: the settings contradict each other, or no plan fits; says what is missing.
    """
    check_problem(problem)
    hears, tables = progress or (lambda what, share: None), TablesOfGraph(problem.graph)

    def search(each: Problem) -> Plan:
        return plan_with_more(each, lambda wider: _Search(wider, hears, tables).run())

    def search_below(each: Problem, seconds: float) -> Plan | None:
        return _Search(each, hears, tables, seconds).find()

    plan = plan_with_cut_points(problem, lambda each: plan_with_split_backward(each, search, search_below, tables))
    _log.info(
        "planned %d stages, %d micro-batches: %.6g s a step, at most %.1f %% above the best possible",
        plan.num_stages,
        plan.num_micro_batches,
        plan.predicted_seconds,
        100 * plan.gap,
    )
    return plan


class _Search:
    """One search: first with one stage a rank, then, if that may be better, with several.

    Args:
        problem: what to plan.
        progress: is told how far the search is.
        tables: of the graph, for any cuts.
        below_seconds: plans that take as long or longer are of no use.
    """

    def __init__(
        self,
        problem: Problem,
        progress: Progress,
        tables: TablesOfGraph,
        below_seconds: float = math.inf,
    ) -> None:
        self.problem, self.progress, self.below_seconds = problem, progress, below_seconds
        self.counts = micro_batch_counts(problem)
        self.all_tables, self.tables = tables, tables.at(cut_positions(problem))
        self.planner = Planner(problem, self.tables)
        self.forced_stages, self.most_each = forced_stages(problem), stages_per_rank(problem)
        self.is_small = is_small(problem, self.tables.num_segments)
        self.trials = self._new_trials(self.planner, below_seconds)
        self.proof = Proof(self.planner, self.counts, self.most_each)
        self.single = SingleSearch(self.trials, self.counts, self.proof, progress)
        self.others: Evaluator | None = None
        """Those of plans with several stages a rank, if there may be better ones."""

    def run(self) -> Plan:
        """Returns the best plan.

        Raises:
            PlanError: none fits.
        """
        plan = self.find()
        if plan is None:
            raise explain_infeasible(self.problem, self.tables, self.counts)
        return plan

    def find(self) -> Plan | None:
        """Returns the best plan, or None if none fits and is as fast as it has to be."""
        trials = self.trials
        self.single.run()
        if trials.best is None and self.below_seconds == math.inf:
            self._try_what_fits()
        chosen = trials
        if self.most_each > 1 and self.proof.leaves_room(trials.best):
            chosen = self._try_interleaved()
        found = self._fastest_first(chosen)
        if not found:
            return None
        better = tuned_promising(self._promising(), seconds_of(found[0][2]))
        found = [*(pair for each in better for pair in changed_in_pairs(each)), *better, *found]
        planner, candidate, plan = found[0]
        plan = with_all_memory_used(planner, candidate, planner.predict_whole(plan))
        if plan.predicted_seconds >= self.below_seconds:
            return None
        self.progress("proving how good the plan is", 1.0)
        plan = self.planner.with_block_bytes(plan)
        was_cut_short = trials.was_cut_short or chosen.was_cut_short
        return self.proof.put_into(plan, trials.best if is_shared(plan) else plan, was_cut_short=was_cut_short)

    def _promising(self) -> list[tuple[float, Found]]:
        every = [self.trials] if self.others is None else [self.trials, self.others]
        return [(bound, (t.planner, variant, plan)) for t in every for bound, variant, plan in t.promising.values()]

    def _try_what_fits(self) -> None:
        """Tries splits that fit by their bytes alone: which ranks a stage gets may leave but a few."""
        for candidate in splits_that_fit(self.problem, self.tables, self.counts):
            self.trials.attempt(candidate, math.inf)
        improve_best(self.trials, _SHAPES_STARTS, _SHAPES_CLIMB_SECONDS, self.single.recut, self.progress)

    def _new_trials(self, planner: Planner, below_seconds: float = math.inf) -> Evaluator:
        settle = that_fits if self.problem.constraints.schedule == SPLIT_SCHEDULE else None
        return Evaluator(planner, is_small=self.is_small, below_seconds=below_seconds, settle=settle)

    # Plans with several.

    def _try_interleaved(self) -> Evaluator:
        """Returns the trials of plans with several stages a rank if one of them is better, else those with one."""
        self.progress("interleaving stages", 0.0)
        known, trials = self.trials, self._new_trials(self.planner)
        self.others = trials
        order = order_of(self.problem, known.best_few(1)[0].ranks if known.ranked else ())
        for more_than, most, seconds in ((1, EVERY, _SHAPES_SECONDS), (EVERY, self.most_each, _MORE_ROUNDS_SECONDS)):
            most_each = min(most, self.most_each)
            if most_each > more_than:
                interleaving = Interleaving(self.planner, most_each, self.forced_stages, order, more_than)
                interleaving.try_shapes(self.counts, known, trials, seconds)
        Interleaving(self.planner, self.most_each, self.forced_stages, order).even_out(trials, _SHAPES_STARTS)
        improve_best(trials, _SHAPES_STARTS, _SHAPES_CLIMB_SECONDS, self.single.recut, self.progress)
        if self.is_small:
            self._try_all_patterns(trials)
            trials.go_deep(that_fits)
            self._try_all_patterns(trials)
        use_all_memory_of_best(trials, _SHAPES_STARTS)
        return trials if trials.least_seconds < known.least_seconds * WORTH else known

    def _try_all_patterns(self, trials: Evaluator) -> None:
        end = self.planner.spent_seconds + _PATTERNS_SECONDS

        def limit() -> float:
            return min(self.trials.least_seconds * WORTH, trials.least_seconds * PROVEN)

        is_complete = True
        for count in sorted(self.counts, key=self.proof.of_all):
            if self.proof.of_all(count) >= limit():
                break
            groups = self.proof.groups.get(count) or GroupSearch(self.planner.sized(count), self.forced_stages)
            search = PatternSearch(groups, self.most_each, limit, lambda: self.planner.count_step() < end)
            for candidate in search.candidates():
                trials.attempt(candidate, limit() * NEAR, limit())
            is_complete &= search.is_complete
        self.proof.is_all_complete |= is_complete

    # The best of all.

    def _fastest_first(self, chosen: Evaluator) -> list[Found]:
        """Returns all plans that were faster than they had to be, those with finer cuts among them."""
        found: dict[int, Found] = {}
        for trials in (self._zoomed(chosen), chosen, self.trials, self.others or chosen):
            for variant, plan in trials.built.values():
                found.setdefault(id(plan), (trials.planner, variant, plan))
        return tuned(list(found.values()), _TUNING_SECONDS)

    def _zoomed(self, trials: Evaluator) -> Evaluator:
        """Lets the cuts of the best plan move between the segments of a large graph."""
        is_whole = self.tables.num_segments == len(self.problem.graph.blocks)
        if trials.best is None or is_whole or self.problem.constraints.has_fixed_places:
            return trials
        candidate = trials.best_few(1)[0]
        if not self._may_move_each_cut(candidate, _FINE_SECONDS):
            trials.was_cut_short = True
            return trials
        cuts = [int(self.tables.positions[start]) for start in candidate.starts]
        positions = zoomed_positions(self.problem, cuts, self.tables.num_segments)
        tables = RangeTables(self.problem.graph, positions)
        fine = self._new_trials(Planner(self.problem, tables))
        fine.is_deep = trials.is_deep
        starts = tuple(int(np.searchsorted(tables.positions, cut)) for cut in cuts)
        variant, start = trials.built[candidate][0], replace(candidate, starts=starts)
        fine.best, fine.ranked = trials.best, {start: trials.best.predicted_seconds}
        fine.built = {start: (replace(variant, starts=starts), trials.best)}
        improve_best(fine, 1, _FINE_SECONDS, self.single.recut, self.progress)
        trials.was_cut_short = trials.was_cut_short or fine.was_cut_short
        return fine

    def _may_move_each_cut(self, candidate: Candidate, most_seconds: float) -> bool:
        """Returns whether there is time to simulate a plan with each cut moved once to either side."""
        each = self.planner.step_costs(candidate) * (ACTS_OF_A_SHARED_ACT if candidate.is_interleaved else 1)
        return 2 * (len(candidate.starts) - 1) * each <= most_seconds
