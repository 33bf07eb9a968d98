"""Saves and loads the state of a wrapped model, in memory and in checkpoints; before the split it waits for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from autovaruna.checkpoint.load import CheckpointInfo, Loading, load_all
from autovaruna.checkpoint.save import SaveOptions, Saver, available_bytes
from autovaruna.checkpoint.source import CheckpointSource
from autovaruna.checkpoint.state import Content, ModelInTraining
from autovaruna.errors import CheckpointError, InputError, OrderError
from autovaruna.ranks.world import on_all
from autovaruna.runtime.optimizer import CutOptimizer
from autovaruna.runtime.weights import load_part, whole_state
from autovaruna.session.model import WrappedModel, WrappedOptimizer, find_device
from autovaruna.session.run import Run

logger = logging.getLogger(__name__)
_MOST_SAVED = 100


@dataclass
class PendingCheckpoint:
    """A checkpoint that is read once this rank knows its part."""

    loading: Loading
    weights: bool  # whether they are still to be read
    optimizer_state: Any  # as it was left, empty; where the script has loaded another one since, it is not read


class Persistence:
    """The state of a wrapped model under its own names, in memory and in checkpoints."""

    def __init__(self, model: WrappedModel, optimizer: WrappedOptimizer, run: Run) -> None:
        self.pending: PendingCheckpoint | None = None
        self.seed: int | None = None  # what random nodes were seeded from in the run that was loaded
        self._model, self._optimizer, self._run = model, optimizer, run
        self._locks = ExitStack()
        self._saver: Saver | None = None
        self._saved: list[tuple[int, str]] = []  # the steps of the last checkpoints, and where they are

    def subject(self) -> ModelInTraining:
        """Returns what checkpoints are of."""
        self._model.borrowed.write_back()
        optimizer, engine = self._optimizer.follow_groups(), self._model.engine
        placement, seed = (None, None) if engine is None else (engine.placement, engine.seed)
        return ModelInTraining(self._run.world, self._model.state, placement, optimizer, seed, self._run.num_calls)

    # checkpoints

    def save(self, root: str | os.PathLike[str], content: Content, options: SaveOptions) -> None:
        """Saves a checkpoint. Collective."""
        if self.pending is not None:
            raise self.too_early("save_checkpoint")
        subject = self.subject()
        self._saver = self._saver or Saver(subject.world)
        self._saver.save(subject, root, content, options)
        self._saved = [*self._saved[1 - _MOST_SAVED :], (content.step, os.fspath(root))]

    def words_of_saved(self, step: int) -> str:
        """Says which of this run's checkpoints was the newest at a step."""
        saved = [each for each in self._saved if each[0] <= step]
        if not saved:
            return "no checkpoint was saved before"
        return f"the newest checkpoint before is step {saved[-1][0]}, in {saved[-1][1]}"

    def too_early(self, what: str) -> OrderError:
        """Returns the error for what the script does while a checkpoint is `pending`."""
        return OrderError(
            "A checkpoint has been loaded, but not yet into the parts of the ranks, which the first call makes: got "
            f"{what} before it. Call the model first."
        )

    def poll(self) -> None:
        """Raises what went wrong in the background, if anything. Collective while there is a checkpoint on its way."""
        if self._saver is not None and self._saver.is_busy:
            self._saver.poll()

    def wait(self) -> None:
        """Waits until the checkpoint on its way is complete; CheckpointError if it failed. Collective."""
        if self._saver is not None:
            self._saver.wait()

    def load(
        self, find: Callable[[ExitStack], CheckpointSource], is_strict: bool, scaler: Any, lr_scheduler: Any
    ) -> CheckpointInfo:
        """Loads the checkpoint that `find` returns; its locks, in the stack, stay until it is read. Collective."""
        run, subject = self._run, self.subject()
        world = subject.world
        self.wait()
        with ExitStack() as locks:
            loading = Loading(find(locks), scaler, lr_scheduler)
            check, what = partial(loading.check, subject, is_strict), "comparing a checkpoint with the model"
            on_all(world, check, what, fails_as=CheckpointError)
            if world.rank == 0:
                loading.remark(subject)
            self.pending = self._read(subject, loading)
            self.seed, run.num_calls = loading.state.get("seed"), loading.state.get("num_calls", subject.num_calls)
            load = partial(loading.load_rest, world.rank)
            info = on_all(world, load, "loading a checkpoint", fails_as=CheckpointError)
            self._locks.close()
            if self.pending is not None:
                self._locks = locks.pop_all()
        run.set_step(info.step or 0)
        if self._model.engine is not None and self.seed is not None:
            self._model.engine.seed = self.seed
        return info

    def _read(self, subject: ModelInTraining, loading: Loading) -> PendingCheckpoint | None:
        """Reads tensors; returns what must wait until the ranks know their parts."""
        world, is_split = subject.world, subject.placement is not None
        if not is_split and world.num_ranks == 1:
            load_all(loading, subject, find_device(self._model.module, self._run.settings))
            return None
        on_meta = any(subject.state.tensor(name).is_meta for name in subject.state.places)
        waits = not is_split and any(world.gather_objects(on_meta, "reading a checkpoint"))
        _read_part(subject, loading, weights=not waits, optimizer=True, with_state=is_split)
        optimizer = self._optimizer.raw
        return None if is_split else PendingCheckpoint(loading, waits, None if optimizer is None else optimizer.state)

    def pending_names(self) -> Container[str]:
        """Returns the first names of what `read_pending` will read."""
        pending = self.pending
        return pending.loading.names(self.subject()).keys() if pending and pending.weights else ()

    def read_pending(self) -> None:
        """Reads what was pending into the parts of the ranks. Collective."""
        pending, self.pending, optimizer = self.pending, None, self._optimizer.raw
        if pending is not None:
            groups = [] if optimizer is None else optimizer.param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            is_due = optimizer is not None and optimizer.state is pending.optimizer_state
            _read_part(self.subject(), pending.loading, pending.weights, is_due, with_state=True)
            for group, own in zip([] if optimizer is None else optimizer.param_groups, options, strict=True):
                group.update(own)
        self._locks.close()

    # in memory

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the whole model's state, on every rank. Collective once the model is split."""
        model, run = self._model, self._run
        if model.engine is None or kwargs.get("keep_vars"):
            plain: Any = getattr(model.module.state_dict, "plain", model.module.state_dict)
            return dict(plain(*args, **kwargs))
        model.borrowed.write_back()
        self._warn_of_memory()
        what, destination = f"state_dict{run.of_model}", kwargs.get("destination")
        whole = whole_state(model.state, model.placement, run.world, what, model.borrowed)
        entries = {kwargs.get("prefix", "") + name: value for name, value in whole.items()}
        if destination is not None:  # a module around the wrapper asks
            destination.update(entries)
        return entries

    def _warn_of_memory(self) -> None:
        """Warns, on the first rank of a host, where its ranks' copies of the model take more than what is free."""
        world, state = self._run.world, self._model.state
        here = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        size, free = len(here) * sum(state.tensor(name).nbytes for name in state.places), available_bytes()
        if size > free and world.rank == here[0]:
            logger.warning(
                "model.state_dict() gives each of the %d ranks of this host the whole model: it takes %.1f GB, and "
                "%.1f GB are free. model.save_checkpoint(folder) does without: each rank writes its own part",
                *(len(here), size / 1e9, free / 1e9),
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Loads a whole model's state, of which this rank takes its part; arguments as in plain PyTorch."""
        model = self._model
        if self.pending is not None:
            self.pending.weights = False
        self._run.actions.record("load_state_dict()")
        model.borrowed.write_back()
        if model.engine is None:
            result = model.module.load_state_dict(state_dict, strict=strict, assign=assign)
            model.read_state()
            return result
        return load_part(model.state, state_dict, strict)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        return self._need_optimizer().state_dict(self._model.placement, self._run.world)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a whole optimizer, of which this rank takes its part."""
        self._run.actions.record("load_optimizer_state_dict()")
        self._need_optimizer().load_state_dict(state_dict, self._model.placement, self._run.world.rank)

    def show_whole_optimizer(self) -> None:
        """Lets the optimizer's own methods give and take the state of all parameters, if this rank has but some."""
        placement, proxy = self._model.placement, self._optimizer.proxy
        if proxy is not None and placement.divides(placement.holders):
            proxy.show(state_dict=self.optimizer_state_dict, load_state_dict=self.load_optimizer_state_dict)

    def _need_optimizer(self) -> CutOptimizer:
        optimizer = self._optimizer.follow_groups()
        if optimizer is None:
            raise InputError("There is no optimizer: AutoVaruna(model, optimizer) was called without one.")
        return optimizer


def _read_part(subject: ModelInTraining, loading: Loading, weights: bool, optimizer: bool, with_state: bool) -> None:
    """Reads this rank's part; of the optimizer at least the options of its groups. Collective."""

    def act() -> None:
        if weights:
            loading.load_weights(subject)
        if optimizer:
            loading.load_optimizer(subject, with_state)

    on_all(subject.world, act, "reading a checkpoint", fails_as=CheckpointError)
