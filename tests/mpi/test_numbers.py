"""The same numbers from any number of ranks and stages, under mpirun."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from tests.catalogue import CASES, HUGGING_FACE, PLAIN, Case
from tests.mpi.launch import run_on_ranks, warm
from tests.mpi.numbers import SIZE, STEPS, optimizer_of, sizes_of, stage_counts
from tests.products import WHOLE
from tests.reference import OPTIMIZERS, Record, bit_equal, compare, plain_steps
from tests.session.training import merge, weighted_losses

pytestmark = pytest.mark.timeout(1000)
NAMES = [case.name for case in PLAIN]
LARGE = [case.name for case in HUGGING_FACE] if find_spec("transformers") else []
DRAWN = {2: slice(0, None, 2), 3: slice(1, None, 4), 4: slice(3, None, 4)}
"""Which names run on a number of ranks."""
REPLICATED = ["chain", "tied_three_ways", "skip", "outputs_dict", "two_losses", "lstm", "frozen"]


def names_on(num_ranks: int) -> list[str]:
    """Returns the models that run on a number of ranks: all on one, half on two, a quarter each on three and on four.

    `tests.session.test_partitions` runs all on two, three and four ranks that are threads.
    """
    return drawn(NAMES, num_ranks) + drawn(LARGE, num_ranks)


def drawn(names: list[str], num_ranks: int) -> list[str]:
    """Returns all names on one rank; each of them either on two, on three or on four."""
    return names if WHOLE or num_ranks == 1 else names[DRAWN[num_ranks]]


@cache
def trace_before_forking() -> None:
    """Traces all models in the process that ranks are forked from; rank 1 of each job, which is not, traces again."""
    warm().prepare("tests.mpi.numbers:trace_all", names_on(1))


@cache
def job(num_ranks: int) -> list[dict[str, Any]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    trace_before_forking()
    names = names_on(num_ranks), drawn(REPLICATED, num_ranks)
    return run_on_ranks(num_ranks, "tests.mpi.numbers:numbers", *names, timeout=900)


def found(num_ranks: int, name: str, num_stages: int, optimizer: str) -> Record:
    """Returns the record of one run, put together from its ranks."""
    return merge([rows["stages"][f"{name}/{num_stages}/{optimizer}"] for rows in job(num_ranks)])


@pytest.mark.parametrize(("num_ranks", "name"), [(num, name) for num in (2, 3, 4) for name in names_on(num)])
def test_every_number_of_stages_gives_the_same_bits(num_ranks: int, name: str) -> None:
    for num_stages in stage_counts(CASES[name], num_ranks):
        optimizer = optimizer_of(name, num_stages)
        bit_equal(found(num_ranks, name, num_stages, optimizer), found(1, name, 1, optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", [case for case in PLAIN if not case.has_dropout and not case.has_batch_norm], ids=str)
def test_the_numbers_are_those_of_plain_pytorch(case: Case, optimizer: str) -> None:
    expected = plain_steps(case, [case.batch(SIZE, step) for step in range(STEPS)], OPTIMIZERS[optimizer])
    compare(found(1, case.name, 1, optimizer), expected)


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num, name) for num in (1, 2, 3, 4) for name in drawn(REPLICATED, num)]
)
@pytest.mark.parametrize("how", ["planned", "replicas"])
def test_ranks_with_batches_of_their_own_train_as_one(num_ranks: int, name: str, how: str) -> None:
    case = CASES[name].without_dropout()
    sizes = sizes_of(num_ranks)
    rows = [ranks["replicas"][f"{name}/{how}"] for ranks in job(num_ranks)]
    expected = plain_steps(case, [case.batch(sum(each), step) for step, each in enumerate(sizes)])
    compare(merge(weighted_losses(case, rows, sizes)), expected)
