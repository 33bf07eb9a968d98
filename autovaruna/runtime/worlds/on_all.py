"""Lets all ranks do something, and all of them fail if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autovaruna.runtime.worlds.world import World

Result = TypeVar("Result")


def on_all(world: World, act: Callable[[], Result], what: str, *, waits: bool = False) -> Result:
    """Returns what `act` returns; an error on one rank is an error on all. Collective.

    Args:
        world: The ranks.
        act: What each rank does; talks to no other.
        what: What to call it in a message.
        waits: Whether ranks that are done wait for those that are still at work, however long.
    """
    results: list[Result] = []
    gather_on_all(world, lambda: results.append(act()), what, waits=waits)
    return results[0]


def gather_on_all(world: World, act: Callable[[], Result], what: str, *, waits: bool = False) -> list[Result]:
    """Returns what `act` returns on each rank; an error on one rank is an error on all. Collective.

    Args:
        world, act, what, waits: As in `on_all`; what `act` returns goes to every rank.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as raised:
        error = raised
    if waits:
        world.barrier(what)
    return world.agree(error, what, result)
