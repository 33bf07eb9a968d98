"""Changes depths, recompute and deferral of single stages of the best plans, where that makes their steps shorter.

While it searches, the planner gives all stages of a plan depths by one rule, and has those recompute that lack memory
for them. What is best for one stage depends on the others: one that recomputes may hold more in flight, one that does
not takes less time for each. So the best plans, and those hardly slower, are changed stage by stage, and all stages at
once, as long as that helps (`changes.py` lists how); every change is simulated, and held against the memory of the
ranks. Then two stages at a time change of what is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autovaruna.planner.bounds.proof import PROVEN, WORTH
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.changes import Change, Changes, Options
from autovaruna.planner.memory.fitting import Option
from autovaruna.planner.records import Plan
from autovaruna.planner.settling import Found, choices_of, is_within

NEAR, _MOST_PLANS = 1.05, 12
BETTER = 0.9995
"""What a change has to save: a plan by rule is easier to understand than one that is hardly faster."""
_SHARE_OF_A_ROUND = 0.1
"""Plans are left as they are if one change of each stage takes a greater share of the time."""
_PROMISING_SECONDS, _SHARE_OF_ONE = 2.0, 0.25
"""What it may take, by the planner's count, to change plans that are slower by any rule, and of that one of them."""
_PAIRS_SECONDS, _SHARE_OF_PAIRS = 2.5, 0.4
"""What it may take to change two stages of the best plan, by the planner's count, and the share of it for simulations
of all pairs: if that is not enough, none is tried.
"""


def tuned(found: Sequence[Found], most_seconds: float) -> list[Found]:
    """Returns plans with those that are faster than them, the best first.

    Args:
        found: plans.
        most_seconds: what simulations may take, for each planner by its own count.
    """
    ends = {id(planner): planner.spent_seconds + most_seconds for planner, _, _ in found}
    ordered, better, least = sorted(found, key=_seconds), list[Found](), math.inf
    for planner, candidate, plan in ordered[:_MOST_PLANS]:
        least = min(least, plan.predicted_seconds)
        if plan.predicted_seconds > least * NEAR:
            break
        if _is_long((planner, candidate, plan), most_seconds):
            continue
        best = Tuning(planner, candidate, plan, ends[id(planner)]).run()
        if best is not None:
            better.append((planner, candidate, best))
            least = min(least, best.predicted_seconds)
    ordered = sorted([*better, *found], key=_seconds)
    return [*changed_in_pairs(ordered[0]), *ordered] if ordered else []


def tuned_promising(promising: Sequence[tuple[float, Found]], least_seconds: float) -> list[Found]:
    """Returns a plan that becomes better than what is known by changes of its stages, if there is one.

    Args:
        promising: plans that are slower, with what their stages do not let them beat.
        least_seconds: of the best plan that is known.
    """
    ends = {id(planner): planner.spent_seconds + _PROMISING_SECONDS for _, (planner, _, _) in promising}
    best: list[Found] = []
    for bound, (planner, candidate, plan) in sorted(promising, key=lambda each: each[0]):
        end = ends[id(planner)]
        if seconds_of(replace(plan, predicted_seconds=bound)) >= least_seconds * PROVEN or planner.spent_seconds > end:
            continue
        end = min(end, planner.spent_seconds + _SHARE_OF_ONE * _PROMISING_SECONDS)
        found = Tuning(planner, candidate, plan, end).run()
        if found is not None and seconds_of(found) < least_seconds * BETTER:
            best, least_seconds = [(planner, candidate, found)], seconds_of(found)
    return best


def changed_in_pairs(found: Found) -> list[Found]:
    """Returns a plan with two stages at once changed where that makes it faster, else none."""
    planner, candidate, plan = found
    if _is_long(found, _PAIRS_SECONDS):
        return []
    best = Tuning(planner, candidate, plan, planner.spent_seconds + _PAIRS_SECONDS).run_in_pairs()
    return [(planner, candidate, best)] if best else []


