"""Shares the seconds of each net among the boundaries between devices, so that what crosses is counted once.

Boundary j, the cut D_j, gets the share a(n, j) of net n; the shares of a net add up to 1. Write c(n) for its seconds.

All devices: a net that is open at any boundary is paid by two devices at least. So all of them together pay no less
than the sum over j of ``price_j(D_j) = sum of 2 a(n, j) c(n)`` over the nets n open at D_j.

The devices up to boundary j: they pay c(n) for a net open at D_j, and 2 c(n) for one that is not, but is open at some
earlier boundary, since no device after j holds a block of it. So they pay no less than ``share_j(D_j) + sum over i < j
of price_i(D_i)``, with ``share_j(D) = sum of (1 - 2 (a(n, 1) + ... + a(n, j - 1))) c(n)`` over the nets open at D. The
devices after j pay, for the same reason, no less than ``price_j(D_j) - share_j(D_j) + sum over i > j of price_i(D_i)``.

Each price_i(D_i) is no less than the least price of any cut that boundary i may have. Shares are good when the sum of
these least prices is great; they are fitted to the cheap cuts known of each boundary, as in a game between who shares
and who cuts: the shares of nets that the cheapest cuts open grow.
"""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.cut_limits import CutList
from autovaruna.planner.partition.cuts import is_open_at
from autovaruna.planner.partition.words import Bools, Floats, pack

_STEPS = 600
_STEP = 2.0
_MOST_KNOWN = 400
_EVEN = 0.05
_LEAST_SHARE = 1e-3


class Shares:
    """The shares of all nets, and the cheap cuts known.

    Attributes:
        seconds: of each net.
        shares: shape (boundaries, nets).
    """

    def __init__(self, graph: BlockGraph, num_boundaries: int) -> None:
        self._nets = pack([net for net, _ in graph.nets], len(graph))
        self.seconds = np.array([seconds for _, seconds in graph.nets])
        self.shares: Floats = np.full((num_boundaries, len(graph.nets)), 1.0 / num_boundaries)
        self._known: list[Bools] = [np.zeros((0, len(graph.nets)), dtype=np.bool_) for _ in range(num_boundaries)]

    def prices(self, boundary: int) -> Floats:
        """Returns what each net adds to the price of a cut at a boundary."""
        prices: Floats = 2.0 * self.shares[boundary] * self.seconds
        return prices

    def sides(self, boundary: int) -> Floats:
        """Returns what each net adds to the share of the devices before a boundary."""
        sides: Floats = (1.0 - 2.0 * self.shares[:boundary].sum(axis=0)) * self.seconds
        return sides

    def learn(self, boundary: int, cuts: CutList, most: int) -> None:
        """Keeps the cheapest of some cuts of a boundary."""
        if not len(cuts):
            return
        cheapest = np.argsort(cuts.price)[:most]
        is_open = np.array([is_open_at(cuts.downsets[cheapest], net) for net in self._nets]).T
        known = np.concatenate([self._known[boundary], is_open.reshape(len(cheapest), len(self._nets))])
        self._known[boundary] = np.unique(known, axis=0)[-_MOST_KNOWN:]

    def fit(self, may_open: Bools) -> None:
        """Fits the shares to the cuts known.

        Args:
            may_open: whether a net can be open at a boundary, shape (boundaries, nets).
        """
        even = np.where(may_open.any(axis=0), may_open, True)
        even = even / even.sum(axis=0)
        shares = np.where(even > 0, np.maximum(self.shares, _LEAST_SHARE), 0.0)
        shares /= shares.sum(axis=0)
        average, best, best_sum = np.zeros_like(shares), shares, -1.0
        for step in range(_STEPS):
            total, cheapest = self._least(shares)
            if total > best_sum:
                best, best_sum = shares, total
            shares = shares * np.exp(_STEP / math.sqrt(1.0 + step) * cheapest)
            shares /= shares.sum(axis=0)
            average += shares / _STEPS
        if self._least(average)[0] > best_sum:
            best = average
        self.shares = (1.0 - _EVEN) * best + _EVEN * even

    def _least(self, shares: Floats) -> tuple[float, Floats]:
        """Returns the sum of the least prices among the cuts known, and which nets these cuts open."""
        total, is_open = 0.0, np.zeros_like(shares)
        for boundary, known in enumerate(self._known):
            if len(known):
                prices = known @ (shares[boundary] * self.seconds)
                cheapest = int(prices.argmin())
                total += float(prices[cheapest])
                is_open[boundary] = known[cheapest]
        return total, is_open
