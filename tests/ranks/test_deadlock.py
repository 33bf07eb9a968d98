"""Every wait that cannot end is found, and no other one; a long one says whom it waits for, and a limit ends it."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from autovaruna.errors import RankError
from autovaruna.ranks.deadlock import STEPS, DeadlockDetector, Leave, Need, Stalls, WaitReport
from autovaruna.ranks.world import World
from tests.rank_threads import run_ranks

EVENT = ("sent", 0, 0, 7)


def judged(num_ranks: int, *notices: WaitReport | Leave | None) -> str:
    """Returns what a detector finds that each rank has told what it does."""
    detector = DeadlockDetector(num_ranks, lambda failure: None)
    for rank, notice in enumerate(notices):
        if notice is not None:
            detector.record(rank, notice)
    return detector.finding()


def waits(rank: int, done: int = 0) -> WaitReport:
    """Returns the report of a rank that needs `rank` to send to rank 0, and has sent that `done` times itself."""
    return WaitReport(f"for rank {rank}", (Need(rank, EVENT, 1),), {EVENT: done})


def calls(label: str, number: int) -> WaitReport:
    """Returns the report of a rank that waits in its collective of that number."""
    joined = "joined", -1, -1, -1
    return WaitReport(f"in {label!r}", (Need(-1, joined, number),), {joined: number})


def test_a_message_on_its_way_is_no_deadlock() -> None:
    """Rank 0 has sent what rank 1 waits for: a slow network, not a circle."""
    assert not judged(2, waits(1, done=1), waits(0))


def test_an_old_report_is_forgotten_when_its_rank_goes_on() -> None:
    detector = DeadlockDetector(2, lambda failure: None)
    detector.record(0, waits(1))
    detector.record(0, WaitReport("", (), {}))
    detector.record(1, waits(0))
    assert not detector.finding()


def test_ranks_in_different_calls_are_found_and_one_that_is_late_for_an_earlier_is_not() -> None:
    assert not judged(3, calls("step", 4), calls("step", 4))
    assert not judged(3, calls("step", 4), calls("save", 5))  # rank 0 has gone on, and its word is on the way
    text = judged(3, calls("step", 4), calls("save", 4))
    assert "rank 0 is in 'step', rank 1 is in 'save', rank 2 is not in a collective call" in text


def test_a_thousand_ranks_are_judged_in_no_time_and_named_in_few_words() -> None:
    text = judged(1000, *[calls("step", 4)] * 999, Leave({}))
    assert text.startswith("rank 999 ended its script while rank 0 waits in 'step'")
    text = judged(1000, *[waits((rank + 1) % 1000) for rank in range(1000)])
    assert "and 984 more" in text and len(text) < 1000


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
