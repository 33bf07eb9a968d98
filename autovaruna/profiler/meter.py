"""Adds up the predicted seconds of the operations that run: the greatest of arithmetic, memory and the least time.

An operation takes the greatest of its arithmetic over what the device computes in a second, the bytes that it touches
over what the memory moves in a second, and the least time of an operation. Views take nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autovaruna._torch import OpOverload, TorchDispatchMode, pytree
from autovaruna.graph.facts import storage_of
from autovaruna.profiler.device_file import DeviceSpec

logger = logging.getLogger(__name__)

Formulas = Mapping[Any, Callable[..., int]]

aten = torch.ops.aten
# Of these, only as much of the first argument is read as comes out.
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.take}
_ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_WITHOUT_FORMULA = ("rnn", "lstm", "gru", "linalg_", "fft", "conv", "mm")


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the predicted seconds of everything that runs in its context."""

    def __init__(self, device: DeviceSpec, formulas: Formulas) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.formulas = formulas
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        num_bytes = touched_bytes(func, args, kwargs, result)
        if num_bytes:
            self.seconds += self._operation(func, args, kwargs, result, num_bytes)
        return result

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any, num_bytes: int) -> float:
        seconds = max(num_bytes / self.device.bytes_per_second, self.device.operation_seconds)
        formula = self.formulas.get(func._overloadpacket)
        if formula is None:
            _note(str(func))
            return seconds
        rate = self.device.flops_of(_dtype((args, kwargs)))
        return max(seconds, float(formula(*args, **kwargs, out_val=result)) / rate)


_noted: set[str] = set()


def _note(name: str) -> None:
    """Says once of an operation with much arithmetic that only its bytes are counted."""
    if name not in _noted and "norm" not in name and any(part in name for part in _WITHOUT_FORMULA):
        _noted.add(name)
        logger.warning("there is no formula for the arithmetic of %s: it is predicted from its bytes alone", name)


def touched_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Returns the bytes that an operation reads and writes; 0 for views and for memory that is only allocated."""
    packet = getattr(func, "_overloadpacket", None)
    outputs = _tensors(result)
    if not isinstance(func, OpOverload) or packet in _ALLOCATIONS or func.namespace == "prim" or not outputs:
        return 0
    inputs = _tensors((args, kwargs))
    changed = _changed(func, args, kwargs)
    storages = {storage_of(tensor) for tensor in inputs}
    made = [tensor for tensor in outputs if storage_of(tensor) not in storages]
    if not made and not changed:
        return 0
    written = sum(map(_num_bytes, [*made, *changed]))
    if packet in _LOOKUPS and inputs:
        read = written + sum(map(_num_bytes, inputs[1:]))
    else:
        only_written = {id(tensor) for tensor in changed} if packet in (aten.copy_, aten.fill_, aten.zero_) else set()
        distinct = {id(tensor): tensor for tensor in inputs if id(tensor) not in only_written}
        read = sum(map(_num_bytes, distinct.values()))
    return int(read + written)


def _changed(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the arguments that an operation changes."""
    if not func._schema.is_mutable:
        return []
    values = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    written = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return _tensors([values.get(name) for name in written])


def _dtype(values: Any) -> str:
    """Returns the dtype that an operation computes in: that of its first tensor of numbers with a point."""
    tensors = _tensors(values)
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return str(next(iter(floating or [tensor.dtype for tensor in tensors]), "")).removeprefix("torch.")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements; those that share memory (an expanded mask) count once."""
    lengths = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(lengths) * tensor.element_size() if tensor.numel() else 0
