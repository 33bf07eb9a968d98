"""Decides limits where all downsets are listed, leaving out cuts that the other devices can never complete.

A cut E, with i devices before it, is left out where the devices left can never hold the rest, by two bounds: the fewest
devices that compute alone needs; and the sum of all loads, for each device after E pays for its blocks, and each net
open at E is paid by one of them at least. The same sum bounds the devices before E.
"""

from __future__ import annotations

import math

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.cuts import Cuts
from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.reach import Answer, Reach
from autovaruna.planner.partition.remaining import remaining_after
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints

_ROUNDING = 1e-12


class FullReach:
    """Answers for one list of all downsets and many limits."""

    def __init__(
        self,
        graph: BlockGraph,
        levels: list[Level],
        resources: Resources,
        num_devices: int,
        deadline: float = math.inf,
    ) -> None:
        """Lays the cuts out.

        Args:
            graph: the blocks.
            levels: all their downsets.
            resources: what a device may hold.
            num_devices: the number of devices.
            deadline: when to give up all that follows, on ``time.monotonic``'s clock.

        Raises:
            TimeoutError: it is later; as `may_exist` and `decide`.
        """
        self._deadline = deadline
        self._levels, self._resources, self._num_devices = levels, resources, num_devices
        self._cuts = Cuts.of_levels(levels, resources, deadline)
        self._reach = Reach(graph, self._cuts, resources, num_devices)

    def may_exist(self, load: float) -> bool:
        """Tells whether compute alone leaves room for a chain with no load above `load`."""
        limit = float(self._resources.limits(load)[0])
        rest = remaining_after(self._levels, self._resources.use[0], limit, self._deadline)
        return int(rest[0].devices[0]) <= self._num_devices

    def decide(self, load: float, deadline: float = math.inf) -> Answer:
        """Looks for a chain on which no load exceeds `load`.

        Args:
            load: the limit in seconds; may be infinite.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        fewest, limits = self._fewest(load), self._resources.limits(load)
        return self._reach.decide(
            load,
            lambda device: self._may_end(limits, device) & (fewest <= self._num_devices - device),
            deadline,
        )

    def _fewest(self, load: float) -> Ints:
        """Returns the fewest devices that compute alone needs after each cut."""
        limit = float(min(self._resources.limits(load)[0], 2.0 * self._resources.use[0].sum()))
        rest = remaining_after(self._levels, self._resources.use[0], limit, self._deadline)
        return np.concatenate([after.devices for after in rest])

    def _may_end(self, limits: Floats, device: int) -> Bools:
        """Tells at which cuts the sums of all loads allow so many devices before, and the others after."""
        cuts, after = self._cuts, self._num_devices - device
        crossing = self._resources.crossing[:, None] * cuts.border
        room = limits[:, None] * (1.0 + _ROUNDING)
        rest = cuts.use[:, -1:] - cuts.use + crossing
        before_fits: Bools = np.logical_and.reduce(cuts.use + crossing <= device * room, axis=0)
        if after == 0:
            is_everything: Bools = np.arange(len(cuts)) == len(cuts) - 1
            return before_fits & is_everything
        after_fits: Bools = np.logical_and.reduce(rest <= after * room, axis=0)
        return before_fits & after_fits
