"""Improves plans by moves that shorten the simulated step: cuts, ranks, micro-batches, depths, recompute, deferral."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

from autovaruna.planner.bounds.proof import PROVEN, WORTH
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator, Progress
from autovaruna.planner.memory.rank_memory import Option, fit
from autovaruna.planner.memory_fit import Found, choices_of, is_within
from autovaruna.planner.placement import changed_ranks
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search_space import nearby_counts, spread, variants
from autovaruna.schedule.pipeline import latency_depth, textbook_depth

_STEPS = (8, 4, 2, 1)
_RANKS, _ANYWHERE = len(_STEPS), len(_STEPS) + 1
_MOST_PLACES = 128
"""If cuts may be at no more places than this, all together, each is tried at all of them."""

Recut = Callable[[Planner, Candidate], Iterator[Candidate]]
"""Yields a candidate with cuts that suit its ranks."""


def improve_best(trials: Evaluator, most: int, most_seconds: float, recut: Recut, progress: Progress) -> None:
    """Changes the best plans by small steps: the simulated optimum is not quite that of the splits."""
    starts = trials.best_few(most)
    for k, candidate in enumerate(starts):
        progress("improving plans", k / len(starts))
        if not improve(trials, candidate, most_seconds / len(starts), recut):
            break


def improve(trials: Evaluator, start: Candidate, most_seconds: float, recut: Recut) -> bool:
    """Changes a candidate until no small change makes it better, or simulations took so many seconds.

    Cuts move by ever fewer segments; then ranks change places, and after each change that helps cuts move again. At
    last each cut is put anywhere: what crosses may be much less at a place that is far away.

    Returns:
        False if not even one simulation fits into the seconds.
    """
    planner = trials.planner
    problem, num_segments, seconds = planner.problem, planner.tables.num_segments, trials.ranked[start]
    limit = planner.spent_seconds + most_seconds
    if planner.spent_seconds + planner.step_costs(start) > limit:
        trials.was_cut_short = True
        return False
    level = 0
    while level <= _ANYWHERE:
        if level == _RANKS:
            near = _moved_ranks(planner, start, recut)
        elif level == _ANYWHERE:
            near = _cuts_anywhere(num_segments, start)
        else:
            near = _moved_cuts(problem, num_segments, start, _STEPS[level])
        better = None
        for other in near:
            if planner.spent_seconds > limit:
                trials.was_cut_short = True
                return True
            found = trials.attempt(other, seconds)
            if found < seconds:
                better, seconds = other, found
                break
        if better is None:
            level += 1
        else:
            start, level = better, min(level, _RANKS - 2)
    return True


def _moved_ranks(planner: Planner, start: Candidate, recut: Recut) -> Iterator[Candidate]:
    """Yields candidates with ranks in other places, with the same cuts and with those that suit them."""
    groups = tuple(dict.fromkeys(start.ranks))
    pattern = [groups.index(ranks) for ranks in start.ranks]
    for changed in changed_ranks(planner.problem, groups):
        other = replace(start, ranks=tuple(changed[group] for group in pattern))
        yield other
        yield from recut(planner, other)


def _moved_cuts(problem: Problem, num_segments: int, start: Candidate, step: int) -> Iterator[Candidate]:
    """Yields candidates with one cut moved, and with other numbers of micro-batches."""
    starts = start.starts
    bounds = [*starts, num_segments]
    for s in range(1, len(starts)):
        for moved in (starts[s] - step, starts[s] + step):
            if bounds[s - 1] < moved < bounds[s + 1]:
                yield _with_cut(start, s, moved)
    if step in (_STEPS[0], _STEPS[-1]):
        for count in nearby_counts(problem, start.num_micro_batches):
            yield replace(start, num_micro_batches=count)


def _cuts_anywhere(num_segments: int, start: Candidate) -> Iterator[Candidate]:
    """Yields candidates with one cut at every place between its neighbours, the nearest first, if these are few."""
    starts = start.starts
    bounds = [*starts, num_segments]
    if sum(bounds[s + 1] - bounds[s - 1] for s in range(1, len(starts))) > _MOST_PLACES:
        return
    for s in range(1, len(starts)):
        for place in sorted(range(bounds[s - 1] + 1, bounds[s + 1]), key=lambda place: abs(place - starts[s])):
            yield _with_cut(start, s, place)


def _with_cut(start: Candidate, stage: int, place: int) -> Candidate:
    """Returns the candidate with a stage that starts elsewhere."""
    return replace(start, starts=(*start.starts[:stage], place, *start.starts[stage + 1 :]))


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
