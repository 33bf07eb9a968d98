"""Notices gradients that come from modules of a model which the script calls itself, beside the wrapper.

Such a gradient is that of a rank's own samples, so that copies of the weights would drift apart. A global hook sees
calls of modules: one on each module would change which kernels torch's own modules take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, local
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autovaruna._torch import FakeTensor, pytree

_on_this_thread = local()
_owners: WeakKeyDictionary[nn.Module, tuple[ReferenceType[DirectCalls], str]] = WeakKeyDictionary()
_lock = Lock()
_is_watching = False


@contextmanager
def own_code() -> Iterator[None]:
    """Notes that what runs on this thread is the library's own."""
    before = getattr(_on_this_thread, "is_own", False)
    _on_this_thread.is_own = True
    try:
        yield
    finally:
        _on_this_thread.is_own = before


class DirectCalls:
    """The modules of a model, beside the wrapper, through which a backward has gone.

    Args:
        model: The model.

    Attributes:
        used: their paths.
    """

    def __init__(self, model: nn.Module) -> None:
        global _is_watching
        self.used: set[str] = set()
        for path, module in model.named_modules():
            _owners[module] = ref(self), path
        with _lock:
            if not _is_watching:
                register_module_forward_hook(_note)
                _is_watching = True

    def take(self) -> str:
        """Returns the outermost module that a backward has gone through since the last time; empty: through none."""
        used, self.used = self.used, set()
        return min((path or "the model itself" for path in used), key=len, default="")

    def note(self, path: str, output: Any) -> None:
        """Waits for a backward through what a module has returned."""
        for each in pytree.tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad and not isinstance(each, FakeTensor):
                each.register_hook(partial(self._add, path))  # type: ignore[no-untyped-call]

    def _add(self, path: str, gradient: Tensor) -> None:
        self.used.add(path)


def _note(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or getattr(_on_this_thread, "is_own", False):
        return
    known, path = _owners.get(module, (None, ""))
    owner = None if known is None else known()
    if owner is not None and not any(isinstance(each, nn.Parameter) for each in args):  # those make weights of weights
        owner.note(path, output)
