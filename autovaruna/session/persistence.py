"""Saves and loads the state of a wrapped model, in memory and in checkpoints.

What is loaded before the plan is known waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from autovaruna.checkpoint.folder import together
from autovaruna.checkpoint.load import CheckpointInfo, Loading, load_all
from autovaruna.checkpoint.save import Saver, Way
from autovaruna.checkpoint.source import CheckpointSource
from autovaruna.checkpoint.state import Content, ModelInTraining
from autovaruna.errors import InputError, OrderError
from autovaruna.runtime.optimizer import CutOptimizer
from autovaruna.runtime.weights import load_part, whole_state
from autovaruna.session.machine import find_device
from autovaruna.session.wrapped import Wrapped


@dataclass
class PendingCheckpoint:
    """A checkpoint that is read once this rank knows its part."""

    loading: Loading
    weights: bool  # whether they are still to be read
    optimizer: bool  # whether its state is


class Persistence:
    """The state of a wrapped model under its own names, in memory and in checkpoints."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.pending: PendingCheckpoint | None = None
        self.seed: int | None = None  # what random nodes were seeded from in the run that was loaded
        self._wrapped = wrapped
        self._locks = ExitStack()
        self._saver: Saver | None = None

    # checkpoints

    def save(self, root: str | os.PathLike[str], content: Content, way: Way) -> None:
        """Saves a checkpoint. Collective."""
        if self.pending is not None:
            raise self.too_early("save_checkpoint")
        subject = self._wrapped.subject()
        self._saver = self._saver or Saver(subject.world)
        self._saver.save(subject, root, content, way)

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
        """Loads what `find` returns; what that enters keeps it there, until it is read. Collective."""
        wrapped, subject = self._wrapped, self._wrapped.subject()
        world = subject.world
        self.wait()
        with ExitStack() as locks:
            loading = Loading(find(locks), scaler, lr_scheduler)
            together(world, lambda: loading.check(subject, is_strict), "comparing a checkpoint with the model")
            if world.rank == 0:
                loading.remark(subject)
            self.pending = self._read(subject, loading)
            self.seed, wrapped.num_calls = loading.state.get("seed"), loading.state.get("num_calls", subject.num_calls)
            found = together(world, lambda: loading.load_rest(world.rank), "loading a checkpoint")
            self._locks.close()
            if self.pending is not None:
                self._locks = locks.pop_all()
        wrapped.stopping.number_from(found.step or 0, wrapped.num_steps)
        if wrapped.engine is not None and self.seed is not None:
            wrapped.engine.seed = self.seed
        return found

    def _read(self, subject: ModelInTraining, loading: Loading) -> PendingCheckpoint | None:
        """Reads tensors; returns what must wait until the ranks know their parts."""
        world, is_split = subject.world, subject.placement is not None
        if not is_split and world.num_ranks == 1:
            load_all(loading, subject, find_device(self._wrapped.module, self._wrapped.settings))
            return None
        on_meta = any(subject.state.tensor(name).is_meta for name in subject.state.places)
        waits = not is_split and any(world.gather_objects(on_meta, "reading a checkpoint"))
        _read_part(subject, loading, weights=not waits, optimizer=is_split)
        return None if is_split else PendingCheckpoint(loading, waits, subject.optimizer is not None)

    def given(self) -> Container[str]:
        """Returns the first names of what `fill` will read."""
        pending = self.pending
        return pending.loading.names(self._wrapped.subject()).keys() if pending and pending.weights else ()

    def fill(self) -> None:
        """Reads what was pending into the parts of the ranks. Collective."""
        pending, self.pending = self.pending, None
        if pending is not None:
            _read_part(self._wrapped.subject(), pending.loading, pending.weights, pending.optimizer)
        self._locks.close()

    # in memory

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the whole model's state, on every rank. Collective once the model is split."""
        wrapped = self._wrapped
        if wrapped.engine is None or kwargs.get("keep_vars"):
            return dict(wrapped.module.state_dict(*args, **kwargs))
        wrapped.state_copies.write_back()
        what, destination = f"state_dict{wrapped.of_model}", kwargs.get("destination")
        whole = whole_state(wrapped.state, wrapped.placement, wrapped.world, what, wrapped.state_copies)
        entries = {kwargs.get("prefix", "") + name: value for name, value in whole.items()}
        if destination is not None:  # a module around the wrapper asks
            destination.update(entries)
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Loads a whole model's state, of which this rank takes its part; arguments as in plain PyTorch."""
        wrapped = self._wrapped
        if self.pending is not None:
            self.pending.weights = False
        wrapped.acts.note("load_state_dict()")
        wrapped.state_copies.write_back()
        if wrapped.engine is None:
            result = wrapped.module.load_state_dict(state_dict, strict=strict, assign=assign)
            wrapped.take_state()
            return result
        return load_part(wrapped.state, state_dict, strict)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        return self._need_optimizer().state_dict(self._wrapped.placement, self._wrapped.world)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a whole optimizer, of which this rank takes its part."""
        if self.pending is not None:
            self.pending.optimizer = False
        self._wrapped.acts.note("load_optimizer_state_dict()")
        self._need_optimizer().load_state_dict(state_dict, self._wrapped.placement, self._wrapped.world.rank)

    def show_whole_optimizer(self) -> None:
        """Lets the optimizer's own methods give and take the state of all parameters, if this rank has but some."""
        placement = self._wrapped.placement
        if self._wrapped.optimizer is not None and placement.divides(placement.holders):
            assert self._wrapped.proxy is not None
            self._wrapped.proxy.show(
                state_dict=self.optimizer_state_dict, load_state_dict=self.load_optimizer_state_dict
            )

    def _need_optimizer(self) -> CutOptimizer:
        optimizer = self._wrapped.follow_groups()
        if optimizer is None:
            raise InputError("There is no optimizer: AutoVaruna(model, optimizer) was called without one.")
        return optimizer


def _read_part(subject: ModelInTraining, loading: Loading, weights: bool, optimizer: bool) -> None:
    """Reads this rank's part; of the optimizer at least the options of its groups. Collective."""

    def act() -> None:
        if weights:
            loading.load_weights(subject)
        loading.load_optimizer(subject, with_state=optimizer)

    together(subject.world, act, "reading a checkpoint")
