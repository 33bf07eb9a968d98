"""Trains, saves, and goes on from what was saved, on ranks that are threads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autovaruna import AutoVaruna, CheckpointInfo
from tests.catalogue import Batch, Case
from tests.reference import MakeOptimizer, Record, adamw, sgd
from tests.session.training import Setup, merge, on_ranks, pipeline, token_of, train, train_rank

SETUPS = {
    "1x1": Setup(),
    "2 stages": pipeline(2),
    "2 replicas": Setup(((0, 1),)),
    "3 stages": pipeline(3),
    "2x2": Setup(((0, 1), (2, 3))),
    "unequal": Setup(((0,), (1, 2))),
    "2 replicas, shared": Setup(((0, 1),), settings={"shard_optimizer": True}),
    "2x2, shared": Setup(((0, 1), (2, 3)), settings={"shard_optimizer": True}),
    "unequal, shared": Setup(((0,), (1, 2)), settings={"shard_optimizer": True}),
}
NUM_STEPS = 3


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "adamw": adamw,
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),  # whose state of a matrix is a row and a column
}


def batches(case: Case) -> list[Batch]:
    """Returns the global batches of a run."""
    return [case.batch(7, step) for step in range(2 * NUM_STEPS)]


def num_replicas(setup: Setup) -> int | None:
    """Returns how many ranks each stage has, over which gradients are summed; None: not all as many."""
    numbers = {len(ranks) for ranks in setup.stage_ranks}
    return numbers.pop() if len(numbers) == 1 else None


def save_halfway(case: Case, setup: Setup, make: MakeOptimizer, root: Path, **options: Any) -> None:
    """Trains for `NUM_STEPS` and saves."""

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        train_rank(case, model, optimizer, batches(case)[:NUM_STEPS])
        model.save_checkpoint(root, step=NUM_STEPS, data_position={"batch": NUM_STEPS}, **options)
        model.wait_checkpoint()

    on_ranks(setup, case, run, make)


def go_on(case: Case, setup: Setup, make: MakeOptimizer, root: Path, steps_before: int = 0) -> Record:
    """Loads into another model, perhaps after steps of its own, and trains for the rest."""

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        train_rank(case, model, optimizer, [case.batch(7, 99)] * steps_before)
        info = model.load_checkpoint(root)
        assert isinstance(info, CheckpointInfo) and (info.step, info.data_position) == (3, {"batch": 3})
        return train_rank(case, model, optimizer, batches(case)[NUM_STEPS:])

    return replace(merge(on_ranks(setup, case.model(seed=1), run, make, token=token_of(case))), gradients=[])


def uninterrupted(case: Case, setup: Setup, make: MakeOptimizer) -> Record:
    """Trains for all steps without a break; the record has the losses of the second half."""
    record = train(case, setup, batches(case), make)
    return replace(record, gradients=[], losses=record.losses[NUM_STEPS:])
