"""Lists how a plan may be changed: depths, recompute and deferral of its stages, and the order of instructions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.memory.fitting import Option, fit
from autovaruna.planner.options import spread, variants
from autovaruna.schedule import latency_depth, textbook_depth

_RATIO = 1.5
"""Of many depths, or of much that may be deferred, each that is tried is greater than the one before by this."""
_MOST_TOGETHER = 512
"""Ways of all stages together of which all are tried."""

Options = Sequence[Option]
Change = tuple[str, Mapping[int, Option]]
"""A schedule, none if it stays as it is, and stages in other ways."""


class Changes:
    """How plans of one candidate may be changed.

    Args:
        planner: of the problem.
        candidate: one of its variants.
    """

    def __init__(self, planner: Planner, candidate: Candidate) -> None:
        self.planner, self.candidate, self.constraints = planner, candidate, planner.problem.constraints
        self.sized = planner.sized(candidate.num_micro_batches)
        self.counts = [len(ranks) for ranks in candidate.ranks]
        self.shares = [-(-candidate.num_micro_batches // count) for count in self.counts]
        pairs = variants(planner.problem, len(self.counts), candidate.is_interleaved)
        more = ["gpipe"] if self.constraints.schedule == "auto" else []
        self.schedules = tuple(dict.fromkeys([*(schedule for _, schedule in pairs), *more]))

    def may_run(self, schedule: str, options: Options) -> bool:
        """Returns whether options are deep enough for a schedule."""
        shares = zip(options, self.shares, strict=True)
        return schedule != "gpipe" or all(option.in_flight >= share for option, share in shares)

    def together(self, schedule: str, options: Options) -> Iterator[Change]:
        """Yields all ways of all stages, or all that leave recompute as it is, by every schedule, if they are few.

        What is best may have two stages changed of which neither is of use alone.
        """
        for ways in self._ways_of_all(schedule, options):
            if math.prod(map(len, ways)) <= _MOST_TOGETHER:
                for chosen in product(*ways):
                    for each in self.schedules:
                        yield each, dict(enumerate(chosen))

    def of_a_stage(self, schedule: str, options: Options) -> Iterator[Change]:
        """Yields each stage in other ways."""
        for stage in range(len(options)):
            for way in self._ways(schedule, options, stage):
                yield "", {stage: way}

    def of_all_stages(self, schedule: str, options: Options) -> Iterator[Change]:
        """Yields depths by a rule, as far as there is memory, and recompute of one stage changed; then schedules."""
        for fitted in () if self._has_fixed_depths(schedule) else self._by_rules(options):
            for each in self.schedules:
                yield each, dict(enumerate(fitted))
        for each in self.schedules:
            yield each, {}

    def of_two_stages(self, schedule: str, options: Options, most: float) -> Iterator[Change]:
        """Yields every two stages in other ways: those that leave recompute as it is, and all, if they are not more."""
        for ways in self._ways_of_all(schedule, options):
            pairs = list(combinations(range(len(ways)), 2))
            if sum(len(ways[a]) * len(ways[b]) for a, b in pairs) <= most:
                for a, b in pairs:
                    for one, other in product(ways[a], ways[b]):
                        yield "", {a: one, b: other}

    def _ways_of_all(self, schedule: str, options: Options) -> tuple[list[list[Option]], list[list[Option]]]:
        """Returns each stage in other ways: first those that leave recompute as it is, then all."""
        ways = [list(self._ways(schedule, options, stage)) for stage in range(len(options))]
        pairs = zip(ways, options, strict=True)
        return [[way for way in own if way.needs_recompute == now.needs_recompute] for own, now in pairs], ways

    def _ways(self, schedule: str, options: Options, stage: int) -> Iterator[Option]:
        """Yields a stage with other recompute, depths and deferral."""
        now, share = options[stage], self.shares[stage]
        near = {now.in_flight + change for change in (-1, 0, 1)} | set(spread(1, share, _RATIO))
        depths = sorted(near & set(range(1, share + 1)), reverse=True)
        if self._has_fixed_depths(schedule):
            depths = [now.in_flight]
        for again, depth, deferred in product(self.sized.recompute_choices, depths, self._deferrals(stage)):
            yield now._replace(needs_recompute=again, in_flight=depth, deferred=deferred)

    def _deferrals(self, stage: int) -> list[int]:
        """Returns how many backwards of a stage may leave weight gradients for later; 0 if it is not split."""
        most = self.planner.most_deferred(self.candidate, stage, self.counts)
        return [0, *spread(1, max(most, self.shares[stage]), _RATIO)] if most else [0]

    def _by_rules(self, options: Options) -> Iterator[Options]:
        """Yields depths by each rule, as far as there is memory, with recompute of one stage changed, and of none."""
        stages = range(len(options))
        for rule in _RULES:
            deep = [
                option._replace(in_flight=max(1, min(rule(len(stages), s, self.counts), self.shares[s])))
                for s, option in enumerate(options)
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
        fitted = fit(self.sized, open_options, self.planner.limits)
        if fitted is not None:
            yield fitted

    def _has_fixed_depths(self, schedule: str) -> bool:
        return bool(self.constraints.in_flight) or schedule == "gpipe"


def _deepest(num_stages: int, stage: int, counts: Sequence[int]) -> int:
    return _MANY


def _one_more(num_stages: int, stage: int, counts: Sequence[int]) -> int:
    return textbook_depth(num_stages, stage, counts) + 1


_MANY = 1 << 30
_RULES = (textbook_depth, _one_more, latency_depth, _deepest)
