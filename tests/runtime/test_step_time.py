"""What a step takes: what its work and its messages force it to take, and a few messages beside."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autovaruna.runtime.deadlock import Watch
from autovaruna.runtime.world import World
from autovaruna.schedule.pipeline import Instruction, Kind
from autovaruna.stage.module import StageModule
from tests.catalogue import PLAIN
from tests.ranks import make_worlds
from tests.reference import sgd
from tests.runtime import delayed
from tests.runtime.delayed import delay_messages
from tests.session.training import Setup, train

CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
Times = dict[str, tuple[int, float, float]]
"""For each instruction its rank, and when it had what it waited for, and when it ended."""


def read(name: str) -> Instruction:
    """Returns the instruction of a name such as 0F3."""
    kind = next(kind for kind in Kind if kind.value in name)
    stage, micro_batch = name.split(kind.value)
    return Instruction(int(stage), kind, int(micro_batch))


def measured(path: Path, step: int) -> Times:
    """Reads the instructions of a step from a trace."""
    rows = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    times = {}
    for row in rows:
        if row["ph"] == "X" and row["pid"] == 0 and row["args"]["step"] == step and row["name"][0].isdigit():
            times[row["name"]] = row["tid"], row["ts"] * 1e-6, (row["ts"] + row["dur"]) * 1e-6
    return times


def forced_seconds(times: Times, num_stages: int, latency_seconds: float = 0.0) -> float:
    """Returns the least seconds of these instructions, in this order on each rank: the longest path."""
    ends: dict[str, float] = {}
    free: dict[int, float] = {}
    for name, (rank, start, end) in sorted(times.items(), key=lambda item: item[1][1]):
        step = read(name)
        before = step.stage + (-1 if step.kind is Kind.FORWARD else 1)
        sender = str(Instruction(before, step.kind, step.micro_batch))
        arrives = ends[sender] + latency_seconds if 0 <= before < num_stages else 0.0
        ends[name] = free[rank] = max(free.get(rank, 0.0), arrives) + end - start
    return max(ends.values())


def step_seconds(times: Times) -> float:
    """Returns the seconds from the first instruction to the last."""
    return max(end for _, _, end in times.values()) - min(start for _, start, _ in times.values())


def run_traced(path: Path, schedule: str = "1f1b", num_micro_batches: int = 8, **more: Any) -> Times:
    """Trains three steps on two ranks and returns the third's times."""
    settings = {"trace_events": True, "trace_events_file": str(path)}
    batches = [CASE.batch(num_micro_batches, step) for step in range(3)]
    sizes = [[num_micro_batches // 2] * 2] * 3
    train(
        CASE, Setup(((0,), (1,)), num_micro_batches, schedule=schedule, settings=settings), batches, sgd, sizes, **more
    )
    return measured(path, 3)


def sleep_in_stages(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, Any]) -> None:
    """Has each run of a stage take longer, by what is drawn for it."""
    run = StageModule.run

    def slow(self: StageModule, *args: Any) -> dict[str, torch.Tensor]:
        time.sleep(seconds[self.index]())
        return run(self, *args)

    monkeypatch.setattr(StageModule, "run", slow)


def holds_in_one_try(run: Callable[[float], tuple[float, float]]) -> bool:
    """Says whether the first of two times is at most the second, in one try of several.

    `run` takes the seconds of a sleep, which double from try to try, so that what a busy machine adds matters less.
    """
    return any(found <= most for found, most in (run(0.01 * 2**each) for each in range(6)))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_at_random_costs_what_it_must(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times as long now and then: the others wait for what they need, and for nothing else."""

    def run(seconds: float) -> tuple[float, float]:
        chance = random.Random(late)
        sleeps = {late: lambda: seconds * (5 if chance.random() < 0.4 else 1), 1 - late: lambda: seconds}
        with monkeypatch.context() as patch:
            sleep_in_stages(patch, sleeps)
            times = run_traced(tmp_path / f"{seconds}.json")
        return step_seconds(times), 1.15 * forced_seconds(times, 2) + 2 * seconds

    assert holds_in_one_try(run)


def test_the_ranks_work_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seconds: float) -> tuple[float, float]:
        with monkeypatch.context() as patch:
            sleep_in_stages(patch, {0: lambda: seconds, 1: lambda: seconds})
            times = run_traced(tmp_path / f"{seconds}.json")
        return step_seconds(times), 0.8 * sum(end - start for _, start, end in times.values())

    assert holds_in_one_try(run)


def test_a_delayed_message_comes_after_its_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of its ranks, which here goes on when somebody sleeps, and not before."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(delayed, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    rank, other = make_worlds(2)
    for world in (rank, other):
        delay_messages(world, 0.05)
    other.send([torch.ones(3)], 0, 0)
    buffer = torch.zeros(3)
    pending = rank.receive([buffer], 1, 0)
    assert not pending.is_done()
    pending.wait()
    assert pending.is_done() and buffer.sum() == 3
    assert 100.05 <= now[0] < 100.052


def count_messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns a list that grows by each message and each exchange of objects."""
    found: list[tuple[str, int]] = []
    send, send_object, gather = World.send, World.send_object, Watch.gather

    def note_send(self: World, tensors: Any, destination: int, tag: int) -> Any:
        found.append(("message", self.rank))
        return send(self, tensors, destination, tag)

    def note_object(self: World, value: object, destination: int, tag: int) -> Any:
        found.append(("message", self.rank))
        return send_object(self, value, destination, tag)

    def note_gather(self: Watch, value: object, label: str, *given: Any) -> Any:
        found.append((label, self.transport.rank))
        return gather(self, value, label, *given)

    monkeypatch.setattr(World, "send", note_send)
    monkeypatch.setattr(World, "send_object", note_object)
    monkeypatch.setattr(Watch, "gather", note_gather)
    return found


def test_a_step_has_one_exchange_and_no_message_that_it_could_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, 8 micro-batches: 8 activations, 8 gradients, labels and inputs of the other rank, the loss."""
    found = count_messages(monkeypatch)
    seen = []

    def note(num_steps: int) -> list[tuple[str, int]]:
        found.clear()
        batches = [CASE.batch(8, step) for step in range(num_steps)]
        train(CASE, Setup(((0,), (1,)), 8), batches, sgd, [[4, 4]] * num_steps)
        return list(found)

    for num_steps in (3, 4):
        seen.append(note(num_steps))
    words = [sorted(what for what, rank in each if rank == 0) for each in seen]
    extra = list(words[1])
    for what in words[0]:
        extra.remove(what)
    inputs_of_rank_0_for_stage_1, activations = 4, 8
    assert extra.count("message") <= activations + inputs_of_rank_0_for_stage_1
    assert [what for what in extra if what != "message"] == ["reading the model's inputs"]
