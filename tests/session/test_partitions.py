"""Any number of stages, any placement, schedule and cut gives the same bits, dropout on: DESIGN.md 6.4 and 6.5."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from tests.catalogue import CASES, HUGGING_FACE, MORE, PLAIN, Case
from tests.products import WHOLE, some
from tests.reference import OPTIMIZERS, Record, bit_equal
from tests.session.training import Setup, TooFewBlocksError, pipeline, train

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
    "zero_bubble": (pipeline(3, schedule="zero_bubble"), "sgd"),
    "zero_bubble_recompute": (pipeline(2, schedule="zero_bubble", recompute=True), "adamw"),
    "two_stages_a_rank": (Setup(((0,), (1,), (0,), (1,))), "sgd"),
    "two_stages_on_one_rank": (Setup(((0,), (0,))), "adamw"),
    "backwards": (Setup(((2,), (0,), (1,)), shares=(0.5, 0.8)), "sgd"),
    "idle_rank": (Setup(((0,), (2,)), num_ranks=3), "sgd"),
}
LARGE = ("3_stages", "recompute", "two_stages_a_rank", "zero_bubble")


@cache
def one_stage(name: str, optimizer: str) -> Record:
    """Returns what one stage on one rank gives."""
    return train_case(CASES[name], Setup(), optimizer)


def train_case(case: Case, setup: Setup, optimizer: str) -> Record:
    """Trains on batches that every rank passes whole; 7 samples in 3 micro-batches, so that one is larger."""
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    return train(case, setup, batches, OPTIMIZERS[optimizer])


def hold(name: str, setup_name: str) -> None:
    """Asserts that a setup gives the bits of one stage."""
    setup, optimizer = SETUPS[setup_name]
    try:
        got = train_case(CASES[name], setup, optimizer)
    except TooFewBlocksError:
        assert len(setup.stage_ranks) > CASES[name].max_stages
        pytest.skip(f"{name} cannot be cut into {len(setup.stage_ranks)} stages")
    bit_equal(got, one_stage(name, optimizer))


def pairs(cases: Sequence[Case], setups: Sequence[str]) -> list[tuple[Case, str]]:
    """Returns every case, and every setup with a seventh of the cases at least; or all of their product."""
    step = 1 if WHOLE else min(7, len(setups))
    return [(case, setup) for k, case in enumerate(cases) for setup in setups[k % step :: step]]


@pytest.mark.parametrize(("case", "setup"), pairs(PLAIN, [*SETUPS]), ids=str)
def test_the_partition_changes_no_bit(case: Case, setup: str) -> None:
    hold(case.name, setup)


@pytest.mark.parametrize(("case", "setup"), pairs(some(HUGGING_FACE, 2), LARGE), ids=str)
def test_the_partition_of_a_hugging_face_model_changes_no_bit(case: Case, setup: str) -> None:
    pytest.importorskip("transformers")
    hold(case.name, setup)


@pytest.mark.parametrize("case", some(MORE, 1), ids=str)
def test_three_stages_of_other_architectures_change_no_bit(case: Case) -> None:
    pytest.importorskip("transformers")
    hold(case.name, "3_stages")
