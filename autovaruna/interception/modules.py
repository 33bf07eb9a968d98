"""Installs hooks of all modules: one sees backwards beside the wrapper, one sees what wraps the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_module_registration_hook

from autovaruna._torch import FakeTensor, pytree, replaced
from autovaruna.interception.installed import ProcessPiece, Undo


class _OwnCode(local):
    is_running = False


_own_code = _OwnCode()
_owners: WeakKeyDictionary[nn.Module, tuple[ReferenceType[DirectCalls], str]] = WeakKeyDictionary()


@contextmanager
def own_code() -> Iterator[None]:
    """Marks what runs on this thread as the library's own."""
    with replaced(_own_code, "is_running", True):
        yield


def is_own_code() -> bool:
    """Whether what runs on this thread now is the library's own."""
    return _own_code.is_running


class DirectCalls:
    """The modules of a model, beside the wrapper, through which a backward has gone: the paths that are `used`."""

    def __init__(self, model: nn.Module) -> None:
        self.used: set[str] = set()
        for path, module in model.named_modules():
            if any(True for _ in module.parameters()):  # a loss has none: its gradients go to what it is given
                _owners[module] = ref(self), path
        self.stop = FORWARD_HOOK.acquire()

    def pop(self) -> str:
        """Returns the outermost module that a backward has gone through since the last time; empty: through none."""
        used, self.used = self.used, set()
        return min((path or "the model itself" for path in used), key=len, default="")


def _await_backward(module: nn.Module, args: Any, output: Any) -> None:
    """Waits for a backward through what a module has returned."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _own_code.is_running:
        return
    known, path = _owners.get(module, (None, ""))
    owner = None if known is None else known()
    if owner is None or any(isinstance(each, nn.Parameter) for each in args):  # those make weights of weights
        return
    for each in pytree.tree_leaves(output):
        if isinstance(each, Tensor) and each.requires_grad and not isinstance(each, FakeTensor):
            each.register_hook(lambda gradient: owner.used.add(path))  # type: ignore[no-untyped-call]


def watch_registrations(act: Callable[[nn.Module, str, nn.Module | None], None]) -> Undo:
    """Has `act` called with each module that gets a module, its name, and that one."""
    return register_module_module_registration_hook(act).remove


FORWARD_HOOK = ProcessPiece(lambda: register_module_forward_hook(_await_backward).remove)
