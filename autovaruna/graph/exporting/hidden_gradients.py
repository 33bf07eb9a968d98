"""Finds more that torch.export drops without a word: inference mode, and hooks of saved tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from autovaruna.graph.exporting.seen_nodes import refuse_hook
from autovaruna.graph.origin import is_users


@contextmanager
def seen_gradients() -> Iterator[None]:
    """Traces ``torch.inference_mode`` as ``torch.no_grad``, on this thread, and refuses hooks of saved tensors.

    Raises:
        TraceError: forward sets hooks for saved tensors.
    """
    tracing, mode = get_ident(), torch.inference_mode
    enter, leave, enter_hooks = mode.__enter__, mode.__exit__, saved_tensors_hooks.__enter__

    def entering(self: Any) -> None:
        if get_ident() != tracing:
            return enter(self)
        self._is_enabled_before = torch.is_grad_enabled()
        if self.mode:
            torch.set_grad_enabled(False)
        return None

    def leaving(self: Any, *error: Any) -> None:
        if get_ident() != tracing:
            return leave(self, *error)
        torch.set_grad_enabled(self._is_enabled_before)
        return None

    def entering_hooks(self: Any) -> None:
        if get_ident() == tracing and type(self) is not save_on_cpu and _is_of_user():
            raise refuse_hook("sets hooks for saved tensors")
        enter_hooks(self)

    mode.__enter__, mode.__exit__ = entering, leaving  # type: ignore[method-assign]
    saved_tensors_hooks.__enter__ = entering_hooks  # type: ignore[method-assign]
    try:
        yield
    finally:
        mode.__enter__, mode.__exit__ = enter, leave  # type: ignore[method-assign]
        saved_tensors_hooks.__enter__ = enter_hooks  # type: ignore[method-assign]


def _is_of_user() -> bool:
    return is_users(sys._getframe(2).f_code.co_filename)
