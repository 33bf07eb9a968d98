"""Defines `SplittableModule`: plans a wrapped model at its first call, and gives each rank its part of it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from autovaruna.errors import InputError, OrderError
from autovaruna.graph.call import CallReader
from autovaruna.graph.guards import Guards
from autovaruna.parallel.calls import SharedCall
from autovaruna.parallel.checkpointed import CheckpointedModule
from autovaruna.parallel.copies import Copies
from autovaruna.parallel.engine import Engine
from autovaruna.parallel.machine import give_back_freed_memory, keep_freed_memory, resident_bytes
from autovaruna.parallel.modes import as_in_training
from autovaruna.parallel.own_device import bring_to_own_device
from autovaruna.parallel.preparation import Preparation
from autovaruna.parallel.prepared import PreparedGraphs
from autovaruna.parallel.totals import BatchValues
from autovaruna.parallel.traces import Traces
from autovaruna.runtime.channels.channel_choice import open_channel
from autovaruna.runtime.optimizers.joint_norm import join_norms
from autovaruna.runtime.optimizers.optimizer import CutOptimizer
from autovaruna.runtime.optimizers.own_part import OwnSteps
from autovaruna.runtime.optimizers.own_steps import step_over_own_part, watch_later_optimizers
from autovaruna.runtime.optimizers.scaler import LossScale
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.weights.split_models import note_split
from autovaruna.runtime.worlds.on_all import on_all
from autovaruna.settings import Settings

_SEED_OF_COPY = 1_000_003


class SplittableModule(CheckpointedModule):
    """A wrapped model that is whole on every rank until its first call, or that of one of its copies.

    Args:
        module: The model.
        optimizer: Its optimizer.
        scaler: The loop's GradScaler; None: the program's own, if there is one.
        settings: The settings.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        settings: Settings,
    ) -> None:
        super().__init__(module, optimizer, settings)
        self._scaler = scaler
        self._guards = Guards(module)
        self._reader = CallReader(module, settings.batch_inputs)
        self._parameter_names = [self._state.first_name[name] for name, _ in module.named_parameters()]
        self._traces: Traces | None = None
        self._batch_values: dict[str, BatchValues] = {}
        self._is_synchronising = True
        self._join(Copies())

    def __deepcopy__(self, memo: dict[int, Any]) -> SplittableModule:
        """Returns a model of its own, without an optimizer, of which each rank holds what it holds of this one."""
        if self._persistence.pending is not None and self._persistence.pending.weights:
            raise OrderError(
                "A checkpoint has been loaded, but not yet into the parts of the ranks, which the first call makes: "
                "got a copy of the model before it. Call the model first."
            )
        made = type(self).__new__(type(self))
        SplittableModule.__init__(made, copy.deepcopy(self.module, memo), None, None, self.settings)
        memo[id(self)] = made
        made._join(self._copies)
        made.training = self.training
        if self._engine is not None:
            made._run_part(self.preparation)
        own = vars(self).keys() - vars(made).keys()
        made.__dict__.update({name: copy.deepcopy(vars(self)[name], memo) for name in own})
        return made

    def _join(self, copies: Copies) -> None:
        self._copies = copies
        self._number_of_copy = copies.add(self)

    @property
    def preparation(self) -> Preparation:
        """How the model and its copies were planned."""
        assert self._copies.preparation is not None
        return self._copies.preparation

    def _check_parameters(self) -> None:
        """Takes the parameters as they are, before the first call; refuses others later."""
        if self._engine is None:
            self._settle()
            if self._guards.replaced():
                self._state = OwnedState(self.module)
            return
        if replaced := self._guards.replaced():
            raise InputError(
                f"Parameters of the model have been replaced after the first call: got other ones for {replaced[:5]}. "
                "Expected the same ones, which are split over the ranks; copy numbers into them (copy_(), "
                "load_state_dict()), or wrap the changed model anew."
            )
        self._state.check_types()

    def _start(self, shared: SharedCall) -> Engine:
        """Plans, and gives each rank its part of the model and of its copies. Collective.

        With an optimizer, the plan is one for training, even if the first call only evaluates.
        """
        self._copies.compare(self.world)
        first = next((each for each in self._copies.members() if each._optimizer is not None), self)
        if first is not self:
            first._start(replace(shared, call=replace(shared.call, mode=first._guards.words())))
            assert self._engine is not None
            return self._engine
        if self._optimizer is not None and not torch.is_grad_enabled():
            with as_in_training(self.module):
                return self._start(replace(shared, call=replace(shared.call, mode=self._guards.words())))
        self._follow_groups()
        if self._cut_optimizer is not None:
            self._cut_optimizer.check()
        keep_freed_memory()
        resident = resident_bytes()
        self._settle()
        device = self._device
        self._traces = Traces(self.module, self.settings, self.world, device)
        traced = self._traces.first(shared)
        self._state = OwnedState(self.module)  # with the buffers that a first call leaves
        preparation = Preparation(
            traced, self.module, self._optimizer, shared, self.settings, self.world, device, resident
        )
        open_channel(self.settings.channel, preparation.plan, self.world, preparation.device)
        if self._optimizer is not None:
            self._check_steps(self._need_optimizer(), self._own_steps, preparation)
        self._copies.preparation = preparation
        for each in self._copies.members():
            each._take_part(preparation)
        give_back_freed_memory()
        assert self._engine is not None
        return self._engine

    def _check_steps(self, cut: CutOptimizer, own: OwnSteps, preparation: Preparation) -> None:
        """Lets an optimizer step over this rank's part, if it will have but a part and may. Collective."""
        if preparation.placement.splits(chain(*cut.names)):
            act = partial(step_over_own_part, cut.optimizer, own, self.world.num_ranks, preparation.device)
            on_all(self.world, act, f"trying the optimizer{self.of_model}")

    def _take_part(self, preparation: Preparation) -> None:
        """Gives each rank its part, and what a checkpoint holds of it. Collective."""
        placement, given = preparation.placement, self._persistence.given(self._subject())
        self._state.distribute(placement, self.world, preparation.device, self._seed(preparation, 0), given)
        if self._cut_optimizer is not None:
            self._cut_optimizer.cut(self._state.parameters())
            self._show_whole_state(self._cut_optimizer.optimizer, placement)
        self._run_part(preparation)
        self._persistence.fill(self._subject())

    def _show_whole_state(self, optimizer: torch.optim.Optimizer, placement: Placement) -> None:
        """Lets the optimizer's own methods give and take the state of all parameters, if this rank has but some."""
        if placement.splits(placement.holders):
            optimizer.state_dict = self.optimizer_state_dict  # type: ignore[method-assign]
            optimizer.load_state_dict = self.load_optimizer_state_dict  # type: ignore[method-assign]

    def _run_part(self, preparation: Preparation) -> None:
        """Makes what runs this rank's part."""
        plan, placement, device = preparation.plan, preparation.placement, preparation.device
        if placement.splits(placement.holders):
            note_split(self._state, placement, self.world)
            join_norms()
            watch_later_optimizers()
        self._traces = self._traces or Traces(self.module, self.settings, self.world, device)
        self._engine = Engine(
            PreparedGraphs(
                self._state,
                plan,
                preparation.assignment,
                placement,
                preparation.orders,
                self.settings,
                self.world,
                device,
            ),
            self._state,
            plan,
            self.settings,
            self.world,
            device,
            self._seed(preparation, self._number_of_copy),
            LossScale(self._optimizer, self._scaler, self.world),
            self.of_model,
            None if self._number_of_copy else preparation.event_trace(),
        )
        self._engine.is_synchronising = self._is_synchronising
        self._guards.settle()

    def _seed(self, preparation: Preparation, number: int) -> int:
        """Returns what random nodes draw from: a copy draws other numbers, as it would in plain PyTorch."""
        seed = preparation.seed if self._persistence.seed is None else self._persistence.seed
        return seed + number * _SEED_OF_COPY

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves or casts the model, as ``to``, ``half`` and the like ask; before the first call only."""
        if self._engine is not None:
            raise InputError(
                "The model has been split over the ranks: got to(), cuda() or a cast after the first call. "
                "Move or cast it before the first call."
            )
        self.module._apply(fn, recurse)
        self._settle()
        self._state = OwnedState(self.module)
        return self

    def _settle(self) -> None:
        """Brings the model, wherever a script has put it, to where this rank computes; before the first call only."""
        self._device = bring_to_own_device(self.module, self._optimizer, self.settings)
