"""Breaks each numbered rule in turn, and reads the error."""

from __future__ import annotations

import dataclasses
import re

import pytest

from autovaruna.errors import ScheduleError
from autovaruna.schedule import check
from autovaruna.schedule.instruction import Instruction, Kind, Schedule
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import replay, simulate
from tests.schedule.pipelines import chain, placed


def parse(text: str) -> Schedule:
    """Returns the schedule of rows such as ``0F0 0B0``, one a line."""
    found = [re.findall(r"(\d+)([FRBW])(\d+)", line) for line in text.strip().splitlines()]
    return tuple(tuple(Instruction(int(s), Kind(kind), int(m)) for s, kind, m in row) for row in found)


TWO = chain(2, 2)
RECOMPUTING = chain(1, 2, recompute=1.0)
ALONE = chain(1, 2, depth=lambda n, s: 2)
SPLIT = chain(1, 2, backward=2.0, weight=1.0, depth=lambda n, s: 2)
GOOD = """0F0 0F1 0B0 0B1
          1F0 1B0 1F1 1B1"""


def test_good_schedules_pass() -> None:
    check(parse(GOOD), TWO)
    check(parse("0F0 0B0 0F1 0B1"), RECOMPUTING)
    check(parse("0F0 0R0 0B0 0F1 0R1 0B1"), RECOMPUTING)
    check(parse("0F0 0F1 0B0 0W0 0B1 0W1"), SPLIT)
    check(parse("0F0 0F1 0B0 0B1"), SPLIT)
    check(parse("0F0 0F1"), dataclasses.replace(ALONE, needs_gradients=False))


@pytest.mark.parametrize(
    ("rule", "pipeline", "broken", "place"),
    [
        (1, TWO, GOOD.replace("1F1", "0F1"), "rank 1, instruction 2"),
        (1, TWO, GOOD.replace("1F1", "1F7"), "rank 1, instruction 2"),
        (1, TWO, GOOD.replace("1F1", "5F1"), ">5F1<"),
        (2, TWO, GOOD.replace("1B1", ""), "rank 1 | 1F0 1B0 1F1 >end<"),
        (2, TWO, GOOD.replace("1B1", "1B0"), ">1B0<"),
        (2, dataclasses.replace(ALONE, needs_gradients=False), "0F0 0F1 0B0", ">0B0<"),
        (3, ALONE, "0F0 0R0 0B0 0F1 0B1", ">0R0<"),
        (3, RECOMPUTING, "0F0 0R0 0B0 0F1 0B1", ">0B1<"),
        (3, RECOMPUTING, "0F0 0F1 0B0 0B1", ">0B0<"),
        (4, ALONE, "0B0 0F0 0F1 0B1", ">0B0<"),
        (4, RECOMPUTING, "0F0 0B0 0R0 0F1 0R1 0B1", ">0R0<"),
        (5, ALONE, "0F1 0F0 0B0 0B1", ">0F0<"),
        (5, ALONE, "0F0 0F1 0B1 0B0", ">0B0<"),
        (6, chain(2, 2, depth=lambda n, s: 1), GOOD, ">0F1<"),
        (7, chain(1, 2, depth=lambda n, s: 2, recompute=1.0), "0F0 0R0 0F1 0R1 0B0 0B1", ">0R1<"),
        (2, SPLIT, "0F0 0B0 0W0 0F1 0B1 0W1 0W1", ">0W1<"),
        (5, SPLIT, "0F0 0F1 0B0 0B1 0W1 0W0", ">0W0<"),
        (9, SPLIT, "0F0 0B0 0F1 0B1 0W1", ">0B0<"),
        (9, SPLIT, "0F0 0W0 0B0 0F1 0B1 0W1", ">0W0<"),
        (9, SPLIT, "0F0 0F1 0B0 0B1 0W0 0W1", ">0B1<"),
        (9, ALONE, "0F0 0B0 0W0 0F1 0B1 0W1", ">0W0<"),
        (8, placed(TWO, [(0,), (0,)], 1), "0F0 0B0 1F0 1B0 0F1 1F1 1B1 0B1", "rank 0 | 0F0 >0B0< 1F0"),
    ],
)  # fmt: skip
def test_each_rule(rule: int, pipeline: Pipeline, broken: str, place: str) -> None:
    with pytest.raises(ScheduleError, match=f"^rule {rule}:") as error:
        check(parse(broken), pipeline)
    assert place in str(error.value)


def test_wrong_number_of_rows() -> None:
    with pytest.raises(ScheduleError, match="rule 1: 1 rows for 2 ranks"):
        check(parse(GOOD)[:1], TWO)


def test_deadlock_between_ranks_marks_where_each_waits() -> None:
    """Rank 0 waits for an activation that rank 1 can only make from what rank 0 sends after."""
    crossed = placed(chain(3, 1), [(0,), (1,), (0,)], 2)
    with pytest.raises(ScheduleError, match="rule 8") as error:
        check(parse("2F0 0F0 2B0 0B0\n 1F0 1B0"), crossed)
    assert "rank 0 | >2F0< 0F0" in str(error.value)
    assert "rank 1 | >1F0< 1B0" in str(error.value)


def test_error_of_a_long_schedule_shows_the_place_alone() -> None:
    pipeline = chain(1, 1000)
    row = list(simulate(pipeline, POLICIES["1f1b"]).schedule[0])
    row[1000], row[1002] = row[1002], row[1000]
    with pytest.raises(ScheduleError, match="rule 4") as error:
        check((tuple(row),), pipeline)
    assert "... " in str(error.value) and len(str(error.value)) < 300


def test_replay_of_another_order_takes_its_own_time() -> None:
    pipeline = chain(2, 2, depth=lambda n, s: 2)
    assert replay(pipeline, parse(GOOD)).step_seconds == 6.0
    assert replay(pipeline, parse(GOOD.replace("0F1 0B0", "0B0 0F1"))).step_seconds == 8.0


def test_gpipe_says_what_it_needs() -> None:
    with pytest.raises(ScheduleError, match="stage 0: gpipe holds 5 micro-batches in flight, the plan allows 2"):
        simulate(chain(2, 5), POLICIES["gpipe"])


def test_a_policy_that_waits_for_ever_is_an_error_not_a_hang() -> None:
    class Lazy(type(POLICIES["varuna"])):
        name = "lazy"

        def pick(self, replicas):
            return None

    with pytest.raises(ScheduleError, match="policy lazy waits on every rank"):
        simulate(chain(2, 2), Lazy())
