"""Bounds from below how many devices the rest of the graph needs, for every downset, by compute seconds alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.clock import check_time
from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.words import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Remaining:
    """For every downset of one level, what the blocks outside need at least.

    Attributes:
        devices: the fewest devices that hold them, each within the limit, shape (downsets,).
        seconds: the least load of the first of these devices when they are that few, shape (downsets,).
    """

    devices: Ints
    seconds: Floats

    def fits(self, index: Ints, device: Ints, load: Floats, limit: float, num_devices: int) -> Bools:
        """Tells where the rest may still fit on the devices that are left.

        If the current device takes more blocks of compute x, and p further devices the rest, then p + 1 devices hold
        what remains and the first of them x: so (p + 1, x) is not below (devices, seconds), and x <= limit - load.

        Args:
            index: a downset for each question.
            device: the number of devices used, with the current one.
            load: compute seconds on the current one.
            limit: greatest load.
            num_devices: number of devices there are.
        """
        more = self.devices[index]
        joins = (load + self.seconds[index] <= limit) & (more > 0)
        return device + more - joins <= num_devices


def remaining_after(levels: list[Level], seconds: Floats, limit: float, deadline: float = math.inf) -> list[Remaining]:
    """Packs what lies outside each downset on devices, from the last block backwards.

    With compute alone, packings are totally ordered: fewer devices first, then less load on the first of them. Adding
    a block in front keeps this order, so the best packing of each downset's rest follows from those of the downsets
    one block larger.

    Raises:
        TimeoutError: it is later than `deadline`, on ``time.monotonic``'s clock.
    """
    span = 2.0 ** math.ceil(math.log2(4.0 * limit + 1.0))  # a power of two, so that division loses nothing
    key = np.zeros(1)
    found = [key]
    for level in reversed(levels[:-1]):
        check_time(deadline)
        after, added = key[level.target], seconds[level.block]
        load = after - span * np.floor(after / span)
        opens = (load + added > limit) | (after == 0.0)
        grown = np.where(opens, span * (np.floor(after / span) + 1.0) + added, after + added)
        key = np.minimum.reduceat(grown, level.first[:-1])
        found.append(key)
    return [_decode(key, span) for key in reversed(found)]


def _decode(key: Floats, span: float) -> Remaining:
    devices = np.floor(key / span).astype(np.int64)
    return Remaining(devices, key - devices * span)
