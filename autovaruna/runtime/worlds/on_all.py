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
    results, error = _tried(world, act, what, waits)
    world.agree(error, what)
    return results[0]


def gather_on_all(world: World, act: Callable[[], Result], what: str, *, waits: bool = False) -> list[Result]:
    """Returns what `act` returns on each rank; an error on one rank is an error on all. Collective.

    Args:
        world, act, what, waits: As in `on_all`; what `act` returns goes to every rank.
    """
    results, error = _tried(world, act, what, waits)
    return world.agree(error, what, *results)


def _tried(world: World, act: Callable[[], Result], what: str, waits: bool) -> tuple[list[Result], Exception | None]:
    """Returns what was returned, if anything, and the error, if there was one."""
    results: list[Result] = []
    error: Exception | None = None
    try:
        results.append(act())
    except Exception as raised:
        error = raised
    if waits:
        world.barrier(what)
    return results, error
