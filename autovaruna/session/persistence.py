"""Saves and loads the state of a wrapped model, in memory and in checkpoints.

What is loaded before the plan is known waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from autovaruna.checkpoint.folder import together
from autovaruna.checkpoint.load import CheckpointInfo, Loading, load_all
from autovaruna.checkpoint.save import Saver, Way
from autovaruna.checkpoint.source import Source
from autovaruna.checkpoint.state import Content, Subject
from autovaruna.errors import InputError, OrderError
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.weights import load_part, whole_state
from autovaruna.session.wrapped import Wrapped


@dataclass
class Pending:
    """A checkpoint that is read once this rank knows its part."""

    loading: Loading
    weights: bool  # whether they are still to be read
    optimizer: bool  # whether its state is


class Persistence:
    """The checkpoints of one wrapped model."""

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.seed: int | None = None
        """What random nodes were seeded from in the run that was loaded."""
        self.num_calls = 0
        """How many calls of the model that run had made."""
        self._locks = ExitStack()
        self._saver: Saver | None = None

    def save(self, subject: Subject, root: str | os.PathLike[str], content: Content, way: Way) -> None:
        """Saves a checkpoint. Collective."""
        if self.pending is not None:
            raise OrderError(
                "A checkpoint has been loaded, but not yet into the parts of the ranks, which the first call makes: "
                "got save_checkpoint before it. Call the model first."
            )
        self._saver = self._saver or Saver(subject.world)
        self._saver.save(subject, root, content, way)

    def poll(self) -> None:
        """Raises what went wrong in the background, if anything. Collective while there is a checkpoint on its way."""
        if self._saver is not None and self._saver.is_busy:
            self._saver.poll()

    def wait(self) -> None:
        """Waits until the checkpoint on its way is complete. Collective."""
        if self._saver is not None:
            self._saver.wait()

    def before_change(self, weights: bool = False, optimizer: bool = False) -> None:
        """Gets ready for weights or optimizer state from elsewhere, which replace those that are pending."""
        if self.pending is not None:
            self.pending.weights &= not weights
            self.pending.optimizer &= not optimizer

    def load(
        self,
        subject: Subject,
        find: Callable[[ExitStack], Source],
        is_strict: bool,
        find_device: Callable[[], torch.device],
        **parts: Any,
    ) -> CheckpointInfo:
        """Loads a checkpoint. Collective.

        Args:
            find: Returns what is loaded; what it enters keeps that there, until it is read.
            is_strict: Whether every name, and no other, must be there.
            find_device: Returns where a whole model on ``meta`` goes, on one process.
            parts: ``scaler`` and ``lr_scheduler``.
        """
        world = subject.world
        self.wait()
        with ExitStack() as locks:
            loading = Loading(find(locks), **parts)
            together(world, lambda: loading.check(subject, is_strict), "comparing a checkpoint with the model")
            if world.rank == 0:
                loading.remark(subject)
            self.pending = self._read(subject, loading, find_device)
            self.seed, self.num_calls = loading.state.get("seed"), loading.state.get("num_calls", subject.num_calls)
            found = together(world, lambda: loading.load_rest(world.rank), "loading a checkpoint")
            self._locks.close()
            if self.pending is not None:
                self._locks = locks.pop_all()
        return found

    def _read(self, subject: Subject, loading: Loading, find_device: Callable[[], torch.device]) -> Pending | None:
        """Reads tensors; returns what must wait until the ranks know their parts."""
        world = subject.world
        is_whole = subject.placement is None
        if is_whole and world.num_ranks == 1:
            load_all(loading, subject, find_device())
            return None
        if not is_whole:
            together(world, lambda: _read_part(loading, subject, True, True), "reading a checkpoint")
            return None
        on_meta = any(subject.state.tensor(name).is_meta for name in subject.state.places)
        waits = any(world.gather_objects(on_meta, "reading a checkpoint"))
        together(world, lambda: _read_part(loading, subject, not waits, False), "reading a checkpoint")
        return Pending(loading, waits, subject.optimizer is not None)

    def given(self, subject: Subject) -> Container[str]:
        """Returns the first names of what `fill` will read."""
        return self.pending.loading.names(subject).keys() if self.pending and self.pending.weights else ()

    def fill(self, subject: Subject) -> None:
        """Reads what was pending into the parts of the ranks. Collective."""
        pending, self.pending = self.pending, None
        if pending is not None:
            together(
                subject.world,
                lambda: _read_part(pending.loading, subject, pending.weights, pending.optimizer),
                "reading a checkpoint",
            )
        self._locks.close()


def _read_part(loading: Loading, subject: Subject, weights: bool, optimizer: bool) -> None:
    """Reads this rank's part; of the optimizer at least the options of its groups."""
    if weights:
        loading.load_weights(subject)
    loading.load_optimizer(subject, with_state=optimizer)


class State:
    """The state of a wrapped model under its own names; one of its checkpoints may be waiting to be read."""

    def __init__(self, wrapped: Wrapped, persistence: Persistence) -> None:
        self._wrapped = wrapped
        self._persistence = persistence

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the whole model's state, on every rank. Collective once the model is split."""
        wrapped = self._wrapped
        if wrapped.engine is None or kwargs.get("keep_vars"):
            return dict(wrapped.module.state_dict(*args, **kwargs))
        wrapped.lent.settle()
        what, destination = f"state_dict{wrapped.of_model}", kwargs.get("destination")
        whole = whole_state(wrapped.state, wrapped.placement, wrapped.world, what, wrapped.lent)
        entries = {kwargs.get("prefix", "") + name: value for name, value in whole.items()}
        if destination is not None:  # a module around the wrapper asks
            destination.update(entries)
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        """Loads a whole model's state, of which this rank takes its part; arguments as in plain PyTorch."""
        wrapped = self._wrapped
        self._persistence.before_change(weights=True)
        wrapped.acts.note("load_state_dict()")
        wrapped.lent.settle()
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
        self._persistence.before_change(optimizer=True)
        self._wrapped.acts.note("load_optimizer_state_dict()")
        self._need_optimizer().load_state_dict(state_dict, self._wrapped.placement, self._wrapped.world.rank)

    def show_whole_optimizer(self) -> None:
        """Lets the optimizer's own methods give and take the state of all parameters, if this rank has but some."""
        placement = self._wrapped.placement
        if self._wrapped.optimizer is not None and placement.divides(placement.holders):
            optimizer = self._wrapped.optimizer.optimizer
            optimizer.state_dict = self.optimizer_state_dict  # type: ignore[method-assign]
            optimizer.load_state_dict = self.load_optimizer_state_dict  # type: ignore[method-assign]

    def _need_optimizer(self) -> CutOptimizer:
        optimizer = self._wrapped.follow_groups()
        if optimizer is None:
            raise InputError("There is no optimizer: AutoVaruna(model, optimizer) was called without one.")
        return optimizer
