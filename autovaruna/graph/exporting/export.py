"""Exports a call by as many attempts as it takes: `nn.Module` in, `torch.fx.GraphModule` with plain names out."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import fx, nn

from autovaruna.errors import TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.explain import of_batch_size
from autovaruna.graph.exporting.attempt import Attempt
from autovaruna.graph.exporting.exported import Exported
from autovaruna.graph.exporting.guards import hooked
from autovaruna.graph.exporting.otherwise import KeepMoreError, Kept
from autovaruna.graph.exporting.quiet import quiet_failure
from autovaruna.graph.exporting.thresholds import find_threshold
from autovaruna.graph.kept_whole.keeping import is_of_keeper
from autovaruna.graph.module_state import warn_of_left
from autovaruna.graph.refused import check_layouts
from autovaruna.graph.said import warn_once

logger = logging.getLogger(__name__)
_OF_HOOKS = (
    "{} have hooks of backward, and are kept whole, never cut. Each hook runs once a micro-batch, on the gradients of "
    "its samples alone: where it goes by all samples of a batch (a norm over them, say), pass num_micro_batches=1"
)


def export(model: nn.Module, call: CallSpec, batch_size: int, is_dynamic: bool, device: torch.device) -> Exported:
    """Traces one call of a model in its present mode, without running it.

    A submodule in which that fails is kept whole.

    Args:
        model: The model; its parameters may be on ``meta``.
        call: The call to trace.
        batch_size: The number that stands for the batch while tracing.
        is_dynamic: Whether the graph must serve every batch size.
        device: Where the graph will run.

    Raises:
        TraceError: the model cannot be traced; says which line and what to do.
    """
    check_layouts(model)
    first = Kept(modules=hooked(model))
    if first.modules:
        warn_once(logger, model, _OF_HOOKS.format(", ".join(sorted(first.modules))))
    kept: Kept | None = first
    while kept is not None:
        attempt = Attempt(model, call, batch_size, is_dynamic, device, kept)
        try:
            with quiet_failure():
                found = attempt.run()
            if found.greatest is not None:
                _check_larger(found, attempt)
            warn_of_left(found.left, model)
            return found
        except KeepMoreError as stopped:
            kept = stopped.kept
        except TraceError as error:
            is_first = kept == replace(first, functions=kept.functions, notes_draws=kept.notes_draws)
            if is_first or not is_of_keeper(error):
                raise
            kept = None
    with quiet_failure():  # fails again, and says why: nobody has asked for what was kept whole
        last = replace(first, can_grow=False, notes_draws=True)
        return Attempt(model, call, batch_size, is_dynamic, device, last).run()


def _check_larger(found: Exported, attempt: Attempt) -> None:
    """Makes sure that a graph holds for the batch sizes for which the model takes another way, too."""

    def again(least: int, batch_size: int) -> tuple[fx.GraphModule, int | None]:
        try:
            with quiet_failure():
                larger = replace(attempt, batch_size=batch_size, least=least).run()
        except KeepMoreError as stopped:
            raise TraceError("larger batches need other modules kept whole") from stopped
        return larger.module, larger.greatest

    greatest = find_threshold(found.module, found.greatest, again)
    if greatest is not None:
        raise of_batch_size(
            type(attempt.model).__qualname__, found.asks_for_many, f"it holds for batch <= {greatest} alone"
        )
