"""Sums the gradients of a step in buckets: large tensors from where they lie, small ones packed, few packed at once.

Buckets of a group of ranks start in the order in which their tensors were added, the same on each of its ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autovaruna.ranks.transport.base import DONE, Pending
from autovaruna.ranks.world import Ranks, World

LARGE_BYTES = 256 << 10
BUCKET_BYTES, HOST_BUCKET_BYTES = 16 << 20, 4 << 20
"""On the host a bucket has to find a place between gradients, where large holes are few."""
BUCKETS_AT_ONCE = 2
"""Full ones: so much memory packed tensors take."""


@dataclass(eq=False)
class Bucket:
    """Tensors of one dtype that are summed at once: from where they lie, or packed into copies.

    There is one share, whose sum all ranks get; or one for each rank, which alone gets its sum, or copies it to all.
    """

    shares: list[list[Tensor]]
    is_packed: bool
    is_on_host: bool
    num_bytes: int = 0
    packed: list[Tensor | None] = field(default_factory=list)
    pending: Pending = DONE

    @property
    def most_bytes(self) -> int:
        return HOST_BUCKET_BYTES if self.is_on_host else BUCKET_BYTES

    def start(self, world: World, ranks: Ranks, *, gathers: bool) -> None:
        shares = self.shares
        if self.is_packed:
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


class BucketQueue:
    """The buckets of one group of ranks, in the order in which each of its ranks starts them."""

    def __init__(self, world: World, ranks: Ranks, *, gathers: bool) -> None:
        self._world, self._ranks, self._gathers = world, ranks, gathers
        self._open: dict[tuple[torch.dtype, bool, bool], Bucket] = {}
        self._waiting: deque[Bucket] = deque()
        self._started: deque[Bucket] = deque()

    def add(self, tensor: Tensor, owner: int | None, *, is_contiguous: bool) -> None:
        """Adds a tensor, of the rank `owner` if there is one; all ranks add the same shapes."""
        is_packed, is_shared = not is_contiguous or tensor.nbytes < LARGE_BYTES, owner is not None
        key = tensor.dtype, is_packed, is_shared
        bucket = self._open.get(key) if is_packed or is_shared else None
        if bucket is None or (is_packed and bucket.num_bytes and bucket.num_bytes + tensor.nbytes > bucket.most_bytes):
            shares = list[list[Tensor]]([] for _ in range(len(self._ranks) if is_shared else 1))
            bucket = self._open[key] = Bucket(shares, is_packed, tensor.is_cpu)
            self._waiting.append(bucket)
        bucket.shares[0 if owner is None else self._ranks.index(owner)].append(tensor)
        bucket.num_bytes += tensor.nbytes

    def start(self) -> None:
        """Starts what has been added, as long as few packed buckets are under way.

        On the host it unpacks those that have come: a device's sums start in one order on all ranks, over all groups.
        """
        self._open = {}
        while self._started and self._started[0].is_on_host and self._started[0].pending.is_done():
            self._finish_first()
        while self._waiting and self._packed_bytes() < BUCKETS_AT_ONCE * self._waiting[0].most_bytes:
            self._waiting[0].start(self._world, self._ranks, gathers=self._gathers)
            self._started.append(self._waiting.popleft())

    def finish(self) -> None:
        self.start()
        while self._started:
            self._finish_first()
            self.start()

    def _packed_bytes(self) -> int:
        return sum(each.num_bytes for each in self._started if each.is_packed)

    def _finish_first(self) -> None:
        self._started.popleft().finish(self._ranks.index(self._world.rank), gathers=self._gathers)


class GradientSums:
    """Sums of many tensors on their way, over any groups of ranks; or copies from owners to all, if it `gathers`."""

    def __init__(self, world: World, *, gathers: bool = False) -> None:
        self._world, self._gathers = world, gathers
        self._queues: dict[Ranks, BucketQueue] = {}

    def add(self, tensor: Tensor, ranks: Ranks, *, is_contiguous: bool, owner: int | None = None) -> None:
        """Adds a tensor that is overwritten by its sum over `ranks` once `finish` is through.

        Args:
            ranks: The group; its ranks add the same shapes in the same order, between the same calls of `start`.
            is_contiguous: Whether the tensor is, on every rank.
            owner: The only rank that gets the sum, or the one that gives its numbers to all; None: all get the sum.
        """
        if ranks not in self._queues:
            self._queues[ranks] = BucketQueue(self._world, ranks, gathers=self._gathers)
        self._queues[ranks].add(tensor, owner, is_contiguous=is_contiguous)

    def start(self) -> None:
        for queue in self._queues.values():
            queue.start()

    def finish(self) -> None:
        """Waits for everything; group by group in one order for all ranks, so that they never wait for each other."""
        self.start()
        for ranks in sorted(self._queues):
            self._queues[ranks].finish()
