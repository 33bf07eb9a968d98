"""What `test_numbers.py` and `test_peers.py` run on ranks: many cases in one job, each planned as for a user."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autovaruna import AutoVaruna, PlanError
from autovaruna.runtime.environment import get_world
from tests.catalogue import CASES, Batch, Case
from tests.parallel.training import gradients_of, share_of, trace_shared, train_rank
from tests.reference import OPTIMIZERS, Record

STEPS, SIZE = 3, 8
NUM_MICRO_BATCHES = 4
FAST: dict[str, Any] = {
    "profile_iterations": 1,
    "load_deployment": False,
    "save_deployment": False,
    "progress": False,
    "seed": 5,
}
Rows = dict[str, Any]


def wrap(case: Case, optimizer: str = "sgd", **settings: Any) -> tuple[AutoVaruna, torch.optim.Optimizer]:
    """Returns a wrapped model with its optimizer; each rank builds another one, which rank 0's weights overwrite."""
    model = case.model(get_world().rank)
    made = OPTIMIZERS[optimizer](model.parameters())
    return AutoVaruna(model, made, **{**FAST, **settings}), made


def stage_counts(case: Case) -> Iterator[int]:
    """Yields every number of stages that this world and the graph allow."""
    yield from range(1, min(get_world().num_ranks, case.max_stages) + 1)


def by_partition(names: Sequence[str], optimizers: Sequence[str], is_quiet: bool) -> Rows:
    """Trains each case with every number of stages, on the same micro-batches; returns records or tracebacks."""
    rows: Rows = {}
    for name in names:
        case = CASES[name].without_dropout() if is_quiet else CASES[name]
        for num_stages in stage_counts(case):
            for optimizer in optimizers:
                rows[f"{name}/{num_stages}/{optimizer}"] = attempt(lambda: trained(case, num_stages, optimizer))  # noqa: B023
    return rows


def trained(case: Case, num_stages: int, optimizer: str) -> Record:
    """Trains as a pipeline; ranks that are left over pass the batch alone."""
    model, made = wrap(
        case,
        optimizer,
        inputs="replicated",
        num_micro_batches=NUM_MICRO_BATCHES,
        stage_ranks=[[stage] for stage in range(num_stages)],
    )
    with trace_shared((case.name, case.has_dropout)):
        return train_rank(case, model, made, [case.batch(SIZE, step) for step in range(STEPS)])


def by_replica(names: Sequence[str]) -> Rows:
    """Trains each case on mini-batches of the ranks' own, as the planner finds best, and on equal replicas."""
    rows: Rows = {}
    for name in names:
        case = CASES[name].without_dropout()
        rows[f"{name}/planned"] = attempt(lambda: own_batches(case))  # noqa: B023
        everyone = [list(range(get_world().num_ranks))]
        rows[f"{name}/replicas"] = attempt(lambda: own_batches(case, stage_ranks=everyone))  # noqa: B023
    return rows


def own_batches(case: Case, **settings: Any) -> Record:
    """Trains on batches of which each rank passes its part; the parts differ in size."""
    model, optimizer = wrap(case, **settings)
    with trace_shared((case.name, case.has_dropout)):
        return train_rank(case, model, optimizer, own_parts(case))


def own_parts(case: Case) -> list[Batch]:
    """Returns this rank's mini-batches."""
    world = get_world()
    return [share_of(case.batch(sum(sizes), step), sizes, world.rank) for step, sizes in enumerate(sizes_of())]


def sizes_of(num_ranks: int = 0) -> list[list[int]]:
    """Returns the sizes of the ranks' mini-batches in each step: one rank has more in the second, none in the third."""
    num_ranks = num_ranks or get_world().num_ranks
    last = [0] if num_ranks > 1 else [3]
    return [[3] * num_ranks, [2] * (num_ranks - 1) + [5], [3] * (num_ranks - 1) + last]


def attempt(act: Callable[[], Any]) -> Any:
    """Returns a result, or the traceback of what all ranks agree is an error."""
    try:
        return act()
    except PlanError:
        return traceback.format_exc()


def quietly(target: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOVARUNA_CONF_DIR"] = folder
        return target(*args)


def numbers(small: Sequence[str], large: Sequence[str], replicated: Sequence[str]) -> dict[str, Rows]:
    """Runs everything that `test_numbers.py` looks at."""
    torch.set_num_threads(1)
    return quietly(
        lambda: {
            "small": by_partition(small, list(OPTIMIZERS), is_quiet=False),
            "large": by_partition(large, ["adamw"], is_quiet=False),
            "replicas": by_replica(replicated),
        }
    )


def stories(names: Sequence[str]) -> Rows:
    """Runs the stories of `test_peers.py` by name."""
    from tests.mpi import peers

    torch.set_num_threads(1)
    return quietly(lambda: {name: getattr(peers, name)() for name in names})


__all__ = ["gradients_of", "numbers", "stories"]
