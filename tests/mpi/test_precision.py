"""Precisions under mpirun: the bits of one rank, and the scale of its GradScaler on all of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.catalogue import CASES
from tests.mpi.launch import run_on_ranks
from tests.mpi.precision import CHOSEN, LARGE, SIZE
from tests.reference import bit_equal, compare
from tests.session.precision import WAYS, plain_in
from tests.session.training import merge


@cache
def job(num_ranks: int) -> list[dict[str, Any]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    return run_on_ranks(num_ranks, "tests.mpi.precision:precisions")


@pytest.mark.parametrize("way", CHOSEN)
def test_two_stages_give_the_bits_and_the_scales_of_one(way: str) -> None:
    records, scales = zip(*(rows[way] for rows in job(2)), strict=True)
    expected, [*expected_scales] = job(1)[0][way]
    bit_equal(merge(records), expected)
    assert all(each == expected_scales for each in scales)


def test_overflow_halves_the_scale_on_every_rank() -> None:
    for num_ranks in (1, 2):
        for rows in job(num_ranks):
            assert rows["overflow"][1][0] == LARGE.scale / 2


def test_a_plan_measured_in_bfloat16_trains_as_plain_pytorch() -> None:
    found = merge([rows["measured"] for rows in job(2)])
    compare(found, plain_in(WAYS["autocast"], CASES["chain"], [CASES["chain"].batch(SIZE, 0)]).record, rtol=2e-2)
