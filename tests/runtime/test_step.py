"""What a step takes: seconds that its work and messages force, few calls beside, and no more memory than it may."""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autovaruna import AutoVaruna
from autovaruna.commands.trace import read_bars
from autovaruna.ranks.deadlock import RankWatch
from autovaruna.ranks.world import World
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.executor import compact
from autovaruna.stage.module import StageModule
from tests.catalogue import PLAIN
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, descend, on_ranks, token_of, train

CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
Times = dict[str, tuple[int, float, float]]
"""For each instruction its rank, and when it had what it waited for, and when it ended."""


def forced_seconds(times: Times, num_stages: int) -> float:
    """Returns the least seconds of these instructions, in this order on each rank: the longest path."""
    ends: dict[str, float] = {}
    free: dict[int, float] = {}
    for name, (rank, start, end) in sorted(times.items(), key=lambda item: item[1][1]):
        stage, kind, micro_batch = re.split("([FB])", name)
        before = int(stage) + (-1 if kind == "F" else 1)
        arrives = ends[f"{before}{kind}{micro_batch}"] if 0 <= before < num_stages else 0.0
        ends[name] = free[rank] = max(free.get(rank, 0.0), arrives) + end - start
    return max(ends.values())


def run_traced(path: Path) -> Times:
    """Trains three steps on two ranks and returns the third's times."""
    setup = Setup(((0,), (1,)), 8, settings={"trace_events": True, "trace_events_file": str(path)})
    train(CASE, setup, [CASE.batch(8, step) for step in range(3)], sgd, [[4, 4]] * 3)
    bars = [bar for bar in read_bars(path) if bar.pid == 0 and bar.args.step == 3 and bar.name[0].isdigit()]
    return {bar.name: (bar.tid, bar.ts * 1e-6, (bar.ts + bar.dur) * 1e-6) for bar in bars}


def sleep_in_stages(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, Any]) -> None:
    """Has each run of a stage take longer, by what is drawn for it."""
    run = StageModule.run

    def slow(self: StageModule, *args: Any) -> dict[str, torch.Tensor]:
        time.sleep(seconds[self.index]())
        return run(self, *args)

    monkeypatch.setattr(StageModule, "run", slow)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_costs_what_it_must(late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times as long now and then: the others wait for what they need, and for nothing else, nor for their turn.

    In one try of several; the seconds double from try to try, so that what a busy machine adds matters less.
    """

    def costs_that(seconds: float) -> bool:
        chance = random.Random(late)
        sleeps = {late: lambda: seconds * (5 if chance.random() < 0.4 else 1), 1 - late: lambda: seconds}
        with monkeypatch.context() as patch:
            sleep_in_stages(patch, sleeps)
            times = run_traced(tmp_path / f"{seconds}.json")
        taken = max(end for _, _, end in times.values()) - min(start for _, start, _ in times.values())
        return taken <= 1.15 * forced_seconds(times, 2) + 2 * seconds

    assert any(costs_that(0.01 * 2**each) for each in range(6))


def test_a_step_has_one_exchange_and_no_message_that_it_could_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, 8 micro-batches: 8 activations, 8 gradients, labels and inputs of the other rank, the loss."""
    found: list[tuple[str, int]] = []
    seen, exchange = [], RankWatch.exchange

    def note_message(act: Callable[..., Any]) -> Callable[..., Any]:
        return lambda world, *args: (found.append(("message", world.rank)), act(world, *args))[1]

    def note_exchange(self: RankWatch, label: str, *args: Any, **kwargs: Any) -> Any:
        found.append((label, self.transport.rank))
        return exchange(self, label, *args, **kwargs)

    for name in ("send", "send_object"):
        monkeypatch.setattr(World, name, note_message(getattr(World, name)))
    monkeypatch.setattr(RankWatch, "exchange", note_exchange)
    for num_steps in (3, 4):
        found.clear()
        batches = [CASE.batch(8, step) for step in range(num_steps)]
        train(CASE, Setup(((0,), (1,)), 8), batches, sgd, [[4, 4]] * num_steps)
        seen.append(Counter(what for what, rank in found if rank == 0))
    inputs_of_rank_0_for_stage_1, activations = 4, 8
    extra = seen[1] - seen[0]
    assert extra.pop("message") <= activations + inputs_of_rank_0_for_stage_1
    assert extra == {"reading the model's inputs": 1} and not seen[0] - seen[1]


def calls_of_python(act: Callable[[], object]) -> int:
    """Returns how many functions of Python an act calls."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return num_calls


def calls_of_a_step(monkeypatch: pytest.MonkeyPatch, setup: Setup) -> int:
    """Returns how many functions of Python the last of four steps calls on the one rank that they run on."""
    found: list[int] = []
    run = Engine.run

    def counted(self: Engine, *args: Any) -> Any:
        returned: list[Any] = []
        found.append(calls_of_python(lambda: returned.append(run(self, *args))))
        return returned[0]

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", counted)
        train(CASE, setup, [CASE.batch(max(8, setup.num_micro_batches), step) for step in range(4)], sgd)
    return found[-1]


def test_a_step_and_a_micro_batch_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step took 261, then 235; a micro-batch 59, forward and backward of two stages: of a millisecond each counts."""
    assert calls_of_a_step(monkeypatch, Setup(((0,),), 1)) <= 170
    few, many = (calls_of_a_step(monkeypatch, Setup(((0,), (0,)), num)) for num in (4, 8))
    assert (many - few) / 4 <= 48


def test_the_tour_names_every_file_that_a_step_enters() -> None:
    """Follows the fourth step of two stages; `evidence/` has steps of its own, and is named as a folder."""
    package, page = Path(AutoVaruna.__init__.__code__.co_filename).parent, Path(__file__).parents[2] / "docs/tour.md"
    args, kwargs = CASE.batch(4, 0)

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> set[Path]:
        entered: set[Path] = set()

        def enter(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                entered.add(Path(frame.f_code.co_filename))

        for step in range(4):
            sys.setprofile(enter if step == 3 else None)
            descend(model(*args, **kwargs), optimizer)
        sys.setprofile(None)
        return entered

    entered = set().union(*on_ranks(Setup(((0,), (1,)), 2), CASE, run, token=token_of(CASE)))
    files = {str(path.relative_to(package)) for path in entered if package in path.parents}
    named = {name for name in files if f"`{name}`" in page.read_text() or f" {name} " in page.read_text()}
    of_folders = ("evidence/", "ranks/transport/")
    assert len(files) > 24 and not {name for name in files - named if not name.startswith(of_folders)}


def test_training_with_offload_is_training() -> None:
    setup = Setup(((0,), (1,)), 3, recompute=True, schedule="varuna", settings={"offload": True})
    batches = [CASE.batch(6, step) for step in range(2)]
    compare(train(CASE, setup, batches, sgd, [[3, 3]] * 2), plain_steps(CASE, batches, sgd))


def test_an_output_is_kept_on_memory_of_its_own() -> None:
    """``mse_loss`` leaves its mean in the memory of all terms: one micro-batch after the other, they added up."""
    x = torch.randn(100, requires_grad=True)
    for output in (F.mse_loss(x, torch.zeros(100)), x[:10], x * 2):
        kept = compact(output)
        assert torch.equal(kept, output) and not kept.requires_grad
        assert kept.untyped_storage().nbytes() == kept.nbytes
    assert kept.data_ptr() == output.data_ptr(), "what fills its memory is not copied"