def _is_long(found: Found, most_seconds: float) -> bool:
    """Returns whether it takes too great a share of some seconds to simulate one change of each stage."""
    planner, candidate, plan = found
    return planner.step_costs(candidate) * plan.num_stages > most_seconds * _SHARE_OF_A_ROUND


def is_shared(plan: Plan) -> bool:
    """Returns whether ranks hold several stages of a plan."""
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    return len(set(ranks)) < len(ranks)


def seconds_of(plan: Plan) -> float:
    """Returns the seconds by which plans are ordered: several stages a rank have to be worth it."""
    return plan.predicted_seconds / (WORTH if is_shared(plan) else 1.0)


def _seconds(found: Found) -> float:
    return seconds_of(found[2])


class Tuning:
    """Makes one plan faster.

    Args:
        planner: that built it.
        candidate: that it was built from.
        plan: the plan, which fits.
        end: when to stop, by the planner's count.
    """

    def __init__(self, planner: Planner, candidate: Candidate, plan: Plan, end: float) -> None:
        self.planner, self.candidate, self.end = planner, candidate, end
        self.least_seconds = planner.predict_whole(plan).predicted_seconds
        self.best: Plan | None = None
        self.sized = planner.sized(plan.num_micro_batches)
        self.cost = planner.step_costs(candidate)
        self.schedule, self.options = plan.schedule, _options_of(planner, candidate, plan)
        self.changes = Changes(planner, candidate)
        self.tried = {(plan.schedule, choices_of(self.options))}

    def run(self) -> Plan | None:
        """Returns a faster plan, None if there is none."""
        changes = self.changes
        return self._run(changes.together, changes.of_a_stage, changes.of_all_stages)

    def run_in_pairs(self) -> Plan | None:
        """Returns a faster plan, of which two stages at once are changed; None if there is none, or too many are."""
        most = _PAIRS_SECONDS * _SHARE_OF_PAIRS / self.cost
        return self._run(lambda schedule, options: self.changes.of_two_stages(schedule, options, most))

    def _run(self, *kinds: Callable[[str, Options], Iterable[Change]]) -> Plan | None:
        """Tries kinds of changes in turns as long as any is of use."""
        before = None
        while self.least_seconds != before:
            before = self.least_seconds
            for kind in kinds:
                for schedule, stages in kind(self.schedule, self.options):
                    options = [stages.get(stage, option) for stage, option in enumerate(self.options)]
                    self._try(schedule or self.schedule, options)
        return self.best

    def _try(self, schedule: str, options: Options) -> None:
        """Takes other options if the plan fits and is faster with them."""
        key = schedule, choices_of(options)
        if key in self.tried or not self.changes.may_run(schedule, options):
            return
        if self.planner.count_candidate() + self.cost > self.end:
            return
        self.tried.add(key)
        plan = self.planner.put_together(replace(self.candidate, schedule=schedule), options)
        predicted = self.planner.predict(plan, self.least_seconds * BETTER)
        if predicted is not None and self._fits(predicted):
            self.best, self.least_seconds = predicted, predicted.predicted_seconds
            self.options, self.schedule = options, schedule

    def _fits(self, plan: Plan) -> bool:
        """Returns whether a plan fits by its instructions: stages of a rank seldom reach their depths together."""
        return is_within(self.planner, self.planner.predict_whole(plan))


def _options_of(planner: Planner, candidate: Candidate, plan: Plan) -> Options:
    """Returns the stages of a plan that was made from a candidate, with their recompute and depths."""
    sized, ends = planner.sized(plan.num_micro_batches), (*candidate.starts[1:], planner.tables.num_segments)
    return [
        Option(sized.held_by(i, j), s.ranks, s.in_flight, s.in_flight, s.needs_recompute, s.deferred)
        for i, j, s in zip(candidate.starts, ends, plan.stages, strict=True)
    ]
