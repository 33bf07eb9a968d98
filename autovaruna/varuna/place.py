"""Says where a rank is: its number on its host, its device, its stage and replica, and which samples are its own."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from autovaruna.config.resolve import replicas_of
from autovaruna.errors import InputError
from autovaruna.runtime.environment import local_rank_in
from autovaruna.runtime.world import World
from autovaruna.varuna.grids import Grid


@dataclass(frozen=True)
class Place:
    """The place of a rank.

    Attributes:
        grid: the ranks of each stage.
        stage: its stage.
        replica: its replica of the whole model; where stages have different numbers of ranks, several of one stage may
            be of one replica.
        num_replicas: how many there are.
        batch_size: samples of a step, over all replicas.
    """

    grid: Grid
    stage: int
    replica: int
    num_replicas: int
    batch_size: int

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank of each replica."""
        return self.grid[0][: self.num_replicas]

    @property
    def samples(self) -> slice:
        """Which samples of a batch are the replica's."""
        start = sum(map(self.share_of, range(self.replica)))
        return slice(start, start + self.share_of(self.replica))

    def share_of(self, replica: int) -> int:
        """Returns the samples of a replica; the first ones have one more where the batch does not divide."""
        return self.batch_size // self.num_replicas + (replica < self.batch_size % self.num_replicas)


def place_of(rank: int, grid: Grid, batch_size: int) -> Place:
    """Returns the place of a rank.

    Raises:
        InputError: there are fewer samples than replicas.
    """
    num_replicas = len(replicas_of(grid))
    if batch_size < num_replicas:
        raise InputError(
            f"batch_size is {batch_size} for {num_replicas} replicas; expected at least one sample for each."
        )
    stage, index = next((stage, ranks.index(rank)) for stage, ranks in enumerate(grid) if rank in ranks)
    return Place(grid, stage, index % num_replicas, num_replicas, batch_size)


def local_rank_of(world: World) -> int:
    """Returns this rank's number on its host, as the launcher says, else by counting."""
    said = local_rank_in(os.environ)
    return said if said is not None else world.hosts[: world.rank].count(world.hosts[world.rank])


def device_of(device: int | str | torch.device | None, local_rank: int) -> torch.device:
    """Returns a device; a number means a GPU, or the CPU where there is none; None, as -1, that of `local_rank`.

    Raises:
        InputError: there is no such device.
    """
    device = -1 if device is None else device
    if isinstance(device, int):
        if not torch.cuda.is_available():
            return torch.device("cpu")
        number = local_rank % torch.cuda.device_count() if device < 0 else device
        if number >= torch.cuda.device_count():
            raise InputError(f"device is {device}: expected the number of one of {torch.cuda.device_count()} GPUs.")
        return torch.device("cuda", number)
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device is {device!r}, which cannot be used here: {error}.") from error
    return found
