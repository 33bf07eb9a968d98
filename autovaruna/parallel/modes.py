"""Puts a model into the mode that it will be trained in, for as long as it is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Sets train mode on every module and turns gradients on; afterwards each module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
