"""Holds that a model on ``meta`` trains: each rank makes its own part, the same numbers whatever the partition."""

import torch

from tests.mpi.launch import run_on_ranks


def test_a_model_on_meta_is_made_in_parts_and_trains_the_same():
    [(losses, state, whole)] = run_on_ranks(1, "tests.mpi.meta:train", 1)
    parts = run_on_ranks(2, "tests.mpi.meta:train", 2)
    assert losses[-1] < losses[0]
    assert sum(held for _, _, held in parts) == whole
    for other, its_state, held in parts:
        assert other == losses
        assert held < whole
        assert all(torch.equal(its_state[name], value) for name, value in state.items())
