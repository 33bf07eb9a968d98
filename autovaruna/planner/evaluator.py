"""Simulates candidates under the memory limit, and remembers what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autovaruna.planner.candidate import DEEPEST, Candidate, Planner
from autovaruna.planner.prediction import SECONDS_OF_AN_ACT
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import variants

_LONG_SECONDS, _LONG_INTERLEAVED_SECONDS = 0.2, 0.02
_LONG_INTERLEAVED_VARIANTS = 2
"""The two orders made for several stages a rank: which one is better depends on recompute."""
_REACHED = 0.999
_LOOSE = 1.2
"""By its depths, a plan that fits by its instructions may need so many times its limits; seldom more."""
_WORTH_ITS_MEMORY = 0.995
"""What as many micro-batches in flight as there is memory for have to save."""

Settle = Callable[[Planner, Candidate, Plan], Plan | None]
"""Returns a plan, or one like it that holds what the first may not; None if there is none."""
Promising = tuple[float, Candidate, Plan]
"""What no depths and no schedule let a plan beat, the variant, and the plan."""
Progress = Callable[[str, float], None]
"""Is told what is being done and the share of it that is done (0 to 1)."""


class Evaluator:
    """What was tried; `best` is the fastest plan so far.

    Args:
        planner: of the problem.
        is_small: whether every schedule is worth a try.
        below_seconds: plans that take as long or longer are of no use.
        settle: what plans have to pass that need more memory by their depths than there is; None: they are not tried.

    Attributes:
        built: for each of `ranked`, the variant that takes so long, and its plan.
        ranked: the least seconds of each candidate that was faster than it had to be.
        promising: of small problems, the candidates that no depths and no schedule keep from being faster than they
            are by the rules for depths.
        is_deep: whether plans with as much in flight as there is memory for are tried, too.
        was_cut_short: whether something was left out since its simulation is long, or time was up.
    """

    def __init__(
        self, planner: Planner, *, is_small: bool, below_seconds: float = math.inf, settle: Settle | None = None
    ) -> None:
        self.planner, self.is_small, self.below_seconds, self.settle = planner, is_small, below_seconds, settle
        self.best: Plan | None = None
        self.built: dict[Candidate, tuple[Candidate, Plan]] = {}
        self.ranked: dict[Candidate, float] = {}
        self.seen: dict[Candidate, float] = {}
        self.promising: dict[Candidate, Promising] = {}
        self.was_cut_short = self.is_deep = False

    @property
    def least_seconds(self) -> float:
        """The seconds that a plan has to beat: those of the best one, if there is one."""
        return self.best.predicted_seconds if self.best else self.below_seconds

    def attempt(self, candidate: Candidate, below: float, worth: float = math.inf) -> float:
        """Simulates a candidate in every variant; returns its least seconds, infinite if they are not below `below`.

        Args:
            candidate: what to try.
            below: plans that take as long or longer are of no use.
            worth: nor are those that no depths and no schedule let take less than that.
        """
        if candidate in self.seen:
            return self.seen[candidate]
        found, bounds, fitting = float("inf"), dict[tuple[bool, ...], float](), list[Promising]()
        most, known = self._most_variants(candidate), list[tuple[Plan, Settle | None]]()
        for tried, (variant, plan, settle) in enumerate(self._plans(candidate)):
            if tried >= most and found < float("inf"):
                self.was_cut_short = True
                break
            if (plan, settle) in known:
                continue  # With few micro-batches, or little memory, variants are alike.
            known.append((plan, settle))
            recomputed = tuple(stage.needs_recompute for stage in plan.stages)
            if recomputed not in bounds:
                bounds[recomputed] = self.planner.bound(plan)  # It knows nothing of depths and schedules.
            if settle is None:
                fitting.append((bounds[recomputed], variant, plan))
            if bounds[recomputed] >= min(below, worth, found * _REACHED):
                if not any(recomputed):
                    break  # None of the others has less to do.
                continue
            limit = min(below, found * (_WORTH_ITS_MEMORY if variant.depth == DEEPEST else 1.0))
            predicted = self.planner.predict(plan, limit)
            if predicted and settle:
                predicted = settle(self.planner, variant, predicted)
            if predicted and predicted.predicted_seconds < limit:
                found = predicted.predicted_seconds
                self.best = predicted if found < self.least_seconds else self.best
                self.built[candidate] = variant, predicted
        self.seen[candidate] = found
        least = min(reversed(fitting), key=lambda each: each[0], default=None)  # Of equal ones the deepest.
        if self.is_small and least and least[0] < found * _REACHED:
            self.promising[candidate] = least
        else:
            self.promising.pop(candidate, None)
        if found < float("inf"):
            self.ranked[candidate] = found
        return found

    def go_deep(self, settle: Settle | None = None) -> None:
        """Has whatever is tried from now on tried at the greatest depths, too, and as if there was all memory."""
        self.is_deep, self.settle = True, settle or self.settle
        self.seen.clear()

    def put(self, candidate: Candidate, variant: Candidate, plan: Plan) -> None:
        """Notes a plan of a candidate that was built otherwise, if it is faster than what is known of it."""
        if plan.predicted_seconds < self.ranked[candidate]:
            self.ranked[candidate], self.built[candidate] = plan.predicted_seconds, (variant, plan)
            self.best = plan if plan.predicted_seconds < self.least_seconds else self.best

    def _most_variants(self, candidate: Candidate) -> float:
        """Returns how many variants to simulate: all, unless that takes long."""
        if not self.is_long(candidate):
            return math.inf
        return _LONG_INTERLEAVED_VARIANTS if candidate.is_interleaved else 1

    def _plans(self, candidate: Candidate) -> Iterator[tuple[Candidate, Plan, Settle | None]]:
        """Yields the variants of a candidate that are worth a simulation, with plans, and what these have to pass."""
        is_free = self.planner.problem.constraints.schedule == "auto" and not self.is_small
        built: dict[tuple[str, bool], list[tuple[Plan, Settle | None]]] = {}
        for depth, schedule in variants(self.planner.problem, len(candidate.starts), candidate.is_interleaved):
            if depth == DEEPEST and not self.is_deep:
                continue
            key, variant = (depth, schedule == "gpipe"), replace(candidate, depth=depth, schedule=schedule)
            if key not in built:
                built[key] = self._built(variant)
            for plan, settle in built[key]:
                is_like_1f1b = is_free and schedule == "varuna" and not any(s.needs_recompute for s in plan.stages)
                if not is_like_1f1b:
                    yield variant, replace(plan, schedule=schedule), settle

    def _built(self, variant: Candidate) -> list[tuple[Plan, Settle | None]]:
        """Returns the plan of a variant that fits into memory, and before it one that may fit."""
        plan, free = self.planner.build(variant), None
        if self.settle:
            loose = math.inf if variant.is_interleaved else _LOOSE
            free = self.planner.build(variant, [loose * limit for limit in self.planner.limits])
        plans = [(free, self.settle)] if free and free != plan else []
        return [*plans, (plan, None)] if plan else plans

    def few_if_long(self, candidates: list[Candidate]) -> list[Candidate]:
        """Returns the candidates, or, if their simulations are long, the one whose stages have the least bound."""
        if len(candidates) < 2 or not self.is_long(candidates[0]):
            return candidates
        plans = [(candidate, self.planner.build(candidate)) for candidate in candidates]
        bounds = {candidate: self.planner.bound(plan) for candidate, plan in plans if plan}
        return [min(bounds, key=bounds.__getitem__)] if bounds else []

    def is_long(self, candidate: Candidate) -> bool:
        """Returns whether a simulation of the candidate takes long."""
        replicas = min(len(ranks) for ranks in candidate.ranks)
        limit = _LONG_INTERLEAVED_SECONDS if candidate.is_interleaved else _LONG_SECONDS
        return is_long(len(candidate.starts), candidate.num_micro_batches, replicas, limit)

    def is_over(self, seconds: float, limit_seconds: float) -> bool:
        """Returns whether plans of so many seconds and more are not worth a try, or simulations took too long."""
        if seconds >= self.least_seconds:
            return True
        if self.best is None and self.below_seconds == math.inf:
            return False
        is_late = self.planner.spent_seconds > limit_seconds
        self.was_cut_short = self.was_cut_short or is_late
        return is_late

    def best_few(self, most: int) -> list[Candidate]:
        """Returns the best candidates: first of each number of stages, then of other ranks and micro-batches."""
        ordered = sorted(self.ranked, key=self.ranked.__getitem__)
        kinds: tuple[Callable[[Candidate], object], ...] = (
            lambda c: len(c.starts),
            lambda c: (c.num_micro_batches, c.ranks),
        )
        chosen: dict[Candidate, None] = {}
        for kind in kinds:
            chosen.update(dict.fromkeys({kind(candidate): candidate for candidate in reversed(ordered)}.values()))
        first = sorted(list(chosen)[:most], key=self.ranked.__getitem__)
        return [ordered[0], *(candidate for candidate in first if candidate != ordered[0])] if ordered else []


def is_long(num_stages: int, num_micro_batches: int, num_replicas: int, limit: float = _LONG_SECONDS) -> bool:
    """Returns whether the simulation of one replica of each stage takes long."""
    return 2 * num_micro_batches / num_replicas * num_stages * SECONDS_OF_AN_ACT > limit
