"""The same numbers from any number of ranks and stages, under mpirun."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.catalogue import CASES, HUGGING_FACE, PLAIN
from tests.mpi.launch import run_on_ranks, warm
from tests.mpi.numbers import optimizer_of, sizes_of, stage_counts
from tests.products import WHOLE, some
from tests.reference import Record, bit_equal, compare, plain_steps
from tests.session.training import merge, weighted_losses

pytestmark = pytest.mark.timeout(1000)
NAMES = [case.name for case in PLAIN[:: 1 if WHOLE else 7]]
LARGEST = [case.name for case in HUGGING_FACE[: None if WHOLE else 1]] if find_spec("transformers") else []
RANKS = (2, 3, 4) if WHOLE else (2, 3)
REPLICATED = some(["chain", "tied_three_ways", "skip", "outputs_dict", "two_losses", "lstm", "frozen"], 3)


def names_on(num_ranks: int) -> list[str]:
    """Returns the models that run on a number of ranks: all on one, half on two, half on three.

    Of the catalogue they are a seventh: `tests.session.test_partitions` runs all of it on ranks that are threads.
    """
    return drawn(NAMES, num_ranks) + drawn(LARGEST, num_ranks)


def drawn(names: list[str], num_ranks: int) -> list[str]:
    """Returns all names on one rank; each of them either on two or on three."""
    return names if WHOLE or num_ranks == 1 else names[num_ranks - 2 :: 2]


@cache
def trace_before_forking() -> None:
    """Traces all models in the process that ranks are forked from; rank 1 of each job, which is not, traces again."""
    if torch.version.cuda is None:  # with CUDA a process that has gone backward has no forks that can
        warm().prepare("tests.mpi.numbers:trace_all", names_on(1))


@cache
def job(num_ranks: int) -> list[dict[str, Any]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    trace_before_forking()
    names = names_on(num_ranks), drawn(REPLICATED, num_ranks) if num_ranks > 1 else []
    return run_on_ranks(num_ranks, "tests.mpi.numbers:numbers", *names, timeout=900)


def found(num_ranks: int, name: str, num_stages: int, optimizer: str) -> Record:
    """Returns the record of one run, put together from its ranks."""
    return merge([rows["stages"][f"{name}/{num_stages}/{optimizer}"] for rows in job(num_ranks)])


@pytest.mark.parametrize(("num_ranks", "name"), [(num, name) for num in RANKS for name in names_on(num)])
def test_every_number_of_stages_gives_the_same_bits(num_ranks: int, name: str) -> None:
    for num_stages in stage_counts(CASES[name], num_ranks):
        optimizer = optimizer_of(name, num_stages)
        bit_equal(found(num_ranks, name, num_stages, optimizer), found(1, name, 1, optimizer))


@pytest.mark.parametrize(("num_ranks", "name"), [(num, name) for num in RANKS for name in drawn(REPLICATED, num)])
@pytest.mark.parametrize("how", ["planned", "replicas"])
def test_ranks_with_batches_of_their_own_train_as_one(num_ranks: int, name: str, how: str) -> None:
    case = CASES[name].without_dropout()
    sizes = sizes_of(num_ranks)
    rows = [ranks["replicas"][f"{name}/{how}"] for ranks in job(num_ranks)]
    expected = plain_steps(case, [case.batch(sum(each), step) for step, each in enumerate(sizes)])
    compare(merge(weighted_losses(case, rows, sizes)), expected)


def test_a_model_on_meta_is_made_in_parts_and_trains_the_same():
    [(losses, state, whole)] = run_on_ranks(1, "tests.mpi.numbers:train_on_meta", 1)
    parts = run_on_ranks(2, "tests.mpi.numbers:train_on_meta", 2)
    assert losses[-1] < losses[0]
    assert sum(held for _, _, held in parts) == whole
    for other, its_state, held in parts:
        assert other == losses
        assert held < whole
        assert all(torch.equal(its_state[name], value) for name, value in state.items())
