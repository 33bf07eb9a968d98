"""Holds micro-batches on one rank: its own samples, and what a stage keeps between a forward and its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autovaruna.graph.pieces import Deferred
from autovaruna.runtime.batch import Job, MicroBatch
from autovaruna.runtime.mail import Mail, Parcel
from autovaruna.runtime.transport.base import empty_on_host, is_dense


class OwnSamples:
    """The mini-batch of this rank.

    Args:
        inputs: Its tensors by input name.
        job: The call.
        rank: This rank.
        mail: Carries tensors.
    """

    def __init__(self, inputs: Mapping[str, Tensor], job: Job, rank: int, mail: Mail) -> None:
        self._inputs = inputs
        self._job = job
        self._rank = rank
        self._mail = mail
        self._slices: dict[str, Mapping[int, Tensor]] = {}

    def of(self, part: MicroBatch, name: str) -> Tensor:
        """Returns a micro-batch's part of an input; all of one that is no batch."""
        slices = self._slices.get(name)
        if slices is None:
            whole = self._inputs[name].detach()
            if name not in self._job.split.traced.batch_inputs:
                return whole
            parts = self._job.batch.owned_by(self._rank)
            pieces = torch.unsafe_split_with_sizes(whole, [each.size for each in parts])
            slices = self._slices[name] = {  # strides of dimensions of one element tell torch of an order in memory
                each.index: piece.contiguous().view(-1).view(piece.shape) if 1 in piece.shape else piece
                for each, piece in zip(parts, pieces, strict=True)
            }
        return slices[part.index].contiguous()

    def send(self, parcels: Iterable[tuple[MicroBatch, Parcel]]) -> None:
        """Starts to send micro-batches to the stages that use them."""
        for part, parcel in parcels:
            self._mail.send([self.of(part, name) for name in parcel.names], parcel.kind)


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


NOTHING: Mapping[str, Tensor] = {}


class InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward.

    Args:
        tensors: What it has received.

    Attributes:
        tensors: the same, until the forward has ended.
        returned: what the forward returned, with its graph.
        gradients: those of what it has received.
        before: state that the forward found and changed.
        stash: what it has received, if it runs forward again.
        deferred: weight gradients that the backward leaves for later.
    """

    __slots__ = ("before", "deferred", "gradients", "returned", "stash", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.returned = NOTHING
        self.gradients: dict[str, Tensor] = {}
        self.before = NOTHING
        self.stash: Stash | None = None
        self.deferred: Deferred | None = None
