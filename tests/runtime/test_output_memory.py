"""What is kept of outputs until a step ends keeps no memory beside its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autovaruna.runtime.step_runner import _alone


def test_an_output_on_memory_of_more_is_kept_on_its_own() -> None:
    """``mse_loss`` leaves its mean in the memory of all terms: one micro-batch after the other, they added up."""
    x = torch.randn(100, requires_grad=True)
    for output in (F.mse_loss(x, torch.zeros(100)), x[:10]):
        kept = _alone(output)
        assert torch.equal(kept, output)
        assert kept.untyped_storage().nbytes() == kept.nbytes
        assert not kept.requires_grad


def test_an_output_that_fills_its_memory_is_not_copied() -> None:
    output = torch.randn(100, requires_grad=True) * 2
    assert _alone(output).data_ptr() == output.data_ptr()
