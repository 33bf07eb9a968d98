"""Decides limits of one graph by few of its cuts: lists those that a limit leaves room for, and connects them."""

from __future__ import annotations

import logging
import math

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, turn
from autovaruna.planner.partition.cheap import CheapCuts
from autovaruna.planner.partition.cut_limits import CutList
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.reach import Answer, Reach
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.room import Room
from autovaruna.planner.partition.seeking import Seeker
from autovaruna.planner.partition.words import Words, pack

_log = logging.getLogger(__name__)
_ROUNDS = 8
_MOST_SOUGHT = 20_000
_MOST_OF_SOME = 8000


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
        self._seeker = Seeker(graph, self._cheap, num_devices, min(most_states, _MOST_SOUGHT))

    def decide(self, load: float, is_for_proof: bool = True, deadline: float = math.inf) -> Answer:
        """Looks for a chain on which no load exceeds `load`.

        Args:
            load: the limit in seconds.
            is_for_proof: whether to list all cuts that matter, so that not to find a chain is exact, and to give up
                where they are too many; else only the cheaper ones are looked at.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        room = Room(self._seeker.shares, self._resources, load, self._spare)
        if room.is_over or not self._seeker.share_out(room, is_for_proof, deadline):
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
                room.note(boundary, cuts)
        for _ in range(_ROUNDS):
            before = sum(map(len, lists))
            lists = [room.keep(boundary, cuts) for boundary, cuts in enumerate(lists)]
            if not is_complete or not all(map(len, lists)) or sum(map(len, lists)) == before:
                break
            for boundary, cuts in enumerate(lists):
                room.note(boundary, cuts)
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
