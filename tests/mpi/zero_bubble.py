"""What `test_zero_bubble.py` runs on ranks: the same training with whole and with split backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autovaruna.runtime.environment import get_world
from tests.catalogue import CASES
from tests.mpi.numbers import NUM_MICRO_BATCHES, SIZE, STEPS, Rows, quietly, wrap
from tests.session.training import Setup, planned, train_rank


def both_ways(names: Sequence[str]) -> Rows:
    """Trains each case as a pipeline over all ranks, by both schedules."""
    torch.set_num_threads(1)
    setup = Setup(tuple((stage,) for stage in range(get_world().num_ranks)), NUM_MICRO_BATCHES)

    def run() -> Rows:
        rows: Rows = {}
        for name in names:
            case = CASES[name]
            for schedule in ("1f1b", "zero_bubble"):
                model, optimizer = wrap(case, "adamw", inputs="replicated", num_micro_batches=NUM_MICRO_BATCHES)
                with planned(replace(setup, schedule=schedule), (case.name, case.has_dropout)):
                    batches = [case.batch(SIZE, step) for step in range(STEPS)]
                    rows[f"{name}/{schedule}"] = train_rank(case, model, optimizer, batches)
        return rows

    found: Rows = quietly(run)
    return found
