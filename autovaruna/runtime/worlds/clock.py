"""Finds how far the clocks of the ranks are apart."""

from __future__ import annotations

from time import perf_counter

import torch

from autovaruna.runtime.worlds.world import World

_TAG = (1 << 20) - 2
_NUM_TIMES = 10


def offset_to_first(world: World) -> float:
    """Returns the seconds to add to this rank's `perf_counter` to get that of rank 0. Collective.

    Rank 0 answers each rank's messages with its own clock. Of several, the fastest answer counts: what its way there
    and its way back can differ by bounds the error (Cristian, "Probabilistic clock synchronization", 1989).
    """
    for rank in range(1, world.num_ranks):
        if world.rank == 0:
            for _ in range(_NUM_TIMES):
                _receive(world, rank)
                _send(world, rank)
        elif world.rank == rank:
            return min(_ask(world) for _ in range(_NUM_TIMES))[1]
    return 0.0


def _ask(world: World) -> tuple[float, float]:
    """Returns the seconds that an answer took, and the offset if both ways took the same."""
    begin = perf_counter()
    _send(world, 0)
    theirs = _receive(world, 0)
    end = perf_counter()
    return end - begin, theirs - (begin + end) / 2


def _send(world: World, rank: int) -> None:
    world.send([torch.tensor([perf_counter()], dtype=torch.float64, device="cpu")], rank, _TAG).wait()


def _receive(world: World, rank: int) -> float:
    clock = torch.empty(1, dtype=torch.float64, device="cpu")
    world.receive([clock], rank, _TAG).wait()
    return float(clock.item())
