"""What a step takes: what its work and its messages force it to take, and a few messages beside."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna.runtime.deadlock import RankWatch
from autovaruna.runtime.world import World
from autovaruna.schedule.pipeline import Instruction, Kind
from autovaruna.stage.module import StageModule
from tests.catalogue import PLAIN
from tests.reference import sgd
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


def forced_seconds(times: Times, num_stages: int) -> float:
    """Returns the least seconds of these instructions, in this order on each rank: the longest path."""
    ends: dict[str, float] = {}
    free: dict[int, float] = {}
    for name, (rank, start, end) in sorted(times.items(), key=lambda item: item[1][1]):
        step = read(name)
        before = step.stage + (-1 if step.kind is Kind.FORWARD else 1)
        sender = str(Instruction(before, step.kind, step.micro_batch))
        arrives = ends[sender] if 0 <= before < num_stages else 0.0
        ends[name] = free[rank] = max(free.get(rank, 0.0), arrives) + end - start
    return max(ends.values())


def step_seconds(times: Times) -> float:
    """Returns the seconds from the first instruction to the last."""
    return max(end for _, _, end in times.values()) - min(start for _, start, _ in times.values())


def run_traced(path: Path) -> Times:
    """Trains three steps on two ranks and returns the third's times."""
    setup = Setup(((0,), (1,)), 8, settings={"trace_events": True, "trace_events_file": str(path)})
    train(CASE, setup, [CASE.batch(8, step) for step in range(3)], sgd, [[4, 4]] * 3)
    return measured(path, 3)


def sleep_in_stages(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, Any]) -> None:
    """Has each run of a stage take longer, by what is drawn for it."""
    run = StageModule.run

    def slow(self: StageModule, *args: Any) -> dict[str, torch.Tensor]:
        time.sleep(seconds[self.index]())
        return run(self, *args)

    monkeypatch.setattr(StageModule, "run", slow)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_at_random_costs_what_it_must(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times as long now and then: the others wait for what they need, and for nothing else, nor for their turn.

    In one try of several; the seconds double from try to try, so that what a busy machine adds matters less.
    """

    def costs_that(seconds: float) -> bool:
        chance = random.Random(late)
        sleeps = {late: lambda: seconds * (5 if chance.random() < 0.4 else 1), 1 - late: lambda: seconds}
        with monkeypatch.context() as patch:
            sleep_in_stages(patch, sleeps)
            times = run_traced(tmp_path / f"{seconds}.json")
        return step_seconds(times) <= 1.15 * forced_seconds(times, 2) + 2 * seconds

    assert any(costs_that(0.01 * 2**each) for each in range(6))


def count_messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Returns a list that grows by each message and each exchange."""
    found: list[tuple[str, int]] = []
    exchange = RankWatch.exchange

    def note_message(act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda world, *args: (found.append(("message", world.rank)), act(world, *args))[1]

    def note_exchange(self: RankWatch, label: str, *args: Any, **kwargs: Any) -> Any:
        found.append((label, self.transport.rank))
        return exchange(self, label, *args, **kwargs)

    for name in ("send", "send_object"):
        monkeypatch.setattr(World, name, note_message(getattr(World, name)))
    monkeypatch.setattr(RankWatch, "exchange", note_exchange)
    return found


def test_a_step_has_one_exchange_and_no_message_that_it_could_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, 8 micro-batches: 8 activations, 8 gradients, labels and inputs of the other rank, the loss."""
    found, seen = count_messages(monkeypatch), []
    for num_steps in (3, 4):
        found.clear()
        batches = [CASE.batch(8, step) for step in range(num_steps)]
        train(CASE, Setup(((0,), (1,)), 8), batches, sgd, [[4, 4]] * num_steps)
        seen.append(Counter(what for what, rank in found if rank == 0))
    inputs_of_rank_0_for_stage_1, activations = 4, 8
    extra = seen[1] - seen[0]
    assert extra.pop("message") <= activations + inputs_of_rank_0_for_stage_1
    assert extra == {"reading the model's inputs": 1} and not seen[0] - seen[1]
