"""Holds that a run goes on from a checkpoint on any number of ranks with the numbers of one that never stopped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.catalogue import CASES
from tests.checkpoint.runs import OPTIMIZERS, SETUPS, go_on, num_replicas, save_halfway, uninterrupted
from tests.products import WHOLE, some
from tests.reference import Record, bit_equal, compare

DROPOUT = CASES["dropout"]


@cache
def expected(case: str, setup: str, optimizer: str) -> Record:
    return uninterrupted(CASES[case], SETUPS[setup], OPTIMIZERS[optimizer])


def check(case: str, source: str, target: str, optimizer: str, root: Path, **options: int) -> None:
    found = go_on(CASES[case], SETUPS[target], OPTIMIZERS[optimizer], root, **options)
    if num_replicas(SETUPS[source]) == num_replicas(SETUPS[target]) == 1:
        bit_equal(found, expected(case, "1x1", optimizer))
    elif source == target or num_replicas(SETUPS[source]) == num_replicas(SETUPS[target]) is not None:
        bit_equal(found, expected(case, target, optimizer))
    else:
        compare(found, expected(case, target, optimizer), rtol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS if WHOLE else ["adamw"])
@pytest.mark.parametrize("source", SETUPS)
def test_from_each_to_each(source: str, optimizer: str, tmp_path: Path) -> None:
    """To every third, so that there is a run from three others to each; or to all."""
    save_halfway(DROPOUT, SETUPS[source], OPTIMIZERS[optimizer], tmp_path)
    names, place = list(SETUPS), list(SETUPS).index(source)
    for target in names if WHOLE else names[place % 3 :: 3]:
        check("dropout", source, target, optimizer, tmp_path)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_each_optimizer(optimizer: str, tmp_path: Path) -> None:
    save_halfway(DROPOUT, SETUPS["unequal"], OPTIMIZERS[optimizer], tmp_path / "a")
    check("dropout", "unequal", "3 stages", optimizer, tmp_path / "a")
    save_halfway(DROPOUT, SETUPS["3 stages"], OPTIMIZERS[optimizer], tmp_path / "b", background=True)
    check("dropout", "3 stages", "2 stages", optimizer, tmp_path / "b")


@pytest.mark.parametrize(
    "name", some(["tied_three_ways", "lstm", "conv_net_batch_norm", "unused_parameter", "frozen"], 2)
)
def test_with_ties_buffers_and_what_is_not_trained(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save_halfway(case, SETUPS["2 stages"], OPTIMIZERS["sgd"], tmp_path)
    for target in ("1x1", "2 stages"):
        check(name, "2 stages", target, "sgd", tmp_path)


def test_after_steps_of_another_run(tmp_path: Path) -> None:
    save_halfway(DROPOUT, SETUPS["2x2"], OPTIMIZERS["adamw"], tmp_path, shard=False)
    for target in ("1x1", "3 stages", "2x2"):
        check("dropout", "2x2", target, "adamw", tmp_path, steps_before=2)
