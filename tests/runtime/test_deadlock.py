"""Holds the judgement of the deadlock detector: every wait that cannot end is found, and no other one."""

from __future__ import annotations

import pickle

from autovaruna.runtime.deadlock import Answer, DeadlockDetector, Failure, Farewell, Join, Leave, Need, Report, Values

EVENT = ("sent", 0, 0, 7)


class Hearing:
    """A detector with its answers and a clock that the test turns."""

    def __init__(self, num_ranks: int) -> None:
        self.answers: list[Answer] = []
        self.seconds = 0.0
        self.detector = DeadlockDetector(num_ranks, self.answers.append, lambda: self.seconds)

    def failure(self) -> Failure | None:
        return next((answer for answer in self.answers if isinstance(answer, Failure)), None)


def waits(rank: int, count: int = 1, **counts: int) -> Report:
    """Returns the report of a rank that needs `rank` to send to rank 0 `count` times, and has sent that itself."""
    return Report(f"for rank {rank}", (Need(rank, EVENT, count),), {EVENT: counts.get("done", 0)})


def test_values_go_to_all_by_rank() -> None:
    hearing = Hearing(2)
    hearing.detector.take(1, Join("step", b"one"))
    assert hearing.answers == []
    hearing.detector.take(0, Join("step", b"zero"))
    assert hearing.answers == [Values((b"zero", b"one"))]


def test_what_a_thousand_ranks_say_alike_travels_once() -> None:
    hearing = Hearing(1000)
    for rank in range(1000):
        hearing.detector.take(rank, Join("step", b"%1000d" % (rank % 3)))
    values = hearing.answers[0]
    assert isinstance(values, Values) and [int(value) for value in values.values] == [rank % 3 for rank in range(1000)]
    assert len(pickle.dumps(values)) < 10_000


def test_all_leave_together() -> None:
    hearing = Hearing(2)
    for rank in range(2):
        hearing.detector.take(rank, Leave({}))
    assert hearing.answers == [Farewell()]


def test_a_disagreement_of_all_is_not_final() -> None:
    hearing = Hearing(2)
    hearing.detector.take(0, Join("step", b""))
    hearing.detector.take(1, Join("save", b""))
    failure = hearing.failure()
    assert failure is not None and not failure.is_final
    assert "rank 0 is in 'step', rank 1 is in 'save'" in failure.text


def test_a_disagreement_waits_a_moment_for_the_rest() -> None:
    hearing = Hearing(3)
    hearing.detector.take(0, Join("step", b""))
    hearing.detector.take(1, Join("save", b""))
    hearing.detector.tick()
    assert hearing.failure() is None
    hearing.seconds = 2.0
    hearing.detector.tick()
    failure = hearing.failure()
    assert failure is not None and failure.is_final and "rank 2 is not in a collective call" in failure.text


def test_a_circle_of_three_is_stuck_when_it_closes() -> None:
    hearing = Hearing(4)
    hearing.detector.take(0, waits(1))
    hearing.detector.take(1, waits(2))
    assert hearing.failure() is None
    hearing.detector.take(2, waits(0))
    failure = hearing.failure()
    assert failure is not None and "rank 0 waits for rank 1; rank 1 waits for rank 2; rank 2 waits" in failure.text


def test_a_message_on_its_way_is_no_deadlock() -> None:
    """Rank 0 has sent what rank 1 waits for: a slow network, not a circle."""
    hearing = Hearing(2)
    hearing.detector.take(0, waits(1, done=1))
    hearing.detector.take(1, waits(0))
    assert hearing.failure() is None


def test_an_old_report_is_forgotten_when_its_rank_goes_on() -> None:
    hearing = Hearing(2)
    hearing.detector.take(0, waits(1))
    hearing.detector.take(0, Join("step", b""))
    hearing.detector.take(1, Join("step", b""))
    hearing.answers.clear()
    hearing.detector.take(1, waits(0))
    assert hearing.failure() is None


def test_waiting_for_a_running_rank_is_no_deadlock() -> None:
    hearing = Hearing(3)
    hearing.detector.take(0, waits(2))
    hearing.detector.take(1, Join("step", b""))
    assert hearing.failure() is None


def test_who_waits_behind_an_ended_rank_is_told_of_it() -> None:
    hearing = Hearing(3)
    hearing.detector.take(2, Leave({}))
    hearing.detector.take(0, waits(1))
    assert hearing.failure() is None
    hearing.detector.take(1, waits(2))
    failure = hearing.failure()
    assert failure is not None and failure.text.startswith("rank 2 ended its script while rank 1 waits for rank 2.")


def test_only_the_first_failure_is_told() -> None:
    hearing = Hearing(2)
    hearing.detector.fail("first")
    hearing.detector.fail("second")
    hearing.detector.take(0, Join("step", b""))
    assert hearing.answers == [Failure("first", is_final=True)]
