"""What `test_precision.py` runs on ranks: an ordinary loop in each precision."""

from __future__ import annotations

import torch

from autovaruna import AutoVaruna
from autovaruna.runtime.environment import get_world
from tests.catalogue import CASES, Batch
from tests.mpi.numbers import FAST, Rows, quietly
from tests.reference import Record, sgd
from tests.session.precision import WAYS, Way, loop
from tests.session.test_precision import MIXED
from tests.session.training import Setup, planned, with_state

LARGE = Way(autocast=torch.float16, scale=2.0**19)
CHOSEN = {"autocast": WAYS["autocast"], "scaler": WAYS["scaler"], "overflow": LARGE}
SIZE, STEPS = 8, 3


def laid_down(way: Way) -> tuple[Record, list[float]]:
    """Trains on one stage a rank; nobody says what scaler the loop has."""
    setup = Setup(tuple((stage,) for stage in range(get_world().num_ranks)), 4)
    model = way.cast(MIXED.model())
    optimizer = sgd(model.parameters())
    wrapped = AutoVaruna(model, optimizer, **FAST, inputs="replicated", num_micro_batches=4)
    with planned(setup):
        record, scales = loop(
            way, MIXED, wrapped, optimizer, way.scaler(), [MIXED.batch(SIZE, step) for step in range(STEPS)]
        )
    return with_state(record, wrapped), scales


def measured() -> Record:
    """Trains as the planner finds best, after measuring in bfloat16; each rank passes half of a batch."""
    case, rank, half = CASES["chain"], get_world().rank, SIZE // get_world().num_ranks
    model = case.model()
    optimizer = sgd(model.parameters())
    wrapped = AutoVaruna(model, optimizer, **FAST)
    args, kwargs = case.batch(SIZE, 0)
    own: Batch = args, {name: value[rank * half : (rank + 1) * half] for name, value in kwargs.items()}
    record, _ = loop(WAYS["autocast"], case, wrapped, optimizer, WAYS["autocast"].scaler(), [own])
    return with_state(record, wrapped)


def precisions() -> Rows:
    """Runs everything that `test_precision.py` looks at."""
    torch.set_num_threads(1)
    found: Rows = quietly(lambda: {"measured": measured(), **{name: laid_down(way) for name, way in CHOSEN.items()}})
    return found
