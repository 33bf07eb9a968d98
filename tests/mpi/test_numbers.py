"""The same numbers from any number of ranks and stages, under mpirun, in any precision and by any schedule."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.catalogue import CASES, HUGGING_FACE, PLAIN, Case
from tests.mpi.launch import run_on_ranks, warm
from tests.mpi.numbers import CHOSEN, LARGE, SIZE, STEPS, Tiny, optimizer_of, samples, sizes_of, stage_counts
from tests.products import WHOLE
from tests.reference import OPTIMIZERS, Record, bit_equal, compare, plain_steps
from tests.session.test_precision import WAYS, plain_in
from tests.session.training import merge, weighted_losses

pytestmark = pytest.mark.timeout(1000)
NAMES = [case.name for case in PLAIN]
LARGEST = [case.name for case in HUGGING_FACE] if find_spec("transformers") else []
DRAWN = {2: slice(0, None, 2), 3: slice(1, None, 4), 4: slice(3, None, 4)}
"""Which names run on a number of ranks."""
REPLICATED = ["chain", "tied_three_ways", "skip", "outputs_dict", "two_losses", "lstm", "frozen"]


def names_on(num_ranks: int) -> list[str]:
    """Returns the models that run on a number of ranks: all on one, half on two, a quarter each on three and on four.

    `tests.session.test_partitions` runs all on two, three and four ranks that are threads.
    """
    return drawn(NAMES, num_ranks) + drawn(LARGEST, num_ranks)


def drawn(names: list[str], num_ranks: int) -> list[str]:
    """Returns all names on one rank; each of them either on two, on three or on four."""
    return names if WHOLE or num_ranks == 1 else names[DRAWN[num_ranks]]


@cache
def trace_before_forking() -> None:
    """Traces all models in the process that ranks are forked from; rank 1 of each job, which is not, traces again."""
    if torch.version.cuda is None:  # with CUDA a process that has gone backward has no forks that can
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


NUMBER = 20_000


def test_a_step_of_20_000_micro_batches_is_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)  # as the ranks have it
    plain = Tiny()
    expected = plain(samples(NUMBER))
    expected.backward()
    ranks = run_on_ranks(2, "tests.mpi.numbers:many_micro_batches", NUMBER)
    assert {name for _, held in ranks for name in held} == {name for name, _ in plain.named_parameters()}
    for loss, held in ranks:
        torch.testing.assert_close(loss, expected.detach())
        for name, gradient in held.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_a_model_on_meta_is_made_in_parts_and_trains_the_same():
    [(losses, state, whole)] = run_on_ranks(1, "tests.mpi.numbers:train_on_meta", 1)
    parts = run_on_ranks(2, "tests.mpi.numbers:train_on_meta", 2)
    assert losses[-1] < losses[0]
    assert sum(held for _, _, held in parts) == whole
    for other, its_state, held in parts:
        assert other == losses
        assert held < whole
        assert all(torch.equal(its_state[name], value) for name, value in state.items())


def test_both_ways_give_the_same_bits() -> None:
    names = ["dropout", "tied_three_ways"]
    rows = run_on_ranks(2, "tests.mpi.numbers:both_ways", names)
    for name in names:
        split, plain = (merge([row[f"{name}/{way}"] for row in rows]) for way in ("zero_bubble", "1f1b"))
        bit_equal(split, plain)


@cache
def job_of_precision(num_ranks: int) -> list[dict[str, Any]]:
    """Runs one job on a number of ranks; returns what each rank found."""
    return run_on_ranks(num_ranks, "tests.mpi.numbers:precisions")


@pytest.mark.parametrize("way", CHOSEN)
def test_two_stages_give_the_bits_and_the_scales_of_one(way: str) -> None:
    records, scales = zip(*(rows[way] for rows in job_of_precision(2)), strict=True)
    expected, [*expected_scales] = job_of_precision(1)[0][way]
    bit_equal(merge(records), expected)
    assert all(each == expected_scales for each in scales)


def test_overflow_halves_the_scale_on_every_rank() -> None:
    for num_ranks in (1, 2):
        for rows in job_of_precision(num_ranks):
            assert rows["overflow"][1][0] == LARGE.scale / 2


def test_a_plan_measured_in_bfloat16_trains_as_plain_pytorch() -> None:
    found = merge([rows["measured"] for rows in job_of_precision(2)])
    compare(found, plain_in(WAYS["autocast"], CASES["chain"], [CASES["chain"].batch(SIZE, 0)]).record, rtol=2e-2)
