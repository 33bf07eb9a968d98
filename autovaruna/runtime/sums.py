"""Sums tensors over groups of ranks, or gives each rank's tensors to all, many tensors at once.

Large tensors go from where they lie, small ones together in flat buckets. What is added starts in that order, the same
on every rank of a group, and few buckets are under way at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autovaruna.runtime.transport.base import DONE, Pending
from autovaruna.runtime.world import World

LARGE_BYTES = 256 << 10
BUCKET_BYTES, HOST_BUCKET_BYTES = 16 << 20, 4 << 20
"""On the host a bucket has to find a place between gradients, where large holes are few."""
BUCKETS_AT_ONCE = 2

Ranks = tuple[int, ...]


@dataclass(eq=False)
class Lot:
    """Tensors of one dtype that go at once: from where they lie, or packed as copies.

    There is one share, whose sum all ranks get; or one for each rank, which alone gets its sum, or gives it to all.
    """

    shares: list[list[Tensor]]
    is_copy: bool
    num_bytes: int = 0
    packed: list[Tensor | None] = field(default_factory=list)
    pending: Pending = DONE

    def has_room(self, tensor: Tensor) -> bool:
        most = HOST_BUCKET_BYTES if tensor.is_cpu else BUCKET_BYTES
        return not self.is_copy or not self.num_bytes or self.num_bytes + tensor.nbytes <= most

    def add(self, tensor: Tensor, place: int) -> None:
        self.shares[place].append(tensor)
        self.num_bytes += tensor.nbytes

    def start(self, world: World, ranks: Ranks, *, gathers: bool) -> None:
        shares = self.shares
        if self.is_copy:
            self.packed = [torch.cat([each.reshape(-1) for each in share]) if share else None for share in shares]
            shares = [[] if flat is None else [flat] for flat in self.packed]
        if len(shares) == 1:
            self.pending = world.start_all_reduce(shares[0][0], ranks)
        else:
            self.pending = world.start_shares(shares, ranks, gathers=gathers)

    def finish(self, own: int, *, gathers: bool) -> None:
        """Waits, and unpacks what this rank, whose share is the one at a place, gets."""
        self.pending.wait()
        for place, flat in enumerate(self.packed):
            if flat is not None and (len(self.packed) == 1 or (place == own) != gathers):
                tensors = self.shares[place]
                parts = torch.split(flat, [each.numel() for each in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))


class Queue:
    """What one group of ranks does, which starts in the order added on each of them, whatever else a rank does."""

    def __init__(self, world: World, ranks: Ranks, *, gathers: bool) -> None:
        self._world, self._ranks, self._gathers = world, ranks, gathers
        self._open: dict[tuple[torch.dtype, bool, bool], Lot] = {}
        self._coming: deque[Lot] = deque()
        self._started: deque[Lot] = deque()

    def add(self, tensor: Tensor, owner: int | None, *, is_contiguous: bool) -> None:
        """Adds a tensor, of the rank `owner` if there is one; all ranks add the same shapes."""
        is_copy, is_shared = not is_contiguous or tensor.nbytes < LARGE_BYTES, owner is not None
        key = tensor.dtype, is_copy, is_shared
        lot = self._open.get(key) if is_copy or is_shared else None
        if lot is None or not lot.has_room(tensor):
            lot = self._open[key] = Lot([[] for _ in range(len(self._ranks) if is_shared else 1)], is_copy)
            self._coming.append(lot)
        lot.add(tensor, 0 if owner is None else self._ranks.index(owner))

    def start(self) -> None:
        """Starts what has been added, as far as few copies are under way."""
        self._open = {}
        while self._coming and sum(each.is_copy for each in self._started) < BUCKETS_AT_ONCE:
            self._coming[0].start(self._world, self._ranks, gathers=self._gathers)
            self._started.append(self._coming.popleft())

    def finish(self) -> None:
        self.start()
        while self._started:
            self._started.popleft().finish(self._ranks.index(self._world.rank), gathers=self._gathers)
            self.start()


class Sums:
    """Sums on their way, over any groups of ranks; or shares, if it `gathers`, that are given to all ranks."""

    def __init__(self, world: World, *, gathers: bool = False) -> None:
        self._world, self._gathers = world, gathers
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
        for queue in self._queues.values():
            queue.start()

    def finish(self) -> None:
        """Waits for everything; group by group in one order for all ranks, so that they never wait for each other."""
        self.start()
        for ranks in sorted(self._queues):
            self._queues[ranks].finish()
