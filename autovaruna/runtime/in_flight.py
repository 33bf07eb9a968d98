"""Keeps what a stage needs of a micro-batch between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autovaruna.graph.pieces import Deferred
from autovaruna.runtime.transport.layout import empty_on_host, is_dense

NOTHING: Mapping[str, Tensor] = {}


@dataclass(slots=True, eq=False)
class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Attributes:
        tensors: what it has received, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
        deferred: weight gradients that the backward leaves for later.
    """

    tensors: Mapping[str, Tensor]
    returned: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    stash: Stash | None = None
    deferred: Deferred | None = None


class Stash:
    """Tensors of a micro-batch between its forward and its recompute; those on a GPU may go to the host meanwhile.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_offloaded: bool) -> None:
        self._devices = {name: tensor.device for name, tensor in tensors.items()}
        self._tensors = {
            name: _on_host(tensor) if is_offloaded and tensor.is_cuda else tensor for name, tensor in tensors.items()
        }

    def pop(self) -> dict[str, Tensor]:
        """Returns the tensors, on the devices where they were, and keeps them no longer."""
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
