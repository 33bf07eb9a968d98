"""Defines `ElasticSampler`: the samples of a step belong to the step, whatever the ranks are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from autovaruna.errors import ConfigError, InputError
from autovaruna.ranks.environment import get_world


class ElasticSampler(Sampler[list[int]]):
    """Gives each rank its part of every global batch: ``DataLoader(dataset, batch_sampler=ElasticSampler(...))``.

    A global batch follows from seed, epoch and its place in the epoch alone. So each sample comes once an epoch, also
    if the job goes on with other ranks in the middle of it. A rank gets a consecutive part; parts differ by at most one
    sample. Every iteration goes through the rest of an epoch; the next one is of the next epoch.

    Save ``data_position=sampler.state_dict(num_batches)`` with a checkpoint, and go on with
    ``sampler.load_state_dict(info.data_position)``.

    Args:
        global_batch_size: Samples of a batch over all ranks, whatever their number; the last of an epoch has fewer.
        shuffle: Whether the order is drawn anew for each epoch, from the seed; else it is that of the dataset.
        drop_last: Whether a last batch that is smaller is left out.

    Raises:
        ConfigError: there are no samples, or no batches.
    """

    def __init__(
        self, dataset: Sized, global_batch_size: int, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.num_samples = len(dataset)
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.batch = 0
        if global_batch_size < 1 or not len(self):
            raise ConfigError(
                f"ElasticSampler got {self.num_samples} samples and global_batch_size={global_batch_size}; expected at "
                "least one sample, and one batch an epoch"
            )

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's samples of each batch that the epoch still has; InputError if one has fewer than ranks."""
        world = get_world()
        rank, num_ranks = world.rank, world.num_ranks
        least = self.num_samples - (len(self) - 1) * self.global_batch_size
        if min(least, self.global_batch_size) < num_ranks:
            raise InputError(
                f"ElasticSampler got {num_ranks} ranks for a batch of {min(least, self.global_batch_size)} samples; "
                "expected at least one sample a rank. Pass drop_last=True if it is the last batch of an epoch, or "
                "another global_batch_size."
            )
        order = self._order()
        while self.batch < len(self):
            samples = order[self.batch * self.global_batch_size : (self.batch + 1) * self.global_batch_size]
            self.batch += 1
            yield samples[len(samples) * rank // num_ranks : len(samples) * (rank + 1) // num_ranks]
        self.epoch, self.batch = self.epoch + 1, 0

    def _order(self) -> list[int]:
        """Returns the order of the epoch's samples."""
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Returns where the data go on, as plain numbers.

        `num_batches` have been trained on since the first epoch began. None: those that were taken from here, which a
        DataLoader with workers does ahead of training.
        """
        done = self.epoch * len(self) + self.batch if num_batches is None else num_batches
        return {"num_batches": done, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state says; raises InputError if it is of other data or of another order."""
        got = {name: state.get(name) for name in self._identity()}
        if got != self._identity():
            raise InputError(
                f"the sampler's state is of {got}; expected {self._identity()}, or samples would come twice or never. "
                "Make the sampler as the run made it that saved the state."
            )
        self.epoch, self.batch = divmod(int(state["num_batches"]), len(self))

    def _identity(self) -> dict[str, Any]:
        names = ("num_samples", "global_batch_size", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}
