"""Draws whole runs at random (model, ranks, cuts, micro-batches, sizes, schedule) and holds them to plain PyTorch."""

from __future__ import annotations

import random

import pytest

from tests.catalogue import PLAIN, Case
from tests.catalogue.small import WIDTH
from tests.reference import OPTIMIZERS, compare, plain_steps
from tests.session.training import Setup, train

STEPS = 3
CASES = [case.without_dropout() for case in PLAIN if not case.has_batch_norm]


def draw_setup(chance: random.Random, case: Case) -> Setup:
    """Returns any placement: unequal replicas, several stages a rank, idle ranks."""
    num_ranks, num_stages = chance.randint(1, 5), chance.randint(1, min(4, case.max_stages))
    ranks = tuple(tuple(chance.sample(range(num_ranks), chance.randint(1, num_ranks))) for _ in range(num_stages))
    return Setup(
        stage_ranks=ranks,
        num_micro_batches=chance.randint(num_ranks, 2 * num_ranks + 3),
        shares=tuple(sorted(chance.random() for _ in range(num_stages - 1))),
        recompute=chance.random() < 0.4,
        schedule=chance.choice(["1f1b", "gpipe", "varuna"]),
        num_ranks=num_ranks,
    )


def draw_sizes(chance: random.Random, num_ranks: int) -> list[int]:
    """Returns samples for each rank: some, and not as many as a tensor without samples has numbers."""
    while True:
        sizes = [chance.choice([0, 1, 2, 3, 5]) for _ in range(num_ranks)]
        if sum(sizes) not in (0, WIDTH):
            return sizes


@pytest.mark.parametrize("seed", range(60))
def test_any_setup_trains_as_plain_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    case = chance.choice(CASES)
    setup = draw_setup(chance, case)
    sizes = [draw_sizes(chance, setup.world_size) for _ in range(STEPS)]
    batches = [case.batch(sum(each), step) for step, each in enumerate(sizes)]
    optimizer = OPTIMIZERS[chance.choice(list(OPTIMIZERS))]
    options = {"max_norm": chance.choice([None, 0.1]), "num_accumulated": chance.choice([1, 3])}
    compare(train(case, setup, batches, optimizer, sizes, **options), plain_steps(case, batches, optimizer, **options))
