"""Counts the ranks that a split needs to end in time; what two answers agree on is not worked out again.

Every range of segments needs a replica or more to end within T seconds, and the fewer the greater T is. A range that
needs as many for a T that is too short as for one that is long enough needs as many for all between. So while T is
bisected, ever fewer ranges have to be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.bounds.ways import Way
from autovaruna.planner.costs import Array


class Needs(Protocol):
    """The fewest replicas of some ranges, one entry a range."""

    def at(self, seconds: float) -> Array:
        """Returns the fewest replicas that end in so many seconds, infinite if none do; never more for more seconds."""

    def only(self, which: NDArray[np.bool_]) -> Needs:
        """Returns the same of some of the ranges."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Needs by what each number of replicas takes, the greatest number first."""

    seconds: Sequence[tuple[int, Array]]

    def at(self, seconds: float) -> Array:
        """Returns the fewest replicas that end in so many seconds."""
        needed = np.full(len(self.seconds[0][1]), np.inf)
        for replicas, each in self.seconds:
            needed[each <= seconds] = replicas
        return needed

    def only(self, which: NDArray[np.bool_]) -> Listed:
        """Returns the same of some of the ranges."""
        return Listed([(replicas, each[which]) for replicas, each in self.seconds])


@dataclass(frozen=True, slots=True)
class Computed:
    """Needs by the share of the micro-batches that one replica finishes in time.

    Attributes:
        num_micro_batches: M.
        alone: seconds on one replica.
        reserved: seconds before and after the work.
        ways: the ways to run each range.
        whole_reserved, whole_ways: another bound of the same kind, if there is one.
    """

    num_micro_batches: int
    alone: Array
    reserved: Array
    ways: Sequence[Way]
    whole_reserved: Array | None = None
    whole_ways: Sequence[Way] = ()

    def at(self, seconds: float) -> Array:
        """Returns the fewest replicas that end in so many seconds."""
        spare = seconds - self.reserved
        share = np.maximum.reduce([way.greatest_share(spare) for way in self.ways])
        if self.whole_reserved is not None:
            spare = seconds - self.whole_reserved
            share = np.minimum(share, np.maximum.reduce([way.busy_share(spare) for way in self.whole_ways]))
        with np.errstate(divide="ignore"):
            several = np.maximum(np.ceil(self.num_micro_batches / share), 2.0)
        needed = np.where((share >= 1) & (spare >= 0), several, np.inf)
        return np.where(self.alone <= seconds, 1.0, needed)

    def only(self, which: NDArray[np.bool_]) -> Computed:
        """Returns the same of some of the ranges."""
        return Computed(
            self.num_micro_batches,
            self.alone[which],
            self.reserved[which],
            [way.only(which) for way in self.ways],
            None if self.whole_reserved is None else self.whole_reserved[which],
            [way.only(which) for way in self.whole_ways],
        )


class Demand:
    """Says whether ranks suffice for splits that end in time.

    Args:
        needs: of all ranges, row by row.
        places: ``i * (n + 1) + j`` of each range.
        num_segments: n.
        num_stages: of the split; 0: any number.
        num_ranks: how many ranks there are.
    """

    def __init__(
        self, needs: Needs, places: NDArray[np.int64], num_segments: int, num_stages: int, num_ranks: int
    ) -> None:
        self.needs, self.places, self.num_stages, self.num_ranks = needs, places, num_stages, num_ranks
        self.table = np.full((num_segments + 1, num_segments + 1), np.inf)
        self.short = np.full(len(places), np.inf)  # what is needed in too few seconds: no time, no split
        self.long = np.zeros(len(places))  # what is needed in enough seconds, as far as is known

    def is_met(self, seconds: float) -> bool:
        """Returns whether some split ends in so many seconds.

        Args:
            seconds: more than have been too few, fewer than have been enough.
        """
        needed = self.needs.at(seconds)
        needed[needed > self.num_ranks] = np.inf
        self.table.ravel()[self.places] = needed
        is_met = _fewest(self.table, self.num_stages) <= self.num_ranks
        if is_met:
            self.long = needed
        else:
            self.short = needed
        self._close(self.short != self.long)
        return is_met

    def _close(self, is_open: NDArray[np.bool_]) -> None:
        """Lets go of ranges that need as many whatever else is asked; the table keeps what they need."""
        if not is_open.all():
            self.needs, self.places = self.needs.only(is_open), self.places[is_open]
            self.short, self.long = self.short[is_open], self.long[is_open]


def _fewest(need: Array, num_stages: int) -> float:
    """Returns the fewest ranks of a split into `num_stages` stages (0: any number)."""
    n = need.shape[0] - 1
    if num_stages:
        best = np.full(n + 1, np.inf)
        best[n] = 0.0
        for _ in range(num_stages):
            best = (need + best[None, :]).min(axis=1)
        return float(best[0])
    best = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        best[i] = (need[i, i + 1 :] + best[i + 1 :]).min()
    return float(best[0])
