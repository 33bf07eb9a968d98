"""Runs torch.export on fake inputs, with layers that are alike run once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import FakeTensorMode
from autovaruna.errors import InputError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.exporting.deferred import deferred_compilation
from autovaruna.graph.exporting.flat_call import FlatCall
from autovaruna.graph.recalling.recalled_modules import recalled_modules
from autovaruna.graph.recalling.repeats import recalled_repeats
from autovaruna.graph.recalling.size_arithmetic import recalled_sizes
from autovaruna.graph.watching.hidden_state import Changes


def program_of(
    flat: FlatCall, inputs: list[Tensor], shapes: list[Any], changes: Changes, recalls: bool
) -> torch.export.ExportedProgram:
    """Runs torch.export; if something was recalled and it fails, or that is in doubt, runs it again without.

    Args:
        flat: Calls the model.
        inputs: What it is called with.
        shapes: Which of their dimensions are the batch.
        changes: The Python state that forward has changed.
        recalls: Whether something may be recalled.
    """
    if not recalls:
        return torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)
    with (
        recalled_sizes(),
        recalled_repeats() as repeats,
        recalled_modules(flat.model) as modules,
        deferred_compilation(),
    ):
        flat.note_start, flat.note_end = modules.start, modules.check
        try:
            program = torch.export.export(flat, (inputs,), dynamic_shapes=(shapes,), strict=False)
            if not modules.num_recalled or not (changes.names or modules.is_doubtful):
                return program
        except (InputError, TraceError):
            raise
        except Exception:
            if not modules.num_recalled and (repeats is None or not repeats.num_recalled):
                raise
    flat.note_start, flat.note_end = lambda reads: None, lambda outputs: None
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
