"""Watches how fast ranks are: one that is slower now and then is not a slower one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from autovaruna.profiler.speed import measure_speed
from autovaruna.runtime.world import World

_NOISE = 1.25
"""Speeds whose ratio is less than this count as equal."""


class SpeedWatch:
    """Looks at the speeds of all ranks at several moments.

    Args:
        world: The ranks.
        device: Where this rank computes.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world = world
        self.device = device
        self._looks: list[Sequence[float]] = []

    def look(self) -> None:
        """Measures every rank's speed now. Collective."""
        self._looks.append(self.world.gather_objects(measure_speed(self.device), "measuring speeds"))

    def speeds(self) -> tuple[float, ...]:
        """Returns the speed of each rank relative to the typical one, by all looks so far."""
        return relative_speeds(self._looks)


def relative_speeds(looks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the speeds of ranks, relative to the typical one.

    A rank differs if it does so at every look, in the same direction and by more than noise: another program that
    takes turns on its core makes it look slower once, and is gone when the model trains.

    Args:
        looks: the seconds that a fixed piece of work took on each rank, at each look.
    """
    return tuple(map(_lasting, zip(*map(_speeds, looks), strict=True)))


def _speeds(seconds: Sequence[float]) -> list[float]:
    typical = sorted(seconds)[len(seconds) // 2]
    return [typical / each for each in seconds]


def _lasting(speeds: Sequence[float]) -> float:
    is_slower = all(speed <= 1 / _NOISE for speed in speeds)
    is_faster = all(speed >= _NOISE for speed in speeds)
    return median(speeds) if is_slower or is_faster else 1.0
