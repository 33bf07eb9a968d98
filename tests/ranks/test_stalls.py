"""Holds what a long wait says: whom it waits for, and where the others are; and that a limit ends it."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from autovaruna.errors import RankError
from autovaruna.ranks.deadlock import STEPS, Stalls
from autovaruna.ranks.world import World
from tests.rank_threads import run_ranks


def stall(world: World, stalled: int, until: threading.Event, limit: float = 0.0) -> None:
    """Stops a rank in the middle of steps: it does nothing any more, as after SIGSTOP."""
    world.watch.stalls = Stalls(report_seconds=0.7, limit_seconds=limit)
    world.barrier("step 1")
    if world.rank == stalled:
        until.wait(20.0)
    if world.rank == (stalled + 1) % 3:
        world.receive([torch.empty(1)], stalled, 4).wait()
    elif world.rank == stalled:
        world.send([torch.ones(1)], (stalled + 1) % 3, 4)
    world.barrier("step 2")


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_long_wait_says_for_whom_and_where_the_others_are(stalled: int, caplog: pytest.LogCaptureFixture) -> None:
    until = threading.Event()

    def end_once_said() -> None:
        while len({text[:6] for text in list(caplog.messages) if "has waited" in text}) < 2 and not until.wait(0.1):
            pass
        until.set()

    threading.Thread(target=end_once_said, daemon=True).start()
    with caplog.at_level(logging.WARNING, "autovaruna.ranks.deadlock"):
        run_ranks(3, lambda world: stall(world, stalled, until))
    receiver, other = (stalled + 1) % 3, (stalled + 2) % 3
    said = {rank: [text for text in caplog.messages if text.startswith(f"rank {rank} has waited")] for rank in range(3)}
    assert not said[stalled] and 1 <= len(said[receiver]) <= 3 and 1 <= len(said[other]) <= 3
    assert f"for a message of rank {stalled} (tag 4)" in said[receiver][0]
    assert "in 'step 2'" in said[other][0]
    for rank in (receiver, other):
        assert "is stopped" in said[rank][0]
    if stalled:
        assert all(f"rank {stalled} has not come" in said[rank][0] for rank in (receiver, other))
        assert f"rank {other} waits in 'step 2'" in said[receiver][0]
    else:
        assert all("rank 0 does not say where the others are" in said[rank][0] for rank in (receiver, other))


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_limit_ends_the_ranks_that_wait(stalled: int) -> None:
    until = threading.Event()
    errors: list[str] = []

    def run(world: World) -> None:
        try:
            stall(world, stalled, until, limit=1.0)
        except RankError as error:
            errors.append(str(error))
            until.set()
            raise

    named = "rank 1 has not come" if stalled else "rank 0 does not say"
    with pytest.raises(RankError, match=rf"has waited \d+ s .*{named}.*stall_limit_seconds is 1"):
        run_ranks(3, run)
    assert errors


def test_long_is_what_takes_many_steps() -> None:
    assert Stalls(30.0).first_seconds == 30.0
    assert Stalls(30.0, step_seconds=10.0).first_seconds == STEPS * 10.0
