"""Lets a model with TorchScript modules be traced: plain modules stand for them, which hold the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ScriptShell(nn.Module):
    """Stands for a TorchScript module while a model is traced: the same tensors under the same names.

    Args:
        script: The module.
    """

    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.__dict__["script"] = script
        self.training = script.training
        self._parameters.update(script._parameters.items())
        self._buffers.update(script._buffers.items())
        self._modules.update({name: ScriptShell(child) for name, child in script.named_children()})


def script_of(module: nn.Module) -> nn.Module:
    """Returns the TorchScript module that a shell stands for, or the module itself."""
    found: nn.Module = module.__dict__["script"] if isinstance(module, ScriptShell) else module
    return found


@contextmanager
def shells(model: nn.Module) -> Iterator[list[str]]:
    """Puts shells in the place of TorchScript modules while the context lasts.

    Yields:
        The paths of those that are in no other one.
    """
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    paths: list[str] = []
    known: dict[int, ScriptShell] = {}
    for path, parent in list(model.named_modules()):
        if isinstance(parent, torch.jit.ScriptModule):
            continue
        for name, child in parent._modules.items():
            if isinstance(child, torch.jit.ScriptModule):
                swapped.append((parent, name, child))
                if id(child) not in known:
                    known[id(child)] = ScriptShell(child)
                    paths.append(f"{path}.{name}" if path else name)
    try:
        for parent, name, child in swapped:
            parent._modules[name] = known[id(child)]
        yield paths
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
