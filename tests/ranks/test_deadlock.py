"""Holds the judgement of the deadlock detector: every wait that cannot end is found, and no other one."""

from __future__ import annotations

from autovaruna.ranks.deadlock import DeadlockDetector, Leave, Need, WaitReport

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
