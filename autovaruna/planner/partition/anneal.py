"""Improves a plan by moving single blocks to the next device, at first also where that makes it worse for a while.

This is simulated annealing (Kirkpatrick, Gelatt, Vecchi: Optimization by Simulated Annealing, Science 220, 1983, DOI
10.1126/science.220.4598.671). What is made small is the sum of the loads' eighth powers, which also tells plans apart
whose greatest loads are equal.
"""

from __future__ import annotations

import math
import random
import time

from autovaruna.planner.partition.blocks import BlockGraph, bits
from autovaruna.planner.partition.bounds import Bounds

_MOVES = 2_000_000
_POWER = 8
_HOT, _COLD = 0.02, 0.0002
_LOOK_AT_CLOCK = 4096


def anneal(graph: BlockGraph, bounds: Bounds, until: float = math.inf) -> None:
    """Offers the best plan that such a walk meets, if it begins with a plan.

    Args:
        graph: the blocks.
        bounds: what is known; gains a better plan.
        until: the walk ends then at the latest, on ``time.monotonic``'s clock.
    """
    if bounds.devices is None or bounds.num_devices < 2:
        return
    walk = _Walk(graph, bounds)
    if any(len({bounds.devices[position] for position in members}) > 1 for members in graph.members):
        return
    begin, end = time.monotonic(), min(until, bounds.deadline)
    for move in range(0, _MOVES, _LOOK_AT_CLOCK):
        if (now := time.monotonic()) > end:
            break
        done = max(move / _MOVES, (now - begin) / (end - begin))
        walk.move(_LOOK_AT_CLOCK, _HOT * (_COLD / _HOT) ** done)
    on = walk.best
    sums = [sum(1 << block for block, device in enumerate(on) if device <= last) for last in range(bounds.num_devices)]
    bounds.offer(graph, tuple(sums))


class _Walk:
    """Where all blocks are by now, in compute and crossing seconds of each device.

    Attributes:
        best: the device of each block, where the greatest load was smallest.
    """

    def __init__(self, graph: BlockGraph, bounds: Bounds) -> None:
        assert bounds.devices is not None
        self._graph, self._join = graph, max if bounds.problem.border == "overlapped" else _add
        self._draw = random.Random(0)
        size, num_devices = len(graph), bounds.num_devices
        self._on = [bounds.devices[members[0]] for members in graph.members]
        self._next: list[list[int]] = [[] for _ in range(size)]
        self._previous: list[list[int]] = [[] for _ in range(size)]
        for a, b in graph.edges:
            self._next[a].append(b)
            self._previous[b].append(a)
        self._nets_of: list[list[tuple[list[int], int, float]]] = [[] for _ in range(size)]
        self._compute, self._crossing = [0.0] * num_devices, [0.0] * num_devices
        self._bytes, self._limit = [0] * num_devices, bounds.problem.limit_bytes or math.inf
        for block, device in enumerate(self._on):
            self._compute[device] += graph.seconds[block]
            self._bytes[device] += graph.num_bytes[block]
        for mask, seconds in graph.nets:
            self._add_net(list(bits(mask)), seconds)
        self._mean = (sum(self._loads()) or 1.0) / num_devices
        self._ranks = [self._rank(load) for load in self._loads()]
        self.best, self._least = list(self._on), max(self._loads())

    def _add_net(self, blocks: list[int], seconds: float) -> None:
        held = [0] * len(self._compute)
        for block in blocks:
            held[self._on[block]] += 1
            self._nets_of[block].append((held, len(blocks), seconds))
        for device, count in enumerate(held):
            if 0 < count < len(blocks):
                self._crossing[device] += seconds

    def _loads(self) -> list[float]:
        return [self._join(a, b) for a, b in zip(self._compute, self._crossing, strict=True)]

    def _rank(self, load: float) -> float:
        return float((load / self._mean) ** _POWER / _POWER)

    def move(self, count: int, heat: float) -> None:
        """Tries some moves; ones that make the plan worse are the likelier the hotter."""
        uniform, on, size, last = self._draw.random, self._on, len(self._on), len(self._compute) - 1
        for _ in range(count):
            block = int(uniform() * size)
            source = on[block]
            target = source + 1 if uniform() < 0.5 else source - 1
            if target < 0 or target > last:
                continue
            if target > source:
                if any(on[after] < target for after in self._next[block]):
                    continue
            elif any(on[before] > target for before in self._previous[block]):
                continue
            self._try(block, source, target, heat)

    def _try(self, block: int, source: int, target: int, heat: float) -> None:
        size, seconds = self._graph.num_bytes[block], self._graph.seconds[block]
        if size and self._bytes[target] + size > self._limit:
            return
        left, joined = self._crossing_after(block, source, target)
        source_rank = self._rank(self._join(self._compute[source] - seconds, left))
        target_rank = self._rank(self._join(self._compute[target] + seconds, joined))
        worse = source_rank + target_rank - self._ranks[source] - self._ranks[target]
        if worse > 0 and self._draw.random() >= math.exp(-worse / heat):
            return
        self._on[block] = target
        self._ranks[source], self._ranks[target] = source_rank, target_rank
        self._crossing[source], self._crossing[target] = left, joined
        self._compute[source] -= seconds
        self._compute[target] += seconds
        self._bytes[source] -= size
        self._bytes[target] += size
        for held, _, _ in self._nets_of[block]:
            held[source] -= 1
            held[target] += 1
        if (load := max(self._loads())) < self._least:
            self.best, self._least = list(self._on), load

    def _crossing_after(self, block: int, source: int, target: int) -> tuple[float, float]:
        """Returns the crossing seconds of both devices once the block has moved."""
        left, joined = self._crossing[source], self._crossing[target]
        for held, size, seconds in self._nets_of[block]:
            if held[source] == size:
                left += seconds
            elif held[source] == 1:
                left -= seconds
            if held[target] == 0:
                joined += seconds
            elif held[target] + 1 == size:
                joined -= seconds
        return left, joined


def _add(compute: float, crossing: float) -> float:
    return compute + crossing
