"""Lists the downsets at which little crosses, without listing the others (`listing.py` says how)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.contract import closures
from autovaruna.planner.partition.cut_limits import CutLimits, CutList
from autovaruna.planner.partition.listing import Listing, States
from autovaruna.planner.partition.merging import Merger
from autovaruna.planner.partition.narrow import narrow_order
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Floats, pack

_ROUNDING = 1e-9
_ROWS_AT_ONCE = 1 << 15
_FINEST, _COARSEST = 1 / 256, 1 / 8


@dataclass(frozen=True, slots=True)
class Least:
    """Bounds from below on all downsets within limits but for those dropped; infinite if there are none.

    Attributes:
        price: of each.
        before, after: what either side needs of each resource, with its share of the nets, shape (resources,).
        cuts: cheap downsets within the limits, or nearly.
        dropped: a price that no downset that was dropped is below.
    """

    price: float
    before: Floats
    after: Floats
    cuts: CutList
    dropped: float = math.inf

    @staticmethod
    def of(states: States, resources: Resources, cuts: CutList, dropped: float) -> Least:
        """Takes states in which all blocks are decided."""
        crossing = resources.crossing[:, None]
        return Least(
            price=float(states.price.min(initial=math.inf)),
            before=(states.used + crossing * states.share).min(axis=1, initial=math.inf),
            after=(states.left_out + crossing * states.rest).min(axis=1, initial=math.inf),
            cuts=cuts,
            dropped=dropped,
        )


class CheapCuts:
    """Lists cheap downsets of one graph, again and again."""

    def __init__(self, graph: BlockGraph, resources: Resources) -> None:
        ancestors, descendants = closures(graph)
        self._size, self._nets = len(graph), [net for net, _ in graph.nets]
        self._resources, self._order = resources, narrow_order(graph, ancestors)
        self._upto = [mask | 1 << block for block, mask in enumerate(ancestors)]
        self._from = [mask | 1 << block for block, mask in enumerate(descendants)]
        self._use_upto, self._use_from = (
            np.array([resources.use[:, list(bits(mask))].sum(axis=1) for mask in masks]).reshape(self._size, -1)
            for masks in (self._upto, self._from)
        )

    def settled(self, limits: CutLimits) -> tuple[int, int]:
        """Returns the blocks that are inside, and those that are outside, of every downset within the limits."""
        crossing = self._resources.crossing
        low_before = np.minimum(limits.shares, 0.0).sum()
        low_after = np.minimum(limits.prices - limits.shares, 0.0).sum()
        most_before = np.minimum(limits.before - crossing * low_before, limits.most_before)
        most_after = np.minimum(limits.after - crossing * low_after, limits.most_after)
        wide = _ROUNDING * self._resources.use.sum(axis=1)
        inside = np.flatnonzero((self._use_from > most_after + wide).any(axis=1))
        outside = np.flatnonzero((self._use_upto > most_before + wide).any(axis=1))
        return sum(1 << int(b) for b in inside), sum(1 << int(b) for b in outside)

    def within(self, limits: CutLimits, most: int, deadline: float = math.inf) -> CutList | None:
        """Lists all downsets within limits; ``None`` if more than `most` are under way at once, or time is over."""
        cuts, is_complete = self.cheapest(limits, most, deadline, may_drop=False)
        return cuts if is_complete else None

    def cheapest(
        self, limits: CutLimits, most: int, deadline: float = math.inf, *, may_drop: bool = True
    ) -> tuple[CutList, bool]:
        """Lists downsets within limits, dropping the dearest under way when they are more than `most`.

        Returns:
            The downsets, and whether these are all. None at all if time is over, or if dropping is not allowed.
        """
        inside, outside = self.settled(limits)
        if inside & outside:
            return self.nothing(), True
        listing = Listing(self._nets, self._from, self._order, self._resources, limits, inside, outside)
        states, is_complete = listing.start(), True
        for position in range(len(listing.free)):
            states = listing.decide(states, position)
            if len(states) > most:
                is_complete = False
                states = states.pick(np.argpartition(states.price, most)[:most])
            if time.monotonic() > deadline or not (is_complete or may_drop):
                return self.nothing(), False
            if not len(states):
                break
        return self._finish(states, listing.free, inside), is_complete

    def least(self, limits: CutLimits, most: int, deadline: float = math.inf) -> Least | None:
        """Bounds the figures of all downsets within limits.

        Args:
            limits: on the downsets.
            most: states under way at once.
            deadline: when to give up, on ``time.monotonic``'s clock.

        Returns:
            The bounds; ``None`` if time is over.
        """
        inside, outside = self.settled(limits)
        if inside & outside:
            nowhere = np.full(len(self._resources.use), math.inf)
            return Least(math.inf, nowhere, nowhere, self.nothing())
        listing = Listing(self._nets, self._from, self._order, self._resources, limits, inside, outside)
        span = float(self._resources.use[0].sum())
        slack = max(float(limits.most_before[0] + limits.most_after[0]) - span, 0.0)
        merger = Merger(listing, most, _FINEST * slack, _COARSEST * slack)
        states = listing.start()
        for position in range(len(listing.free)):
            states = merger.merge(listing.decide(states, position), position + 1)
            if time.monotonic() > deadline:
                return None
            if not len(states):
                break
        return Least.of(states, self._resources, self._finish(states, listing.free, inside), merger.dropped)

    def nothing(self) -> CutList:
        """Returns a list without downsets."""
        empty = np.zeros(0)
        return CutList(pack([], self._size), self._resources.use[:, :0], empty, empty)

    def _finish(self, states: States, free: list[int], inside: int) -> CutList:
        """Writes downsets of free blocks as downsets of all blocks."""
        if not len(states):
            return self.nothing()
        first = pack([inside], self._size)
        num_words = first.shape[1]
        parts = []
        for begin in range(0, len(states), _ROWS_AT_ONCE):
            rows = np.ascontiguousarray(states.inside[:, begin : begin + _ROWS_AT_ONCE].T)
            held = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")[:, : len(free)]
            wide = np.zeros((len(rows), 64 * num_words), dtype=np.uint8)
            wide[:, free] = held
            parts.append(np.packbits(wide, axis=1, bitorder="little").view(np.uint64) | first)
        return CutList(np.concatenate(parts), states.used, states.price, states.share)
