"""How tensors lie in memory: what of them is one piece of bytes, which a message can send as it is.

`Layout` is what both ends of a message know of one of its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

MAX_PART_BYTES = 1 << 30


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Says whether the elements of a tensor fill memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def is_dense(tensor: Tensor) -> bool:
    """Says whether a tensor fills one piece of memory."""
    return tensor.is_contiguous() or fills_memory(tensor.shape, tensor.stride())


def check_dense(tensor: Tensor) -> None:
    """Asserts that the memory of `tensor` is its value: dense, and no lazy conjugate or negative."""
    assert tensor.is_contiguous() or is_dense(tensor), (
        f"tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not dense; copy it"
    )
    assert not tensor.is_conj() and not tensor.is_neg(), "resolve the lazy conjugate or negative first"


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in the order of memory, sharing it; shape (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def to_host(tensor: Tensor, *, non_blocking: bool = False) -> Tensor:
    """Returns `tensor` itself on the CPU, else a copy in pinned memory with the same layout, maybe on its way yet."""
    if tensor.device.type == "cpu":
        return tensor
    host = empty_on_host(tensor)
    host.copy_(tensor.detach(), non_blocking=non_blocking)
    return host


def distinct(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor whose elements lie in memory of their own: of what is expanded, the original."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def empty_on_host(tensor: Tensor) -> Tensor:
    """Returns uninitialised host memory laid out as `tensor`, pinned where the device is CUDA."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def split(tensor: Tensor) -> list[Tensor]:
    """Returns a dense tensor as pieces of at most 1 GiB that share its memory: as a rule itself."""
    check_dense(tensor)
    if tensor.nbytes <= MAX_PART_BYTES:
        return [tensor]
    return list(torch.split(flat(tensor), MAX_PART_BYTES // tensor.element_size()))


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of one tensor of a message; whether it fills memory; and what travels of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool = field(init=False, compare=False)
    num_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_dense", fills_memory(self.shape, self.strides))
        object.__setattr__(self, "num_bytes", prod(self._narrow_shape) * self.dtype.itemsize)

    @property
    def _narrow_shape(self) -> tuple[int, ...]:
        """The shape without repeats: a dimension of stride 0 is sent once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(min(length, 1) if stride == 0 else length for length, stride in pairs)

    def fits(self, tensor: Tensor | None) -> TypeGuard[Tensor]:
        return (
            tensor is not None
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and (tensor.stride() == self.strides or self._steps(tensor.stride()) == self._steps(self.strides))
        )

    def _steps(self, strides: Sequence[int]) -> list[int]:
        """Returns the strides that mean something: a dimension of one element is never stepped along."""
        return [stride for stride, length in zip(strides, self.shape, strict=True) if length > 1]

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
        return Layout(self._narrow_shape, torch.empty(self._narrow_shape, device="meta").stride(), self.dtype)

    def unpack(self, buffer: Tensor) -> Tensor:
        """Returns the tensor as the sender had it, from what has travelled."""
        if self.is_dense:
            return buffer
        tensor = torch.empty_strided(self._narrow_shape, self.strides, dtype=self.dtype, device=buffer.device)
        return tensor.copy_(buffer).expand(self.shape)
