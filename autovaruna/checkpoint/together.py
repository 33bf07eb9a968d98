"""Lets all ranks do something that may take long, or one of them for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autovaruna.runtime.worlds.on_all import gather_on_all, on_all
from autovaruna.runtime.worlds.world import World

Result = TypeVar("Result")


def together(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns what `act` returns; an error on one rank is an error on all. Collective.

    Ranks that have failed wait for those that are still at work, however long.
    """
    return on_all(world, act, what, waits=True)


def on_first(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns on every rank what `act` returns on rank 0. Collective."""
    return gather_on_all(world, lambda: act() if world.rank == 0 else None, what, waits=True)[0]  # type: ignore[return-value]
