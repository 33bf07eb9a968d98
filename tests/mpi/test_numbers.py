"""Ranks of mpirun train as one process; `tests.session` has all models, on threads, and other numbers of stages.

That these give the same bits under mpirun, too, `test_checkpoint` holds.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.catalogue import CASES
from tests.mpi.launch import run_on_ranks
from tests.mpi.numbers import sizes_of
from tests.products import WHOLE, some
from tests.reference import Record, compare, plain_steps
from tests.session.training import merge, weighted_losses

pytestmark = pytest.mark.timeout(1000)
RANKS = (2, 3, 4) if WHOLE else (2, 3)
NAMES = some(["chain", "tied_three_ways", "skip", "outputs_tuple", "two_losses", "lstm", "frozen"], 2)


@cache
def job(num_ranks: int) -> list[dict[str, Record]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    return run_on_ranks(num_ranks, "tests.mpi.numbers:numbers", NAMES, timeout=900)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("how", ["planned", "replicas"])
def test_ranks_with_batches_of_their_own_train_as_one(num_ranks: int, name: str, how: str) -> None:
    case, sizes = CASES[name].without_dropout(), sizes_of(num_ranks)
    records = [each[f"{name}/{how}"] for each in job(num_ranks)]
    expected = plain_steps(case, [case.batch(sum(each), step) for step, each in enumerate(sizes)])
    compare(merge(weighted_losses(case, records, sizes)), expected)


def test_a_model_on_meta_is_made_in_parts_and_trains_the_same():
    [(losses, state, whole)] = run_on_ranks(1, "tests.mpi.numbers:train_on_meta", 1)
    parts = run_on_ranks(2, "tests.mpi.numbers:train_on_meta", 2)
    assert losses[-1] < losses[0]
    assert sum(held for _, _, held in parts) == whole
    for other, its_state, held in parts:
        assert other == losses
        assert held < whole
        assert all(torch.equal(its_state[name], value) for name, value in state.items())
