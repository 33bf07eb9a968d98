"""Searches plans with one stage a rank: those that splits promise, what is near them, and of small problems all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import combinations
from math import comb

from autovaruna.planner.bounds.proof import PROVEN, Proof
from autovaruna.planner.candidate import Candidate, Planner
from autovaruna.planner.evaluator import Evaluator, Progress, is_long
from autovaruna.planner.exhaustive import GroupSearch
from autovaruna.planner.local_search import improve_best
from autovaruna.planner.problem import forced_stages
from autovaruna.planner.search_space import MAX_UNITS, stage_limit
from autovaruna.planner.splits import Even, Splitter, varied

_SMALL = 3000
_SPLIT_SECONDS, _FEWER_SECONDS, _CLIMB_SECONDS, _REST_SECONDS = 4.0, 1.0, 2.0, 4.0
"""What simulations may take, by the count of `Planner.spent_seconds`, so that a search ends alike on every machine."""
_PATIENCE_SECONDS = 1.0
"""What it may take to find the next better plan among all others: these are endless where a model has many blocks."""
_STARTS = 4
_NEAR, _NEAR_OF_FEW_RANKS = 1.03, 1.1


class SingleSearch:
    """A search of plans with one stage a rank.

    Args:
        trials: is given all that is tried.
        counts: the numbers of micro-batches in question.
        proof: hears what has been tried in full.
        progress: is told how far the search is.
    """

    def __init__(self, trials: Evaluator, counts: list[int], proof: Proof, progress: Progress) -> None:
        self.trials, self.counts, self.proof, self.progress = trials, counts, proof, progress
        self.planner = trials.planner
        self.problem, self.tables = self.planner.problem, self.planner.tables
        self.max_stages = stage_limit(self.problem, self.tables.num_segments)
        self.forced_stages = forced_stages(self.problem)

    def run(self) -> None:
        """Tries plans, if any has one stage a rank."""
        groups = self.problem.constraints.stage_ranks
        if groups and self._num_cuts() <= _SMALL:
            self.trials.go_deep()
            self._try_all(self._all_cuts(), "trying all cuts")
        elif groups or self.max_stages <= self.problem.cluster.num_ranks:
            self._try_promising()
            improve_best(self.trials, _STARTS, _CLIMB_SECONDS, self.recut, self.progress)
            self._try_deeper()
            self._try_fewer()
            if self.trials.is_small:
                self._try_rest()

    def recut(self, planner: Planner, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with the cuts that suit its ranks by the formula of the splits, if that is quick."""
        if self.problem.cluster.num_ranks <= MAX_UNITS:
            splitter = self._splitter(planner)
            for _, other in splitter.for_ranks(candidate.num_micro_batches, candidate.ranks):
                yield other

    def _try_all(self, candidates: Iterable[Candidate], what: str) -> None:
        everything = list(candidates)
        for k, candidate in enumerate(everything):
            self.progress(what, k / len(everything))
            self.trials.attempt(candidate, self.trials.least_seconds)

    def _try_promising(self) -> None:
        splitter = self._splitter(self.planner)
        if splitter.has_many_ranks and not self.problem.constraints.stage_ranks:
            self._try_many(splitter)
            return
        promising: list[tuple[float, Candidate]] = []
        for k, count in enumerate(self.counts):
            self.progress("splitting the model", k / len(self.counts))
            promising += splitter.splits(count)
        self._try_best_first(promising, "simulating plans")

    def _try_many(self, splitter: Splitter) -> None:
        """Goes through (stages, micro-batches) in the order of what even splits take, till none can be better."""
        evens, trials = splitter.even_splits(self.counts), self.trials
        self._try_evens(splitter, varied(evens) if is_long(*evens[0][1:]) else evens, _SPLIT_SECONDS)
        for count in sorted({candidate.num_micro_batches for candidate in trials.best_few(_STARTS)}):
            splits = splitter.unequal_replicas(count, trials.least_seconds * _NEAR_OF_FEW_RANKS)
            self._try_best_first(splits, "trying unequal replicas")

    def _try_fewer(self) -> None:
        """Tries fewer replicas than many ranks allow, and what is near them if that helps."""
        if self.problem.cluster.num_ranks <= MAX_UNITS or self.problem.constraints.stage_ranks:
            return
        splitter, before = self._splitter(self.planner), self.trials.least_seconds
        fewer = splitter.smaller_splits(self.counts)
        self._try_evens(splitter, fewer, self.planner.spent_seconds + _FEWER_SECONDS)
        if self.trials.least_seconds < before:
            improve_best(self.trials, _STARTS, _CLIMB_SECONDS, self.recut, self.progress)

    def _try_evens(self, splitter: Splitter, evens: list[Even], limit_seconds: float) -> None:
        trials = self.trials
        for k, even in enumerate(evens):
            self.progress("splitting the model", k / len(evens))
            if trials.is_over(even.seconds, limit_seconds):
                if even.seconds >= trials.least_seconds:
                    continue  # The order may be another than that of the seconds.
                break
            splits = splitter.equal_replicas(even, trials.least_seconds * _NEAR_OF_FEW_RANKS)
            for candidate in trials.few_if_long([each for _, each in splits]):
                trials.attempt(candidate, trials.least_seconds * _NEAR)

    def _try_best_first(self, promising: Iterable[tuple[float, Candidate]], what: str) -> None:
        ordered = sorted(promising, key=lambda pair: pair[0])
        for k, (seconds, candidate) in enumerate(ordered):
            self.progress(what, k / len(ordered))
            if self.trials.is_over(seconds * 0.98, _SPLIT_SECONDS):
                break
            is_small = self.problem.cluster.num_ranks <= MAX_UNITS
            self.trials.attempt(candidate, self.trials.least_seconds * (_NEAR_OF_FEW_RANKS if is_small else _NEAR))

    def _try_deeper(self) -> None:
        """Tries the best plans with more in flight, and what is near them if that helps."""
        trials, before = self.trials, self.trials.least_seconds
        trials.go_deep()
        for candidate in trials.best_few(_STARTS):
            trials.attempt(candidate, trials.ranked[candidate])
        if trials.least_seconds < before:
            improve_best(trials, _STARTS, _CLIMB_SECONDS, self.recut, self.progress)

    def _num_cuts(self) -> int:
        return comb(self.tables.num_segments - 1, self.forced_stages - 1) * len(self.counts)

    def _all_cuts(self) -> Iterator[Candidate]:
        for count in self.counts:
            for inner in combinations(range(1, self.tables.num_segments), self.forced_stages - 1):
                yield Candidate((0, *inner), self.problem.constraints.stage_ranks, count)

    def _try_rest(self) -> None:
        """Tries all plans whose bound leaves room for something better, the least bound first."""
        groups = {count: GroupSearch(self.planner.sized(count), self.forced_stages) for count in self.counts}
        self.proof.groups = groups
        start, first = self.planner.spent_seconds, self.trials.least_seconds
        limit, better = start + _REST_SECONDS, start
        open_counts = [each for each in groups.values() if each.least_seconds < first * PROVEN]
        for seconds, candidate in merge(*(each.in_order() for each in open_counts), key=lambda pair: pair[0]):
            if seconds >= self.trials.least_seconds * PROVEN:
                break
            spent = self.planner.count_candidate()
            if spent > min(limit, better + _PATIENCE_SECONDS):
                return
            self.progress("trying all other plans", (spent - start) / _REST_SECONDS)
            least = self.trials.least_seconds
            self.trials.attempt(candidate, least * _NEAR, least * PROVEN)
            better = spent if self.trials.least_seconds < least else better
        self.proof.is_complete = True

    def _splitter(self, planner: Planner) -> Splitter:
        return Splitter(planner, self.max_stages, self.forced_stages, len(self.counts))
