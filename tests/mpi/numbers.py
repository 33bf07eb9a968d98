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
from tests.reference import Record, sgd
from tests.session.training import QUIET, descend, share_of, trace_shared, train_rank

FAST: dict[str, Any] = {**QUIET, "profile_iterations": 1}


def own_batches(case: Case, **settings: Any) -> Record:
    """Trains on batches of which each rank passes its part; the parts differ in size.

    Each rank builds another model, which rank 0's weights overwrite.
    """
    world = get_world()
    all_sizes = enumerate(sizes_of(world.num_ranks))
    parts = [share_of(case.batch(sum(sizes), step), sizes, world.rank) for step, sizes in all_sizes]
    model = case.model(world.rank)
    optimizer = sgd(model.parameters())
    with trace_shared((case.name, case.has_dropout)):
        return train_rank(case, AutoVaruna(model, optimizer, **FAST, **settings), optimizer, parts)


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


def numbers(names: Sequence[str]) -> dict[str, Record]:
    """Returns the records of cases with batches of the ranks' own, as the planner finds best, and on equal replicas."""
    torch.set_num_threads(1)
    everyone = [list(range(get_world().num_ranks))]
    quiet = {name: CASES[name].without_dropout() for name in names}
    with own_folder():
        found = {f"{name}/planned": own_batches(case) for name, case in quiet.items()}
        return found | {f"{name}/replicas": own_batches(case, stage_ranks=everyone) for name, case in quiet.items()}


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
