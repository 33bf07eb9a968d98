"""Defines `CheckpointedModule`: puts the state of a wrapped model on disk, and takes it from there."""

from __future__ import annotations

from functools import partial
from os import PathLike
from typing import Any

from autovaruna.checkpoint.load import CheckpointInfo
from autovaruna.checkpoint.save import Way
from autovaruna.checkpoint.state import Content, Subject
from autovaruna.kinds import whole_number
from autovaruna.parallel.own_device import find_device
from autovaruna.parallel.stateful import StatefulModule


class CheckpointedModule(StatefulModule):
    """Saves and loads checkpoints; arguments as of `StatefulModule`."""

    def save_checkpoint(
        self,
        dir: str | PathLike[str],
        *,
        step: int,
        data_position: Any = None,
        extra: Any = None,
        keep: int | None = None,
        tempdir: str | None = None,
        background: bool = False,
        shard: bool = True,
        scaler: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        """Saves model, optimizer and the state of the run in a folder ``dir/step-...`` of its own. Collective.

        The weights are safetensors files with an index, under the names of the plain model. The folder appears when
        it is complete; rank 0 gives what is the same on all ranks (`data_position`, `extra`, `scaler`, ...).

        Args:
            dir: A folder that all ranks share.
            step: Number of the checkpoint; the same one again replaces it.
            data_position: Where the data go on: numbers, texts, tensors, lists, tuples and dicts of them.
            extra: More of the same kind.
            keep: How many checkpoints stay, this one included; None: all.
            tempdir: A local folder where files are written first.
            background: Whether training goes on while files are written, from a copy that is made first, in memory of
                the host that is kept for the next one; where that is short, a warning says so, and training waits for
                the files. What goes wrong is raised by the next call of the model, `wait_checkpoint`, or the end of
                the program.
            shard: Whether the replicas of a stage share the writing; false: the first of them writes all.
            scaler: A GradScaler.
            lr_scheduler: A schedule of the learning rate.

        Raises:
            CheckpointError: it cannot be saved; the same on every rank. Earlier ones are as they were.
        """
        step, keep = whole_number("step", step, 0), None if keep is None else whole_number("keep", keep)
        content = Content(step, data_position, extra, scaler, lr_scheduler)
        self._persistence.save(self._subject(), dir, content, Way(keep, tempdir, shard, background))

    def wait_checkpoint(self) -> None:
        """Waits until the checkpoint in the background is complete. Collective.

        Raises:
            CheckpointError: it failed.
        """
        self._persistence.wait()

    def load_checkpoint(
        self,
        dir: str | PathLike[str],
        step: int | str = "latest",
        *,
        scaler: Any = None,
        lr_scheduler: Any = None,
        strict: bool = True,
    ) -> CheckpointInfo:
        """Loads this rank's part of a checkpoint, saved by any number of ranks, whatever their plan. Collective.

        Before the first call, what needs the plan (weights on ``meta``, the optimizer's state) is read with it.

        Args:
            dir: A folder of checkpoints, one of them, a Hugging Face folder, or a safetensors file.
            step: The step, or ``"latest"``: the newest that is intact.
            scaler: A GradScaler.
            lr_scheduler: A schedule of the learning rate.
            strict: Whether every name of the model, and no other, must be there.

        Returns:
            What was saved beside the weights.

        Raises:
            CheckpointError: there is none that is intact, or it does not fit; nothing has been changed.
        """
        find = partial(find_device, self.module, self.settings)
        parts = {"scaler": scaler, "lr_scheduler": lr_scheduler}
        info = self._persistence.load(self._subject(), dir, step, strict, find, **parts)
        self._num_calls = self._persistence.num_calls
        if self._engine is not None and self._persistence.seed is not None:
            self._engine.seed = self._persistence.seed
        return info

    def _subject(self) -> Subject:
        """Returns what checkpoints are of."""
        self._lent.settle()
        self._follow_groups()
        engine = self._engine
        placement = None if engine is None else engine.placement
        seed = None if engine is None else engine.seed
        return Subject(self.world, self._state, placement, self._cut_optimizer, seed, self._num_calls)
