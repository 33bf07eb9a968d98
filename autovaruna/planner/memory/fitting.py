"""Fits stages into the memory of their ranks: fewer deferred weight gradients, recompute, then a smaller depth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.records import Peak, together
from autovaruna.planner.sized import Sized


class Option(NamedTuple):
    """A stage while its recompute and depths are still open.

    The in-flight depth goes down to `least_in_flight`, what is deferred to 0. With `spares_recompute`
    no stage recomputes if smaller depths are enough. A replica is short if it has one micro-batch less than others.
    """

    held: Holdings[float]
    ranks: tuple[int, ...]
    in_flight: int
    least_in_flight: int
    needs_recompute: bool
    deferred: int = 0
    spares_recompute: bool = False
    is_short: bool = False


Share = tuple[int, bool]
"""A stage of a rank, and whether the rank is a short replica of it."""


def fit(sized: Sized, options: Sequence[Option], limits: Sequence[float]) -> list[Option] | None:
    """Saves memory where a rank has less than its limit asks for; returns None if there is no way."""
    fitted = list(options)
    for shared, limit in _tightest(sized, options, limits).items():
        found = _fit_rank(sized, _of_rank(fitted, shared), limit)
        if found is None:
            return None
        for (stage, _), option in zip(shared, found, strict=True):
            fitted[stage] = option._replace(is_short=False)
    return fitted


def fits(sized: Sized, options: Sequence[Option], limits: Sequence[float]) -> bool:
    """Returns whether the stages fit into the memory of their ranks as they are."""
    tightest = _tightest(sized, options, limits)
    return all(_total(sized, _of_rank(options, shared)) <= limit for shared, limit in tightest.items())


def _of_rank(options: Sequence[Option], shared: Sequence[Share]) -> list[Option]:
    return [options[stage]._replace(is_short=True) if is_short else options[stage] for stage, is_short in shared]


def _tightest(sized: Sized, options: Sequence[Option], limits: Sequence[float]) -> dict[tuple[Share, ...], float]:
    """Returns the least limit of the ranks that hold the same stages, with as many micro-batches, by these stages."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for stage, option in enumerate(options):
        groups.setdefault(option.ranks, []).append(stage)
    tightest: dict[tuple[Share, ...], float] = {}
    if len(set().union(*groups)) == sum(map(len, groups)):  # stages share all their ranks, or none
        for ranks, stages in groups.items():
            full = _num_full(sized, len(ranks))
            limit = tightest[tuple((stage, False) for stage in stages)] = min(map(limits.__getitem__, ranks[:full]))
            short_limit = min(map(limits.__getitem__, ranks[full:]), default=limit)
            if short_limit < limit:
                tightest[tuple((stage, True) for stage in stages)] = short_limit
        return tightest
    held: dict[int, list[Share]] = {}
    for stage, option in enumerate(options):
        full = _num_full(sized, len(option.ranks))
        for place, rank in enumerate(option.ranks):
            held.setdefault(rank, []).append((stage, place >= full))
    for rank, shared in held.items():
        tightest[tuple(shared)] = min(tightest.get(tuple(shared), limits[rank]), limits[rank])
    return tightest


def _num_full(sized: Sized, num_replicas: int) -> int:
    """Returns how many replicas have the most micro-batches; they come first."""
    return sized.num_micro_batches % num_replicas or num_replicas


def peak_of(sized: Sized, option: Option) -> Peak:
    """Returns the peak of a stage on one replica."""
    held, ranks, in_flight, _, needs_recompute, deferred, _, is_short = option
    return sized.peaks.of(held, needs_recompute, deferred, in_flight, len(ranks), is_short=is_short)


def _fit_rank(sized: Sized, options: list[Option], limit: float) -> list[Option] | None:
    """Fits the stages of one rank: they defer less; if that is not enough, they hold less, and defer what is left."""
    fitted = _with_less_deferred(sized, options, limit)
    if _total(sized, fitted) <= limit:
        return fitted
    smaller = _holding_less(sized, fitted, limit)
    if smaller is None:
        return None
    again = [each._replace(deferred=option.deferred) for each, option in zip(smaller, options, strict=True)]
    return _with_less_deferred(sized, again, limit)


def _with_less_deferred(sized: Sized, options: Sequence[Option], limit: float) -> list[Option]:
    """Returns the options with as much deferred as there is memory for, at most as much as they have."""
    most = max(option.deferred for option in options)
    less = bisect_left(range(most), True, key=lambda less: _total(sized, _deferring(options, less)) <= limit)
    return _deferring(options, less)


def _holding_less(sized: Sized, options: list[Option], limit: float) -> list[Option] | None:
    """Has those stages recompute that save most by it, then lowers depths; the latter alone if recompute is spared."""
    if any(option.spares_recompute for option in options):
        shallow = _with_less_in_flight(sized, options, limit)
        if shallow is not None:
            return shallow
    while _total(sized, options) > limit:
        savings = [_recompute_saving(sized, option) for option in options]
        most = max(range(len(options)), key=savings.__getitem__)
        if savings[most] <= 0:
            return _with_less_in_flight(sized, options, limit)
        options[most] = options[most]._replace(needs_recompute=True)
    return options


def _recompute_saving(sized: Sized, option: Option) -> float:
    if option.needs_recompute or True not in sized.recompute_choices:
        return 0.0
    with_recompute = option._replace(needs_recompute=True)
    return peak_of(sized, option).num_bytes - peak_of(sized, with_recompute).num_bytes


def _with_less_in_flight(sized: Sized, options: list[Option], limit: float) -> list[Option] | None:
    """Lowers the depths to the greatest one that fits for all, and lets stages keep one more where there is room."""
    deepest = max(option.in_flight for option in options)
    depth = deepest - bisect_left(
        range(deepest), True, key=lambda less: _total(sized, _lowered(options, deepest - less)) <= limit
    )
    if depth == 0:
        return None
    fitted = _lowered(options, depth)
    for k, option in enumerate(options):
        more = [*fitted[:k], *_lowered([option], depth + 1), *fitted[k + 1 :]]
        fitted = more if _total(sized, more) <= limit else fitted
    return fitted


def _deferring(options: Sequence[Option], less: int) -> list[Option]:
    """Returns the options with so much less deferred; with nothing left, backward is not split."""
    return [o._replace(deferred=max(o.deferred - less, 0)) if less else o for o in options]


def _lowered(options: Iterable[Option], depth: int) -> list[Option]:
    """Returns the options with a depth no greater than given, as far as it may be lowered."""
    return [o._replace(in_flight=min(o.in_flight, max(depth, o.least_in_flight))) for o in options]


def _total(sized: Sized, options: Sequence[Option]) -> float:
    """Returns the peak of one rank: its stages together, in one process."""
    return together(peak_of(sized, option) for option in options)
