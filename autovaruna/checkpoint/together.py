"""Lets all ranks do something, and all of them fail if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autovaruna.runtime.world import World

Result = TypeVar("Result")


def together(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns what `act` returns; an error on one rank is an error on all. Collective.

    Ranks that have failed wait for those that are still at work, however long.
    """
    error: Exception | None = None
    result: Result | None = None
    try:
        result = act()
    except Exception as caught:
        error = caught
    world.barrier(what)
    world.agree(error, what)
    return result  # type: ignore[return-value]


def on_first(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns on every rank what `act` returns on rank 0. Collective."""
    result = together(world, lambda: act() if world.rank == 0 else None, what)
    return world.broadcast_object(result, 0, what)  # type: ignore[no-any-return]
