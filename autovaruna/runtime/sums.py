"""Sums tensors over groups of ranks, or gives each rank's tensors to all, many tensors at once.

Large tensors go from where they lie, small ones together in flat buckets. What is added starts in that order, the same
on every rank of a group, and few buckets are under way at once.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from autovaruna.runtime.transport.base import DONE, Pending
from autovaruna.runtime.world import World

LARGE_BYTES = 256 << 10
BUCKET_BYTES, HOST_BUCKET_BYTES = 16 << 20, 4 << 20
"""On the host a bucket has to find a place between gradients, where large holes are few."""
BUCKETS_AT_ONCE = 2

Ranks = tuple[int, ...]


class Lot:
    """Tensors of one dtype that go at once: from where they lie, or packed.

    Args:
        num_shares: One: all are summed for all ranks. As many as ranks: each tensor belongs to one of them, and is
            summed there, or given from there to the others.
        is_copy: Whether they are packed.
        gathers: Whether they are given, not summed.
    """

    def __init__(self, num_shares: int, *, is_copy: bool, gathers: bool) -> None:
        self.is_copy = is_copy
        self._gathers = gathers
        self._shares: list[list[Tensor]] = [[] for _ in range(num_shares)]
        self._num_bytes = 0
        self._flat: list[Tensor | None] = []
        self._own = 0
        self._pending: Pending = DONE

    def take(self, tensor: Tensor, place: int) -> bool:
        """Takes a tensor in, that of the share at a place, if there is room; says whether."""
        is_fitting = not (self.is_copy and self._num_bytes and self._num_bytes + tensor.nbytes > _most_bytes(tensor))
        if is_fitting:
            self._shares[place].append(tensor)
            self._num_bytes += tensor.nbytes
        return is_fitting

    def start(self, world: World, ranks: Ranks) -> None:
        """Starts what is to be done."""
        self._own = ranks.index(world.rank)
        shares = self._shares
        if self.is_copy:
            self._flat = [_packed(share) if share else None for share in shares]
            shares = [[] if flat is None else [flat] for flat in self._flat]
        if len(shares) == 1:
            self._pending = world.start_all_reduce(shares[0][0], ranks)
        else:
            self._pending = (world.start_all_gather if self._gathers else world.start_reduce_scatter)(shares, ranks)

    def finish(self) -> None:
        """Waits, and unpacks what this rank gets."""
        self._pending.wait()
        for place, flat in enumerate(self._flat):
            if flat is not None and (len(self._flat) == 1 or (place == self._own) != self._gathers):
                _unpack(flat, self._shares[place])


def _most_bytes(tensor: Tensor) -> int:
    return HOST_BUCKET_BYTES if tensor.is_cpu else BUCKET_BYTES


def _packed(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, value in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.copy_(value.view(tensor.shape))


class Queue:
    """What one group of ranks does, which starts in the order added on each of them, whatever else a rank does."""

    def __init__(self, world: World, ranks: Ranks, *, gathers: bool) -> None:
        self._world = world
        self._ranks = ranks
        self._gathers = gathers
        self._open: dict[tuple[torch.dtype, bool, bool], Lot] = {}
        self._coming: deque[Lot] = deque()
        self._started: deque[Lot] = deque()

    def add(self, tensor: Tensor, owner: int | None, *, is_contiguous: bool) -> None:
        """Adds a tensor, of the rank `owner` if there is one; all ranks add the same shapes."""
        is_copy, is_shared = not is_contiguous or tensor.nbytes < LARGE_BYTES, owner is not None
        place = 0 if owner is None else self._ranks.index(owner)
        key = tensor.dtype, is_copy, is_shared
        lot = self._open.get(key) if is_copy or is_shared else None
        if lot is None or not lot.take(tensor, place):
            lot = self._open[key] = Lot(len(self._ranks) if is_shared else 1, is_copy=is_copy, gathers=self._gathers)
            lot.take(tensor, place)
            self._coming.append(lot)

    def start(self) -> None:
        """Starts what has been added, as far as few copies are under way."""
        self._open = {}
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
        gathers: Whether shares are given to all ranks in place of summed.
    """

    def __init__(self, world: World, *, gathers: bool = False) -> None:
        self._world = world
        self._gathers = gathers
        self._queues: dict[Ranks, Queue] = {}

    def add(self, tensor: Tensor, ranks: Ranks, *, is_contiguous: bool, owner: int | None = None) -> None:
        """Adds a tensor that is overwritten by its sum over `ranks` once `finish` is through.

        Args:
            ranks: The group; its ranks add the same shapes in the same order, between the same calls of `start`.
            is_contiguous: Whether the tensor is, on every rank.
            owner: The only rank that gets the sum, or the one that gives its numbers to all; None: all get the sum.
        """
        if ranks not in self._queues:
            self._queues[ranks] = Queue(self._world, ranks, gathers=self._gathers)
        self._queues[ranks].add(tensor, owner, is_contiguous=is_contiguous)

    def start(self) -> None:
        """Starts what has been added."""
        for queue in self._queues.values():
            queue.start()

    def finish(self) -> None:
        """Waits for everything; group by group in one order for all ranks, so that they never wait for each other."""
        self.start()
        for ranks in sorted(self._queues):
            self._queues[ranks].finish()
