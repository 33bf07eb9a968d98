"""Decides whether a chain of devices exists on which no load exceeds a limit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autovaruna.planner.partition.blocks import BlockGraph
from autovaruna.planner.partition.labels import Labels, NetCosts, drop_beaten, merge_excess
from autovaruna.planner.partition.lattice import Level
from autovaruna.planner.partition.remaining import remaining_after
from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.starts import Starts
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words, byte_sums, expand, pack, weigh

Chain = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a decision found.

    Attributes:
        chain: the growing downsets at which devices end, the last one being everything; ``None`` when there is none.
        is_exact: whether the chain keeps the limit, or that there is none is proven. If not, labels were merged and
            the chain may break the limit, or time was over.
    """

    chain: Chain | None
    is_exact: bool


class Decider:
    """Answers for one list of downsets and many limits."""

    def __init__(self, graph: BlockGraph, levels: list[Level], resources: Resources, num_devices: int) -> None:
        self._levels = levels
        self._resources = resources
        self._num_devices = num_devices
        nets = [net for net, _ in graph.nets]
        words = levels[0].open_nets.shape[1]
        self._costs = NetCosts(byte_sums([seconds for _, seconds in graph.nets], words), resources.crossing)
        holding = [0] * len(graph)
        for position, net in enumerate(nets):
            for block in range(len(graph)):
                holding[block] |= (net >> block & 1) << position
        self._nets_of = pack(holding, len(nets))

    def may_exist(self, load: float) -> bool:
        """Tells whether compute alone leaves room for a chain with no load above `load`."""
        limit = float(self._resources.limits(load)[0])
        return int(remaining_after(self._levels, self._resources.use[0], limit)[0].devices[0]) <= self._num_devices

    def decide(self, load: float, most_labels: int, deadline: float = math.inf) -> Answer:
        """Looks for a chain on which no load exceeds `load`.

        Args:
            load: the limit in seconds; may be infinite.
            most_labels: labels kept for one downset; more are merged.
            deadline: when to give up, on ``time.monotonic``'s clock.
        """
        return _Sweep(self, load).run(most_labels, deadline)

    @property
    def levels(self) -> list[Level]:
        """The downsets, by size."""
        return self._levels

    @property
    def resources(self) -> Resources:
        """What a device may hold."""
        return self._resources

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self._num_devices

    @property
    def costs(self) -> NetCosts:
        """The seconds of the nets."""
        return self._costs

    @property
    def nets_of(self) -> Words:
        """The nets of each block, shape (blocks, words)."""
        return self._nets_of


class _Sweep:
    """One pass over the levels, from the empty downset up."""

    def __init__(self, decider: Decider, load: float) -> None:
        self._decider = decider
        self._limits = decider.resources.limits(load)
        finite = float(min(self._limits[0], 2.0 * decider.resources.use[0].sum()))
        self._remaining = remaining_after(decider.levels, decider.resources.use[0], finite)
        self._starts = Starts()

    def run(self, most_labels: int, deadline: float) -> Answer:
        """Grows labels from the empty downset to everything."""
        labels, is_exact = self._begin(), True
        for size in range(len(self._decider.levels) - 1):
            labels = self._grow(labels, size)
            if not len(labels) or time.monotonic() > deadline:
                return Answer(None, not len(labels))
            if size + 2 < len(self._decider.levels):
                labels = labels.join(self._close(labels, size + 1))
            labels = drop_beaten(labels, self._decider.costs)
            labels, num_merged = merge_excess(labels, most_labels, self._decider.costs)
            labels.start[len(labels) - num_merged :] = self._starts.repeat(labels.start[len(labels) - num_merged :])
            is_exact = is_exact and not num_merged
        return Answer(self._starts.chain(int(labels.start[0]), self._decider.levels), is_exact)

    def _begin(self) -> Labels:
        words = self._decider.nets_of.shape[1]
        nothing = np.zeros((1, words), dtype=np.uint64)
        use = np.zeros((1, len(self._limits)))
        return Labels(np.array([0]), np.array([1]), use, nothing, nothing, np.zeros(1), np.array([-1]))

    def _grow(self, labels: Labels, size: int) -> Labels:
        """Adds one block to the last device of each label, in every possible way that keeps the limits."""
        level = self._decider.levels[size]
        row, step = expand(level.first[labels.downset], np.diff(level.first)[labels.downset])
        row, step = _once(row, step, level.target[step], labels.start[row])
        use = labels.use[row] + self._decider.resources.use[:, level.block[step]].T
        keep = np.flatnonzero(self._keeps(size + 1, level.target[step], labels.device[row], use))
        row, step, use = row[keep], step[keep], use[keep]
        grown = self._add(labels, row, level.target[step], level.block[step], use, size)
        return grown.take(self._keeps(size + 1, grown.downset, grown.device, grown.use))

    def _add(self, labels: Labels, row: Ints, target: Ints, block: Ints, use: Floats, size: int) -> Labels:
        """Makes the labels for steps to `target`, with what they pay for nets from earlier devices."""
        costs, nets = self._decider.costs, self._decider.nets_of[block]
        held, unpaid = labels.held[row], labels.unpaid[row]
        still = self._decider.levels[size + 1].open_nets[target]
        paid = weigh(unpaid & nets, costs.seconds)
        closed = weigh(held & ~still, costs.seconds)
        return Labels(
            target,
            labels.device[row],
            use + paid[:, None] * costs.crossing,
            held & still,
            unpaid & ~nets,
            labels.held_seconds[row] - closed,
            labels.start[row],
        )

    def _close(self, labels: Labels, size: int) -> Labels:
        """Ends the last device of labels where it may end, and starts the next one there: at most one for a downset."""
        level = self._decider.levels[size]
        leaves = level.border[labels.downset] - labels.held_seconds
        use = labels.use + leaves[:, None] * self._decider.costs.crossing
        can_end = np.flatnonzero((use <= self._limits).all(axis=1))
        can_end = can_end[np.lexsort((labels.device[can_end], labels.downset[can_end]))]
        downset, one = np.unique(labels.downset[can_end], return_index=True)
        rows = can_end[one]
        nothing = np.zeros((len(rows), len(self._limits)))
        device = labels.device[rows] + 1
        keep = self._keeps(size, downset, device, nothing)
        rows, downset, device = rows[keep], downset[keep], device[keep]
        opened, start = level.open_nets[downset], self._starts.add(labels.start[rows], downset, size)
        return Labels(downset, device, nothing[: len(rows)], opened, opened, level.border[downset], start)

    def _keeps(self, size: int, downset: Ints, device: Ints, use: Floats) -> Bools:
        """Tells where the last device keeps its limits and the rest may fit on the devices left."""
        limit = float(self._limits[0])
        fits = self._remaining[size].fits(downset, device, use[:, 0], limit, self._decider.num_devices)
        keeps: Bools = np.logical_and.reduce(use <= self._limits, axis=1) & fits
        return keeps


def _once(row: Ints, step: Ints, target: Ints, start: Ints) -> tuple[Ints, Ints]:
    """Keeps one of the steps that end at the same downset with the same start, for they make the same label."""
    key = target * (int(start.max(initial=0)) + 2) + start + 1
    _, kept = np.unique(key, return_index=True)
    return row[kept], step[kept]
