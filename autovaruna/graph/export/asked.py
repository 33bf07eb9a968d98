"""Tells whether a forward still does what its trace does, by what it asks of torch when it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from autovaruna._torch import FakeTensor, FakeTensorMode, disable_current_modes
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.errors import quiet_failure
from autovaruna.graph.export.fakes import as_before, example_inputs, faked, unchecked_distributions
from autovaruna.graph.export.watchers import without_script_hooks
from autovaruna.graph.precision import compiling_nothing, in_precision
from autovaruna.graph.random import python_generators
from autovaruna.graph.tree import words

_MOST = 2**16  # numbers of a tensor of which each counts


class _Asked(TorchFunctionMode):
    """Notes each function of torch that is called, with its arguments: tensors by the order in which they are met."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Hashable] = []
        self._known: dict[int, tuple[int, Tensor]] = {}
        for each in (*model.parameters(), *model.buffers()):
            self._number(each)

    def _number(self, tensor: Tensor) -> int:
        return self._known.setdefault(id(tensor), (len(self._known), tensor))[0]

    def _said(self, value: Any) -> Hashable:
        if isinstance(value, FakeTensor):
            return self._number(value), value.shape, value.dtype
        if isinstance(value, tuple | list):
            return tuple([self._said(each) for each in value])
        if isinstance(value, dict):
            return tuple([(name, self._said(each)) for name, each in value.items()])
        with disable_current_modes():
            return words(value) if not isinstance(value, Tensor) or value.numel() < _MOST else str(value.shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls.append((getattr(func, "__name__", ""), self._said(args), self._said(kwargs or {})))
        return made


def asked_of_torch(model: nn.Module, call: CallSpec, device: torch.device) -> list[Hashable]:
    """Returns what a forward asks of torch, in order: equal for two forwards of which the traces are equal.

    Raises whatever a forward does that needs numbers.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with (
        as_before(model),
        without_script_hooks(model),
        quiet_failure(),
        unchecked_distributions(),
        compiling_nothing(),
        python_generators(0),
        in_precision(call.precision),
        faked(model, mode, device),
    ):
        args, kwargs = call.arguments(example_inputs(call, max(2, call.batch_size), mode, device))
        asked = _Asked(model)
        with mode, asked:
            call.of(model)(*args, **kwargs)
    return asked.calls
