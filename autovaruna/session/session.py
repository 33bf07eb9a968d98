"""Defines `Session`: agrees with the other ranks on each call; plans the model at the first one and splits it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
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
from autovaruna.graph.call import CallReader, CallSpec
from autovaruna.graph.export.watchers import kept_by_hooks
from autovaruna.graph.guards import full_name
from autovaruna.graph.key_values import fill_given
from autovaruna.graph.side_effects import apply_changes, put_constants, put_left
from autovaruna.graph.traced import TracedModel
from autovaruna.interception.ending import record_training
from autovaruna.interception.modules import own_code
from autovaruna.log import long_call, phase
from autovaruna.ranks.environment import check_alone
from autovaruna.ranks.exchange import ALIKE, BLOCK
from autovaruna.ranks.torch_channel import open_channel
from autovaruna.ranks.world import World, gather_on_all
from autovaruna.runtime.batch import GlobalBatch, cut_batch, weight_micro_batches
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.optimizer import LATER_OPTIMIZERS
from autovaruna.runtime.scaler import LossScale
from autovaruna.runtime.weights import register_shared_parameters, register_split
from autovaruna.session.agreement import (
    NORM_WANTED,
    SNAPSHOT_LACKS,
    STOP_WANTED,
    TO_LEAVE,
    BatchNumbers,
    Report,
    SameInputs,
    SharedCall,
    Totals,
    check_alike,
    compare_settings,
    input_groups,
)
from autovaruna.session.batch_values import BatchValues, ValuesOfBatch, micro_batch_weights
from autovaruna.session.device import on_own_gpu
from autovaruna.session.manager_link import refuse_several
from autovaruna.session.memory import give_back_freed_memory, keep_freed_memory, resident_bytes
from autovaruna.session.model import WrappedModel, WrappedOptimizer
from autovaruna.session.persistence import Persistence
from autovaruna.session.plain_call import PlainCalls
from autovaruna.session.preparation import GivenPlan, Preparation
from autovaruna.session.recheck import TraceRecheck
from autovaruna.session.run import Run
from autovaruna.session.traces import Traces
from autovaruna.session.varying import VaryingNumbers

logger = logging.getLogger(__name__)

_SEED_OF_COPY = 1_000_003


class Copies:
    """A wrapped model and its deep copies (averages of weights, teachers), which are all split alike, at one time."""

    def __init__(self, given_plan: GivenPlan | None = None) -> None:
        self.given_plan = given_plan
        self.preparation: Preparation | None = None  # their common plan; None before the first call of any
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
        self._reader = CallReader(model.module, run.settings.batch_inputs, run.settings.batch_dims)
        self._batch_values: dict[str, BatchValues] = {}
        self._varying = VaryingNumbers(model.module)
        self._sets = set[tuple[str, str]]()  # attributes, by module and name, that the latest trace sets
        self._left = list[Callable[[], None]]()  # takes stand-ins out of attributes in which forward leaves tensors

    @property
    def preparation(self) -> Preparation:
        """How the model and its copies were planned."""
        assert self.copies.preparation is not None
        return self.copies.preparation

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
            manager.begin_call(self._run.step, self._run.metrics.work_seconds, engine.plan if engine else None)
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
        self._same_inputs.compare(shared, warns=run.world.rank == 0)
        self._at_border()
        engine = model.engine or self._start(shared)
        batch = self._cut(shared, engine.plan.num_micro_batches)
        assert self.traces is not None
        traced = self.traces.of(shared, batch)
        run.num_calls += 1
        lengths = traced.lengths_of(shared.call) or ()
        values = self._values_of_batch(traced, shared, batch, lengths)
        is_new = self.traces.num_traced > num_known
        if is_new and engine.witness is not None:
            engine.witness.trace_seconds += perf_counter() - began
        if is_new and run.world.rank == 0:
            self._varying.record(shared.call, model.guards.counted(), perf_counter() - began)
        if torch.is_grad_enabled():
            start = perf_counter() - exchanged if is_new else began  # to trace is no part of a step
            run.metrics.begin_call(start, shared.global_batch_size, shared.num_tokens, exchanged)
        returned = engine.run(traced, shared.tensors, shared.number, batch, values, lengths)
        apply_changes(model.module, traced.changes)
        sets, self._sets = self._sets, put_constants(model.module, traced.sets, self._sets)
        if shared.call.tree.has_caches:
            fill_given((args, kwargs), returned)
        for key in self.traces.forget_oldest():
            engine.forget(key)
            self._batch_values.pop(key, None)
            if self._recheck is not None:
                self._recheck.kinds.pop(key, None)
        kept = kept_by_hooks(model.module)[1] if traced.watched else {}
        if is_new:
            self._record_trace(traced, kept)
        if is_new or kept or sets or traced.sets or traced.runs_own_code:  # all may set attributes
            model.guards.settle(kept)
        self._left = put_left(model.module, traced.left)
        return returned

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

    # agree

    def _agree(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward") -> SharedCall:
        """Exchanges the ranks' reports of their calls, and joins these to one. Collective.

        Ranks ask again if what they have found out leaves attributes out of the keys of calls, or is of parameters that
        some ranks alone could freeze.
        """
        if self._model.engine is None:
            compare_settings(self._run.settings, self._run.world, has_plan=self.copies.given_plan is not None)
        while (shared := self._join(args, kwargs, method)) is None:
            pass
        return shared

    def _join(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> SharedCall | None:
        """Returns the call that the ranks' reports make together; None: ask again. Collective."""
        model, world, what = self._model, self._run.world, f"reading the model's inputs{self._run.of_model}"
        try:
            call, tensors = self._read(args, kwargs, method)
            own = self._report(call, tensors)
        except Exception as error:
            world.exchange(what, error)  # raises on all ranks
            raise
        alike, numbers = self._exchange(own, what)
        if self._drop_unread_attributes(call, {key for key, _ in alike}):
            return None
        shared = SharedCall(call, tensors, self._run.num_calls, self._same_inputs.groups, numbers)
        try:
            check_alike(shared, alike, self._words, world)
        except RankError:  # on every rank; parameters() gives a caller those of this rank alone to freeze
            if model.engine is None or not model.state.follow_frozen(model.placement, world):
                raise
            return None
        return shared

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> tuple[CallSpec, list[Tensor]]:
        """Returns what this rank calls the model with, and its tensors; looks at the model that the call is of."""
        mode = self._model.guards.words(method)
        self._model.check_parameters()
        tensors, call = self._reader.read(args, kwargs, mode, method)
        self._recheck_trace(call)
        return call, on_own_gpu(tensors, self._model.device)

    def _exchange(self, own: Report, what: str) -> tuple[list[tuple[str, str]], list[BatchNumbers]]:
        """Returns what is to be alike of all ranks' reports, or of one if no two differ, and numbers of each rank."""
        run, world = self._run, self._run.world
        found = world.exchange(what, None, repr(own.alike).encode(), own.flags, own.numbers.to_bytes())
        run.is_stop_agreed |= bool(found.flags & STOP_WANTED)
        if run.manager is not None:
            run.manager.agree(not found.flags & SNAPSHOT_LACKS, bool(found.flags & TO_LEAVE))
        numbers = [own.numbers] * world.num_ranks
        if found.differs(ALIKE):
            return world.gather_objects(own.alike, what), numbers
        if found.differs(BLOCK):
            numbers = list(map(BatchNumbers.of_bytes, found.blocks()))
        run.metrics.collect(bool(found.flags & NORM_WANTED), [each.metrics for each in numbers])
        return [own.alike], numbers

    def _report(self, call: CallSpec, tensors: Sequence[Tensor]) -> Report:
        run, manager, engine = self._run, self._run.manager, self._model.engine
        flags = STOP_WANTED * run.is_stop_wanted_here
        if manager is not None:
            flags |= SNAPSHOT_LACKS * (not manager.is_snapshot_ready) | TO_LEAVE * manager.is_to_leave
        inputs = self._same_inputs.digests(call, run.num_calls, tensors)
        wants_norm, metrics = run.metrics.report()
        flags |= NORM_WANTED * wants_norm
        actions = (*run.actions.digest(), *(engine.script_actions.values() if engine else ()), run.is_synchronising)
        numbers = BatchNumbers(call.batch_size, inputs, self._own_totals(call, tensors), metrics)
        return Report((call.key, repr(actions)), flags, numbers)

    def _words(self) -> dict[str, str]:
        """Returns what this rank's script has done since the start, in words."""
        engine = {} if self._model.engine is None else self._model.engine.script_actions
        return {**self._run.actions.words(), **engine, "no_sync()": "off" if self._run.is_synchronising else "on"}

    def _drop_unread_attributes(self, call: CallSpec, keys: Collection[str]) -> bool:
        """Leaves attributes that no trace reads out of keys of new calls; says whether there were any. Collective."""
        world, guards, traces = self._run.world, self._model.guards, self.traces
        if self._model.engine is None or traces is None or (len(keys) == 1 and traces.knows(call)):
            return False
        found = world.gather_objects((guards.doubtful(), guards.filled), "comparing changed attributes")
        filled = set().union(*(each for _, each in found))
        names = set().union(*(each for each, _ in found)) - filled
        guards.filled = set()
        if filled:
            guards.record_trial((), filled, ())
        if not names:
            return bool(filled)
        trials = world.gather_objects(traces.try_without(names, call, guards), "comparing trials")
        unread = set.intersection(*(unread for unread, _ in trials))
        guards.record_trial(names, unread, set().union(*(read for _, read in trials)))
        if unread and world.rank == 0:
            text = "no trace depends on %s, which the script sets between calls: calls do not differ by it from now on"
            logger.info(text, ", ".join(sorted(unread)))
        return bool(unread or filled)

    def _record_trace(self, traced: TracedModel, kept: Collection[int] = ()) -> None:
        """Takes the state of the model as that of a new trace."""
        if self._recheck is not None:
            self._recheck.record(traced)
        if counted := {full_name(each.path, each.name) for each in traced.changes}:
            self._model.guards.record_trial((), counted, ())
        self._model.guards.start(kept)

    def _recheck_trace(self, call: CallSpec) -> None:
        """Makes sure, in a few calls, that the forward is what was traced."""
        traced = None if self.traces is None or not torch.is_grad_enabled() else self.traces.find(call)
        if traced is not None and self._recheck is not None and self._recheck.recheck(traced):
            self._model.guards.settle()

    @cached_property
    def _recheck(self) -> TraceRecheck | None:
        """What looks at the forward again; None: that is turned off."""
        assert self.traces is not None and self._model.engine is not None
        witness = self._model.engine.witness
        if witness is None or not self._run.settings.recheck_trace:
            return None
        return TraceRecheck(self._model.module, self.traces, self._run.world, witness)

    @cached_property
    def _same_inputs(self) -> SameInputs:
        return SameInputs(input_groups(self._run.settings, self._run.world.num_ranks))

    def _cut(self, shared: SharedCall, num_micro_batches: int) -> GlobalBatch:
        settings = self._run.settings
        batch = cut_batch(shared.sizes, num_micro_batches, shared.groups)
        weights = micro_batch_weights(settings.micro_batch_weight, self._model.module, shared, batch, self._run.world)
        return weight_micro_batches(batch, weights, settings.reduction == "sum")

    def _own_totals(self, call: CallSpec, tensors: Sequence[Tensor]) -> Totals | None:
        """Returns the totals of this rank's mini-batch; None: the graph is not known yet."""
        traced = None if self.traces is None else self.traces.find(call)
        if traced is None:
            return None
        lengths = traced.lengths_of(call) or ()
        return self._values_in(traced).of_samples(tensors, call.batch_size, lengths) if traced.totals else []

    def _values_of_batch(
        self, traced: TracedModel, shared: SharedCall, batch: GlobalBatch, lengths: tuple[int, ...]
    ) -> ValuesOfBatch:
        """Returns what micro-batches are given of the whole batch. Collective if the graph is new."""
        if not traced.totals:
            return {}
        values = self._values_in(traced)
        reported: Sequence[Totals | None] = [each.totals for each in shared.numbers]
        if None in reported:  # on every rank
            own = partial(values.of_samples, shared.tensors, shared.call.batch_size, lengths)
            reported = gather_on_all(self._run.world, own, f"counting over the batch{self._run.of_model}")
        first = [ranks[0] for ranks in shared.groups]
        totals = [reported[rank] or [] for rank in first]
        return values.of_batch(totals, [shared.sizes[rank] for rank in first], shared.tensors, batch, lengths)

    def _values_in(self, traced: TracedModel) -> BatchValues:
        if traced.key not in self._batch_values:
            device = self.preparation.device
            self._batch_values[traced.key] = BatchValues(traced, lambda: self._model.state.buffers(), device)
        return self._batch_values[traced.key]

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
        raw, given = self._optimizer.raw, self.copies.given_plan
        preparation = Preparation(traced, shared, model, raw, run, resident_before=resident, given_plan=given)
        plan = preparation.plan
        open_channel(settings.channel, set(plan.pairs()), plan.groups(), world, model.device)
        if optimizer is not None:
            self._optimizer.step_over_part(preparation.placement, preparation.device)
        self.copies.preparation = preparation
        with phase(logger, "splitting the model"):
            for each in self.copies.members():
                each._split()
        give_back_freed_memory()
        assert model.engine is not None
        return model.engine

    # split

    def _split(self) -> None:
        """Gives each rank its part, and what a checkpoint holds of it. Collective."""
        model, preparation = self._model, self.preparation
        names = self._persistence.pending_names()
        model.state.distribute(preparation.placement, self._run.world, preparation.device, self._seed(0), names)
        self.run_part()
        if self._optimizer.cut is not None:
            self._optimizer.cut.cut(model.state.parameters())
        self._persistence.show_whole_optimizer()
        self._persistence.read_pending()

    def run_part(self) -> None:
        """Makes what runs this rank's part, of a model that has been split."""
        model, run, preparation = self._model, self._run, self.preparation
        settings, world = run.settings, run.world
        plan, placement, device = preparation.plan, preparation.placement, preparation.device
        register_shared_parameters(model.state, placement, world, device)
        if placement.divides(placement.holders):
            register_split(model.state, placement, world)
            run.installed.callback(LATER_OPTIMIZERS.acquire())
        self.traces = self.traces or Traces(model.module, settings, world, device)
        run.metrics.follow(
            *(world.rank, world.num_ranks, WeakMethod(model.counted_parameters), preparation.held_memory),
            predicted_seconds=plan.predicted_seconds,
            bound=(plan.bound_seconds, plan.num_micro_batches * plan.micro_batch_size),
        )
        model.engine = Engine(
            state=model.state,
            plan=plan,
            assignment=preparation.assignment,
            placement=placement,
            orders=preparation.orders,
            settings=settings,
            world=world,
            device=device,
            seed=self._seed(self._number_of_copy),
            loss_scale=LossScale(self._optimizer.raw, self._scaler, world),
            asks_for_sums=lambda: run.is_synchronising,
            metrics=run.metrics,
            of_model=run.of_model,
            trace=None if self._number_of_copy else preparation.event_trace(run),
            step=lambda: run.step + 1,
            saved=self._persistence.words_of_saved,
        )
        world.watch.stalls.step_seconds = max(world.watch.stalls.step_seconds, plan.predicted_seconds)
        model.guards.settle()

    def _seed(self, number: int) -> int:
        """Returns what random nodes draw from: a copy draws other numbers, as it would in plain PyTorch."""
        seed = self.preparation.seed if self._persistence.seed is None else self._persistence.seed
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
