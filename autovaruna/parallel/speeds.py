"""Watches how fast ranks are: one that is slower now and then is not a slower one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from autovaruna.profiler.speed import Pace, measure_pace
from autovaruna.runtime.worlds.world import World

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
        self._looks: list[list[Pace]] = []

    def look(self) -> None:
        """Measures every rank now. Collective."""
        self._looks.append(self.world.gather_objects(measure_pace(self.device), "measuring speeds"))

    def speeds(self) -> tuple[float, ...]:
        """Returns the speed of each rank by all looks so far: what a step gets.

        Speed 1 is that of short samples on the typical rank.
        """
        return lasting([[_typical(look) / pace.mean for pace in look] for look in self._looks])

    def speeds_of_samples(self) -> tuple[float, ...]:
        """Returns the same for what takes so little time that other programs seldom come between."""
        return lasting([[_typical(look) / pace.typical for pace in look] for look in self._looks])


def lasting(looks: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the speeds of ranks by what was seen at each look.

    A rank differs from the typical one, and that one from speed 1, if it does so at every look, in the same direction
    and by more than noise: another program that takes turns on its core makes it look slower once, and is gone when
    the model trains.
    """
    middles = [sorted(look)[len(look) // 2] for look in looks]
    to_middle = [[speed / middle for speed in look] for look, middle in zip(looks, middles, strict=True)]
    return tuple(_lasting(middles) * _lasting(speeds) for speeds in zip(*to_middle, strict=True))


def _typical(look: Sequence[Pace]) -> float:
    return sorted(pace.typical for pace in look)[len(look) // 2]


def _lasting(speeds: Sequence[float]) -> float:
    is_slower = all(speed <= 1 / _NOISE for speed in speeds)
    is_faster = all(speed >= _NOISE for speed in speeds)
    return median(speeds) if is_slower or is_faster else 1.0
