"""Holds that the samples of a step are the same whatever the ranks are, each of them once an epoch."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autovaruna import ConfigError, ElasticSampler, InputError
from autovaruna.ranks.world import World
from tests.rank_threads import run_ranks

DATA = TensorDataset(torch.arange(37))
BATCH = 8


def batches(num_ranks: int, start: dict[str, int] | None = None, count: int = 99, workers: int = 0) -> list[list[int]]:
    """Returns the global batches that ranks take, from a state on: their parts put together in the order of ranks."""

    def take(world: World) -> list[list[int]]:
        sampler = ElasticSampler(DATA, BATCH, seed=3)
        if start is not None:
            sampler.load_state_dict(start)
        found: list[list[int]] = []
        for (samples,) in DataLoader(DATA, batch_sampler=sampler, num_workers=workers):
            found.append(samples.tolist())
            if len(found) == count:
                break
        return found

    return [list(chain(*parts)) for parts in zip(*run_ranks(num_ranks, take), strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_batch_is_the_same_on_any_ranks(num_ranks: int) -> None:
    assert batches(num_ranks) == batches(1)


def test_each_sample_comes_once_while_ranks_change() -> None:
    sampler, found = ElasticSampler(DATA, BATCH, seed=3), []
    for num_ranks, count in ((2, 2), (3, 1), (1, 1), (3, 1)):
        found += batches(num_ranks, sampler.state_dict(len(found)), count)
    assert found == batches(1)
    assert sorted(chain(*found)) == list(range(37))
    assert [len(batch) for batch in found] == [8, 8, 8, 8, 5]


def test_the_next_epoch_has_an_order_of_its_own() -> None:
    sampler = ElasticSampler(DATA, BATCH, seed=3)
    epochs = [list(chain(*sampler)) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(37))
    assert epochs[0] != epochs[1] != list(range(37))
    assert sampler.state_dict() == {**sampler.state_dict(10)}
    assert batches(2, sampler.state_dict(7))[0] == epochs[1][2 * BATCH : 3 * BATCH]


def test_workers_take_ahead_and_the_state_is_what_was_trained_on() -> None:
    assert batches(1, workers=1) == batches(1)


def test_without_shuffling_it_is_the_dataset_s_order() -> None:
    assert list(chain(*ElasticSampler(DATA, BATCH, shuffle=False, drop_last=True))) == list(range(32))


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"got|expected .*'seed': 4"):
        ElasticSampler(DATA, BATCH, seed=4).load_state_dict(ElasticSampler(DATA, BATCH, seed=3).state_dict())


def test_a_rank_without_a_sample_is_refused() -> None:
    with pytest.raises(InputError, match="6 ranks for a batch of 5 samples"):
        run_ranks(6, lambda world: next(iter(ElasticSampler(DATA, BATCH))))
    with pytest.raises(ConfigError, match="37 samples and global_batch_size=0"):
        ElasticSampler(DATA, 0)
