"""Any number of stages, any placement, schedule and cut gives the same bits, dropout on: DESIGN.md 6.4 and 6.5."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from threading import Event, Thread

import pytest
import torch

from autovaruna import AutoVaruna
from autovaruna.runtime import gradients
from tests.catalogue import CASES, HUGGING_FACE, MORE, PLAIN, Case
from tests.products import WHOLE, some
from tests.reference import OPTIMIZERS, Record, bit_equal
from tests.session.training import Setup, TooFewBlocksError, on_ranks, pipeline, train, train_rank

SIZE, STEPS = 7, 3
SETUPS: dict[str, tuple[Setup, str]] = {
    "2_stages": (pipeline(2), "sgd"),
    "3_stages": (pipeline(3), "adamw"),
    "4_stages": (pipeline(4), "sgd"),
    "cut_early": (pipeline(2, shares=(0.0,)), "sgd"),
    "cut_late": (pipeline(2, shares=(1.0,)), "adamw"),
    "recompute": (pipeline(3, recompute=True), "sgd"),
    "gpipe": (pipeline(3, schedule="gpipe", shares=(0.2, 0.4)), "adamw"),
    "varuna": (pipeline(3, schedule="varuna", recompute=True), "adamw"),
    "two_stages_a_rank": (Setup(((0,), (1,), (0,), (1,))), "sgd"),
    "two_stages_on_one_rank": (Setup(((0,), (0,))), "adamw"),
    "backwards": (Setup(((2,), (0,), (1,)), shares=(0.5, 0.8)), "sgd"),
    "idle_rank": (Setup(((0,), (2,)), num_ranks=3), "sgd"),
}
LARGE = ("3_stages", "recompute", "two_stages_a_rank")


@cache
def one_stage(name: str, optimizer: str) -> Record:
    return train_case(CASES[name], Setup(), optimizer)


def train_case(case: Case, setup: Setup, optimizer: str) -> Record:
    """Trains on batches that every rank passes whole; 7 samples in 3 micro-batches, so that one is larger."""
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    return train(case, setup, batches, OPTIMIZERS[optimizer])


def pairs(cases: Sequence[Case], setups: Sequence[str]) -> list[tuple[Case, str]]:
    """Returns every case, and every setup with a seventh of the cases at least; or all of their product."""
    step = 1 if WHOLE else min(7, len(setups))
    return [(case, setup) for k, case in enumerate(cases) for setup in setups[k % step :: step]]


ALL = [*pairs(PLAIN, [*SETUPS]), *pairs(some(HUGGING_FACE, 2), LARGE), *((case, "3_stages") for case in some(MORE, 1))]


@pytest.mark.parametrize(("case", "name"), ALL, ids=str)
def test_the_partition_changes_no_bit(case: Case, name: str) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    setup, optimizer = SETUPS[name]
    try:
        got = train_case(case, setup, optimizer)
    except TooFewBlocksError:
        assert len(setup.stage_ranks) > case.max_stages
        pytest.skip(f"{case} cannot be cut into {len(setup.stage_ranks)} stages")
    bit_equal(got, one_stage(case.name, optimizer))


EARLY = ("lstm", "tied_three_ways", "unused_parameter", "batch_norm")


@pytest.mark.parametrize("is_shared", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", EARLY)
def test_sums_over_hosts_that_begin_beside_backwards_change_no_bit(
    name: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run for each parameter, in two stages of two replicas each, or of one stage after another on both ranks."""
    monkeypatch.setattr(gradients, "EARLY_BYTES", 0)
    early, take = list[str](), gradients.Summation.take

    def noted(self: gradients.Summation, use: tuple[str, int], accumulator: torch.Tensor) -> None:
        early.append(use[0])
        take(self, use, accumulator)

    monkeypatch.setattr(gradients.Summation, "take", noted)
    for ranks, hosts in ((((0, 1), (2, 3)), "abab"), (((0, 1), (0, 1)), "ab")):
        setup = Setup(ranks, 3, settings={"shard_optimizer": is_shared})
        near = train_case(CASES[name], setup, "adamw")
        assert not early
        bit_equal(train_case(CASES[name], replace(setup, hosts=hosts), "adamw"), near)
        assert early
        early.clear()


def test_a_thread_of_the_script_may_draw_meanwhile() -> None:
    """A loader drew from torch's generator: dropout was refused, or another in recompute, and the loader's repeated."""
    case, drawn, done = CASES["dropout"], list[float](), Event()
    first, *others = (case.batch(SIZE, step) for step in range(20))

    def draw() -> None:
        while not done.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        train_rank(case, model, optimizer, [first])
        drawn.clear()
        return train_rank(case, model, optimizer, others)

    setup, models = Setup(((0,), (0,)), recompute=True), [case.model(), case.model()]
    thread, interval = Thread(target=draw, daemon=True), sys.getswitchinterval()
    (expected,) = on_ranks(setup, models[0], run)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        (found,) = on_ranks(setup, models[1], run)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    bit_equal(found, expected)
    assert len(drawn) == len(set(drawn)) > 100
