"""Sums many tensors over groups of ranks: large ones where they lie, small ones together in flat buckets.

Sums start in the order in which tensors are added, which is the same on every rank of a group. Few buckets are under
way at once, so that their copies take little memory beside the gradients themselves.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from autovaruna.runtime.transport.base import Done, Pending
from autovaruna.runtime.worlds.world import World

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
        self._pending: Pending = Done()

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
        self._pending: Pending = Done()

    def take(self, tensor: Tensor) -> bool:
        """Takes a tensor in, if it is of the same dtype and there is room; says whether."""
        most_bytes = HOST_BUCKET_BYTES if tensor.is_cpu else BUCKET_BYTES
        is_fitting = self._tensors[0].dtype == tensor.dtype and self._num_bytes + tensor.nbytes <= most_bytes
        if is_fitting:
            self._tensors.append(tensor)
            self._num_bytes += tensor.nbytes
        return is_fitting

    def start(self, world: World, ranks: Ranks) -> None:
        """Packs the tensors and starts to sum them."""
        self._flat = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        self._pending = world.start_all_reduce(self._flat, ranks)

    def finish(self) -> None:
        """Waits for the sum and unpacks it."""
        self._pending.wait()
        values = torch.split(self._flat, [tensor.numel() for tensor in self._tensors])
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value.view(tensor.shape))


class Queue:
    """The sums of one group of ranks, which start in the order added on each of them, whatever else a rank does."""

    def __init__(self, world: World, ranks: Ranks) -> None:
        self._world = world
        self._ranks = ranks
        self._open: dict[torch.dtype, Bucket] = {}
        self._coming: deque[Large | Bucket] = deque()
        self._started: deque[Large | Bucket] = deque()

    def add(self, tensor: Tensor, *, is_contiguous: bool) -> None:
        """Adds a tensor; all ranks add the same shapes."""
        if is_contiguous and tensor.nbytes >= LARGE_BYTES:
            self._coming.append(Large(tensor))
            return
        bucket = self._open.get(tensor.dtype)
        if bucket is None or not bucket.take(tensor):
            self._open[tensor.dtype] = bucket = Bucket(tensor)
            self._coming.append(bucket)

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
        world: The ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._queues: dict[Ranks, Queue] = {}

    def add(self, tensor: Tensor, ranks: Ranks, *, is_contiguous: bool) -> None:
        """Adds a tensor that is overwritten by its sum over `ranks` once `finish` is through.

        Args:
            tensor: The tensor.
            ranks: The group; its ranks add the same shapes in the same order, between the same calls of `start`.
            is_contiguous: Whether the tensor is, on every rank.
        """
        if ranks not in self._queues:
            self._queues[ranks] = Queue(self._world, ranks)
        self._queues[ranks].add(tensor, is_contiguous=is_contiguous)

    def start(self) -> None:
        """Starts what has been added."""
        for queue in self._queues.values():
            queue.start()

    def finish(self) -> None:
        """Waits for everything; group by group in one order for all ranks, so that they never wait for each other."""
        self.start()
        for ranks in sorted(self._queues):
            self._queues[ranks].finish()
