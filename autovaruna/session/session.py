"""Defines `Session`: agrees with the other ranks on each call; plans the model at the first one and splits it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from autovaruna.checkpoint.save import Way
from autovaruna.checkpoint.source import words_of_newest
from autovaruna.checkpoint.state import Content, ModelInTraining
from autovaruna.errors import CheckpointError, ConfigError, RankError
from autovaruna.graph.call import CallReader, CallSpec
from autovaruna.graph.traced import TracedModel
from autovaruna.interception.optimizer import OptimizerProxy
from autovaruna.log import phase
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch, cut_batch, weight_micro_batches
from autovaruna.runtime.clipping import CLIPPING
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.optimizer import LATER_OPTIMIZERS, OWN_PART, CutOptimizer, step_over_own_part
from autovaruna.runtime.scaler import LossScale
from autovaruna.runtime.transport.torch_channel import open_channel
from autovaruna.runtime.weights import register_shared_parameters, register_split
from autovaruna.runtime.world import World, gather_on_all, on_all
from autovaruna.session import calls
from autovaruna.session.borders import NO_WISHES, refuse_several
from autovaruna.session.calls import BatchValues, Report, SharedCall, Totals, ValuesOfBatch
from autovaruna.session.machine import give_back_freed_memory, keep_freed_memory, on_own_gpu, resident_bytes
from autovaruna.session.persistence import Persistence
from autovaruna.session.preparation import Preparation
from autovaruna.session.traces import Traces
from autovaruna.session.witness import Witness
from autovaruna.session.wrapped import Wrapped

logger = logging.getLogger(__name__)

_SEED_OF_COPY = 1_000_003


class Copies:
    """A wrapped model and its deep copies, which are all split in the same way at the same time.

    So averages of weights, teachers and target networks stay alike in what each rank holds of them.
    """

    def __init__(self) -> None:
        self.preparation: Preparation | None = None  # their common plan; None before the first call of any
        self.num_made = 0
        self._members: list[ref[Session]] = []

    def add(self, session: Session) -> int:
        """Takes a model in; returns its number."""
        self._members.append(ref(session))
        self.num_made += 1
        return self.num_made - 1

    def members(self) -> list[Session]:
        """Returns those that there still are, the first one first."""
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
    """The calls of one wrapped model, which is whole on every rank until its first one, or that of one of its copies.

    `scaler` is the loop's GradScaler; None: the program's own, if there is one.
    """

    def __init__(
        self, wrapped: Wrapped, persistence: Persistence, scaler: torch.amp.GradScaler | None, copies: Copies
    ) -> None:
        self.copies = copies
        self.traces: Traces | None = None  # None: there was no call yet
        self._wrapped = wrapped
        self._persistence = persistence
        self._scaler = scaler
        self._num_steps = 0  # of the optimizer, at the call before
        self._number_of_copy = copies.add(self)
        self._reader = CallReader(wrapped.module, wrapped.settings.batch_inputs, wrapped.settings.batch_dims)
        self._batch_values: dict[str, BatchValues] = {}

    @property
    def preparation(self) -> Preparation:
        """How the model and its copies were planned."""
        assert self.copies.preparation is not None
        return self.copies.preparation

    @cached_property
    def is_plain(self) -> bool:
        """Whether the model is called as it is: one process, and no setting that asks for more."""
        if self._wrapped.world.num_ranks > 1:
            return False
        settings = self._wrapped.settings
        asks_for_stages = settings.num_stages > 1 or settings.cuts or settings.stage_ranks
        asks_for_memory = settings.recompute == "all" or settings.memory_limit_bytes
        return not (asks_for_stages or asks_for_memory or settings.num_micro_batches or settings.micro_batch_size)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward") -> Any:
        """Calls the model, or a method of it, on all ranks; the first call plans and splits it. Collective."""
        with self.reported():
            return self._call(args, kwargs, method)

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Tells the manager of the job, if there is one, that the rank is in a call."""
        wrapped, morphing = self._wrapped, self._wrapped.morphing
        if morphing is None:
            yield
            return
        engine = wrapped.engine
        work, plan = (engine.metrics.work_seconds, engine.plan) if engine else (0.0, None)
        morphing.begin_call(wrapped.num_steps, work, plan)
        yield
        morphing.end_call()

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str) -> Any:
        wrapped, began = self._wrapped, perf_counter()
        num_known = 0 if self.traces is None else self.traces.num_traced
        shared = self._agree(args, kwargs, method)
        self._same_inputs.compare(shared, is_told=wrapped.world.rank == 0)
        self.at_border()
        engine = wrapped.engine or self._start(shared)
        batch = self._cut(shared, engine.plan)
        assert self.traces is not None
        traced = self.traces.of(shared, batch)
        wrapped.num_calls += 1
        lengths = traced.lengths_of(shared.call) or ()
        values = self._values_of_batch(traced, shared, batch, lengths)
        returned = engine.run(
            traced, shared.tensors, shared.number, batch, values, lambda: wrapped.is_synchronising, lengths
        )
        is_new = self.traces.num_traced > num_known
        for key in self.traces.forget_oldest():
            engine.forget(key)
            self._batch_values.pop(key, None)
            self._witness.kinds.pop(key, None)
        if is_new:
            self._note_trace(traced, perf_counter() - began)
        if is_new or traced.runs_own_code:  # both may set attributes
            wrapped.guards.settle()
        return returned

    def at_border(self) -> None:
        """Does what is due between two steps: a snapshot for the manager, or the end of the run after a signal.

        Collective, if it is due.
        """
        wrapped, stopping = self._wrapped, self._wrapped.stopping
        folder, morphing, num_steps = wrapped.settings.save_on_signal, wrapped.morphing, wrapped.num_steps
        has_stepped, self._num_steps = num_steps != self._num_steps, num_steps
        step = stopping.step_after(num_steps)
        if morphing is not None:
            if wrapped.world.num_ranks == 1:
                morphing.agree([morphing.wishes])
            if has_stepped:
                morphing.at_border(self._only_subject, num_steps, step)
        if folder:
            self._save_if_asked(folder, has_stepped, step)
        if morphing is not None and has_stepped:
            morphing.end_if_agreed(step)

    def _save_if_asked(self, folder: str, has_stepped: bool, step: int) -> None:
        """Saves the state and ends this rank, if a signal has come to any. Collective."""
        wrapped, stopping = self._wrapped, self._wrapped.stopping
        if wrapped.of_model or wrapped.world.num_models > 1:
            raise ConfigError(
                f"save_on_signal is {folder!r}, but the script calls {wrapped.world.num_models} models, or copies of "
                "one; expected one model. Leave the setting out, and save all of them once model.should_stop() is true."
            )
        if wrapped.world.num_ranks == 1:
            stopping.is_agreed = stopping.own
        if has_stepped and stopping.is_agreed:
            try:
                self._persistence.save(folder, Content(step, scaler=self._scaler), Way())
            except CheckpointError as error:
                raise CheckpointError(f"{error} {words_of_newest(folder)}.") from error
            stopping.end(step)

    def _only_subject(self) -> ModelInTraining:
        """Returns what a snapshot is of, if that is all there is."""
        refuse_several(max(self._wrapped.world.num_models, len(self.copies.members())))
        return self._wrapped.subject()

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plans and splits the model now, from a sample of the calls to come: no number of it is used. Collective."""
        if self._wrapped.engine is None:
            began = perf_counter()
            self._start(self._agree(args, kwargs))
            assert self.traces is not None and self.traces.latest is not None
            self._note_trace(self.traces.latest, perf_counter() - began)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer of a model that has been split, made from ``parameters()`` of this rank. Collective.

        It is refused if it has parameters that this rank does not hold, or its steps join numbers of several.
        """
        wrapped = self._wrapped
        cut = wrapped.joined_optimizer(optimizer)
        proxy = OptimizerProxy(optimizer, OWN_PART)
        wrapped.installed.add_method(proxy.remove)
        self._check_steps(cut, proxy, self.preparation)
        wrapped.optimizer, wrapped.proxy = cut, proxy
        wrapped.acts.watch(proxy, optimizer, cut.names)

    # agree

    def _agree(self, args: Sequence[Any], kwargs: Mapping[str, Any], method: str = "forward") -> SharedCall:
        """Tells all ranks of this rank's call. Collective."""
        wrapped, world = self._wrapped, self._wrapped.world
        if wrapped.engine is None:
            calls.compare_settings(wrapped.settings, world)
        error: Exception | None = None
        report = None
        try:
            mode = wrapped.guards.words(method)
            wrapped.check_parameters()
            tensors, call = self._reader.read(args, kwargs, mode, method)
            tensors = on_own_gpu(tensors, wrapped.device)
            self._look_again(call)
            passed = self._same_inputs.digests(call, wrapped.num_calls, tensors)
            totals = self._own_totals(call, tensors)
            wishes = NO_WISHES if wrapped.morphing is None else wrapped.morphing.wishes
            report = call.key(), call.batch_size, wrapped.digest(), passed, wrapped.stopping.own, wishes, totals
        except Exception as caught:
            error = caught
        reports = world.agree(error, f"reading the model's inputs{wrapped.of_model}", report)
        wrapped.stopping.is_agreed |= any(is_wanted for *_, is_wanted, _, _ in reports)
        if wrapped.morphing is not None:
            wrapped.morphing.agree(wishes for *_, wishes, _ in reports)
        if self._leave_out(call, reports):
            return self._agree(args, kwargs, method)
        try:
            return calls.share_call(
                call, tensors, wrapped.num_calls, self._same_inputs.groups, world, reports, wrapped.doings
            )
        except RankError:  # on every rank; parameters() gives a caller those of this rank alone to freeze
            if wrapped.engine is None or not wrapped.state.follow_frozen(wrapped.placement, world):
                raise
            return self._agree(args, kwargs, method)

    def _leave_out(self, call: CallSpec, reports: Sequence[Report]) -> bool:
        """Makes attributes that the script has set and no trace depends on count no more; says whether there were any.

        It looks where a call is new. Collective then.
        """
        world, guards, traces = self._wrapped.world, self._wrapped.guards, self.traces
        keys = {key for key, *_ in reports}
        if self._wrapped.engine is None or traces is None or (len(keys) == 1 and traces.knows(call)):
            return False
        found = world.gather_objects(guards.doubtful(), "comparing changed attributes")
        names = set().union(*found)
        if not names:
            return False
        trials = world.gather_objects(traces.try_without(names, call, guards), "comparing trials")
        unread = set.intersection(*(unread for unread, _ in trials))
        guards.note_trial(names, unread, set().union(*(read for _, read in trials)))
        if unread and world.rank == 0:
            text = "no trace depends on %s, which the script sets between calls: calls do not differ by it from now on"
            logger.info(text, ", ".join(sorted(unread)))
        return bool(unread)

    def _note_trace(self, traced: TracedModel, seconds: float) -> None:
        """Takes the state of the model as that of a new trace, in a call that has taken so long."""
        if self._wrapped.settings.recheck_trace:
            self._witness.begin(traced, seconds)
        self._wrapped.guards.start()

    def _look_again(self, call: CallSpec) -> None:
        """Makes sure, in a few calls, that the forward is what was traced."""
        traced = None if self.traces is None or not torch.is_grad_enabled() else self.traces.known(call)
        if traced is not None and self._witness.look(traced):
            self._wrapped.guards.settle()

    @cached_property
    def _witness(self) -> Witness:
        assert self.traces is not None
        return Witness(self._wrapped.module, self.traces, self._wrapped.world, self.preparation.plan.predicted_seconds)

    @cached_property
    def _same_inputs(self) -> calls.SameInputs:
        return calls.SameInputs(calls.input_groups(self._wrapped.settings, self._wrapped.world.num_ranks))

    def _cut(self, shared: SharedCall, plan: Plan) -> GlobalBatch:
        settings, world = self._wrapped.settings, self._wrapped.world
        batch = cut_batch(shared.sizes, plan.num_micro_batches, shared.groups)
        weights = calls.micro_batch_weights(settings.micro_batch_weight, self._wrapped.module, shared, batch, world)
        return weight_micro_batches(batch, weights, settings.reduction == "sum")

    def _own_totals(self, call: CallSpec, tensors: Sequence[Tensor]) -> Totals | None:
        """Returns the totals of this rank's mini-batch; None: the graph is not known yet."""
        traced = None if self.traces is None else self.traces.known(call)
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
        reported: Sequence[Totals | None] = shared.totals
        if None in reported:  # on every rank
            own = partial(values.of_samples, shared.tensors, shared.call.batch_size, lengths)
            reported = gather_on_all(self._wrapped.world, own, f"counting over the batch{self._wrapped.of_model}")
        first = [ranks[0] for ranks in shared.groups]
        totals = [reported[rank] or [] for rank in first]
        return values.of_batch(totals, [shared.sizes[rank] for rank in first], shared.tensors, batch, lengths)

    def _values_in(self, traced: TracedModel) -> BatchValues:
        if traced.key not in self._batch_values:
            device = self.preparation.device
            self._batch_values[traced.key] = BatchValues(traced, lambda: self._wrapped.state.buffers(), device)
        return self._batch_values[traced.key]

    # trace, measure, plan

    def _start(self, shared: SharedCall) -> Engine:
        """Plans, and gives each rank its part of the model and of its copies. Collective.

        With an optimizer, the plan is one for training, even if the first call only evaluates.
        """
        wrapped, world = self._wrapped, self._wrapped.world
        self.copies.compare(world)
        first = next((each for each in self.copies.members() if each._wrapped.optimizer is not None), self)
        if first is not self:
            first._start(replace(shared, call=replace(shared.call, mode=first._wrapped.guards.words())))
            assert wrapped.engine is not None
            return wrapped.engine
        if wrapped.optimizer is not None and not torch.is_grad_enabled():
            with as_in_training(wrapped.module):
                return self._start(replace(shared, call=replace(shared.call, mode=wrapped.guards.words())))
        optimizer = wrapped.follow_groups()
        if optimizer is not None:
            optimizer.check()
        keep_freed_memory()
        resident = resident_bytes(wrapped.device)
        wrapped.settle()
        settings, device = wrapped.settings, wrapped.device
        self.traces = Traces(wrapped.module, settings, world, device)
        traced = self.traces.first(shared)
        wrapped.take_state()
        preparation = Preparation(traced, wrapped, shared, resident)
        open_channel(settings.channel, preparation.plan, world, device)
        if optimizer is not None and wrapped.proxy is not None:
            self._check_steps(optimizer, wrapped.proxy, preparation)
        self.copies.preparation = preparation
        with phase(logger, "giving each rank its part of the model"):
            for each in self.copies.members():
                each._take_part()
        give_back_freed_memory()
        assert wrapped.engine is not None
        return wrapped.engine

    def _check_steps(self, cut: CutOptimizer, proxy: OptimizerProxy, preparation: Preparation) -> None:
        """Lets an optimizer step over this rank's part, if it will have but a part and may. Collective."""
        placement, world = preparation.placement, self._wrapped.world
        if placement.divides(chain(*cut.names)):
            is_shared = bool(placement.owners)
            act = partial(
                step_over_own_part, proxy, cut.optimizer, world.num_ranks, preparation.device, is_shared=is_shared
            )
            on_all(world, act, f"trying the optimizer{self._wrapped.of_model}")

    # split

    def _take_part(self) -> None:
        """Gives each rank its part, and what a checkpoint holds of it. Collective."""
        wrapped, preparation = self._wrapped, self.preparation
        given = self._persistence.given()
        seed = self._seed(0)
        wrapped.state.distribute(preparation.placement, wrapped.world, preparation.device, seed, given)
        self.run_part()
        if wrapped.optimizer is not None:
            wrapped.optimizer.cut(wrapped.state.parameters())
        self._persistence.show_whole_optimizer()
        self._persistence.fill()

    def run_part(self) -> None:
        """Makes what runs this rank's part, of a model that has been split."""
        wrapped, preparation = self._wrapped, self.preparation
        settings, world = wrapped.settings, wrapped.world
        plan, placement, device = preparation.plan, preparation.placement, preparation.device
        register_shared_parameters(wrapped.state, placement, world, device)
        if placement.divides(placement.holders):
            register_split(wrapped.state, placement, world)
            wrapped.installed.add(CLIPPING.use())
            wrapped.installed.add(LATER_OPTIMIZERS.use())
        self.traces = self.traces or Traces(wrapped.module, settings, world, device)
        orders, assignment = preparation.orders, preparation.assignment
        wrapped.engine = Engine(
            wrapped.state,
            plan,
            assignment,
            placement,
            orders,
            settings,
            world,
            device,
            self._seed(self._number_of_copy),
            LossScale(wrapped.raw_optimizer, self._scaler, world),
            wrapped.of_model,
            None if self._number_of_copy else preparation.event_trace(),
        )
        world.watch.stalls.step_seconds = max(world.watch.stalls.step_seconds, plan.predicted_seconds)
        wrapped.guards.settle()

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
