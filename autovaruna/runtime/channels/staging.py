"""Defines how a tensor's memory is seen as bytes on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Says whether the elements fill one piece of memory without holes or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def check_dense(tensor: Tensor) -> None:
    """Asserts that the memory of `tensor` is its value: dense, and no lazy conjugate or negative."""
    assert tensor.is_contiguous() or is_dense(tensor), (
        f"tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not dense; copy it"
    )
    assert not tensor.is_conj() and not tensor.is_neg(), "resolve the lazy conjugate or negative first"


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in the order of memory, sharing it; shape (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def to_host(tensor: Tensor) -> Tensor:
    """Returns `tensor` itself on the CPU, else a copy in pinned memory with the same layout."""
    if tensor.device.type == "cpu":
        return tensor
    host = empty_on_host(tensor)
    host.copy_(tensor.detach())
    return host


def rows_on_host(tensor: Tensor) -> Tensor:
    """Returns `tensor` itself if it is contiguous and on the CPU, else a copy of which this is so.

    Its bytes are then its elements in order, however ranks lay out their memory.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return to_host(tensor.detach().resolve_conj().resolve_neg().contiguous())


def distinct(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor whose elements lie in memory of their own: of what is expanded, the original."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def empty_on_host(tensor: Tensor) -> Tensor:
    """Returns uninitialised host memory laid out as `tensor`, pinned where the device is CUDA."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
