"""Keeps the memory layout of tensors on their way, so that the receiver computes with exactly what the sender had.

Kernels choose their order of operations by the strides of their arguments; a received tensor with other strides
could differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

from autovaruna.runtime.channels.staging import distinct


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of one tensor of a message: a `Blank`, if it is dense.

    Attributes:
        is_dense: whether its elements fill memory without holes.
        num_bytes: what travels of it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool = field(init=False, compare=False)
    num_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_dense", self._fills_memory())
        object.__setattr__(self, "num_bytes", prod(self._narrow_shape) * self.dtype.itemsize)

    @property
    def _narrow_shape(self) -> tuple[int, ...]:
        """The shape without repeats: a dimension of stride 0 is sent once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(min(length, 1) if stride == 0 else length for length, stride in pairs)

    def _fills_memory(self) -> bool:
        expected = 1
        for stride, length in sorted(zip(self.strides, self.shape, strict=True)):
            if length > 1:
                if stride != expected:
                    return False
                expected *= length
        return True

    def fits(self, tensor: Tensor | None) -> TypeGuard[Tensor]:
        """Says whether a tensor has this layout."""
        return (
            tensor is not None
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
        )

    def pack(self, tensor: Tensor) -> Tensor:
        """Returns what travels of a tensor with holes, or with numbers that are there twice: a copy without."""
        return distinct(tensor).contiguous()

    def buffer(self, device: torch.device) -> Tensor:
        """Returns memory for what travels."""
        if self.is_dense:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.empty(self._narrow_shape, dtype=self.dtype, device=device)

    @property
    def travelling(self) -> Layout:
        """The layout of what travels: this one, unless it has holes."""
        if self.is_dense:
            return self
        shape = self._narrow_shape
        return Layout(shape, torch.empty(shape, device="meta").stride(), self.dtype)

    def unpack(self, buffer: Tensor) -> Tensor:
        """Returns the tensor as the sender had it, of one that is not dense."""
        tensor = torch.empty_strided(self._narrow_shape, self.strides, dtype=self.dtype, device=buffer.device)
        return tensor.copy_(buffer).expand(self.shape)


Layouts = tuple[Layout | None, ...]


def packed(layouts: Layouts, tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Returns what of a message travels; None: it has other layouts."""
    if len(layouts) != len(tensors):
        return None
    if len(layouts) == 1 and (only := layouts[0]) is not None and only.is_dense and only.fits(tensors[0]):
        return [tensors[0]]  # what most messages are
    travelling = []
    for layout, tensor in zip(layouts, tensors, strict=True):
        if layout is None or tensor is None:
            if not (layout is None and tensor is None):
                return None
        elif layout.fits(tensor):
            travelling.append(tensor if layout.is_dense else layout.pack(tensor))
        else:
            return None
    return travelling


def unpacked(layouts: Layouts, travelled: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns a message as the sender had it, from what of it has travelled."""
    if len(travelled) == len(layouts) == 1 and (only := layouts[0]) is not None and only.is_dense:
        return [travelled[0]]  # what most messages are
    come, found = iter(travelled), list[Tensor | None]()
    for layout in layouts:
        if layout is None:
            found.append(None)
        else:
            found.append(next(come) if layout.is_dense else layout.unpack(next(come)))
    return found


def layouts_of(tensors: Sequence[Tensor | None]) -> Layouts:
    """Returns the layouts of a message; None stands for a gradient that is not there."""
    return tuple(
        None if tensor is None else Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors
    )
