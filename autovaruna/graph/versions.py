"""Lets the versions of fake tensors say what was changed in place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autovaruna._torch import HigherOrderOperator
from autovaruna.graph.arguments import changed_by


class Counting(TorchFunctionMode):
    """Counts changes by operations that leave it to what runs them: lists of tensors, and operations of libraries.

    A tensor's version rises with each change, but on fake tensors such operations run nothing.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self if isinstance(function, HigherOrderOperator) else nullcontext():  # regions hold others
            result = function(*args, **(kwargs or {}))
        for each in changed_by(function, args, kwargs or {}):
            if isinstance(each, Tensor):
                torch.autograd.graph.increment_version(each)
        return result
