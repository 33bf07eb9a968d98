"""Says what room a limit on all loads leaves for what crosses at each boundary between devices."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.cut_limits import CutLimits, CutList
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.shares import Shares
from autovaruna.planner.partition.words import Bools, Floats


@dataclass(frozen=True, slots=True)
class Side:
    """What is asked of the devices on one side of a boundary.

    Attributes:
        limits: on the cuts of the boundary.
        row: the resource that nets use.
        is_before: whether it is the side before the boundary.
        least: what they pay at least, if prices are not negative.
        most: what they may pay.
    """

    limits: CutLimits
    row: int
    is_before: bool
    least: float
    most: float

    def limits_with(self, extra: float) -> CutLimits:
        """Returns the limits when this side pays no more than `extra` above the least."""
        name = "before" if self.is_before else "after"
        figures = getattr(self.limits, name).copy()
        figures[self.row] = min(self.most, self.least + extra)
        most_price = min(self.limits.most_price, extra)
        return dataclasses.replace(self.limits, most_price=most_price, **{name: figures})


class Room:
    """What a limit leaves.

    Attributes:
        least: a price below which a boundary has no cut, shape (boundaries,); depends on the shares.
        least_before: what the devices before a boundary pay at least for their blocks and by the shares, whatever its
            cut, shape (boundaries,); depends on the shares.
        least_after: what those after it pay at least, less what boundaries after it cost.
    """

    def __init__(self, shares: Shares, resources: Resources, load: float, spare_seconds: float) -> None:
        """Takes a limit.

        Args:
            shares: of the nets.
            resources: of the blocks.
            load: the limit in seconds.
            spare_seconds: what the devices hold together besides the blocks.
        """
        self._shares, self._resources = shares, resources
        self._limits = resources.limits(load)
        self._totals = resources.use.sum(axis=1)
        self._spare = spare_seconds
        self._num_devices = len(shares.shares) + 1
        self._row = int(np.flatnonzero(resources.crossing > 0)[0])
        self.least: Floats = np.zeros(len(shares.shares))
        self.least_before: Floats = np.full(len(shares.shares), -math.inf)
        self.least_after: Floats = np.full(len(shares.shares), -math.inf)

    @property
    def is_over(self) -> bool:
        """Whether even the blocks alone are too much for all devices together."""
        return self._left() < 0

    def most_price(self, boundary: int) -> float:
        """Returns the greatest price that leaves room for all other boundaries."""
        return self._left() - float(np.delete(self.least, boundary).sum())

    def holds(self, boundary: int) -> bool:
        """Tells whether the least price of a boundary leaves room for all others."""
        return bool(self.least[boundary] <= self.most_price(boundary))

    def limits(self, boundary: int, most_price: float) -> CutLimits:
        """Returns the limits on the cuts of a boundary, with a price of at most `most_price`."""
        before, after = boundary + 1, self._num_devices - boundary - 1
        crossing, limits = self._resources.crossing, self._limits
        most_before = before * limits - crossing * self.least[:boundary].sum()
        most_after = after * limits - crossing * self.least[boundary + 1 :].sum()
        most_one = float(limits[self._row] + self._totals[self._row])
        if boundary > 0:
            most_before[self._row] = min(most_before[self._row], most_one - self.least_after[boundary - 1])
        if after > 1:
            most_after[self._row] = min(most_after[self._row], most_one - self.least_before[boundary + 1])
        return CutLimits(
            prices=self._shares.prices(boundary),
            shares=self._shares.sides(boundary),
            most_price=min(most_price, self.most_price(boundary)),
            before=most_before,
            after=most_after,
            most_before=before * limits,
            most_after=after * limits,
        )

    def keep(self, boundary: int, cuts: CutList) -> CutList:
        """Returns those of some cuts of a boundary that there is room for."""
        limits = self.limits(boundary, math.inf)
        return cuts.pick(limits.keep(cuts.use, cuts.price, cuts.share, self._resources))

    def forget(self) -> None:
        """Drops what depends on the shares."""
        self.least = np.zeros_like(self.least)
        self.least_before = np.full_like(self.least, -math.inf)
        self.least_after = np.full_like(self.least, -math.inf)

    def note(self, boundary: int, cuts: CutList) -> None:
        """Takes what all cuts of a boundary that there is room for have in common."""
        self.least[boundary] = max(self.least[boundary], cuts.price.min(initial=math.inf))
        before = cuts.use[self._row] + cuts.share
        after = self._totals[self._row] - cuts.use[self._row] + cuts.price - cuts.share
        self.least_before[boundary] = max(self.least_before[boundary], before.min(initial=math.inf))
        self.least_after[boundary] = max(self.least_after[boundary], after.min(initial=math.inf))

    def sides(self, boundary: int) -> list[Side]:
        """Returns what is asked of either side of a boundary, that after it first."""
        limits, total = self.limits(boundary, math.inf), float(self._totals[self._row])
        before, after = float(limits.before[self._row]), float(limits.after[self._row])
        return [
            Side(limits, self._row, False, total - before, after),
            Side(limits, self._row, True, total - after, before),
        ]

    def may_open(self, cheap: CheapCuts, graph: BlockGraph) -> Bools:
        """Tells which nets can be open at each boundary, shape (boundaries, nets)."""
        rows = []
        for boundary in range(len(self.least)):
            inside, outside = cheap.settled(self.limits(boundary, math.inf))
            rows.append([bool(net & ~inside and net & ~outside) for net, _ in graph.nets])
        return np.array(rows, dtype=np.bool_)

    def _left(self) -> float:
        """Returns what all devices together can hold above the blocks, of what nets count for."""
        left = self._num_devices * self._limits - self._totals - self._spare * np.array(self._resources.is_seconds)
        return float(left[self._resources.crossing > 0].min())
