"""Says where a rank is on a grid of stages and replicas, and which samples of a batch are its replica's."""

from __future__ import annotations

from dataclasses import dataclass

from autovaruna.config import replicas_of
from autovaruna.errors import InputError
from autovaruna.varuna.batches import share_of_replica
from autovaruna.varuna.stage_map import Grid


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
        """Returns how many samples are a replica's."""
        return share_of_replica(self.batch_size, replica, self.num_replicas)


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
