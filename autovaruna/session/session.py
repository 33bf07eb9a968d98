"""Defines `Session`: agrees with the other ranks on each call; plans the model at the first one and splits it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from autovaruna._torch import is_transforming
from autovaruna.checkpoint.folder import words_of_newest
from autovaruna.checkpoint.save import SaveOptions
from autovaruna.checkpoint.state import Content, ModelInTraining
from autovaruna.errors import CheckpointError, ConfigError, InputError, RankError
from autovaruna.graph.export.watchers import kept_by_hooks
from autovaruna.graph.facts import tensors_in
from autovaruna.graph.guards import full_name
from autovaruna.graph.key_values import fill_given
from autovaruna.graph.side_effects import apply_changes, put_constants, put_left
from autovaruna.graph.traced import TracedModel
from autovaruna.heap import give_back_freed_memory, keep_freed_memory
from autovaruna.interception.ending import record_training
from autovaruna.interception.modules import own_code
from autovaruna.log import long_call, phase
from autovaruna.ranks.environment import check_alone
from autovaruna.ranks.torch_channel import open_channel
from autovaruna.ranks.world import World
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.executor import RankContext
from autovaruna.runtime.metrics import Subject
from autovaruna.runtime.optimizer import LATER_OPTIMIZERS
from autovaruna.runtime.scaler import LossScale
from autovaruna.runtime.weights import register_shared_parameters, register_split
from autovaruna.runtime.witness import witness_of
from autovaruna.session.agreement import Agreement, Known, compare_settings
from autovaruna.session.batch_values import WholeBatch
from autovaruna.session.manager_link import refuse_several
from autovaruna.session.memory import HeldMemory, resident_bytes
from autovaruna.session.model import WrappedModel, WrappedOptimizer
from autovaruna.session.persistence import Persistence
from autovaruna.session.preparation import FirstCall, GivenPlan, Prepared, prepare
from autovaruna.session.recheck import TraceRecheck
from autovaruna.session.record import start_record, start_trace
from autovaruna.session.run import Run
from autovaruna.session.shared_call import SharedCall, tokens_of
from autovaruna.session.traces import Traces, VaryingNumbers

logger = logging.getLogger(__name__)

_SEED_OF_COPY = 1_000_003


class Copies:
    """A wrapped model and its deep copies (averages of weights, teachers), which are all split alike, at one time."""

    def __init__(self, given_plan: GivenPlan | None = None) -> None:
        self.given_plan = given_plan
        self.prepared: Prepared | None = None  # their common plan; None before the first call of any
        self._members: list[ref[Session]] = []

    def add(self, session: Session) -> int:
        """Adds a model; returns its number."""
        self._members.append(ref(session))
        return len(self._members) - 1

    def members(self) -> list[Session]:
        """Returns those that are still there, the first one first."""
        return [session for each in self._members if (session := each()) is not None]

    def compare(self, world: World) -> None:
        """Raises RankError unless all ranks have made the same copies. Collective."""
        numbers = world.gather_objects(len(self.members()), "counting copies of the model")
        if len(set(numbers)) > 1:
            raise RankError(
                f"The ranks have {numbers} models that are copies of one another, to be split together. Expected "
                "copy.deepcopy(model) on every rank, or on none."
            )


class Session:
    """The calls of one wrapped model, whole on every rank until the first call of it, or of one of its copies."""

    def __init__(
        self,
        model: WrappedModel,
        optimizer: WrappedOptimizer,
        run: Run,
        persistence: Persistence,
        *,
        scaler: torch.amp.GradScaler | None,  # None: the program's own, if there is one
        copies: Copies,
    ) -> None:
        self.copies = copies
        self.traces: Traces | None = None  # None: there was no call yet
        self._model, self._optimizer, self._run, self._persistence = model, optimizer, run, persistence
        self._scaler = scaler
        self._num_steps = 0  # of the optimizer, at the call before
        self._number_of_copy = copies.add(self)
        self._plain = PlainCalls(model.module, run)
        self._agreement = Agreement(model, run)
        self._known: Known | None = None  # None: the model has not been split
        self._varying = VaryingNumbers(model.module)
        self._sets = set[tuple[str, str]]()  # attributes, by module and name, that the latest trace sets
        self._left = list[Callable[[], None]]()  # takes stand-ins out of attributes in which forward leaves tensors

    @property
    def prepared(self) -> Prepared:
        """How the model and its copies run."""
        assert self.copies.prepared is not None
        return self.copies.prepared

    @cached_property
    def is_plain(self) -> bool:
        """Whether the model is called as it is: one process, and neither a setting nor a plan that asks for more."""
        if self._run.world.num_ranks > 1 or self.copies.given_plan is not None:
            return False
        settings = self._run.settings
        asks_for_stages = settings.num_stages > 1 or settings.cuts or settings.stage_ranks
        asks_for_memory = settings.recompute == "all" or settings.memory_limit_bytes
        return not (asks_for_stages or asks_for_memory or settings.num_micro_batches or settings.micro_batch_size)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward") -> Any:
        """Calls the model, or a method of it, on all ranks; the first call plans and splits it. Collective."""
        if is_transforming():
            raise InputError(
                "The wrapped model is called inside of a function transform of torch.func (vmap, grad, jacrev, jvp and "
                "the like): got no plain tensors, and a step computes numbers alone. Expected a plain call; make the "
                "transform a part of forward, in a submodule, which is kept whole as one operation."
            )
        if self._run.world.num_ranks == 1:
            check_alone()
        self._persistence.poll()
        self._model.borrowed.write_back()
        with self._reported():
            if self.is_plain:
                self._at_border()
                return self._plain.call(args, kwargs)
            with own_code():
                if torch.is_inference_mode_enabled():
                    with torch.inference_mode(False), torch.no_grad():  # what a call prepares is for later steps, too
                        return self._call(args, kwargs, method)
                return self._call(args, kwargs, method)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Reports to the manager of the job, if there is one, that the rank is in a call."""
        manager, engine = self._run.manager, self._model.engine
        if manager is not None:
            manager.begin_call(self._run.step, self._run.metrics.account.work, engine.plan if engine else None)
        yield
        if manager is not None:
            manager.end_call()

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> Any:
        model, run, began = self._model, self._run, perf_counter()
        while self._left:
            self._left.pop()()
        num_known = 0 if self.traces is None else self.traces.num_traced
        shared = self._agree(args, kwargs, method)
        exchanged = perf_counter() - began
        self._agreement.same_inputs.compare(shared, warns=run.world.rank == 0)
        self._at_border()
        engine = model.engine or self._start(shared)
        known = self._known
        assert known is not None
        traced, batch, lengths, of_batch = self._agreement.find(shared, known, engine.plan.num_micro_batches)
        run.num_calls += 1
        is_new = known.traces.num_traced > num_known
        if is_new:
            self._count_trace(shared, perf_counter() - began)
        if torch.is_grad_enabled():
            start = perf_counter() - exchanged if is_new else began  # to trace is no part of a step
            run.metrics.begin_call(start, shared.global_batch_size, shared.num_tokens, exchanged)
        returned = engine.run(traced, shared.tensors, shared.number, batch, of_batch, lengths)
        if shared.call.tree.has_caches:
            fill_given((args, kwargs), returned)
        for key in known.traces.forget_oldest():
            engine.forget(key)
            known.forget(key)
        self._settle(traced, is_new)
        return returned

    def _count_trace(self, shared: SharedCall, seconds: float) -> None:
        """Counts what a call has taken that was traced."""
        engine = self._model.engine
        if engine is not None and engine.rank.witness is not None:
            engine.rank.witness.trace_seconds += seconds
        if self._run.world.rank == 0:
            self._varying.record(shared.call, self._model.guards.counted(), seconds)

    def _settle(self, traced: TracedModel, is_new: bool) -> None:
        """Leaves on the model what a forward leaves there, and takes that for what the script has not changed."""
        module, guards = self._model.module, self._model.guards
        apply_changes(module, traced.changes)
        sets, self._sets = self._sets, put_constants(module, traced.sets, self._sets)
        kept = kept_by_hooks(module)[1] if traced.watched else {}
        if is_new:
            self._record_trace(traced, kept)
        if is_new or kept or sets or traced.sets or traced.kept:  # all may set attributes
            guards.settle(kept)
        self._left = put_left(module, traced.left)

    def _at_border(self) -> None:
        """Does what is due between two steps: a snapshot, or the end of the run. Collective, if it is due."""
        run, manager, num_steps = self._run, self._run.manager, self._run.num_steps
        has_stepped, self._num_steps = num_steps != self._num_steps, num_steps
        step = run.step
        if has_stepped:
            record_training()
        if manager is not None:
            if run.world.num_ranks == 1:
                manager.agree(manager.is_snapshot_ready, manager.is_to_leave)
            if has_stepped:
                manager.at_border(self._only_subject, num_steps, step)
        if folder := run.settings.save_on_signal:
            self._save_on_signal(folder, has_stepped, step)
        if manager is not None and has_stepped:
            manager.end_if_agreed(step)

    def _save_on_signal(self, folder: str, has_stepped: bool, step: int) -> None:
        """Saves the state and ends this rank, if a signal has come to any. Collective."""
        run = self._run
        if run.of_model or run.world.num_models > 1:
            raise ConfigError(
                f"save_on_signal is {folder!r}, but the script calls {run.world.num_models} models, or copies of "
                "one; expected one model. Leave the setting out, and save all of them once model.should_stop() is true."
            )
        if run.world.num_ranks == 1:
            run.is_stop_agreed = run.is_stop_wanted_here
        if has_stepped and run.is_stop_agreed:
            try:
                self._persistence.save(folder, Content(step, scaler=self._scaler), SaveOptions())
            except CheckpointError as error:
                raise CheckpointError(f"{error} {words_of_newest(folder)}.") from error
            run.end(step)

    def _only_subject(self) -> ModelInTraining:
        """Returns what a snapshot is of, if that is all there is."""
        refuse_several(self.num_models)
        return self._persistence.subject()

    @property
    def num_models(self) -> int:
        """The models that the script has called, or the copies of this one if there are more."""
        return max(self._run.world.num_models, len(self.copies.members()))

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plans and splits the model now, from a sample of the calls to come: no number of it is used. Collective."""
        if self._model.engine is None and not self.is_plain:
            self._start(self._agree(args, kwargs))
            assert self.traces is not None and self.traces.latest is not None
            self._record_trace(self.traces.latest)

    def _agree(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward") -> SharedCall:
        """Joins the ranks' calls to one. Collective."""
        if self._known is None:
            compare_settings(self._run.settings, self._run.world, has_plan=self.copies.given_plan is not None)
        return self._agreement.agree(args, kwargs, method, self._known)

    def _record_trace(self, traced: TracedModel, kept: Collection[int] = ()) -> None:
        """Takes the state of the model as that of a new trace."""
        if self._known is not None and self._known.recheck is not None:
            self._known.recheck.record(traced)
        if counted := {full_name(each.path, each.name) for each in traced.changes}:
            self._model.guards.record_trial((), counted, ())
        self._model.guards.start(kept)

    # trace, measure, plan

    @long_call()
    def _start(self, shared: SharedCall) -> Engine:
        """Plans, for training if there is an optimizer, and gives ranks their parts of model and copies. Collective."""
        model, run = self._model, self._run
        world, settings = run.world, run.settings
        self.copies.compare(world)
        first = next((each for each in self.copies.members() if each._optimizer.cut is not None), self)
        if first is not self:
            first._start(replace(shared, call=replace(shared.call, mode=first._model.guards.words())))
            assert model.engine is not None
            return model.engine
        if self._optimizer.cut is not None and not torch.is_grad_enabled():
            with as_in_training(model.module):
                return self._start(replace(shared, call=replace(shared.call, mode=model.guards.words())))
        if (optimizer := self._optimizer.follow_groups()) is not None:
            optimizer.check()
        self._optimizer.compare_state()
        keep_freed_memory()
        resident = resident_bytes(model.device)
        model.move_to_device()
        self.traces = Traces(model.module, settings, world, model.device)
        traced = self.traces.first(shared)
        model.read_state()
        call = FirstCall(traced, shared, model, self._optimizer.raw, settings, world, resident)
        prepared = prepare(call, self.copies.given_plan)
        plan = prepared.plan
        open_channel(settings.channel, set(plan.pairs()), plan.groups(), world, model.device)
        if optimizer is not None:
            self._optimizer.step_over_part(prepared.placement, prepared.device)
        self.copies.prepared = prepared
        with phase(logger, "splitting the model"):
            for each in self.copies.members():
                each._split()
        give_back_freed_memory()
        assert model.engine is not None
        return model.engine

    # split

    def _split(self) -> None:
        """Gives each rank its part, and what a checkpoint holds of it. Collective."""
        model, prepared = self._model, self.prepared
        names = self._persistence.pending_names()
        model.state.distribute(prepared.placement, self._run.world, prepared.device, self._seed(0), names)
        self.run_part()
        if self._optimizer.cut is not None:
            self._optimizer.cut.cut(model.state.parameters())
        self._persistence.show_whole_optimizer()
        self._persistence.read_pending()

    def run_part(self) -> None:
        """Makes what runs this rank's part, of a model that has been split."""
        model, run, prepared = self._model, self._run, self.prepared
        settings, world = run.settings, run.world
        plan, placement, device = prepared.plan, prepared.placement, prepared.device
        register_shared_parameters(model.state, placement, world, device)
        if placement.divides(placement.holders):
            register_split(model.state, placement, world)
            run.installed.callback(LATER_OPTIMIZERS.acquire())
        self.traces = self.traces or Traces(model.module, settings, world, device)
        run.metrics.follow(
            Subject(
                rank=world.rank,
                num_ranks=world.num_ranks,
                parameters=WeakMethod(model.counted_parameters),
                memory=prepared.held_memory,
                predicted_seconds=plan.predicted_seconds,
                bound=(plan.bound_seconds, plan.num_micro_batches * plan.micro_batch_size),
                is_plain=False,
            )
        )
        witness = witness_of(
            *(settings, model.module, world, device, plan.predicted_seconds),
            memory_bytes=prepared.fingerprint.memory_bytes[world.rank],
            step=lambda: run.step + 1,
            saved=self._persistence.words_of_saved,
        )
        rank = RankContext(
            world=world,
            device=device,
            state=model.state,
            settings=settings,
            loss_scale=LossScale(self._optimizer.raw, self._scaler, world),
            metrics=run.metrics,
            asks_for_sums=lambda: run.is_synchronising,
            trace=None if self._number_of_copy else start_trace(run, type(model.module).__name__, prepared),
            witness=witness,
        )
        seed = self._seed(self._number_of_copy)
        model.engine = Engine(rank, plan, prepared.assignment, placement, prepared.orders, seed, run.of_model)
        recheck = None
        if witness is not None and settings.recheck_trace:
            recheck = TraceRecheck(model.module, self.traces, world, witness)
        self._known = Known(self.traces, WholeBatch(model.state.buffers, world, device), recheck)
        world.watch.stalls.step_seconds = max(world.watch.stalls.step_seconds, plan.predicted_seconds)
        model.guards.settle()

    def _seed(self, number: int) -> int:
        """Returns what random nodes draw from: a copy draws other numbers, as it would in plain PyTorch."""
        seed = self.prepared.seed if self._persistence.seed is None else self._persistence.seed
        return seed + number * _SEED_OF_COPY


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Sets train mode on every module and turns gradients on; afterwards each module is as it was."""
    with all_in_mode(model, is_training=True), torch.enable_grad():
        yield


@contextmanager
def all_in_mode(model: nn.Module, *, is_training: bool) -> Iterator[None]:
    """Sets train or eval mode on every module; afterwards each is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(is_training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class PlainCalls:
    """The calls of a model as it is, on one process that needs no plan; counts its steps for `Metrics`."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self._model, self._run = model, run
        self._is_followed = False

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the model; a backward from what it returns is a step."""
        run, began = self._run, perf_counter()
        run.num_calls += 1
        if not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        if not self._is_followed:
            self._is_followed, model = True, self._model
            device = next((each.device for each in model.parameters()), torch.device("cpu"))
            run.metrics.follow(Subject(parameters=WeakMethod(model.parameters), memory=HeldMemory(device, model)))
            start_record(run, type(model).__name__)
            began = perf_counter()
        run.metrics.begin_call(began, *self._size(args, kwargs))
        returned = self._model(*args, **kwargs)
        self._watch(returned)
        return returned

    def _size(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Returns how many samples a call has, and tokens."""
        dimensions, named = dict(self._run.settings.batch_dims), dict[str, Any](all=(args, kwargs))
        if dimensions:
            named = inspect.signature(self._model.forward).bind(*args, **kwargs).arguments
        shapes = []
        for name, value in named.items():
            for tensor in tensors_in(value):
                shape, place = list(tensor.shape), dimensions.get(name, 0)
                if len(shape) > place:
                    shapes.append(((shape.pop(place), *shape), tensor.dtype))
        samples = shapes[0][0][0] if shapes else 0
        return samples, samples * tokens_of(shape for shape in shapes if shape[0][0] == samples)

    def _watch(self, returned: Any) -> None:
        """Records a step once a backward reaches the loss among what a call returned, or else any of it."""
        number, metrics, loss = self._run.num_calls, self._run.metrics, _loss_in(returned)
        value = None if loss is None else loss.detach().clone()  # the script may scale it in place

        def record(_: Any) -> None:
            metrics.record(number, value, lambda: "the loss is not finite", is_loss=value is not None)

        for each in [loss] if loss is not None else _with_gradient(returned):
            assert each.grad_fn is not None
            each.grad_fn.register_prehook(record)


def _with_gradient(returned: Any) -> Iterator[Tensor]:
    values = [*returned.values()] if isinstance(returned, Mapping) else returned
    return (each for each in tensors_in(values) if each.grad_fn is not None)


def _loss_in(returned: Any) -> Tensor | None:
    """Returns what is called the loss, or the only number with a gradient; None: there is neither."""
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(named, Tensor) and named.numel() == 1 and named.grad_fn is not None:
        return named
    numbers = [each for each in _with_gradient(returned) if each.dim() == 0]
    return numbers[0] if len(numbers) == 1 else None
