"""What a step keeps in memory: receives that are posted, what waits for a recompute, outputs; no more than it may."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autovaruna.runtime.executor import compact
from tests.catalogue import PLAIN
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()


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
