"""Closes in on the optimum of graphs with too many downsets, looking only at cuts where little crosses.

If no load exceeds T, all loads together are at most k T, and the blocks take most of that. What is left bounds what may
cross at all boundaries together. So a cut matters only if its price leaves room for the least price of every other
boundary (see `shares`), and such cuts are few when T is close to what is proven.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, turn
from autovaruna.planner.partition.bounds import Bounds, chain_load
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.cut_limits import CutList
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.hunt import Hunt
from autovaruna.planner.partition.reach import Answer, Reach
from autovaruna.planner.partition.resources import Resources, resources_of
from autovaruna.planner.partition.room import Room
from autovaruna.planner.partition.shares import Shares
from autovaruna.planner.partition.words import Words, pack

_log = logging.getLogger(__name__)
_ROUNDS = 8
_PROGRESS = 1.01
_GROWTH = 1.5
_FIRST_PRICE = 0.02
_MOST_LEARNT = 60
_MOST_SOUGHT = 100_000
_SHARE_OF_TIME = 0.6
_MOST_OF_SOME = 8000


def squeeze(
    graph: BlockGraph,
    bounds: Bounds,
    proof: str,
    most_states: int,
    loose: Sequence[Sequence[int]] = (),
    until: float = math.inf,
) -> None:
    """Raises the bound, and offers the plans that it meets, by halving what lies between them.

    Args:
        graph: blocks whose every chain costs no more than in the problem.
        bounds: what is known, a plan among it; updated.
        proof: how a bound found here is proved.
        most_states: downsets under way at once in a listing.
        loose: groups of nodes that are not in the graph.
        until: the search ends about then, on ``time.monotonic``'s clock.
    """
    until = min(until, bounds.deadline)
    if bounds.num_devices < 2 or not graph.nets or math.isinf(bounds.upper):
        return
    resources = resources_of(graph, bounds.problem.border, bounds.problem.limit_bytes)
    few = FewCuts(graph, resources, bounds.num_devices, most_states, _spare_seconds(graph, bounds, loose))
    hunt = Hunt(bounds)
    while time.monotonic() < until and (step := hunt.next_step()) is not None:
        begin = time.monotonic()
        load, is_for_proof = step
        answer = few.decide(load, is_for_proof, begin + _SHARE_OF_TIME * (until - begin))
        verdict = "unknown" if not answer.is_exact else answer.chain is not None
        _log.debug("squeezing: load %g: %s, %.2f seconds", load, verdict, time.monotonic() - begin)
        if answer.chain is not None:
            bounds.offer(graph, answer.chain, loose)
            hunt.found(chain_load(graph, answer.chain, bounds.problem.border))
        elif answer.is_exact:
            hunt.refuted(load)
            bounds.raise_lower(min(hunt.low, bounds.upper), proof)
        else:
            hunt.gave_up(load)


def _spare_seconds(graph: BlockGraph, bounds: Bounds, loose: Sequence[Sequence[int]]) -> float:
    """Returns the seconds of loose nodes that no block of the graph took over."""
    if bounds.problem.border == "overlapped":
        return 0.0  # crossings share no room with them
    nodes = bounds.problem.nodes
    held, left = (
        sum(nodes[position].seconds for group in groups for position in group) for groups in (graph.members, loose)
    )
    return max(0.0, left - (sum(graph.seconds) - held))


class FewCuts:
    """Decides limits of one graph."""

    def __init__(
        self,
        graph: BlockGraph,
        resources: Resources,
        num_devices: int,
        most_states: int,
        spare_seconds: float = 0.0,
    ) -> None:
        self._spare = spare_seconds
        self._graph, self._resources, self._num_devices = graph, resources, num_devices
        self._most_states = most_states
        self._cheap = CheapCuts(graph, resources)
        self._shares = Shares(graph, num_devices - 1)
        self._guesses = [0.0] * (num_devices - 1)
        self._has_learnt = False

    def decide(self, load: float, is_for_proof: bool = True, deadline: float = math.inf) -> Answer:
        """Looks for a chain on which no load exceeds `load`.

        Args:
            load: the limit in seconds.
            is_for_proof: whether to list all cuts that matter, so that not to find a chain is exact, and to give up
                where they are too many; else only the cheaper ones are looked at.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        room = Room(self._shares, self._resources, load, self._spare)
        if room.is_over or not self._share_out(room, _ROUNDS if is_for_proof else 1, deadline):
            return Answer(None, True)
        lists, is_complete = self._list_all(room, is_for_proof, deadline)
        _log.debug("least prices %s, cuts %s, all: %s", room.least, [len(cuts) for cuts in lists], is_complete)
        if not all(len(cuts) for cuts in lists) or (is_for_proof and not is_complete):
            return Answer(None, is_complete)
        try:
            answer = self._connect(lists, load, deadline)
        except TimeoutError:
            return Answer(None, False)
        return Answer(answer.chain, answer.chain is not None or (answer.is_exact and is_complete))

    def _share_out(self, room: Room, rounds: int, deadline: float) -> bool:
        """Improves the shares as long as that helps; returns whether the limit leaves room for all boundaries."""
        if not self._has_learnt:
            self._learn_from_full_prices(room, deadline)
        best, best_sum = (self._shares.shares, room.least), -1.0
        for _ in range(rounds):
            room.least = np.zeros_like(room.least)
            if not self._find_least(room, deadline):
                return False
            total = float(room.least.sum())
            has_grown = total > _PROGRESS * best_sum
            if total > best_sum:
                best, best_sum = (self._shares.shares, room.least), total
            if not has_grown or time.monotonic() > deadline:
                break
            if rounds > 1:
                self._shares.fit(room.may_open(self._cheap, self._graph))
        self._shares.shares, room.least = best
        return True

    def _learn_from_full_prices(self, room: Room, deadline: float) -> None:
        """Learns the cheapest cuts of each boundary as if no other one had a share."""
        self._has_learnt = True
        even = self._shares.shares
        for boundary in range(len(even)):
            self._shares.shares = np.zeros_like(even)
            self._shares.shares[boundary] = 1.0
            self._seek(room, boundary, deadline)
        self._guesses = [0.0] * len(even)
        self._shares.shares = even
        self._shares.fit(room.may_open(self._cheap, self._graph))

    def _find_least(self, room: Room, deadline: float) -> bool:
        """Finds the least price of each boundary; returns whether there is room for all of them."""
        for boundary in range(len(room.least)):
            room.least[boundary] = self._seek(room, boundary, deadline)
            if not room.holds(boundary):
                return False
        return True

    def _seek(self, room: Room, boundary: int, deadline: float) -> float:
        """Returns a price below which a boundary has no cut, learning its cheapest cuts."""
        most, proven = room.most_price(boundary), 0.0
        price = max(_FIRST_PRICE * most, 0.8 * self._guesses[boundary])
        while True:
            price = min(price, most)
            cuts = self._cheap.within(room.limits(boundary, price), _MOST_SOUGHT, deadline)
            if cuts is None:
                return proven
            if len(cuts):
                self._shares.learn(boundary, cuts, _MOST_LEARNT)
                self._guesses[boundary] = float(cuts.price.min())
                return self._guesses[boundary]
            if price >= most:
                return math.inf
            proven, price = price, price * _GROWTH

    def _list_all(self, room: Room, is_for_proof: bool, deadline: float) -> tuple[list[CutList], bool]:
        """Lists the cuts of every boundary that there is room for; returns as well whether these are all.

        Ends with a boundary that settles the matter: it has none, or there are too many to prove anything.
        """
        lists, is_complete = [self._cheap.nothing()] * len(room.least), True
        for boundary in self._narrow_first(room):
            cuts, has_all = self._list(room, boundary, is_for_proof, deadline)
            lists[boundary] = cuts
            if (has_all and not len(cuts)) or (is_for_proof and not has_all):
                return [cuts], has_all
            is_complete = is_complete and has_all
            if has_all:
                room.least[boundary] = max(room.least[boundary], cuts.price.min(initial=math.inf))
        for _ in range(_ROUNDS):
            before = sum(map(len, lists))
            lists = [room.keep(boundary, cuts) for boundary, cuts in enumerate(lists)]
            if not is_complete or not all(map(len, lists)) or sum(map(len, lists)) == before:
                break
            room.least = np.maximum(room.least, [cuts.price.min(initial=math.inf) for cuts in lists])
        return lists, is_complete

    def _narrow_first(self, room: Room) -> list[int]:
        """Orders boundaries by how many blocks may be on either side, so that the long lists profit from all others."""
        settled = [self._cheap.settled(room.limits(boundary, math.inf)) for boundary in range(len(room.least))]
        return sorted(range(len(settled)), key=lambda boundary: -sum(map(int.bit_count, settled[boundary])))

    def _list(self, room: Room, boundary: int, is_for_proof: bool, deadline: float) -> tuple[CutList, bool]:
        """Lists the cuts of a boundary, or only the cheaper ones; tells whether these are all."""
        limits = room.limits(boundary, math.inf)
        if not is_for_proof:
            return self._cheap.cheapest(limits, _MOST_OF_SOME, deadline)
        cuts = self._cheap.within(limits, self._most_states, deadline)
        return (self._cheap.nothing(), False) if cuts is None else (cuts, True)

    def _connect(self, lists: list[CutList], load: float, deadline: float) -> Answer:
        """Looks for a chain whose every cut is listed, from the end where fewer are."""
        listed = [some.downsets for some in lists]
        if len(listed[0]) <= len(listed[-1]):
            return self._connect_from_start(self._graph, listed, load, deadline)
        everything = (1 << len(self._graph)) - 1
        row = pack([everything], len(self._graph))
        answer = self._connect_from_start(turn(self._graph), [row & ~some for some in listed[::-1]], load, deadline)
        if answer.chain is None:
            return answer
        return Answer((*(everything & ~downset for downset in answer.chain[-2::-1]), everything), answer.is_exact)

    def _connect_from_start(self, graph: BlockGraph, listed: list[Words], load: float, deadline: float) -> Answer:
        cuts, which = Cuts.of_list(graph, np.concatenate(listed), self._resources, deadline)
        may_end = np.zeros((self._num_devices, len(cuts)), dtype=np.bool_)
        begin = 0
        for boundary, some in enumerate(listed):
            may_end[boundary, which[begin : begin + len(some)]] = True
            begin += len(some)
        may_end[-1, -1] = True
        reach = Reach(graph, cuts, self._resources, self._num_devices)
        return reach.decide(load, lambda device: may_end[device - 1], deadline)
