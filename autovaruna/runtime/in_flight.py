"""Holds what a rank keeps during a call: its own samples, stages between forward and backward, and changed state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autovaruna._torch import preserve_version_counter
from autovaruna.graph.pieces import Deferred
from autovaruna.graph.traced import TracedModel
from autovaruna.runtime.batch import Job, MicroBatch
from autovaruna.runtime.mail import Mail, Parcel
from autovaruna.runtime.transport.base import empty_on_host, is_dense
from autovaruna.runtime.weights import OwnedState, Placement
from autovaruna.runtime.world import World
from autovaruna.stage.module import StageModule


class OwnSamples:
    """The mini-batch of this rank, by input name."""

    def __init__(self, inputs: Mapping[str, Tensor], job: Job, rank: int, mail: Mail) -> None:
        self._inputs, self._job, self._rank, self._mail = inputs, job, rank, mail
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
    """Tensors of a micro-batch between its forward and its recompute; those on a GPU may go to the host meanwhile.

    Copies run on the current stream in pinned memory, and nobody waits for them: the memory that a tensor had on the
    GPU is given to later work of the same stream alone, which comes after the copy.
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

    Attributes:
        tensors: what it has received, until the forward has ended.
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


class ChangedState:
    """The state of this rank's stages that the forwards of one call change.

    If it `is_steady`, micro-batches must `start_alike`: some of it changes whatever their samples are, which is once a
    call in plain PyTorch.
    """

    def __init__(self, traced: TracedModel, num_micro_batches: int) -> None:
        self.is_steady = num_micro_batches > 1 and bool(traced.steady_state)
        self._traced = traced
        self._found_first: dict[int, dict[str, Tensor]] = {}

    def start_alike(self, stage: StageModule) -> None:
        """Gives a micro-batch what the first one found of the state that changes once a call."""
        steady = stage.changed_state(self._traced.steady_state)
        if stage.index in self._found_first:
            _overwrite(steady, self._found_first[stage.index])
        else:
            self._found_first[stage.index] = _copies(steady)

    def copy(self, stage: StageModule) -> dict[str, Tensor]:
        """Returns what a forward finds now, for when it runs again."""
        return _copies(stage.changed_state(self._traced.changed_state))

    @contextmanager
    def as_before(self, stage: StageModule, before: Mapping[str, Tensor]) -> Iterator[None]:
        """Puts back what a forward has found, as long as it runs again."""
        changed = stage.changed_state(self._traced.changed_state)
        now = _copies(changed)
        _overwrite(changed, before)
        yield
        _overwrite(changed, now)


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _overwrite(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Puts values back into what forward changes; no backward reads that, so autograd need not know."""
    for name, value in values.items():
        with preserve_version_counter(state[name]):
            state[name].copy_(value)


def share_state(changed: Collection[str], state: OwnedState, placement: Placement, world: World) -> None:
    """Overwrites changed buffers everywhere, and parameters where held, by those of the first holder. Collective."""
    every = tuple(range(world.num_ranks))
    groups: dict[tuple[int, tuple[int, ...], torch.dtype], list[Tensor]] = {}
    for name in sorted(changed):
        tensor, holders = state.tensor(name), placement.ranks_of(name)
        ranks = holders if isinstance(tensor, nn.Parameter) else every
        groups.setdefault((holders[0], ranks, tensor.dtype), []).append(tensor.detach())
    for (root, ranks, _), tensors in sorted(groups.items(), key=lambda group: str(group[0])):
        if len(ranks) > 1 and world.rank in ranks:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            world.broadcast(flat, root, ranks)
            parts = torch.split(flat, [each.numel() for each in tensors])
            for tensor, part in zip(tensors, parts, strict=True) if world.rank != root else ():
                tensor.data.copy_(part.view(tensor.shape))  # autograd may have kept it
