"""Defines `AutoVaruna`: the one line that turns a training script into a pipeline- and data-parallel one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.config import resolve
from autovaruna.errors import InputError, RankError
from autovaruna.graph.call import describe
from autovaruna.graph.mode import ModeReader
from autovaruna.parallel.calls import SharedCall, compare_settings, input_groups, share_call
from autovaruna.parallel.engine import Engine
from autovaruna.parallel.machine import find_device, give_back_freed_memory, keep_freed_memory, resident_bytes
from autovaruna.parallel.modes import as_in_training
from autovaruna.parallel.preparation import Preparation
from autovaruna.parallel.prepared import PreparedGraphs
from autovaruna.parallel.stateful import StatefulModule
from autovaruna.parallel.traces import Traces
from autovaruna.parallel.weights import micro_batch_weights
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, cut_batch, weigh
from autovaruna.runtime.channel_choice import open_channel
from autovaruna.runtime.environment import promise
from autovaruna.runtime.local_norm import refuse_local_norms
from autovaruna.runtime.norm import clip_grad_norm
from autovaruna.runtime.optimizer import refuse_joint_steps
from autovaruna.runtime.placement import OwnedState
from autovaruna.runtime.scaler import LossScale

logger = logging.getLogger(__name__)


class AutoVaruna(StatefulModule):
    """Trains a model over all ranks of ``mpirun``, split as the planner finds best.

    The first call traces the model, measures it, plans, and gives each rank its part. On one process the model is
    called as it is, unless a setting asks for micro-batches, stages or recomputation.

    Args:
        model: Any model that torch.export can trace.
        optimizer: Its optimizer; its groups are cut down in place to this rank's parameters.
        scaler: The loop's GradScaler, if it has one; None: the program's own, if there is one.
        **settings: See ``python -m autovaruna config``.

    Raises:
        ConfigError: a setting is unknown or of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, AutoVaruna) or not isinstance(model, nn.Module):
            raise InputError(f"AutoVaruna wraps a torch.nn.Module that is not wrapped yet: got {type(model).__name__}.")
        if any(hasattr(parameter, "is_held_elsewhere") for parameter in model.parameters()):
            raise InputError(
                "The model has been split over the ranks by an earlier AutoVaruna: other ranks hold parameters of it. "
                "Expected a model that is whole: go on with the first wrapper, or wrap a new model and load the "
                "state_dict() of the first into it."
            )
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"The second argument is the optimizer: got {type(optimizer).__name__}, expected a "
                "torch.optim.Optimizer; settings are keywords."
            )
        super().__init__(model, optimizer, resolve(settings))
        self._scaler = scaler
        self._mode = ModeReader(model)
        self._parameter_names = [self._state.first_name[name] for name, _ in model.named_parameters()]
        self._preparation: Preparation | None = None
        self._traces: Traces | None = None
        self._is_synchronising = True
        promise()

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first call, and on one process that runs the model as it is."""
        return self._engine.plan if self._engine is not None else None

    @property
    def loss_mode(self) -> str | None:
        """What calls do: ``loss`` (the whole step), ``outputs`` (forwards; backwards in backward), None: not known."""
        latest = self._traces.latest if self._traces is not None else None
        if latest is None:
            return None
        return "loss" if latest.loss is not None else "outputs"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on this rank's mini-batch; returns what the model returns, for the global batch."""
        if torch.compiler.is_dynamo_compiling():  # torch.compile around the wrapper: there is nothing in it to compile
            return torch.compiler.disable(self.forward)(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._persistence.poll()
        if self._is_plain():
            return self.module(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # what a call prepares is for later steps, too
                return self.forward(*args, **kwargs)
        if self._engine is None:
            compare_settings(self.settings, self.world)
        shared = self._share(args, kwargs)
        num_known = 0 if self._traces is None else self._traces.num_known
        engine = self._engine or self._start(shared)
        batch = self._cut(shared, engine.plan)
        assert self._traces is not None
        traced = self._traces.of(shared, batch)
        self._num_calls += 1
        returned = engine.run(traced, shared, batch)
        if self._traces.num_known > num_known:
            self._mode.attributes.watch(traced.reads)
        if self._traces.num_known > num_known or traced.has_kept_modules:  # both may set attributes
            self._mode.attributes.settle()
        return returned

    def _share(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SharedCall:
        """Tells all ranks of this rank's call. Collective."""
        error: Exception | None = None
        report = None
        try:
            mode = self._mode.words()
            self._check_parameters()
            tensors, call = describe(self.module, args, kwargs, self.settings.batch_inputs, mode)
            report = call.key(), call.batch_size, self._digest()
        except Exception as caught:
            error = caught
        reports = self.world.agree(error, f"reading the model's inputs{self.of_model}", report)
        try:
            return share_call(call, tensors, self._num_calls, self._groups, self.world, reports, self._doings)
        except RankError:  # on every rank; parameters() gives a caller those of this rank alone to freeze
            if self._engine is None or not self._state.follow_frozen(self._engine.placement, self.world):
                raise
        return self._share(args, kwargs)

    def _digest(self) -> str:
        """Returns a short text that is equal for ranks whose scripts have done the same since the start."""
        return f"{self._acts.digest()} {() if self._engine is None else tuple(self._engine.doings.values())}"

    def _doings(self) -> dict[str, str]:
        """Returns what this rank's script has done since the start, in words."""
        return self._acts.words() | ({} if self._engine is None else self._engine.doings)

    def _check_parameters(self) -> None:
        """Takes the parameters as they are, before the first call; refuses others later."""
        if self._engine is None:
            if self._mode.attributes.replaced():
                self._state = OwnedState(self.module)
            return
        if replaced := self._mode.attributes.replaced():
            raise InputError(
                f"Parameters of the model have been replaced after the first call: got other ones for {replaced[:5]}. "
                "Expected the same ones, which are split over the ranks; copy numbers into them (copy_(), "
                "load_state_dict()), or wrap the changed model anew."
            )

    def _is_plain(self) -> bool:
        """Whether the model is called as it is: one process, and no setting that asks for more."""
        settings = self.settings
        asks = (
            settings.num_micro_batches,
            settings.micro_batch_size,
            settings.num_stages > 1,
            settings.recompute == "all",
            settings.memory_limit_bytes,
            settings.cuts,
            settings.stage_ranks,
        )
        return self.world.num_ranks == 1 and not any(asks)

    def _start(self, shared: SharedCall) -> Engine:
        """Plans, and gives each rank its part of the model. Collective.

        With an optimizer, the plan is one for training, even if the first call only evaluates.
        """
        if self._optimizer is not None and not torch.is_grad_enabled():
            with as_in_training(self.module):
                return self._start(replace(shared, call=replace(shared.call, mode=self._mode.words())))
        self._follow_groups()
        if self._cut_optimizer is not None:
            self._cut_optimizer.check()
        keep_freed_memory()
        resident = resident_bytes()
        device = find_device(self.module, self.settings)
        self._traces = Traces(self.module, self.settings, self.world, device)
        traced = self._traces.first(shared)
        preparation = Preparation(
            traced, self.module, self._optimizer, shared, self.settings, self.world, device, resident
        )
        self._preparation = preparation
        plan, assignment, placement = preparation.plan, preparation.assignment, preparation.placement
        seed = preparation.seed if self._persistence.seed is None else self._persistence.seed
        given = self._persistence.given(self._subject())
        open_channel(self.settings.channel, plan, self.world, preparation.device)
        if self._optimizer is not None:
            refuse_joint_steps(self._optimizer, placement)
        self._state.distribute(placement, self.world, preparation.device, seed, given)
        if any(len(ranks) < self.world.num_ranks for ranks in placement.holders.values()):
            refuse_local_norms(self._state)
        if self._cut_optimizer is not None:
            held = {name: parameter for name, parameter in self._state.parameters().items() if not parameter.is_meta}
            self._cut_optimizer.cut(held)
        device, orders = preparation.device, preparation.orders
        self._engine = Engine(
            PreparedGraphs(self._state, plan, assignment, placement, orders, self.settings, self.world, device),
            self._state,
            plan,
            self.settings,
            self.world,
            device,
            seed,
            LossScale(self._optimizer, self._scaler, self.world),
            self.of_model,
            preparation.event_trace(),
        )
        self._engine.is_synchronising = self._is_synchronising
        give_back_freed_memory()
        self._persistence.fill(self._subject())
        self._mode.attributes.settle()
        return self._engine

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that pass the same mini-batch."""
        return input_groups(self.settings, self.world.num_ranks)

    def _cut(self, shared: SharedCall, plan: Plan) -> GlobalBatch:
        batch = cut_batch(shared.sizes, plan.num_micro_batches, shared.groups)
        weights = micro_batch_weights(self.settings.micro_batch_weight, self.module, shared, batch, self.world)
        return weigh(batch, weights, self.settings.reduction == "sum")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keeps gradients on each rank back; the next call outside, or `allreduce_grads`, sums them with its own."""
        before = self._is_synchronising
        self.delay_grad_allreduce(True)
        try:
            yield
        finally:
            self.delay_grad_allreduce(not before)

    def delay_grad_allreduce(self, is_delayed: bool) -> None:
        """Keeps gradients back from now on (RaNNC's name), until `allreduce_grads`."""
        self._is_synchronising = not is_delayed
        if self._engine is not None:
            self._engine.is_synchronising = not is_delayed

    def allreduce_grads(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``. Collective."""
        if self._engine is not None:
            self._engine.synchronise()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales the gradients so that the norm of all of them, on all ranks, is at most `max_norm`. Collective.

        Returns:
            The norm before, the same on every rank and for every plan.
        """
        if self._engine is None:
            return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return clip_grad_norm(
            self._state,
            self._engine.placement,
            self._parameter_names,
            self.world,
            max_norm,
            norm_type,
            error_if_nonfinite,
            f"clip_grad_norm_{self.of_model}",
        )

    def save_deployment(self, path: str) -> None:
        """Writes the plan, with what it is valid for, to a file.

        Raises:
            InputError: there is no plan yet.
        """
        if self._preparation is None:
            raise InputError("There is no plan to save: got no call of the model yet, or one process that needs none.")
        self._preparation.save(path)

    def _apply(self, fn: Any, recurse: bool = True) -> AutoVaruna:
        """Moves or casts the model, as ``to``, ``half`` and the like ask; before the first call only."""
        if self._engine is not None:
            raise InputError(
                "The model has been split over the ranks: got to(), cuda() or a cast after the first call. "
                "Move or cast it before the first call."
            )
        self.module._apply(fn, recurse)
        self._state = OwnedState(self.module)
        return self
