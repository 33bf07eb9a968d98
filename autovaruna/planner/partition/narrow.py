"""Orders blocks so that few of those placed so far still matter to those that follow.

A block matters as long as an edge or a net joins it with a block that is not placed yet. Very wide nets, and edges from
blocks with very many followers, are left out: they tell little about single blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.planner.partition.blocks import BlockGraph, bits

_WIDEST = 12
_MOST_AT_ONCE = 8
_STEPS_AHEAD = 4


def narrow_order(graph: BlockGraph, ancestors: Sequence[int]) -> list[int]:
    """Returns a topological order of the blocks.

    Takes again and again, of the blocks a few steps ahead, one that can be reached with the fewest more blocks that
    matter, most blocks at once, and all that precede it.

    Args:
        graph: the blocks.
        ancestors: of each block, as sets.
    """
    walk = _Walk(graph, ancestors)
    while walk.ready:
        walk.place(min(walk.candidates(), key=walk.rank))
    return walk.order


class _Walk:
    """What is placed so far.

    Attributes:
        order: the blocks placed, in order.
        ready: the blocks whose predecessors are all placed, as a set.
    """

    def __init__(self, graph: BlockGraph, ancestors: Sequence[int]) -> None:
        self._before, self._after = [0] * len(graph), [0] * len(graph)
        for a, b in graph.edges:
            self._before[b] |= 1 << a
            self._after[a] |= 1 << b
        self._ancestors = ancestors
        self._near = self._neighbours(graph)
        self._placed = self._mattering = 0
        self.order: list[int] = []
        self.ready = sum(1 << block for block, before in enumerate(self._before) if not before)

    def _neighbours(self, graph: BlockGraph) -> list[int]:
        near = [0] * len(graph)
        joined = [net for net, _ in graph.nets if net.bit_count() <= _WIDEST]
        joined += [1 << a | 1 << b for a, b in graph.edges if self._after[a].bit_count() <= _WIDEST]
        for net in joined:
            for block in bits(net):
                near[block] |= net
        return [mask & ~(1 << block) for block, mask in enumerate(near)]

    def candidates(self) -> list[int]:
        """Returns the sets of blocks that may be placed next, each a block with all that precede it."""
        found = latest = self.ready
        for _ in range(_STEPS_AHEAD):
            following = 0
            for block in bits(latest):
                following |= self._after[block]
            latest = following & ~found
            found |= following
        missing = [(self._ancestors[block] | 1 << block) & ~self._placed for block in bits(found)]
        return [blocks for blocks in missing if blocks.bit_count() <= _MOST_AT_ONCE]

    def rank(self, blocks: int) -> tuple[int, int]:
        """Returns how many more blocks will matter with some more placed, and how few these are."""
        stay, leave = self._changes(blocks)
        return stay.bit_count() - leave.bit_count(), -blocks.bit_count()

    def place(self, blocks: int) -> None:
        """Places some more blocks."""
        stay, leave = self._changes(blocks)
        self._mattering = (self._mattering | stay) & ~leave
        self._placed |= blocks
        self.order.extend(bits(blocks))
        for block in bits(blocks):
            for after in bits(self._after[block]):
                if not self._before[after] & ~self._placed:
                    self.ready |= 1 << after
        self.ready &= ~self._placed

    def _changes(self, blocks: int) -> tuple[int, int]:
        """Returns which of some more blocks will matter, and which of those placed will not any more."""
        placed, near = self._placed | blocks, 0
        for block in bits(blocks):
            near |= self._near[block]
        stay = sum(1 << block for block in bits(blocks) if self._near[block] & ~placed)
        leave = sum(1 << block for block in bits(near & self._mattering) if not self._near[block] & ~placed)
        return stay, leave
