"""Lets the ranks that save or load a checkpoint act together, and makes sure that they ask for the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from autovaruna.config.files import at_home
from autovaruna.errors import AutoVarunaError, CheckpointError, InputError
from autovaruna.runtime.world import World, differences, gather_on_all, on_all

Result = TypeVar("Result")


def together(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns what `act` returns; an error on one rank is an error on all. Collective.

    Ranks that have failed wait for those that are still at work, however long.
    """
    return on_all(world, partial(as_ours, act, what), what, waits=True)


def as_ours(act: Callable[[], Result], what: str) -> Result:
    """Returns what `act` returns.

    Raises:
        AutoVarunaError: it fails, whatever it raises: a script can catch the same on every rank.
    """
    try:
        return act()
    except AutoVarunaError:
        raise
    except Exception as error:  # no memory, as a rule
        raise CheckpointError(f"{what} failed: {type(error).__name__}: {error!s:.500}") from error


def on_first(world: World, act: Callable[[], Result], what: str) -> Result:
    """Returns on every rank what `act` returns on rank 0. Collective."""
    return gather(world, lambda: act() if world.rank == 0 else None, what)[0]  # type: ignore[return-value]


def gather(world: World, act: Callable[[], Result], what: str) -> list[Result]:
    """Returns what `act` returns on each rank; as `together`. Collective."""
    return gather_on_all(world, partial(as_ours, act, what), what, waits=True)


def place_of(given: str | os.PathLike[str]) -> str:
    """Returns the path that a script gives.

    Raises:
        InputError: no file can have that path.
    """
    try:
        path = at_home(given)
    except TypeError:
        path = ""
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"The folder of checkpoints is {given!r}; expected a path, as 'checkpoints'.")
    return path


def different_requests(world: World, place: str, own: Mapping[str, str], what: str) -> str:
    """Returns in words what ranks ask for in another way than rank 0; empty: nothing. Collective."""
    every = world.gather_objects((dict(own), place, _real(place)), what)
    is_one = len({given for _, given, _ in every}) == 1
    return differences([mine if is_one else {**mine, "dir": real} for mine, _, real in every])


def _real(path: str) -> str:
    """Returns the one path of a folder that may have several."""
    try:
        return os.path.realpath(path)
    except OSError:  # the folder that the script is in has gone
        return path
