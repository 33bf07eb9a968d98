"""What `test_numbers.py` runs on ranks: many cases in one job."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.ranks.environment import get_world
from tests.catalogue import CASES, DEVICE, Case
from tests.catalogue.small import WIDTH, Classifier, hidden, labelled
from tests.reference import OPTIMIZERS, Record
from tests.session.training import QUIET, descend, pipeline, share_of, trace_shared, train, train_rank, work_shared

STEPS, SIZE = 3, 8
NUM_MICRO_BATCHES = 4
FAST: dict[str, Any] = {**QUIET, "profile_iterations": 1}
Rows = dict[str, Any]


def wrap(case: Case, optimizer: str = "sgd", **settings: Any) -> tuple[AutoVaruna, torch.optim.Optimizer]:
    """Returns a wrapped model with its optimizer; each rank builds another one, which rank 0's weights overwrite."""
    model = case.model(get_world().rank)
    made = OPTIMIZERS[optimizer](model.parameters())
    return AutoVaruna(model, made, **{**FAST, **settings}), made


def stage_counts(case: Case, num_ranks: int) -> list[int]:
    """Returns the numbers of stages to run: the most that ranks and graph allow, and one less on four ranks.

    `tests.session.test_partitions` runs all of them, on ranks that are threads.
    """
    return sorted({min(count, case.max_stages) for count in (num_ranks, 3 if num_ranks == 4 else num_ranks)})


def optimizer_of(name: str, num_stages: int) -> str:
    """Returns one optimizer or the other for each case, by turns; each of them occurs on every number of ranks."""
    names = list(OPTIMIZERS)
    return names[(list(CASES).index(name) // 4 + num_stages) % len(names)]


def by_partition(names: Sequence[str]) -> Rows:
    """Trains each case with several numbers of stages, on the same micro-batches; returns records or tracebacks."""
    rows: Rows = {}
    num_ranks = get_world().num_ranks
    for name in names:
        for num_stages in stage_counts(CASES[name], num_ranks):
            for optimizer in OPTIMIZERS if num_ranks == 1 else (optimizer_of(name, num_stages),):
                rows[f"{name}/{num_stages}/{optimizer}"] = trained(CASES[name], num_stages, optimizer)
    return rows


def trained(case: Case, num_stages: int, optimizer: str) -> Record:
    """Trains as a pipeline on a plan laid down here; ranks that are left over pass the batch alone."""
    setup = pipeline(num_stages, num_micro_batches=NUM_MICRO_BATCHES, num_ranks=get_world().num_ranks)
    model, made = wrap(case, optimizer, inputs="replicated", plan=setup.plan)
    with work_shared((case.name, case.has_dropout)):
        return train_rank(case, model, made, [case.batch(SIZE, step) for step in range(STEPS)])


def trace_all(names: Sequence[str]) -> None:
    """Traces each case as `trained` does, so that processes that are forked later need not."""
    with own_folder():
        for case in map(CASES.__getitem__, names):
            train(case, pipeline(1, num_micro_batches=NUM_MICRO_BATCHES), [case.batch(SIZE, 0)])


def by_replica(names: Sequence[str]) -> Rows:
    """Trains each case on mini-batches of the ranks' own, as the planner finds best, and on equal replicas."""
    rows: Rows = {}
    everyone = [list(range(get_world().num_ranks))]
    for name in names:
        case = CASES[name].without_dropout()
        rows[f"{name}/planned"] = own_batches(case)
        rows[f"{name}/replicas"] = own_batches(case, stage_ranks=everyone)
    return rows


def own_batches(case: Case, **settings: Any) -> Record:
    """Trains on batches of which each rank passes its part; the parts differ in size."""
    world = get_world()
    all_sizes = enumerate(sizes_of(world.num_ranks))
    parts = [share_of(case.batch(sum(sizes), step), sizes, world.rank) for step, sizes in all_sizes]
    model, optimizer = wrap(case, **settings)
    with trace_shared((case.name, case.has_dropout)):
        return train_rank(case, model, optimizer, parts)


def sizes_of(num_ranks: int) -> list[list[int]]:
    """Returns the sizes of the ranks' mini-batches in each step: one rank has more in the second, none in the third."""
    others = num_ranks - 1
    return [[3] * num_ranks, [2] * others + [5], [3] * others + [0]]


@contextmanager
def own_folder() -> Iterator[None]:
    """Gives this rank a configuration directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOVARUNA_CONF_DIR"] = folder
        yield


def numbers(names: Sequence[str], replicated: Sequence[str]) -> dict[str, Rows]:
    torch.set_num_threads(1)
    with own_folder():
        return {"stages": by_partition(names), "replicas": by_replica(replicated)}


def train_on_meta(num_stages: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Returns the losses of three steps, the whole state, and the parameters that this rank holds.

    Weights, buffers and a normalisation have an initialiser of their own each.
    """
    with torch.device("meta"):
        net = Classifier(hidden(nn.ReLU(), nn.BatchNorm1d(WIDTH)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    cuts = ("body.3",)[: num_stages - 1]  # whatever a busy machine measures
    settings = {"cuts": cuts, "num_micro_batches": 2, "inputs": "replicated", "device": DEVICE.type, **FAST}
    model = AutoVaruna(net, optimizer, **settings)
    batch = {name: each.to(DEVICE) for name, each in labelled(8, 0)[1].items()}
    losses = []
    for _ in range(3):
        loss = model(**batch)
        descend(loss, optimizer)
        losses.append(loss.item())
    held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    return losses, {name: each.cpu() for name, each in model.state_dict().items()}, held
