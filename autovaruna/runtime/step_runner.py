"""Runs one call of the model on this rank: prepares it, runs it, sums gradients, and publishes what comes of it.

    prepare   this rank's samples go to the stages that use them; receives are posted; the seeds of backwards are made
    run       the instructions of this rank, in the order of its schedule: forward, recompute, backward, weights
    sum       gradients, over the uses of a parameter and over ranks; those of stages that have ended are on their way
    publish   outputs are put together, and joined to the caller's autograd graph

The call of a model with a loss has all four; that of another runs forwards and publishes, and its backward the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from autovaruna.errors import InputError, OrderError
from autovaruna.graph.call import InputSpec
from autovaruna.graph.export.watchers import show
from autovaruna.graph.opaque.run import forgetting
from autovaruna.graph.pieces import Deferred
from autovaruna.graph.precision import is_autocast, without_autocast
from autovaruna.graph.random import RandomStream, untouched_generator
from autovaruna.graph.source_lines import failed_at
from autovaruna.graph.traced import OutputKind, OutputSpec
from autovaruna.runtime.autograd import Finish, Gradients, arrive, follows_a_call, go_backward, publish, while_unchanged
from autovaruna.runtime.batch import (
    NOTHING,
    Act,
    BatchJob,
    ChangedState,
    GlobalBatch,
    InFlight,
    MicroBatch,
    OwnSamples,
    Stash,
    Traffic,
    share_state,
)
from autovaruna.runtime.gradients import Backwards, GradientBook
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.metrics import Metrics
from autovaruna.runtime.outputs import GradientExchange, OutputCollector
from autovaruna.runtime.reduction import WIDER
from autovaruna.runtime.scaler import LossScale
from autovaruna.runtime.timeline import EventTrace
from autovaruna.runtime.weights import OwnedState, Placement
from autovaruna.runtime.world import World
from autovaruna.schedule.pipeline import Kind
from autovaruna.stage.module import ParameterUse, StageModule

logger = logging.getLogger(__name__)
Key = TypeVar("Key")
_ALL = tuple(Kind)
_FORWARDS = (Kind.FORWARD,)
_BACKWARDS = Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHT


@dataclass
class RankParts:
    """What all calls of a model have in common on this rank; `parameters` are those that it holds."""

    world: World
    device: torch.device
    mail: Mail
    state: OwnedState
    parameters: Mapping[str, Tensor]
    backwards: Backwards
    loss_scale: LossScale
    metrics: Metrics
    delivers_all: bool
    """Whether a step returns outputs beside the loss."""
    trace: EventTrace | None


@dataclass(frozen=True)
class Found:
    """The gradients of a step: this rank's own if kept back, sums, those kept before, and those of inputs."""

    own: dict[ParameterUse, Tensor] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class StepRunner:
    """One call on its way.

    Attributes:
        asks_for_sums: whether gradients are to be summed over ranks; what it says when a backward comes counts.
        factor: what comes into the loss is expected to be this, so backwards start from it; None: the caller's
            backward says what they start from.
    """

    job: BatchJob
    rank: RankParts
    stages: Mapping[int, StageModule]
    traffic: Traffic
    book: GradientBook
    placement: Placement
    inputs: Mapping[str, Tensor]
    asks_for_sums: Callable[[], bool]
    factor: float | None

    def __post_init__(self) -> None:
        self._world, self._mail, self._device = self.rank.world, self.rank.mail, self.rank.device
        self._is_synchronising = self.asks_for_sums()
        self._keeps_graphs = False  # whether the same backwards may run again
        self._samples = OwnSamples(self.inputs, self.job, self._world.rank)
        self._state = ChangedState(self.job.split.traced, len(self.job.batch.micro_batches))
        self._in_flight: dict[tuple[int, int], InFlight] = {}  # by stage and micro-batch, as what follows
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._input_gradients: dict[tuple[str, int], Tensor | None] = {}
        self._seeds: Mapping[float, Tensor] = {}
        self._act: Act | None = None
        self._loss: Tensor | None = None
        self._found = Found()

    def run(self) -> list[Tensor | None]:
        """Runs the call; returns the model's outputs, None for those that are not delivered. Collective."""
        traced = self.job.split.traced
        with self._guarded():
            outputs = self._forwards() if self.factor is None else self._whole(self.factor)
            if traced.changed_state:
                share_state(traced.changed_state, self.rank.state, self.placement, self._world)
            self._world.flush()
            if self.rank.trace is not None:
                self.rank.trace.write_step()
        return outputs

    def _whole(self, factor: float) -> list[Tensor | None]:
        """Runs forwards and backwards, from the loss times `factor`; the caller's backward gives the gradients out."""
        self._seeds = self.traffic.seeds(factor)
        self._collector.expect(self._wanted)
        self._run(self._prepare(_ALL))
        self._collector.send(self._wanted)
        self._found = self._sum()
        outputs = self._collector.take(self._wanted)  # last: they have come while gradients were summed
        loss = {self._loss_place: outputs.pop(self._loss_place)}
        self._loss = loss[self._loss_place]
        published = {**self._publish(loss, self._give_out), **self._publish(outputs, self._refuse)}
        return [published.get(place) for place in self._specs]

    def _forwards(self) -> list[Tensor | None]:
        """Runs forwards; where gradients are wanted, the backwards run when the caller goes backward."""
        self._run(self._prepare(_FORWARDS))
        self._collector.send(self._specs)
        outputs = self._collector.take(self._specs)
        if not self.job.needs_gradient:
            return list(outputs.values())
        zeros = [output.new_zeros(()).expand(output.shape) for output in outputs.values()]
        return list(self._publish(outputs, partial(self._backwards, zeros)).values())

    def _backwards(self, zeros: Sequence[Tensor], gradients: Gradients, is_kept: bool) -> Gradients:
        """Runs all backwards for the gradients of this rank's outputs."""
        if is_kept and self.job.splitting:
            raise OrderError(
                "A backward with retain_graph=True: got the schedule zero_bubble, whose stages keep nothing for "
                "another one. Expected one backward, of the sum of all losses; or another schedule."
            )
        self._is_synchronising = self.asks_for_sums()
        if self._world.rank == 0 and not self.rank.backwards.num:
            self._say_where_the_loss_is(gradients)
        self.rank.backwards.note("of its outputs")
        has_scaler = self.rank.loss_scale.words != "none"  # whose gradients may overflow
        total = None if has_scaler else _total(gradients)
        self.rank.metrics.note(self.job.step + 1, total, self._where_not_finite(), is_loss=False)
        self.rank.loss_scale.after(1.0)
        self.rank.backwards.note_gradients(self._is_synchronising)
        with self._guarded():
            self._exchange.spread_output_gradients(gradients, zeros)
            self._keeps_graphs = is_kept
            self._run(self._prepare(_BACKWARDS))
            found = self._sum()
            self._world.flush()  # others wait for it, and this rank may wait for them by itself
            self.book.keep(found.own)
            return self._for_sources(found.totals, found.kept, found.inputs)

    def _say_where_the_loss_is(self, gradients: Gradients) -> None:
        """Logs what the first backward shows: the script makes the loss of outputs, or takes it from among them."""
        used = [spec for spec, gradient in zip(self._specs.values(), gradients, strict=True) if gradient is not None]
        if used and all(spec.kind is not OutputKind.SAMPLES for spec in used):
            logger.info(_OF_OUTPUTS, ", ".join(spec.path for spec in used))
        elif len(self.job.batch.groups) > 1:
            logger.info(_OF_OWN_SAMPLES)

    # prepare

    def _prepare(self, kinds: tuple[Kind, ...]) -> Sequence[Act]:
        """Sends samples to where they are used, posts receives, and begins the sums; returns what is to be run."""
        if Kind.FORWARD in kinds:
            for part, parcel in self.traffic.handed_out:
                self._mail.send([self._samples.of(part, name) for name in parcel.names], parcel.kind)
        program = self.traffic.program(kinds, self._exchange.origin)
        self._mail.follow(program)
        if Kind.BACKWARD in kinds and self._is_synchronising:
            self.book.begin(self._exchange.origin)
        elif Kind.BACKWARD in kinds:
            self.book.may_have_kept = True  # on some rank
        return program

    # run

    def _run(self, program: Sequence[Act]) -> None:
        """Executes instructions in order; the sums of a stage start once its last gradients on this rank are there."""
        mail, trace = self._mail, self.rank.trace
        idle = set(self.stages)
        begin = perf_counter() - mail.waited_seconds
        with torch.set_grad_enabled(self.job.needs_gradient):
            for position, act in enumerate(program, 1):
                self._act = act
                if trace is None:
                    _METHODS[act.instruction.kind](self, self.stages[act.instruction.stage], act)
                else:
                    self._recorded(act, trace)
                if act.ends_stage:
                    idle.discard(act.instruction.stage)
                    self.book.end_stage(act.instruction.stage)
                if position >= mail.due:
                    mail.go_to(position)
                self._world.glance()
        self.rank.metrics.work_seconds += perf_counter() - mail.waited_seconds - begin
        for stage in idle:
            self.book.end_stage(stage)

    def _recorded(self, act: Act, trace: EventTrace) -> None:
        begin, waited = perf_counter(), self._mail.waited_seconds
        _METHODS[act.instruction.kind](self, self.stages[act.instruction.stage], act)
        trace.noted.append((act.instruction, begin, perf_counter(), self._mail.waited_seconds - waited))

    def _forward(self, stage: StageModule, act: Act) -> None:
        """Waits for inputs and activations, runs the stage, starts to send what it returns."""
        part = act.part
        state = InFlight(self._arrived(act))
        if self._state.is_steady:
            self._state.start_alike(stage)
        needs_gradient = self.job.needs_gradient
        keeps_graph = needs_gradient and stage.index not in self.job.recomputing
        if needs_gradient and not keeps_graph:
            state.before = self._state.copy(stage)
        returned = self._run_stage(stage, part, state, keeps_graph)
        for call in stage.part.watched:
            show(self.rank.state.model, call, returned)
        for kind, names in act.sends:
            self._mail.send([returned[name].detach() for name in names], kind)
        for place, name in stage.part.outputs:
            self._outputs[place, part.index] = _alone(returned[name])
        if keeps_graph:
            state.returned = returned
        elif needs_gradient:
            state.stash = Stash(state.tensors, is_offloaded=self.job.offload)
        state.tensors = NOTHING
        if needs_gradient:
            self._in_flight[stage.index, part.index] = state

    def _recompute(self, stage: StageModule, act: Act) -> None:
        """Runs the forward of a micro-batch again, from the same state and with the same random numbers."""
        state = self._in_flight[stage.index, act.part.index]
        assert state.stash is not None, "a stage that recomputes has kept what it received"
        state.tensors = state.stash.take()
        if self._keeps_graphs:
            state.stash = Stash(state.tensors, is_offloaded=self.job.offload)
        with self._state.as_before(stage, state.before):
            state.returned = self._run_stage(stage, act.part, state, keeps_graph=True)
        state.tensors = NOTHING

    def _backward(self, stage: StageModule, act: Act) -> None:
        """Waits for gradients, runs backward, starts to send the gradients of what the stage received."""
        place = stage.index, act.part.index
        state = self._in_flight[place]
        is_kept = self._keeps_graphs and stage.index not in self.job.recomputing
        roots, gradients = list[Tensor](), list[Tensor]()
        for name, gradient in self._arrived_gradients(stage, act):
            if gradient is not None and (root := state.returned[name]).requires_grad:
                roots.append(root)
                gradients.append(gradient)
        if not is_kept:
            state.returned = NOTHING
        if not self._keeps_graphs:
            del self._in_flight[place]
        if roots:
            go_backward(roots, gradients, is_kept)
        if state.deferred is not None:
            self._deferred[place] = state.deferred
        for kind, names in act.sends:
            self._mail.send(list(map(state.gradients.get, names)), kind)
        for name, holder in self.job.split.input_gradients.items():
            if holder == stage.index:
                self._input_gradients[name, act.part.index] = state.gradients.get(name)
        state.gradients.clear()

    def _weights(self, stage: StageModule, act: Act) -> None:
        stage.compute_weights(self._deferred.pop((stage.index, act.part.index)))

    def _run_stage(self, stage: StageModule, part: MicroBatch, state: InFlight, keeps_graph: bool) -> dict[str, Tensor]:
        job = self.job
        stream = RandomStream(job.seed, job.step, part.index, self._device) if stage.is_random else None
        tensors = self._leaves(stage, state) if job.needs_gradient else state.tensors
        if job.of_batch:
            tensors = {**tensors, **job.of_batch.get(part.share, NOTHING)}
        if job.needs_gradient and not keeps_graph:
            with forgetting():
                return stage.run(tensors, part.size, stream, None, job.lengths)
        if keeps_graph and stage.index in job.splitting:
            state.deferred = Deferred()
        return stage.run(tensors, part.size, stream, state.deferred, job.lengths)

    def _leaves(self, stage: StageModule, state: InFlight) -> Mapping[str, Tensor]:
        """Turns what the stage received into leaves whose gradients are noted in `state`."""
        tensors = dict(state.tensors)
        for name in self.traffic.wanted[stage.index]:
            if name in tensors:
                tensors[name] = arrive(tensors[name], state.gradients, name)
        return tensors

    def _arrived(self, act: Act) -> dict[str, Tensor]:
        """Returns all that a forward receives, by name."""
        tensors: dict[str, Tensor] = {}
        for name in act.own:  # first what is here: the rest may still be on its way
            tensors[name] = self._samples.of(act.part, name)
        for kind, names in act.receives:
            for name, tensor in zip(names, self._mail.take(kind), strict=True):
                assert tensor is not None, f"{name} is always there; gradients alone may be missing"
                tensors[name] = tensor
        return tensors

    def _arrived_gradients(self, stage: StageModule, act: Act) -> list[tuple[str, Tensor | None]]:
        """Returns the gradients of what a stage returns: of the model's outputs first, then of what it sent."""
        arrived, own = list[tuple[str, Tensor | None]](), list[tuple[str, Tensor | None]]()
        for kind, names in act.receives:
            arrived += zip(names, self._mail.take(kind), strict=True)
        for place, name in stage.part.outputs:  # a backward starts from the loss's share, or from what the caller says
            if self.factor is None:
                own.append((name, self._exchange.output_gradient(place, act.part)))
            else:
                own.append((name, self._seeds[act.part.share] if place == self._loss_place else None))
        return own + arrived

    # sum

    def _sum(self) -> Found:
        """Returns the gradients of the step once they are there; not summed where they are kept back."""
        own = self.book.take()
        inputs = self._exchange.input_gradients()
        if not self._is_synchronising:
            return Found(own, {}, {}, inputs)
        totals = self.book.total(own, self._exchange.origin)
        return Found({}, totals, self.rank.backwards.take_kept(), inputs)

    # publish

    def _publish(self, outputs: Mapping[int, Tensor], finish: Finish) -> dict[int, Tensor]:
        """Joins outputs to the caller's autograd graph, whose backward calls `finish`."""
        carries = [self._specs[place].needs_gradient for place in outputs]
        if not any(carries):
            return dict(outputs)
        finish = while_unchanged(finish, self.rank.parameters, self.job.split.traced.saved_weights)
        published = publish(list(outputs.values()), carries, list(self._sources.values()), finish)
        return dict(zip(outputs, published, strict=True))

    def _give_out(self, gradients: Gradients, is_kept: bool) -> Gradients:
        """Gives out the gradients of the step, scaled by what comes into the loss; copies if another backward may come.

        What earlier calls kept back is given out once.
        """
        assert self.factor is not None, "only a step that starts from its loss has gone backward"
        found, backwards = self._found, self.rank.backwards
        self._found = Found()
        if is_kept:
            self._found = Found(found.own, found.totals, {}, found.inputs)
            inputs = {**found.inputs, **_copies(found.inputs)}
            found = Found(_copies(found.own), _copies(found.totals), found.kept, inputs)
        if gradients[0] is None:
            backwards.note("none")
            return self._for_sources({}, found.kept, {})
        self.rank.metrics.note(self.job.step + 1, self._loss, self._where_not_finite(), is_loss=True)
        factor = gradients[0].item()
        backwards.note(f"{factor:g}")
        self.rank.loss_scale.after(factor)
        asks_for_sums = self.asks_for_sums()
        backwards.note_gradients(asks_for_sums)
        scale = factor / self.factor
        self.book.keep(_scaled(found.own, scale))
        totals, kept = _scaled(found.totals, scale), found.kept
        if asks_for_sums and not self._is_synchronising:
            kept = backwards.take_kept()
        elif self._is_synchronising and not asks_for_sums:
            backwards.keep_totals(totals)
            backwards.keep_totals(kept)
            totals, kept = {}, {}
        return self._for_sources(totals, kept, _scaled(found.inputs, scale))

    def _refuse(self, gradients: Gradients, is_kept: bool) -> Gradients:
        """Refuses to go backward from outputs beside the loss."""
        others = [spec for place, spec in self._wanted.items() if place != self._loss_place]
        self.rank.backwards.note("of other outputs")
        used = [spec.path for spec, gradient in zip(others, gradients, strict=True) if gradient is not None]
        if not used:  # what the script made of them has no gradient
            return [None] * len(self._sources)
        raise InputError(
            f"backward reached {', '.join(used)}, but this model's step starts from its own loss, whose backward has "
            "already run. Expected a loss made from the model's loss alone; pass loss_mode='outputs' to go backward "
            "from any output."
        )

    def _for_sources(
        self, totals: Mapping[str, Tensor], kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the gradient of each source: of this step and, for parameters, of those kept back before it."""
        found: dict[str, Tensor | None] = dict(totals)
        for name, gradient in kept.items():
            now = found.get(name)
            found[name] = gradient if now is None else gradient.add_(now)
        found |= {_input_key(name): self._as_own(name, gradient) for name, gradient in inputs.items()}
        return [found.get(name) for name in self._sources]

    def _as_own(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of an input; for another call, which weighs this rank's own loss itself, that of it."""
        weight = self.job.rank_weight(self._world.rank)
        if gradient is None or weight == 1.0 or name not in self.job.split.traced.batch_inputs:
            return gradient
        return gradient / weight if follows_a_call(self._sources[_input_key(name)]) else gradient

    # what the phases share

    @cached_property
    def _specs(self) -> dict[int, OutputSpec]:
        return dict(enumerate(self.job.split.traced.outputs))

    @cached_property
    def _loss_place(self) -> int:
        return next(place for place, spec in self._specs.items() if spec.kind is OutputKind.LOSS)

    @cached_property
    def _wanted(self) -> dict[int, OutputSpec]:
        """The outputs that a whole step delivers."""
        specs = self._specs.items()
        return {place: spec for place, spec in specs if self.rank.delivers_all or spec.kind is OutputKind.LOSS}

    @cached_property
    def _sources(self) -> dict[str, Tensor]:
        """What gets gradients on this rank: parameters by name, inputs by `_input_key`."""
        trained = {name: parameter for name, parameter in self.rank.parameters.items() if parameter.requires_grad}
        return trained | {_input_key(name): self.inputs[name] for name in self.job.split.input_gradients}

    @cached_property
    def _collector(self) -> OutputCollector:
        return OutputCollector(self.job, self._world, self._mail, self._outputs, self._device)

    @cached_property
    def _exchange(self) -> GradientExchange:
        return GradientExchange(self.job, self._world, self._mail, self._input_gradients, self.inputs)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Gives the user's generator and autocast back; an error in the middle of a step ends all ranks."""
        try:
            if self.job.split.traced.draws_or_casts or is_autocast():
                with untouched_generator(self._device), without_autocast():
                    yield
            else:
                yield
        except BaseException as error:
            if isinstance(error, Exception):
                where = self._where(error)
                if self._world.num_ranks > 1:
                    self._world.abort(error, where)
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(where)
            self.rank.mail = Mail(self._world, self._device)  # a script on one process may catch the error and go on
            self.rank.backwards.forget_step()
            raise

    def _where_not_finite(self) -> Callable[[], str]:
        """Returns what says where a loss that is not finite was found; empty: on another rank.

        It may be asked in the next step alone, and keeps nothing of this one but losses.
        """
        rank = self._world.rank
        if self._loss is None:
            stage = self.job.plan.num_stages - 1
            return lambda: f"the gradient of rank {rank}'s loss is not finite at the outputs of stage {stage}"
        stage, parts = self.job.split.makers[self._loss_place], self.job.batch.micro_batches
        losses = {index: loss for (place, index), loss in self._outputs.items() if place == self._loss_place}

        def words() -> str:
            for index, loss in losses.items():
                if not loss.isfinite().all():
                    part = parts[index]
                    samples = f"samples {part.start} to {part.start + part.size - 1} of rank {part.origin}"
                    return f"the loss of micro-batch {index} ({samples}) is {loss.item()} on rank {rank}, stage {stage}"
            return ""

        return words

    def _where(self, error: BaseException) -> str:
        """Returns rank, stage and micro-batch, and the line of the user's model if an operation raised `error`."""
        if self._act is None:
            return f"rank {self._world.rank}, before the first instruction"
        part = self._act.part
        owner = "" if len(self.job.batch.groups) == 1 else f" of rank {part.origin}"
        samples = f"samples {part.start} to {part.start + part.size - 1}{owner}"
        place = f"rank {self._world.rank}, stage {self._act.instruction.stage}, micro-batch {part.index} ({samples})"
        traced = self.job.split.traced
        line = failed_at(error, traced.nodes)
        return place + line + (given_whole(traced.inputs.values(), part, self.job.batch) if line else "")


_OF_OWN_SAMPLES = (
    "the loss is made outside of the model, by each rank of its own samples, and counts with its share of them, as in "
    "DistributedDataParallel: one that sums over samples, or compares samples with each other (contrastive), is "
    "another one than that of the global batch. Have forward return such a loss, with reduction='sum' if it is a sum"
)
_OF_OUTPUTS = (
    "backward starts from %s of what forward returns, once all forwards of the call are done. Return the loss that the "
    "script makes of it under the key 'loss' (or pass loss_mode='loss', if it is the only scalar with a gradient), and "
    "the call runs the whole step, faster and in less memory"
)

_METHODS: dict[Kind, Callable[[StepRunner, StageModule, Act], None]] = {
    Kind.FORWARD: StepRunner._forward,
    Kind.RECOMPUTE: StepRunner._recompute,
    Kind.BACKWARD: StepRunner._backward,
    Kind.WEIGHT: StepRunner._weights,
}


def given_whole(inputs: Iterable[InputSpec], part: MicroBatch, batch: GlobalBatch) -> str:
    """Returns a sentence about the inputs that a part of a mini-batch has whole, whose numbers may not fit to it."""
    whole = [f"{each.name} {each.words()}" for each in inputs if not each.is_batch and each.shape]
    if not whole or part.size == batch.num_samples_of(part.origin):
        return ""
    return (
        f". Every micro-batch has its own samples, but all of {', '.join(whole)}, whose first dimension is not the "
        "batch. If numbers in there name samples (the edges of a graph, say), pass "
        f"num_micro_batches={len(batch.groups)}, so that each is all that a rank passes"
    )


def _total(gradients: Gradients) -> Tensor | None:
    """Returns a number that is finite if, and as a rule only if, the gradients are: their sum."""
    present = [torch.view_as_real(each) if each.is_complex() else each for each in gradients if each is not None]
    return torch.stack([each.sum(dtype=WIDER.get(each.dtype)) for each in present]).sum() if present else None


def _input_key(name: str) -> str:
    """Returns the key of an input among the sources of gradients; no parameter has it."""
    return f"input:{name}"


def _alone(output: Tensor) -> Tensor:
    """Returns an output without its graph, and without memory of more: torch leaves a mean in that of its terms."""
    output = output.detach()
    is_one_number = output.numel() == 1  # to copy it takes less than to look
    return output.clone() if is_one_number or output.untyped_storage().nbytes() > 2 * output.nbytes else output


def _copies(gradients: Mapping[Key, Tensor | None]) -> dict[Key, Tensor]:
    return {key: gradient.clone() for key, gradient in gradients.items() if gradient is not None}


def _scaled(gradients: Mapping[Key, Tensor | None], scale: float) -> dict[Key, Tensor]:
    present = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    if scale != 1.0:
        for gradient in present.values():
            gradient.mul_(scale)
    return present
