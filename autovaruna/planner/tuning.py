"""Changes depths, recompute and deferral of single stages of the best plans, where that makes their steps shorter.

While it searches, the planner gives all stages of a plan depths by one rule, and has those recompute that lack memory
for them. What is best for one stage depends on the others: one that recomputes may hold more in flight, one that does
not takes less time for each. So the best plans, and those hardly slower, are changed stage by stage, and all stages at
once, as long as that helps; every change is simulated, and held against the memory of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from autovaruna.planner.bounds.proof import WORTH
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.memory.fitting import Option, fit, fits
from autovaruna.planner.options import spread, variants
from autovaruna.planner.problem import SPLIT_SCHEDULE
from autovaruna.planner.records import Plan
from autovaruna.planner.settling import Found, excess_bytes, that_fits
from autovaruna.schedule import latency_depth, textbook_depth

NEAR, _MOST_PLANS = 1.05, 12
BETTER = 0.9995
"""What a change has to save: a plan by rule is easier to understand than one that is hardly faster."""
_SHARE_OF_A_ROUND = 0.1
"""Plans are left as they are if it takes a greater share of the time to simulate one change of each stage."""
_RATIO = 1.5
"""Of many depths, or of much that may be deferred, each that is tried is greater than the one before by this."""
_MOST_TOGETHER = 512
"""Ways of all stages together of which all are tried."""

Options = Sequence[Option]


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
        if planner.step_costs(candidate) * plan.num_stages > most_seconds * _SHARE_OF_A_ROUND:
            continue
        best = Tuning(planner, candidate, plan, ends[id(planner)]).run()
        if best is not None:
            better.append((planner, candidate, best))
            least = min(least, best.predicted_seconds)
    return sorted([*better, *found], key=_seconds)


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
        plan: the plan.
        end: when to stop, by the planner's count.
        below: plans that take as long or longer are of no use; whether they fit by their instructions is not asked.
    """

    def __init__(self, planner: Planner, candidate: Candidate, plan: Plan, end: float, below: float = math.inf) -> None:
        self.planner, self.problem, self.candidate, self.end = planner, planner.problem, candidate, end
        self.below, self.settled, self.excess = below, None, 0.0
        predicted = planner.predict(plan)
        assert predicted is not None, "nothing is asked of the plan"
        self.least_seconds = predicted.predicted_seconds
        self.is_loose = candidate.is_interleaved or candidate.schedule == SPLIT_SCHEDULE
        """Whether stages may fit together that would not if each held at once all that it may."""
        if self.is_loose or self.least_seconds < below:
            self.settled = that_fits(planner, candidate, plan)
            self.least_seconds = self.settled.predicted_seconds if self.settled else below
            self.excess = 0.0 if self.settled else excess_bytes(planner, planner.predict_whole(plan))
        self.best: Plan | None = None
        plan, self.sized = self.settled or plan, planner.sized(plan.num_micro_batches)
        self.cost, self.limits = planner.step_costs(candidate), self.problem.cluster.memory_bytes
        self.counts = [len(stage.ranks) for stage in plan.stages]
        self.shares = [-(-plan.num_micro_batches // count) for count in self.counts]
        self.options, self.schedule = _options_of(planner, candidate, plan), plan.schedule
        pairs = variants(self.problem, len(self.counts), candidate.is_interleaved)
        self.all_schedules = list(dict.fromkeys(schedule for _, schedule in pairs))
        self.tried = {(plan.schedule, _choices(self.options))}

    def run(self) -> Plan | None:
        """Returns a faster plan, None if there is none; any that fits, if the plan itself does not."""
        while True:
            before = self.least_seconds, self.excess
            for schedule, options in self._changes():
                self._try(schedule, options)
            if (self.least_seconds, self.excess) == before:
                return self.best

    def _try(self, schedule: str, options: Options) -> None:
        """Takes other options if the plan is faster with them, or, while it does not fit, lacks less memory."""
        key = schedule, _choices(options)
        if key in self.tried or self.planner.count_candidate() + self.cost > self.end:
            return
        self.tried.add(key)
        if self.is_loose or fits(self.sized, options, self.limits):
            plan = self.planner.put_together(replace(self.candidate, schedule=schedule), options)
            predicted = self.planner.predict(plan, self.least_seconds * BETTER)
            if predicted is not None and self._lacks_less(predicted):
                self.options, self.schedule = list(options), schedule

    def _lacks_less(self, plan: Plan) -> bool:
        """Returns whether a plan fits by its instructions, or nothing did yet and it lacks less memory.

        By depths alone it may not fit: stages of one rank seldom reach their depths together, nor does a stage hold
        and defer as much as it may at the same time.
        """
        if plan.predicted_seconds >= self.below and not self.is_loose:
            self.least_seconds = plan.predicted_seconds
            return True
        enough = () if self.excess else self.limits  # Else how much is missing tells nothing.
        excess = excess_bytes(self.planner, self.planner.predict_whole(plan, enough))
        if not excess:
            self.best, self.least_seconds = plan, plan.predicted_seconds
        is_less = not excess or excess < self.excess
        self.excess = min(self.excess, excess)
        return is_less

    def _changes(self) -> Iterator[tuple[str, Options]]:
        """Yields the plan with single stages changed, with all of them changed, and in other orders.

        What is best may have two stages changed of which neither is of use alone: if they are few, all ways of all
        stages come first, at least those that leave recompute as it is.
        """
        ways = [list(self._ways(stage)) for stage in range(len(self.shares))]
        pairs = list(zip(ways, self.options, strict=True))
        alike = [[way for way in own if way.needs_recompute == now.needs_recompute] for own, now in pairs]
        for some in (alike, ways):
            if math.prod(map(len, some)) <= _MOST_TOGETHER:
                for together in product(*some):
                    yield self.schedule, together
        for stage, own in enumerate(ways):
            for option in own:
                yield self.schedule, [*self.options[:stage], option, *self.options[stage + 1 :]]
        for options in (*self._all_changed(), self.options):
            for schedule in self._schedules(options):
                yield schedule, options

    def _ways(self, stage: int) -> Iterator[Option]:
        """Yields a stage with other recompute, depths and deferral."""
        now, share = self.options[stage], self.shares[stage]
        near = {now.in_flight + change for change in (-1, 0, 1)} | set(spread(1, share, _RATIO))
        depths = [now.in_flight] if self._has_fixed_depths() else sorted(near & set(range(1, share + 1)), reverse=True)
        for again, depth, deferred in product(self.sized.recompute_choices, depths, self._deferrals(stage)):
            yield now._replace(needs_recompute=again, in_flight=depth, deferred=deferred)

    def _deferrals(self, stage: int) -> list[int]:
        """Returns how many backwards of a stage may leave weight gradients for later; 0 if it is not split."""
        most = self.planner.most_deferred(self.candidate, stage, self.counts)
        return [0, *spread(1, max(most, self.shares[stage]), _RATIO)] if most else [0]

    def _all_changed(self) -> Iterator[Options]:
        """Yields the plan with depths by a rule, as far as there is memory, and recompute of one stage as it is not."""
        if self._has_fixed_depths():
            return
        stages = range(len(self.shares))
        for rule in _RULES:
            deep = [
                option._replace(in_flight=max(1, min(rule(len(stages), s, self.counts), self.shares[s])))
                for s, option in enumerate(self.options)
            ]
            for stage in (*stages, None):
                yield from self._fitted(deep, stage)

    def _fitted(self, options: Options, stage: int | None) -> Iterator[Options]:
        """Yields options with as much in flight as there is memory for, and one stage's recompute changed."""
        open_options = [option._replace(least_in_flight=1, spares_recompute=True) for option in options]
        if stage is not None:
            again = not options[stage].needs_recompute
            if again not in self.sized.recompute_choices:
                return
            open_options[stage] = open_options[stage]._replace(needs_recompute=again)
        fitted = fit(self.sized, open_options, self.limits)
        if fitted is not None:
            yield fitted

    def _has_fixed_depths(self) -> bool:
        return bool(self.problem.constraints.in_flight) or self.schedule == "gpipe"

    def _schedules(self, options: Options) -> list[str]:
        """Returns the schedules that options may run by."""
        if all(option.in_flight >= share for option, share in zip(options, self.shares, strict=True)):
            return [*self.all_schedules, *(["gpipe"] if self.problem.constraints.schedule == "auto" else [])]
        return [each for each in self.all_schedules if each != "gpipe"]


def _options_of(planner: Planner, candidate: Candidate, plan: Plan) -> list[Option]:
    """Returns the stages of a plan that was made from a candidate, with their recompute and depths."""
    sized, ends = planner.sized(plan.num_micro_batches), (*candidate.starts[1:], planner.tables.num_segments)
    return [
        Option(sized.held_by(i, j), s.ranks, s.in_flight, s.in_flight, s.needs_recompute, s.deferred)
        for i, j, s in zip(candidate.starts, ends, plan.stages, strict=True)
    ]


def _choices(options: Options) -> tuple[tuple[bool, int, int], ...]:
    return tuple((option.needs_recompute, option.in_flight, option.deferred) for option in options)


def _deepest(num_stages: int, stage: int, counts: Sequence[int]) -> int:
    return _MANY


def _one_more(num_stages: int, stage: int, counts: Sequence[int]) -> int:
    return textbook_depth(num_stages, stage, counts) + 1


_MANY = 1 << 30
_RULES = (textbook_depth, _one_more, latency_depth, _deepest)
