"""Says what room a limit on all loads leaves for what crosses at each boundary between devices."""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.cut_limits import CutLimits, CutList
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.shares import Shares
from autovaruna.planner.partition.words import Bools, Floats


class Room:
    """What a limit leaves.

    Attributes:
        least: a price below which a boundary has no cut, shape (boundaries,); depends on the shares.
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
        self.least: Floats = np.zeros(len(shares.shares))

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
        return CutLimits(
            prices=self._shares.prices(boundary),
            shares=self._shares.sides(boundary),
            most_price=min(most_price, self.most_price(boundary)),
            before=before * limits - crossing * self.least[:boundary].sum(),
            after=after * limits - crossing * self.least[boundary + 1 :].sum(),
            most_before=before * limits,
            most_after=after * limits,
        )

    def keep(self, boundary: int, cuts: CutList) -> CutList:
        """Returns those of some cuts of a boundary that there is room for."""
        limits = self.limits(boundary, math.inf)
        return cuts.pick(limits.keep(cuts.use, cuts.price, cuts.share, self._resources))

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
