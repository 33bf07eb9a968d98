"""Sums tensors over groups of ranks, or gives each rank's tensors to all, many tensors at once.

Large tensors go from where they lie, small ones together in flat buckets. What is added starts in that order, the same
on every rank of a group, and few buckets are under way at once.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import torch
from torch import Tensor

from autovaruna.runtime.transport.base import DONE, Pending
from autovaruna.runtime.world import World

LARGE_BYTES = 256 << 10
BUCKET_BYTES, HOST_BUCKET_BYTES = 16 << 20, 4 << 20
"""On the host a bucket has to find a place between gradients, where large holes are few."""
BUCKETS_AT_ONCE = 2

Ranks = tuple[int, ...]


class Large:
    """A tensor that is summed where it lies."""

    is_copy = False

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._pending: Pending = DONE

    def start(self, world: World, ranks: Ranks) -> None:
        """Starts the sum."""
        self._pending = world.start_all_reduce(self._tensor, ranks)

    def finish(self) -> None:
        """Waits for the sum."""
        self._pending.wait()


class Bucket:
    """Small tensors of one dtype that are summed in one message."""

    is_copy = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensors = [tensor]
        self._num_bytes = tensor.nbytes
        self._flat = tensor
        self._pending: Pending = DONE

    def take(self, tensor: Tensor) -> bool:
        """Takes a tensor in, if it is of the same dtype and there is room; says whether."""
        is_fitting = self._tensors[0].dtype == tensor.dtype and self._num_bytes + tensor.nbytes <= _most_bytes(tensor)
        if is_fitting:
            self._tensors.append(tensor)
            self._num_bytes += tensor.nbytes
        return is_fitting

    def start(self, world: World, ranks: Ranks) -> None:
        """Packs the tensors and starts to sum them."""
        self._flat = _packed(self._tensors)
        self._pending = world.start_all_reduce(self._flat, ranks)

    def finish(self) -> None:
        """Waits for the sum and unpacks it."""
        self._pending.wait()
        _unpack(self._flat, self._tensors)


class Shares:
    """Tensors that each belong to one rank of the group: summed there, or given from there to the others.

    Args:
        num_ranks: How many ranks the group has.
        is_copy: Whether they go in buckets, one for each rank, and not from where they lie.
        gathers: Whether they are given, not summed.
    """

    def __init__(self, num_ranks: int, *, is_copy: bool, gathers: bool) -> None:
        self.is_copy = is_copy
        self._gathers = gathers
        self._tensors: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        self._num_bytes = 0
        self._flat: list[Tensor | None] = []
        self._pending: Pending = DONE

    def take(self, tensor: Tensor, place: int) -> bool:
        """Takes a tensor of the rank at a place of the group in, if there is room; says whether."""
        is_fitting = not (self.is_copy and self._num_bytes and self._num_bytes + tensor.nbytes > _most_bytes(tensor))
        if is_fitting:
            self._tensors[place].append(tensor)
            self._num_bytes += tensor.nbytes
        return is_fitting

    def start(self, world: World, ranks: Ranks) -> None:
        """Starts what is to be done."""
        self._own = ranks.index(world.rank)
        shares = self._tensors
        if self.is_copy:
            self._flat = [_packed(share) if share else None for share in shares]
            shares = [[] if flat is None else [flat] for flat in self._flat]
        start = world.start_all_gather if self._gathers else world.start_reduce_scatter
        self._pending = start(shares, ranks)

    def finish(self) -> None:
        """Waits, and unpacks what this rank gets."""
        self._pending.wait()
        for place, flat in enumerate(self._flat):
            if flat is not None and (place == self._own) != self._gathers:
                _unpack(flat, self._tensors[place])


_Any: TypeAlias = Large | Bucket | Shares


def _most_bytes(tensor: Tensor) -> int:
    return HOST_BUCKET_BYTES if tensor.is_cpu else BUCKET_BYTES


def _packed(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, value in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(value.view(tensor.shape))


class Queue:
    """What one group of ranks does, which starts in the order added on each of them, whatever else a rank does."""

    def __init__(self, world: World, ranks: Ranks, *, gathers: bool = False) -> None:
        self._world = world
        self._ranks = ranks
        self._gathers = gathers
        self._open: dict[torch.dtype, Bucket] = {}
        self._open_shares: dict[tuple[torch.dtype, bool], Shares] = {}
        self._coming: deque[_Any] = deque()
        self._started: deque[_Any] = deque()

    def add(self, tensor: Tensor, *, is_contiguous: bool) -> None:
        """Adds a tensor to be summed for all; all ranks add the same shapes."""
        if is_contiguous and tensor.nbytes >= LARGE_BYTES:
            self._coming.append(Large(tensor))
            return
        bucket = self._open.get(tensor.dtype)
        if bucket is None or not bucket.take(tensor):
            self._open[tensor.dtype] = bucket = Bucket(tensor)
            self._coming.append(bucket)

    def add_share(self, tensor: Tensor, owner: int, *, is_contiguous: bool) -> None:
        """Adds a tensor of the rank `owner`; all ranks add the same shapes."""
        key = tensor.dtype, not is_contiguous or tensor.nbytes < LARGE_BYTES
        place, shares = self._ranks.index(owner), self._open_shares.get(key)
        if shares is None or not shares.take(tensor, place):
            shares = Shares(len(self._ranks), is_copy=key[1], gathers=self._gathers)
            shares.take(tensor, place)
            self._open_shares[key] = shares
            self._coming.append(shares)

    def start(self) -> None:
        """Starts what has been added, as far as few copies are under way."""
        self._open, self._open_shares = {}, {}
        while self._coming and self._num_copies < BUCKETS_AT_ONCE:
            self._coming[0].start(self._world, self._ranks)
            self._started.append(self._coming.popleft())

    def finish(self) -> None:
        """Waits for everything."""
        self.start()
        while self._started:
            self._started.popleft().finish()
            self.start()

    @property
    def _num_copies(self) -> int:
        return sum(each.is_copy for each in self._started)


class Sums:
    """Sums on their way, over any groups of ranks.

    Args:
        world: The ranks.
        gathers: Whether shares are given to all ranks in place of summed.
    """

    def __init__(self, world: World, *, gathers: bool = False) -> None:
        self._world = world
        self._gathers = gathers
        self._queues: dict[Ranks, Queue] = {}

    def add(self, tensor: Tensor, ranks: Ranks, *, is_contiguous: bool, owner: int | None = None) -> None:
        """Adds a tensor that is overwritten by its sum over `ranks` once `finish` is through.

        Args:
            tensor: The tensor.
            ranks: The group; its ranks add the same shapes in the same order, between the same calls of `start`.
            is_contiguous: Whether the tensor is, on every rank.
            owner: The only rank that gets the sum, or the one that gives its numbers to all; None: all get the sum.
        """
        if ranks not in self._queues:
            self._queues[ranks] = Queue(self._world, ranks, gathers=self._gathers)
        if owner is None:
            self._queues[ranks].add(tensor, is_contiguous=is_contiguous)
        else:
            self._queues[ranks].add_share(tensor, owner, is_contiguous=is_contiguous)

    def start(self) -> None:
        """Starts what has been added."""
        for queue in self._queues.values():
            queue.start()

    def finish(self) -> None:
        """Waits for everything; group by group in one order for all ranks, so that they never wait for each other."""
        self.start()
        for ranks in sorted(self._queues):
            self._queues[ranks].finish()
