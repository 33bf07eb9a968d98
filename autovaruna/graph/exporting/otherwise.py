"""Says what another attempt to trace a model does otherwise, where one has stopped: what is kept whole, and told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from autovaruna.graph.exporting.culprit import function_to_keep, more_to_keep
from autovaruna.graph.kept_whole.applied import Function
from autovaruna.graph.refused import InModuleError
from autovaruna.graph.said import warn_once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What is kept whole.

    Attributes:
        functions: autograd functions, where gradients are wanted.
        operations: names of functions of torch; the way that ``cdist`` takes depends on the batch size.
        modules: paths of submodules.
        can_grow: whether a submodule that stops the trace joins them.
        is_told: whether the model is told that it is traced, for which libraries have ways of their own.
        can_tell: whether that is still to be tried.
        notes_draws: whether modules that draw from Python's generators are looked for.
    """

    functions: frozenset[Function] = frozenset()
    operations: frozenset[str] = frozenset({"torch.cdist"})
    modules: frozenset[str] = frozenset()
    can_grow: bool = True
    is_told: bool = False
    can_tell: bool = True
    notes_draws: bool = False


class KeepMoreError(Exception):
    """Says what the next trace has to keep whole."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept


def try_otherwise(error: Exception, model: nn.Module, kept: Kept, stopped: Sequence[str] = ()) -> None:
    """Asks for another attempt: first one that does what stopped this one in another way, then without that.

    Args:
        error: What stopped this one.
        model: The model.
        kept: What this one has kept whole.
        stopped: Functions of torch that it has stopped in, the innermost first.
    """
    if kept.can_tell and not isinstance(error, InModuleError):
        raise KeepMoreError(replace(kept, is_told=True, can_tell=False)) from error
    kept = replace(kept, is_told=False, can_tell=False)
    modules = more_to_keep(error, model, kept.modules)
    if modules:
        _warn(model, sorted(modules - kept.modules), error)
        raise KeepMoreError(replace(kept, modules=modules)) from error
    function = function_to_keep(error) or next(iter(stopped), "")
    if function and function not in kept.operations:
        _warn(model, [function], error)
        raise KeepMoreError(replace(kept, operations=kept.operations | {function})) from error


def _warn(model: nn.Module, new: list[str], error: Exception) -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warn_once(logger, model, f"{', '.join(new)} cannot be traced and is kept whole, never cut ({reason})")
