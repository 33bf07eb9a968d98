"""Keeps what a stage needs for its recompute in the host's memory, so that the GPU's is free in between."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autovaruna.runtime.channels.staging import empty_on_host, is_dense


class Stash:
    """Tensors of a micro-batch between its forward and its recompute.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.

    Args:
        tensors: What to keep, by name.
        is_offloaded: Whether those on a GPU go to the host; all others stay as they are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_offloaded: bool) -> None:
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._tensors = {
            name: _on_host(tensor) if is_offloaded and tensor.is_cuda else tensor for name, tensor in tensors.items()
        }

    def take(self) -> dict[str, Tensor]:
        """Returns the tensors where they were, and lets go of them."""
        tensors, self._tensors = self._tensors, {}
        return {name: tensor.to(self._devices[name], non_blocking=True) for name, tensor in tensors.items()}


def _on_host(tensor: Tensor) -> Tensor:
    """Returns a copy in pinned memory, of the same strides; of a tensor with holes or repeats, the tensor itself."""
    if not is_dense(tensor):
        return tensor
    host = empty_on_host(tensor)
    with torch.no_grad():
        host.copy_(tensor, non_blocking=True)
    return host
