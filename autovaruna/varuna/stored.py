"""Writes and reads the checkpoints of a split model under Varuna's own names."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from autovaruna.errors import CheckpointError
from autovaruna.varuna.loss_scale import StepScale
from autovaruna.varuna.split_module import SplitModule

logger = logging.getLogger(__name__)


class StoredModule(SplitModule):
    """A split model in training whose state goes to disk and comes back.

    Attributes:
        iteration: steps done.
        optimizer: the optimizer; None: there is none yet.
    """

    iteration: int
    optimizer: torch.optim.Optimizer | None
    _scale: StepScale | None

    def checkpoint(
        self,
        global_store: str | os.PathLike[str],
        step: int | None = None,
        tempdir: str | None = None,
        shard: bool = False,
        on_demand: bool = False,
    ) -> None:
        """Writes a checkpoint: weights, buffers, optimizer, loss scale and random state. Collective.

        Args:
            global_store: Folder of all checkpoints, which every rank reaches.
            step: Number of the checkpoint; None: the steps done so far.
            tempdir: Folder of this host to write to first; the copy to `global_store` goes on in the background.
            shard: Whether replicas share the writing.
            on_demand: Whether it must be complete on return, as before the process ends.
        """
        self.model.save_checkpoint(
            global_store,
            step=self.iteration if step is None else step,
            tempdir=tempdir,
            background=tempdir is not None and not on_demand,
            shard=shard,
            scaler=self._scale.scaler if self._scale else None,
            extra={"iteration": self.iteration},
        )

    def load_checkpoint(
        self, global_store: str | os.PathLike[str], iteration: int | str, check_complete: bool = True
    ) -> None:
        """Loads a checkpoint that was written by any number of ranks, on any grid. Collective.

        The optimizer's state is loaded into the one that `set_optimizer` has registered before.

        Args:
            global_store: Folder of all checkpoints.
            iteration: Its number, or ``latest``.
            check_complete: Whether a checkpoint that is not complete is an error; it is never loaded in any case: with
                False the newest complete one is loaded in its place.
        """
        if self.optimizer is None:
            logger.warning("loading without the optimizer's state: call set_optimizer() before, to go on with it")
        scaler = self._scale.scaler if self._scale else None
        try:
            found = self.model.load_checkpoint(global_store, step=iteration, scaler=scaler)
        except CheckpointError as error:
            if check_complete:
                raise
            logger.warning("loading the newest complete checkpoint: %s", error)
            found = self.model.load_checkpoint(global_store, step="latest", scaler=scaler)
        known = found.extra if isinstance(found.extra, Mapping) else {}
        self.iteration = int(known.get("iteration", found.step or 0))
