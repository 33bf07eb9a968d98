"""Defines `State`: gives out and takes in the state of a wrapped model and its optimizer, wherever its parts are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autovaruna.errors import InputError
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.weights.state import load_part, whole_state
from autovaruna.session.persistence import Persistence
from autovaruna.session.wrapped import Wrapped


class State:
    """The state of a wrapped model under its own names.

    Args:
        wrapped: The model.
        persistence: Its checkpoints, one of which may be waiting to be read.
    """

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
        if self._wrapped.optimizer is not None and placement.splits(placement.holders):
            optimizer = self._wrapped.optimizer.optimizer
            optimizer.state_dict = self.optimizer_state_dict  # type: ignore[method-assign]
            optimizer.load_state_dict = self.load_optimizer_state_dict  # type: ignore[method-assign]

    def _need_optimizer(self) -> CutOptimizer:
        optimizer = self._wrapped.follow_groups()
        if optimizer is None:
            raise InputError("There is no optimizer: AutoVaruna(model, optimizer) was called without one.")
        return optimizer
