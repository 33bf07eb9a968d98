"""What a stage keeps for its recompute comes back as it was, on the device where it was."""

from __future__ import annotations

import pytest
import torch

from autovaruna.runtime.batch import Stash
from tests.catalogue import PLAIN
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_a_stash_gives_back_what_it_took(device: str) -> None:
    tensors = {"a": torch.randn(3, 4, device=device).t(), "b": torch.arange(5, device=device), "c": torch.ones(1)}
    taken = Stash(tensors, is_offloaded=True).take()
    assert all(torch.equal(taken[name], tensors[name]) for name in tensors)
    assert all(taken[name].device == tensors[name].device for name in tensors)
    assert all(taken[name].stride() == tensors[name].stride() for name in tensors)


def test_a_stash_lets_go_of_what_it_gave() -> None:
    stash = Stash({"a": torch.ones(2)}, is_offloaded=False)
    stash.take()
    assert stash.take() == {}


def test_training_with_offload_is_training() -> None:
    case = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
    setup = Setup(((0,), (1,)), 3, recompute=True, schedule="varuna", settings={"offload": True})
    batches = [case.batch(6, step) for step in range(2)]
    compare(train(case, setup, batches, sgd, [[3, 3]] * 2), plain_steps(case, batches, sgd))
