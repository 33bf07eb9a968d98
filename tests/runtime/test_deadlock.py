"""Holds the judgement of the deadlock detector: every wait that cannot end is found, and no other one."""

from __future__ import annotations

import pickle

from autovaruna.runtime.deadlock import Answer, DeadlockDetector, Failure, Join, JoinedValues, Leave, Need, WaitReport

EVENT = ("sent", 0, 0, 7)


class Hearing:
    """A detector with its answers."""

    def __init__(self, num_ranks: int) -> None:
        self.answers: list[Answer] = []
        self.detector = DeadlockDetector(num_ranks, self.answers.append)

    def failure(self) -> Failure | None:
        return next((answer for answer in self.answers if isinstance(answer, Failure)), None)


def waits(rank: int, done: int = 0) -> WaitReport:
    """Returns the report of a rank that needs `rank` to send to rank 0, and has sent that `done` times itself."""
    return WaitReport(f"for rank {rank}", (Need(rank, EVENT, 1),), {EVENT: done})


def test_what_a_thousand_ranks_say_alike_travels_once() -> None:
    hearing = Hearing(1000)
    for rank in range(1000):
        hearing.detector.record(rank, Join("step", b"%1000d" % (rank % 3)))
    values = hearing.answers[0]
    assert isinstance(values, JoinedValues) and [int(value) for value in values.values] == [
        rank % 3 for rank in range(1000)
    ]
    assert len(pickle.dumps(values)) < 10_000


def test_a_circle_of_three_is_stuck_when_it_closes() -> None:
    hearing = Hearing(4)
    hearing.detector.record(0, waits(1))
    hearing.detector.record(1, waits(2))
    assert hearing.failure() is None
    hearing.detector.record(2, waits(0))
    failure = hearing.failure()
    assert failure is not None and "rank 0 waits for rank 1; rank 1 waits for rank 2; rank 2 waits" in failure.text


def test_a_message_on_its_way_is_no_deadlock() -> None:
    """Rank 0 has sent what rank 1 waits for: a slow network, not a circle."""
    hearing = Hearing(2)
    hearing.detector.record(0, waits(1, done=1))
    hearing.detector.record(1, waits(0))
    assert hearing.failure() is None


def test_an_old_report_is_forgotten_when_its_rank_goes_on() -> None:
    hearing = Hearing(2)
    hearing.detector.record(0, waits(1))
    hearing.detector.record(0, Join("step", b""))
    hearing.detector.record(1, Join("step", b""))
    hearing.answers.clear()
    hearing.detector.record(1, waits(0))
    assert hearing.failure() is None


def test_who_waits_behind_an_ended_rank_is_told_of_it() -> None:
    hearing = Hearing(3)
    hearing.detector.record(2, Leave({}))
    hearing.detector.record(0, waits(1))
    assert hearing.failure() is None
    hearing.detector.record(1, waits(2))
    failure = hearing.failure()
    assert failure is not None and failure.text.startswith("rank 2 ended its script while rank 1 waits for rank 2.")
