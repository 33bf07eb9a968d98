"""Runs things on all ranks: an error on one is an error on all; what they have differently is said in words.

Also finds how far the clocks of the ranks are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeVar

import torch

from autovaruna.runtime.world import World


def differences(of_ranks: Sequence[Mapping[str, str]]) -> str:
    """Returns in words what the first rank that differs from rank 0 has in another way; empty: nothing."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return "; ".join(
                f"{name} is {first.get(name, 'missing')} on rank 0, {other.get(name, 'missing')} on rank {rank}"
                for name in names[:5]
            )
    return ""


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


_CLOCK_TAG = (1 << 20) - 2
_NUM_TIMES = 10


def offset_to_first(world: World) -> float:
    """Returns the seconds to add to this rank's `perf_counter` to get that of rank 0. Collective.

    Rank 0 answers each rank's messages with its own clock. Of several, the fastest answer counts: what its way there
    and its way back can differ by bounds the error (Cristian, "Probabilistic clock synchronization", 1989).
    """
    for rank in range(1, world.num_ranks):
        if world.rank == 0:
            for _ in range(_NUM_TIMES):
                _receive_clock(world, rank)
                _send_clock(world, rank)
        elif world.rank == rank:
            return min(_ask_for_clock(world) for _ in range(_NUM_TIMES))[1]
    return 0.0


def _ask_for_clock(world: World) -> tuple[float, float]:
    """Returns the seconds that an answer took, and the offset if both ways took the same."""
    begin = perf_counter()
    _send_clock(world, 0)
    theirs = _receive_clock(world, 0)
    end = perf_counter()
    return end - begin, theirs - (begin + end) / 2


def _send_clock(world: World, rank: int) -> None:
    world.send([torch.tensor([perf_counter()], dtype=torch.float64, device="cpu")], rank, _CLOCK_TAG).wait()


def _receive_clock(world: World, rank: int) -> float:
    clock = torch.empty(1, dtype=torch.float64, device="cpu")
    world.receive([clock], rank, _CLOCK_TAG).wait()
    return float(clock.item())
