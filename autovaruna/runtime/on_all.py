"""Lets all ranks do something, and all of them fail if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autovaruna.runtime.world import World

Result = TypeVar("Result")


def on_all(world: World, act: Callable[[], Result], what: str, *, waits: bool = False) -> Result:
    """Returns what `act` returns; an error on one rank is an error on all. Collective.

    Args:
        world: The ranks.
        act: What each rank does; talks to no other.
        what: What to call it in a message.
        waits: Whether ranks that are done wait for those that are still at work, however long.
    """
    error: Exception | None = None
    results: list[Result] = []
    try:
        results.append(act())
    except Exception as caught:
        error = caught
    if waits:
        world.barrier(what)
    world.agree(error, what)
    return results[0]
