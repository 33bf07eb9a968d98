"""Trains random graphs on random plans: none waits for ever, and all give the numbers of plain PyTorch.

``DRAWN_GRAPHS=1000 pytest tests/session/test_drawn_graphs.py`` draws as many,
``DRAWN_FROM=5000`` from that seed on.
"""

from __future__ import annotations

import random

import pytest

from tests.catalogue.case import Batch, Case, batch_size
from tests.catalogue.drawn import draw_case
from tests.products import drawn_seeds
from tests.reference import OPTIMIZERS, bit_equal, compare, part, plain_micro_batched, ranges
from tests.session.training import Setup, TooFewBlocksError, train

STEPS = 2
ONCE_WRONG = (68, 255)  # a value and the same under another name on both sides of a cut
SHARED = ("interleaved", "deepest_first")
SCHEDULES = ("gpipe", "1f1b", "varuna", "zero_bubble", *SHARED)


def draw_setup(chance: random.Random, case: Case, num_stages: int) -> Setup:
    """Returns any placement of stages: unequal replicas (each has buffers of its own), several stages a rank."""
    num_ranks = chance.randint(1, 4)
    schedule = chance.choice(SCHEDULES)
    most = 1 if schedule in ("zero_bubble", *SHARED) or case.has_batch_norm else num_ranks
    ranks = tuple(tuple(chance.sample(range(num_ranks), chance.randint(1, most))) for _ in range(num_stages))
    if schedule in SHARED:
        ranks = tuple((stage % num_ranks,) for stage in range(num_stages))
    return Setup(
        stage_ranks=ranks,
        num_micro_batches=chance.randint(1, 7),
        shares=tuple(sorted(chance.random() for _ in range(num_stages - 1))),
        recompute=chance.random() < 0.4 and schedule != "zero_bubble",
        schedule=schedule,
        num_ranks=num_ranks,
    )


def micro_batches(batch: Batch, num_micro_batches: int) -> list[Batch]:
    """Returns the parts that a run cuts the batch into, without empty ones."""
    return [part(batch, start, end) for start, end in ranges(batch_size(batch), num_micro_batches) if end > start]


def hold(case: Case, setup: Setup, size: int, optimizer: str) -> None:
    """Compares a run with one on a single rank, bit for bit where that is promised, and with plain PyTorch."""
    batches = [case.batch(size, step) for step in range(STEPS)]
    got = train(case, setup, batches, OPTIMIZERS[optimizer])
    alone = train(case, Setup(((0,),), setup.num_micro_batches), batches, OPTIMIZERS[optimizer])
    if all(len(ranks) == 1 for ranks in setup.stage_ranks):
        bit_equal(got, alone)
    else:
        compare(got, alone)
    if not case.has_dropout:
        steps = [micro_batches(batch, setup.num_micro_batches) for batch in batches]
        compare(got, plain_micro_batched(case, steps, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("seed", sorted({*drawn_seeds(24), *ONCE_WRONG}))
def test_a_drawn_graph_trains_as_plain_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    case = draw_case(seed, chance.randint(6, 20))
    if chance.random() < 0.5:
        case = case.without_dropout()
    for num_stages in range(chance.randint(1, 5), 0, -1):
        try:
            hold(case, draw_setup(chance, case, num_stages), chance.randint(1, 12), chance.choice(list(OPTIMIZERS)))
        except TooFewBlocksError:
            continue
        return
