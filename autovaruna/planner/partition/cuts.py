"""Lays the downsets of a graph out in one table, as the cuts between devices, and says which cuts beat which.

A cut D, with some number of devices before it, can be completed if the blocks outside D can be split over the devices
left. Write c(D) for the seconds of the nets open at D. Take a block v that may join D next.

Rule "further". If ``seconds(v) + c(D) >= c(D + v)`` (border "overlapped": if ``c(D) >= c(D + v)``), then D + v can be
completed on any number of devices on which D can. For take the split of what is outside D, and v from its device. All
other devices hold what they held. That device loses v. The nets that v opens, which have no block in D, may become
cut there. The nets that v closes, which have blocks in D and none outside D + v but v, were cut there and are not any
more. All other nets with v have a block in D and were cut there before. So no load grows; downsets stay downsets, and
memory is only freed.

So of the cuts that so many devices reach, only those from which no step of the rule leads to another one matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, byte_sums, weigh

_ROUNDING = 1e-15


class Cuts:
    """All downsets, numbered by size, from the empty one to everything.

    Attributes:
        downsets: shape (cuts, words of blocks).
        open_nets: the nets with blocks on both sides, shape (cuts, words of nets).
        border: seconds of these nets, shape (cuts,).
        use: what the blocks of a downset use of each resource, shape (resources, cuts).
    """

    def __init__(self, levels: list[Level], resources: Resources) -> None:
        self.downsets: Words = np.concatenate([level.downsets for level in levels])
        self.open_nets: Words = np.concatenate([level.open_nets for level in levels])
        self.border: Floats = np.concatenate([level.border for level in levels])
        words = self.downsets.shape[1]
        self.use: Floats = np.array([weigh(self.downsets, byte_sums(list(row), words)) for row in resources.use])
        self._first = np.cumsum([0] + [len(level.downsets) for level in levels])
        self._steps = list(_steps_further(levels, resources))

    def __len__(self) -> int:
        return len(self.border)

    def beaten(self, reached: Bools) -> Bools:
        """Tells which cuts lead, by steps of rule "further", to another one that is reached."""
        beaten = np.zeros(len(self), dtype=np.bool_)
        good = reached.copy()
        for first, (source, target) in zip(self._first[-3::-1], reversed(self._steps), strict=True):
            leads = source[good[target + first]] + first
            beaten[leads] = good[leads] = True
        return beaten


def _steps_further(levels: list[Level], resources: Resources) -> Iterator[tuple[Ints, Ints]]:
    """Yields the steps of the rule from each level to the next: (row there, row here counted from the same start)."""
    rounding = _ROUNDING * resources.use.sum(axis=1)
    for level, after in itertools.pairwise(levels):
        source = np.repeat(np.arange(len(level.downsets)), np.diff(level.first))
        grows = after.border[level.target] - level.border[source]
        freed = resources.use[:, level.block] - resources.crossing[:, None] * grows
        is_further = (freed >= -rounding[:, None]).all(axis=0)
        yield source[is_further], level.target[is_further] + len(level.downsets)
