"""Runs torch.export on fake inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import FakeTensorMode
from autovaruna.graph.call import CallSpec
from autovaruna.graph.exporting.flat_call import FlatCall
from autovaruna.graph.exporting.size_arithmetic import recalled_sizes


def program_of(flat: FlatCall, inputs: list[Tensor], shapes: list[Any]) -> torch.export.ExportedProgram:
    """Runs torch.export.

    Args:
        flat: Calls the model.
        inputs: What it is called with.
        shapes: Which of their dimensions are the batch.
    """
    with recalled_sizes():
        return torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)


def example_inputs(call: CallSpec, batch_size: int, mode: FakeTensorMode, device: torch.device) -> list[Tensor]:
    """Returns fake tensors for the inputs of `call` with another batch size."""
    with mode:
        return [
            torch.empty(
                (batch_size, *spec.shape[1:]) if spec.is_batch else spec.shape, dtype=spec.dtype, device=device
            ).requires_grad_(spec.needs_gradient)
            for spec in call.inputs
        ]
