"""Holds that another program on the same core changes neither what a block takes nor what a step gets of the core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from autovaruna.profiler import time as clocks
from autovaruna.profiler.time import measure_pace, own_clock
from tests.profiler.models import CPU, profile, traced

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that pins to cores")
TRIES = 3


@pytest.fixture
def one_core() -> Iterator[None]:
    """Runs a test with one thread on one core."""
    cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    os.sched_setaffinity(0, cores)


@contextmanager
def other_programs(count: int) -> Iterator[None]:
    """Has programs that never rest share the core of this one."""
    busy = "import sys\nprint(flush=True)\nwhile True: pass"
    programs = [subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        yield
    finally:
        for program in programs:
            program.kill()
            program.communicate(timeout=20)


@pytest.mark.usefixtures("one_core")
def test_seconds_of_long_blocks_have_no_turns_of_other_programs() -> None:
    """A block that takes longer than a turn would have some in every sample."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh())
    graph = traced(model, torch.zeros(3, 1000))

    def seconds() -> float:
        costs = profile(graph, model, [600], CPU, iterations=3).costs[0]
        return sum(cost.forward_seconds + cost.backward_seconds for cost in costs)

    ratios = []
    for _ in range(TRIES):
        alone = seconds()
        with other_programs(2):
            ratios.append(seconds() / alone)
        if ratios[-1] < 1.6:
            return
    pytest.fail(f"beside two other programs blocks seem to take {ratios} times as long")


@pytest.mark.usefixtures("one_core")
def test_pace_tells_what_other_programs_take() -> None:
    """Two others leave a third of the core, or less; the rank's own time stays what it is."""
    found = []
    for _ in range(TRIES):
        alone = measure_pace(CPU)
        with other_programs(2):
            beside = measure_pace(CPU)
        found.append((beside.typical / alone.typical, beside.mean / beside.typical))
        if found[-1][0] < 1.6 and found[-1][1] > 1.8:
            return
    pytest.fail(f"own time changed, and the core was shared, by {found}")


def test_clock_that_counts_turns_alone_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the time of one thread where several compute."""
    readings = iter(0.01 * (count // 7) for count in range(10_000))
    clocks._is_fine.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(clocks, "thread_time", lambda: next(readings))
        assert own_clock(CPU) is clocks.perf_counter
    clocks._is_fine.cache_clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert own_clock(CPU) is clocks.perf_counter
