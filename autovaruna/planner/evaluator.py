"""Simulates candidates under the memory limit, and remembers what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.rank_memory import Choices, choices_of, is_within
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import variants

_LOOSER = (math.inf, *(1.35 - 0.02 * step for step in range(18)))
"""By its depths, a plan that fits by its instructions may need so many times its limits."""

NEAR, NEAR_OF_A_FORMULA = 1.06, 1.1
"""What takes no more than so many times the least seconds is looked at: by a simulation, or by a formula or a bound."""
Trial = tuple[Candidate, float]
"""A candidate, and the seconds that it has to beat."""


class Evaluator:
    """What was simulated.

    Attributes:
        best: the fastest plan so far.
        plans: the plans that fit and were as fast as they had to be, by candidates that say their depth and schedule.
    """

    def __init__(self, planner: Planner, *, has_every_variant: bool = False) -> None:
        """Begins with nothing; `has_every_variant`: no depth and no schedule is left out, whatever a candidate says."""
        self.planner, self._loose = planner, [_LOOSER[1] * limit for limit in planner.limits]
        self._has_every_variant = has_every_variant
        self.best: Plan | None = None
        self.plans: dict[Candidate, Plan] = {}
        self._seen: dict[Candidate, tuple[Candidate | None, float]] = {}

    @property
    def least_seconds(self) -> float:
        """The seconds of the best plan, infinite if there is none."""
        return self.best.predicted_seconds if self.best else math.inf

    def found(self, candidate: Candidate) -> Candidate | None:
        """Returns one of `plans`, what an attempt has found for a candidate; None: nothing that was fast enough."""
        return self._seen.get(self._asked(candidate), (None, 0.0))[0]

    def seconds_of(self, candidate: Candidate) -> float:
        """Returns the least seconds of a candidate, infinite if an attempt found nothing that was fast enough."""
        found = self.found(candidate)
        return self.plans[found].predicted_seconds if found else math.inf

    def attempt(self, candidate: Candidate, below: float = math.inf) -> None:
        """Simulates a candidate by every schedule, or the one that it says; keeps what takes less than `below`."""
        asked = self._asked(candidate)
        found, limit = self._seen.get(asked, (None, -math.inf))
        if found or below <= limit:
            return
        variant, plan = self._of_choices(asked, below) if asked.choices else self._fastest(asked, below)
        self._seen[asked] = self._seen[variant] = (variant if plan else None), below
        if plan and plan.predicted_seconds < self._known_seconds(variant):
            self.plans[variant] = plan
            self.best = plan if plan.predicted_seconds < self.least_seconds else self.best

    def _asked(self, candidate: Candidate) -> Candidate:
        return candidate.opened() if self._has_every_variant and not candidate.choices else candidate

    def _known_seconds(self, variant: Candidate) -> float:
        return self.plans[variant].predicted_seconds if variant in self.plans else math.inf

    def _of_choices(self, candidate: Candidate, below: float) -> tuple[Candidate, Plan | None]:
        self.planner.count_candidate()
        plan = self.planner.predict(self.planner.put_together(candidate, self.planner.fixed_options(candidate)), below)
        return candidate, plan if plan and self._fits(plan) else None

    def _fits(self, plan: Plan) -> bool:
        """Returns whether a plan fits, by its depths, or where these need more by its instructions."""
        limits = self.planner.limits
        return is_within(plan, limits) or is_within(self.planner.predict_whole(plan, is_quick=True), limits)

    def _fastest(self, candidate: Candidate, below: float) -> tuple[Candidate, Plan | None]:
        """Returns the fastest plan of a candidate in its variants, and which that is; None if none fits in time."""
        best, bounds = None, dict[tuple[bool, ...], float]()
        best_variant, built = candidate, list[tuple[Candidate, Plan]]()
        for each, plan in self._plans(candidate):
            if any(plan == other for _, other in built):
                continue  # With few micro-batches, or little memory, variants are alike.
            built.append((each, plan))
            key = tuple(stage.needs_recompute for stage in plan.stages)
            if key not in bounds:
                bounds[key] = self.planner.bound(plan)  # It knows nothing of depths and schedules.
            if bounds[key] >= below:
                continue
            predicted = self.planner.predict(plan, below)
            if predicted and self._fits(predicted):
                best, below, best_variant = predicted, predicted.predicted_seconds, each
        if not self._has_every_variant:
            built = [(best_variant, best)] if best else built[:1]
        for each, plan in built:
            if found := self._with_all_memory(each, plan, below):
                best, below, best_variant = found, found.predicted_seconds, each
        return best_variant, best

    def _with_all_memory(self, candidate: Candidate, plan: Plan, below: float) -> Plan | None:
        """Returns a faster plan of a variant, whose depths need more than there is: stages do not hold all at once."""
        limits, below = self.planner.limits, min(below, self.least_seconds)
        tried: tuple[Choices, ...] = ()
        for factor in _LOOSER:
            built = self.planner.build(candidate, [factor * limit for limit in limits])
            if built is None or self.planner.bound(built) >= below:
                return None
            choices = choices_of(built.stages)
            if choices == choices_of(plan.stages) and is_within(plan, limits):
                return None
            if choices == tried:
                continue
            tried = choices
            whole = self.planner.predict_whole(built, is_quick=True)
            if is_within(whole, limits):
                seconds = whole.predicted_seconds
                return replace(built, predicted_seconds=seconds) if seconds < below else None
        return None

    def _plans(self, candidate: Candidate) -> Iterator[tuple[Candidate, Plan]]:
        """Yields a candidate in all its variants, or the one that it says, with its plan; plans may be alike."""
        is_free = self.planner.problem.constraints.schedule == "auto"
        every = variants(self.planner.problem, len(candidate.starts), candidate.is_interleaved)
        built: dict[tuple[str, bool], Plan | None] = {}
        for depth, schedule in [(candidate.depth, candidate.schedule)] if candidate.is_fixed else every:
            variant = replace(candidate, depth=depth, schedule=schedule, is_fixed=True)
            key = depth, schedule == "gpipe"
            if key not in built:
                built[key] = self.planner.build(variant) or self.planner.build(variant, self._loose)
            plan = built[key]
            if plan and not (is_free and schedule == "varuna" and not any(s.needs_recompute for s in plan.stages)):
                yield variant, replace(plan, schedule=schedule)

    def best_of_each(self, kind: Callable[[Candidate], Hashable], near: float) -> list[Candidate]:
        """Returns the best of each kind that is not slower than `near` times the best, the fastest first."""
        ordered = sorted(self.plans, key=lambda each: self.plans[each].predicted_seconds)
        first: dict[Hashable, Candidate] = {}
        for candidate in ordered:
            if self.plans[candidate].predicted_seconds <= near * self.least_seconds:
                first.setdefault(kind(candidate), candidate)
        return list(first.values())
