"""Reads the text timeline of a step."""

from __future__ import annotations

import dataclasses

from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import render
from autovaruna.schedule.simulator import simulate
from tests.schedule.pipelines import chain, random_pipeline


def test_timeline_of_two_stages() -> None:
    pipeline = chain(2, 2, 1.0, 2.0)
    stages = (dataclasses.replace(pipeline.stages[0], reduce_seconds=1.0), pipeline.stages[1])
    text = render(simulate(dataclasses.replace(pipeline, stages=stages), POLICIES["1f1b"]), 50)
    assert text.splitlines() == [
        "rank 0 |0F0>>0F1>>..........0B0<<<<<<<.....0B1<<<<<<<+++++| work 60%  bubble 30%  all-reduce 10%",
        "rank 1 |.....1F0>>1B0<<<<<<<1F1>>1B1<<<<<<<...............| work 60%  bubble 40%",
        "step 10 s    > forward  o recompute  < backward  + all-reduce  . idle",
    ]


def test_every_row_has_the_width() -> None:
    for seed in range(40):
        pipeline = random_pipeline(seed)
        lines = render(simulate(pipeline, POLICIES["varuna"]), 64).splitlines()
        assert len(lines) == pipeline.num_ranks + 1
        assert {line.rindex("|") - line.index("|") for line in lines[:-1]} == {65}


def test_lines_fit_into_a_terminal_the_shares_left_out_where_it_is_narrow() -> None:
    for seed in range(6):
        simulation = simulate(random_pipeline(seed), POLICIES["varuna"])
        for columns in (60, 80, 120, 160):
            lines = render(simulation, columns=columns).splitlines()[:-1]
            assert max(map(len, lines)) <= columns
            assert {line.rindex("|") - line.index("|") - 1 for line in lines} <= {*range(50, 101)}
            assert columns < 160 or all("%" in line for line in lines)
    assert "%" not in render(simulation, columns=60)


def test_many_instructions_leave_no_room_for_labels() -> None:
    row = render(simulate(chain(1, 1000), POLICIES["1f1b"]), 40).splitlines()[0]
    assert set(row.split("|")[1]) <= {">", "<", "."}
