"""The same numbers from any number of ranks and stages, under mpirun, planned as for a user: issue 2, "Numbers"."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.catalogue import CASES, HUGGING_FACE, PLAIN, Case
from tests.mpi.launch import run_on_ranks
from tests.mpi.numbers import SIZE, STEPS, sizes_of
from tests.parallel.training import merge, weighted_losses
from tests.reference import OPTIMIZERS, Record, bit_equal, compare, plain_steps

pytestmark = pytest.mark.timeout(400)
SMALL = [case.name for case in PLAIN]
LARGE = [case.name for case in HUGGING_FACE]
REPLICATED = ["chain", "tied_three_ways", "skip", "outputs_dict", "two_losses", "conv_net", "lstm", "frozen", "gpt2"]


@cache
def job(num_ranks: int) -> list[dict[str, Any]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    large = LARGE if num_ranks in (2, 4) else []
    return run_on_ranks(num_ranks, "tests.mpi.numbers:numbers", SMALL, large, REPLICATED, timeout=380)


def found(num_ranks: int, part: str, key: str) -> Record:
    """Returns the record of one run, put together from its ranks."""
    rows = [ranks[part][key] for ranks in job(num_ranks)]
    broken = [row for row in rows if isinstance(row, str)]
    assert not broken, broken[0]
    return merge(rows)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_number_of_stages_gives_the_same_bits(case: Case, num_ranks: int, optimizer: str) -> None:
    one = found(1, "small", f"{case.name}/1/{optimizer}")
    assert len(one.losses) == STEPS
    for num_stages in range(1, min(num_ranks, case.max_stages) + 1):
        bit_equal(found(num_ranks, "small", f"{case.name}/{num_stages}/{optimizer}"), one)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", HUGGING_FACE, ids=str)
def test_every_number_of_stages_of_a_hugging_face_model_gives_the_same_bits(case: Case, num_ranks: int) -> None:
    pytest.importorskip("transformers")
    one = found(2, "large", f"{case.name}/1/adamw")
    for num_stages in range(1, num_ranks + 1):
        bit_equal(found(num_ranks, "large", f"{case.name}/{num_stages}/adamw"), one)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", [case for case in PLAIN if not case.has_dropout and not case.has_batch_norm], ids=str)
def test_the_numbers_are_those_of_plain_pytorch(case: Case, optimizer: str) -> None:
    expected = plain_steps(case, [case.batch(SIZE, step) for step in range(STEPS)], OPTIMIZERS[optimizer])
    for num_stages in range(1, min(4, case.max_stages) + 1):
        compare(found(4, "small", f"{case.name}/{num_stages}/{optimizer}"), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["planned", "replicas"])
@pytest.mark.parametrize("name", REPLICATED)
def test_ranks_with_batches_of_their_own_train_as_one(name: str, how: str, num_ranks: int) -> None:
    case = CASES[name].without_dropout()
    sizes = sizes_of(num_ranks)
    rows = [ranks["replicas"][f"{name}/{how}"] for ranks in job(num_ranks)]
    assert not [row for row in rows if isinstance(row, str)]
    expected = plain_steps(case, [case.batch(sum(each), step) for step, each in enumerate(sizes)])
    compare(merge(weighted_losses(case, rows, sizes)), expected)
