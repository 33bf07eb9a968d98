"""Finds what every cut of each boundary costs at least under a limit, and shares the nets so that this is much."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.cheap import CheapCuts, Least
from autovaruna.planner.partition.cut_limits import CutLimits
from autovaruna.planner.partition.room import Room, Side
from autovaruna.planner.partition.shares import Shares

_ROUNDS = 8
_PROGRESS = 1.02
_GROWTH = 1.5
_FIRST_PRICE = 0.02
_ABOVE_GUESS = 1.15
_MOST_LEARNT = 60


class Seeker:
    """Seeks the least prices of one graph, again and again.

    Attributes:
        shares: of the nets, the best so far.
    """

    def __init__(self, graph: BlockGraph, cheap: CheapCuts, num_devices: int, most_states: int) -> None:
        self.shares = Shares(graph, num_devices - 1)
        self._graph, self._cheap, self._most_states = graph, cheap, most_states
        self._guesses = [0.0] * (num_devices - 1)
        self._side_guesses: dict[tuple[int, bool], float] = {}
        self._has_learnt = False

    def share_out(self, room: Room, is_for_proof: bool, deadline: float) -> bool:
        """Improves the shares as long as that helps; returns whether the limit leaves room for all boundaries.

        Args:
            room: what the limit leaves; gains what is found.
            is_for_proof: whether it is worth while to improve the shares.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        if not self._has_learnt:
            self._learn_from_full_prices(room, deadline)
        best, best_sum = (self.shares.shares, room.least), -1.0
        for _ in range(_ROUNDS):
            room.forget()
            if not self._find_least(room, deadline):
                return False
            total = float(room.least.sum())
            has_grown = total > _PROGRESS * best_sum
            if total > best_sum:
                best, best_sum = (self.shares.shares, room.least), total
            if not has_grown or not is_for_proof or time.monotonic() > deadline:
                break
            self.shares.fit(room.may_open(self._cheap, self._graph))
        self.shares.shares, room.least = best
        return self._narrow(room, deadline)

    def _narrow(self, room: Room, deadline: float) -> bool:
        """Finds what either side of each boundary pays at least; returns whether that leaves room for all of them."""
        last = len(room.least) - 1
        for boundary in range(last):
            room.least_after[boundary] = least = self._seek_side(room.sides(boundary)[0], boundary, deadline)
            if math.isinf(least):
                return False
        for boundary in range(last, 0, -1):
            room.least_before[boundary] = least = self._seek_side(room.sides(boundary)[1], boundary, deadline)
            if math.isinf(least):
                return False
        return True

    def _seek_side(self, side: Side, boundary: int, deadline: float) -> float:
        """Returns what one side of a boundary pays at least; infinite if it has no cut."""
        if (most := side.most - side.least) < 0:
            return math.inf
        guess = self._side_guesses.get((boundary, side.is_before), 0.0)
        proven, found = self._widened(side.limits_with, most, guess, deadline)
        if found is None:
            return side.least + proven
        least = float((found.before if side.is_before else found.after)[side.row])
        least = max(side.least + proven, min(least, side.least + found.dropped))
        self._side_guesses[boundary, side.is_before] = least - side.least
        return least

    def _learn_from_full_prices(self, room: Room, deadline: float) -> None:
        """Learns the cheapest cuts of each boundary as if no other one had a share."""
        self._has_learnt = True
        even = self.shares.shares
        for boundary in range(len(even)):
            self.shares.shares = np.zeros_like(even)
            self.shares.shares[boundary] = 1.0
            self._seek(room, boundary, deadline)
        self._guesses = [0.0] * len(even)
        self.shares.shares = even
        self.shares.fit(room.may_open(self._cheap, self._graph))

    def _find_least(self, room: Room, deadline: float) -> bool:
        """Finds the least price of each boundary; returns whether there is room for all of them."""
        for boundary in range(len(room.least)):
            room.least[boundary] = self._seek(room, boundary, deadline)
            if not room.holds(boundary):
                return False
        return True

    def _seek(self, room: Room, boundary: int, deadline: float) -> float:
        """Returns a price below which a boundary has no cut, learning its cheapest cuts."""
        most, guess = room.most_price(boundary), self._guesses[boundary]
        proven, found = self._widened(lambda price: room.limits(boundary, price), most, guess, deadline)
        if found is None:
            return proven
        self.shares.learn(boundary, found.cuts, _MOST_LEARNT)
        self._guesses[boundary] = max(proven, min(found.price, found.dropped))
        return self._guesses[boundary]

    def _widened(
        self, limits_at: Callable[[float], CutLimits], most: float, guess: float, deadline: float
    ) -> tuple[float, Least | None]:
        """Raises a price until there are cuts; returns one below which there are none, and the cuts if time sufficed.

        Args:
            limits_at: says what cuts at a price may hold.
            most: the greatest price; the one returned is infinite if even that has no cuts.
            guess: about what the least price is.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        proven, price = 0.0, max(_FIRST_PRICE * most, _ABOVE_GUESS * guess)
        while True:
            price = min(price, most)
            found = self._cheap.least(limits_at(price), self._most_states, deadline)
            if found is None or len(found.cuts) or found.dropped < math.inf:
                return proven, found
            if price >= most:
                return math.inf, None
            proven, price = price, price * _GROWTH
