"""Defines `StatefulModule`: the state of a wrapped model, of which each rank has its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import nn

from autovaruna.config import log_settings
from autovaruna.errors import InputError
from autovaruna.log import configure
from autovaruna.parallel.acts import Acts
from autovaruna.parallel.engine import Engine
from autovaruna.parallel.own_device import bring_to_own_device
from autovaruna.parallel.persistence import Persistence
from autovaruna.parallel.shown import ShownModule
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.optimizers.own_part import OwnSteps, with_hooks
from autovaruna.runtime.weights.lent import Lent
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.weights.state import load_part, whole_state
from autovaruna.runtime.worlds.environment import get_world
from autovaruna.runtime.worlds.world import World
from autovaruna.settings import Settings


class StatefulModule(ShownModule):
    """Gives out and takes in the state of a model under its own names, wherever its parts are.

    Args:
        module: The model.
        optimizer: Its optimizer.
        settings: The settings.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> None:
        super().__init__(module)
        self.settings = settings
        self._device = bring_to_own_device(module, optimizer, settings)
        self._optimizer = None if optimizer is None else with_hooks(optimizer)
        self._state = OwnedState(module)
        self._first_parameters = [(ref(each), name) for name, each in self._state.parameters().items()]
        self._cut_optimizer = None if optimizer is None else CutOptimizer(optimizer, self._names())
        self._engine: Engine | None = None
        self._num_calls = 0
        self._persistence = Persistence()
        self._acts = Acts()
        self._lent = Lent()
        if self._cut_optimizer is not None:
            self._own_steps = OwnSteps(self._cut_optimizer.optimizer)
            self._acts.watch(self._cut_optimizer.optimizer, self._cut_optimizer.names)
            self._cut_optimizer.optimizer.register_step_pre_hook(self._lent.settle)
        self._known_world: World | None = None
        self._number = 0

    @property
    def of_model(self) -> str:
        """Says, behind what ranks do together, which model they do it with: the first one needs no word."""
        if not self._number:
            self.world.num_models += 1
            self._number = self.world.num_models
        return "" if self._number == 1 else f" (model {self._number})"

    @property
    def world(self) -> World:
        """The ranks; the first use starts MPI."""
        if self._known_world is None:
            self._known_world = get_world()
            configure(self._known_world.rank)
            if self.settings.show_settings:
                log_settings(self.settings)
        return self._known_world

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle a model that is split: this rank has but a part of it."""
        if self._engine is not None:
            raise InputError(
                "The model has been split over the ranks: got a pickle, or a shallow copy, of the wrapper. Expected "
                "one of its state: state_dict() (on every rank), or save_checkpoint(); or copy.deepcopy(model)."
            )
        return super().__reduce_ex__(protocol)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole model's state under its own names, on every rank. Collective after the first call."""
        if self._engine is None or kwargs.get("keep_vars"):
            return dict(self.module.state_dict(*args, **kwargs))
        self._lent.settle()
        what, destination = f"state_dict{self.of_model}", kwargs.get("destination")
        whole = whole_state(self._state, self._engine.placement, self.world, what, self._lent)
        entries = {kwargs.get("prefix", "") + name: value for name, value in whole.items()}
        if destination is not None:  # a module around the wrapper asks
            destination.update(entries)
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a whole model's state, of which this rank takes its part; `assign` is as in plain PyTorch."""
        self._persistence.before_change(weights=True)
        self._acts.note("load_state_dict()")
        self._lent.settle()
        if self._engine is None:
            result = self.module.load_state_dict(state_dict, strict=strict, assign=assign)
            self._state = OwnedState(self.module)
            return result
        return load_part(self._state, state_dict, strict)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads what a module around the wrapper hands down, as PyTorch asks each module to."""
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        try:
            found = self.load_state_dict(
                own, strict=False, assign=local_metadata.get("assign_to_params_buffers", False)
            )
        except RuntimeError as error:
            error_msgs.append(str(error))
            return
        missing_keys += [prefix + name for name in found.missing_keys]
        if strict:
            unexpected_keys += [prefix + name for name in found.unexpected_keys]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of the model, under its own names; those that other ranks hold are `Elsewhere`."""
        self._lent.settle()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Returns the state of the whole optimizer, in the form of plain PyTorch, on every rank. Collective."""
        return self._need_optimizer().state_dict(self._placement(), self.world)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of a whole optimizer, of which this rank takes its part."""
        self._persistence.before_change(optimizer=True)
        self._acts.note("load_optimizer_state_dict()")
        self._need_optimizer().load_state_dict(state_dict, self._placement(), self.world.rank)

    def _need_optimizer(self) -> CutOptimizer:
        if self._cut_optimizer is None:
            raise InputError("There is no optimizer: AutoVaruna(model, optimizer) was called without one.")
        self._follow_groups()
        return self._cut_optimizer

    def _follow_groups(self) -> None:
        """Takes the groups of parameters as a script has made them after wrapping."""
        if self._cut_optimizer is not None and self._cut_optimizer.has_changed:
            self._cut_optimizer.follow(self._names(), self._state.parameters())

    def _names(self) -> dict[int, str]:
        """Returns the first name of each parameter, by identity, those included that this rank has let go."""
        first = {id(each): name for known, name in self._first_parameters if (each := known()) is not None}
        return first | {id(each): name for name, each in self._state.parameters().items()}

    def _placement(self) -> Placement:
        return self._engine.placement if self._engine is not None else Placement({}, self.world.num_ranks)
