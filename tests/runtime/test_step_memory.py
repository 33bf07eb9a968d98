"""What a step keeps in memory: receives that are posted, what waits for a recompute, outputs; no more than it may."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autovaruna.runtime.executor import Stash, compact
from tests.catalogue import PLAIN
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_a_stash_gives_back_what_it_took_and_lets_go_of_it(device: str) -> None:
    tensors = {"a": torch.randn(3, 4, device=device).t(), "b": torch.arange(5, device=device), "c": torch.ones(1)}
    stash = Stash(tensors, is_offloaded=True)
    taken = stash.pop()
    assert taken.keys() == tensors.keys() and stash.pop() == {}
    for name, tensor in tensors.items():
        assert torch.equal(taken[name], tensor)
        assert (taken[name].device, taken[name].stride()) == (tensor.device, tensor.stride())


def test_training_with_offload_is_training() -> None:
    setup = Setup(((0,), (1,)), 3, recompute=True, schedule="varuna", settings={"offload": True})
    batches = [CASE.batch(6, step) for step in range(2)]
    compare(train(CASE, setup, batches, sgd, [[3, 3]] * 2), plain_steps(CASE, batches, sgd))


def test_an_output_is_kept_on_memory_of_its_own() -> None:
    """``mse_loss`` leaves its mean in the memory of all terms: one micro-batch after the other, they added up."""
    x = torch.randn(100, requires_grad=True)
    for output in (F.mse_loss(x, torch.zeros(100)), x[:10], x * 2):
        kept = compact(output)
        assert torch.equal(kept, output) and not kept.requires_grad
        assert kept.untyped_storage().nbytes() == kept.nbytes
    assert kept.data_ptr() == output.data_ptr(), "what fills its memory is not copied"
