"""Defines a step: one call of the model on this rank, its backward within the call or later.

WholeStep   model(x):          prepare ─ run forwards and backwards ─ sum ─ publish the loss
            loss.backward():   gives the gradients out

SplitStep   model(x):          prepare ─ run forwards ─ publish all outputs
            loss.backward():   prepare ─ run backwards ─ sum ─ give the gradients out

prepare   this rank's samples go to the stages that use them
run       the tasks of this rank, in the order of its schedule (`executor.py`)
sum       gradients, over the uses of a parameter and over ranks; those of stages that have ended are on their way
publish   outputs are put together, and joined to the caller's autograd graph
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.graph.key_values import Kept, KeptTensor
from autovaruna.graph.lengths import free_value
from autovaruna.graph.precision import is_autocast, without_autocast
from autovaruna.graph.traced import OutputKind
from autovaruna.ranks.reduction import WIDER
from autovaruna.runtime.autograd import Finish, Gradients, follows_a_call, publish, while_unchanged
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.executor import Executor, RankContext, no_gradient
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.outputs import GradientExchange, OutputCollector
from autovaruna.runtime.program import ModelCall, Task
from autovaruna.runtime.weights import Placement
from autovaruna.schedule.pipeline import Kind
from autovaruna.stage.module import ParameterUse

logger = logging.getLogger(__name__)
Key = TypeVar("Key")
_ALL = tuple(Kind)
_FORWARDS = (Kind.FORWARD,)
_BACKWARDS = Kind.RECOMPUTE, Kind.BACKWARD
_OF_OWN_SAMPLES = (
    "the loss is made outside of the model, by each rank of its own samples, as in DistributedDataParallel: right for "
    "a mean over samples. One that sums over samples (with reduction='sum') or compares them belongs in forward"
)
_OF_OUTPUTS = (
    "backward starts from %s of what forward returns, once all forwards of the call are done. Return the loss that the "
    "script makes of it under the key 'loss' (or pass loss_mode='loss', if it is the only scalar with a gradient), and "
    "the call runs the whole step, faster and in less memory"
)


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step.

    Attributes:
        own: this rank's, by use, where they are not summed yet.
        totals: summed, by parameter.
        inputs: those of this rank's inputs.
    """

    own: Mapping[ParameterUse, Tensor] = field(default_factory=dict)
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor | None] = field(default_factory=dict)


class Step(ABC):
    """What both kinds of steps do alike."""

    _is_over = True  # once the call has run

    def __init__(self, call: ModelCall, rank: RankContext) -> None:
        self._call, self._rank, self._program = call, rank, call.program
        self._backwards, self._book = rank.backwards, call.program.graph.book
        self._executor = Executor(call, rank)
        self._is_summed = self._reaches_parameters = rank.asks_for_sums()  # hooks would get what is kept back as None

    def run(self, placement: Placement) -> list[Tensor | None]:
        """Runs the call; returns the model's outputs, None for those that are not delivered. Collective."""
        program, world = self._program, self._rank.world
        with self._guarded():
            outputs = self._run()
            if changed := program.traced.changed_state:
                first, holders = next(iter(program.batch.micro_batches)), program.split.assignment.holders
                roots = {name: program.graph.plan.rank_of(holders[name][0], first) for name in changed}
                self._rank.state.share_changes(roots, placement, world)
            world.flush()
            if self._rank.trace is not None:
                self._rank.trace.write_step()
                if self._rank.trace.num_steps_left <= 0:
                    self._rank.trace = None
        observation = self._executor.observation
        if self._is_over or not self._call.needs_gradient:
            self._look()
        elif observation is not None and observation.is_first:  # who knows what the script makes of outputs
            observation.compare(is_over=False)
        return outputs

    def _look(self) -> None:
        """Makes sure, in some steps, that the step is what the whole batch gives; nothing of it is given out yet."""
        observation, self._executor.observation = self._executor.observation, None
        if observation is not None:
            observation.compare()

    @abstractmethod
    def _run(self) -> list[Tensor | None]:
        """Runs the instructions of the call; returns the outputs."""

    def _prepare(self, kinds: tuple[Kind, ...]) -> Sequence[Task]:
        """Sends samples to where they are used, and begins the sums; returns what is to be run."""
        if Kind.FORWARD in kinds:
            self._executor.hand_out_samples()
        if Kind.BACKWARD in kinds:
            self._book.begin(self._exchange.root_names, is_summed=self._is_summed)
        return self._program.tasks(kinds, self._exchange.root_names)

    def _sum(self) -> StepGradients:
        """Returns the gradients of the step once they are there; not summed where they are kept back."""
        own = self._book.pop()
        inputs = self._exchange.input_gradients()
        if not self._is_summed:
            return StepGradients(own=own, inputs=inputs)
        began = perf_counter()
        totals = self._book.total(own, self._exchange.root_names)
        self._rank.metrics.account.sums += perf_counter() - began
        return StepGradients(totals=totals, inputs=inputs)

    def _publish(self, outputs: Mapping[int, Tensor], finish: Finish) -> dict[int, Tensor]:
        """Joins outputs to the caller's autograd graph, whose backward calls `finish`."""
        carries = [self._program.outputs[place].needs_gradient for place in outputs]
        if not any(carries):
            return dict(outputs)
        finish = while_unchanged(finish, self._rank.parameters, self._program.traced.saved_weights)
        published = publish(list(outputs.values()), carries, list(self._sources.values()), finish)
        return dict(zip(outputs, published, strict=True))

    def _for_sources(self, totals: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """Returns the gradient of each source, of this step."""
        found: dict[str, Tensor | None] = dict(totals)
        found |= {_input_key(name): self._as_own(name, gradient) for name, gradient in inputs.items()}
        return [found.get(name) for name in self._sources]

    def _as_own(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of an input; for another call, which weighs this rank's own loss itself, that of it."""
        weight = self._program.weight_of(self._rank.world.rank)
        if gradient is None or weight == 1.0 or name not in self._program.traced.batch_inputs:
            return gradient
        return gradient / weight if follows_a_call(self._sources[_input_key(name)]) else gradient

    @cached_property
    def _sources(self) -> dict[str, Tensor]:
        """What gets gradients on this rank: parameters by name, inputs by `_input_key`."""
        own = self._rank.stepped if self._reaches_parameters else {}
        return {name: each for name, each in own.items() if each.requires_grad} | {
            _input_key(name): self._call.inputs[name] for name in self._program.split.input_gradients
        }

    @cached_property
    def _collector(self) -> OutputCollector:
        return OutputCollector(self._program, self._rank, self._executor.outputs)

    @cached_property
    def _exchange(self) -> GradientExchange:
        return GradientExchange(self._call, self._rank, self._executor.input_gradients)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Gives the user's autocast back; an error in the middle of a step ends all ranks."""
        rank, account = self._rank, self._rank.metrics.account
        began = perf_counter() - account.of_instructions
        try:
            if self._program.traced.casts or is_autocast():
                with without_autocast():
                    yield
            else:
                yield
        except BaseException as error:
            if isinstance(error, Exception):
                where = self._executor.where(error)
                if rank.world.num_ranks > 1:
                    rank.world.abort(error, where)
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(where)
            rank.mail = Mail(rank.world, rank.device)  # a script on one process may catch the error and go on
            self._backwards.forget_step()
            raise
        account.messages += perf_counter() - account.of_instructions - began


class WholeStep(Step):
    """A step that goes backward within the call, from the loss times `factor`: what is expected to come into the loss.

    The caller's backward gives the gradients out, scaled by what comes into the loss.
    """

    def __init__(self, call: ModelCall, rank: RankContext, factor: float) -> None:
        super().__init__(call, rank)
        self._factor = factor
        self._gradients = StepGradients()
        self._loss: Tensor | None = None
        self._read: Mapping[str, object] = {}
        every, loss = self._program.outputs, self._program.loss_place
        self._delivered = every if rank.settings.outputs == "all" else {loss: every[loss]}

    def _run(self) -> list[Tensor | None]:
        program = self._program
        tasks = self._prepare(_ALL)
        self._executor.run(tasks, partial(_seed, program.seeds(self._factor), program.loss_place))
        self._collector.send(self._delivered)
        self._gradients = self._sum()
        self._read = program.traced.backward_constants()
        outputs = self._collector.collect(self._delivered)  # last: they have come while gradients were summed
        self._loss = outputs.pop(program.loss_place)
        published = self._publish({program.loss_place: self._loss}, self._give_out)
        published |= self._publish(outputs, self._refuse)
        return [published.get(place) for place in program.outputs]

    def _give_out(self, gradients: Gradients, retains_graph: bool) -> Gradients:
        """Gives out the gradients of the step, scaled by what comes into the loss.

        summed in the call   sums asked for now   gradients of this step     gradients kept back before
        yes                  yes                  given out                  given out
        yes                  no                   kept back, as sums         stay kept back
        no                   yes                  kept back, then summed and given out with those of before
        no                   no                   kept back                  stay kept back
        """
        found, backwards = self._take_gradients(retains_graph), self._backwards
        if gradients[0] is None:
            backwards.record("none")
            return self._for_sources({}, {})
        self._rank.metrics.record(self._call.number + 1, self._loss, self._where_not_finite(), is_loss=True)
        self._refuse_changed()
        factor = gradients[0].item()
        backwards.record(f"{factor:g}")
        if factor != self._factor:
            self._refuse_clipped(factor)
        self._rank.loss_scale.record(factor)
        is_asked = self._rank.asks_for_sums()
        backwards.show_gradients_elsewhere(is_asked)
        scale = factor / self._factor
        totals = _scaled(found.totals, scale)
        self._book.keep(_scaled(found.own, scale))
        if is_asked:  # now, not in the call, which may be one whose loss the script does not go backward from
            backwards.add_kept()
            self._rank.world.flush()
        else:
            backwards.keep_totals(totals)
            totals = {}
        return self._for_sources(totals, _scaled(found.inputs, scale))

    def _refuse_changed(self) -> None:
        """Refuses a backward whose autograd functions would read something else by now than in the call."""
        now = self._program.traced.backward_constants()
        if changed := [name for name in now.keys() | self._read.keys() if now.get(name) != self._read.get(name)]:
            name = min(changed)
            raise InputError(
                f"The backward of an autograd function reads {name}, which has changed since the call: got "
                f"{now.get(name)!r}, and the step has gone backward with {self._read.get(name)!r}. Expected it to be "
                "set before the call; or pass loss_mode='outputs', where a step goes backward once the script does."
            )

    def _refuse_clipped(self, factor: float) -> None:
        """Refuses to scale gradients that do not grow with what comes into the loss."""
        if bent := next((each for each in self._program.traced.kept if not each.returned.is_linear_back), None):
            raise InputError(
                f"The backward of {bent.path} at {bent.line} does not grow with what comes into it (it clips it, say), "
                f"and the step has gone backward from {self._factor:g}: got {factor:g} times the loss. Expected a "
                "backward from the loss itself: divide or multiply it in forward, by a number that is an argument; or "
                "pass loss_mode='outputs', where a step goes backward once the script does."
            )

    def _take_gradients(self, retains_graph: bool) -> StepGradients:
        """Returns the gradients of the step; copies if another backward may come."""
        found, self._gradients = self._gradients, StepGradients()
        if not retains_graph:
            return found
        self._gradients = found
        return StepGradients(_copies(found.own), _copies(found.totals), _copies(found.inputs))

    def _refuse(self, gradients: Gradients, retains_graph: bool) -> Gradients:
        """Refuses to go backward from outputs beside the loss."""
        others = [spec for place, spec in self._delivered.items() if place != self._program.loss_place]
        self._backwards.record("of other outputs")
        used = [spec.path for spec, gradient in zip(others, gradients, strict=True) if gradient is not None]
        if not used:  # what the script made of them has no gradient
            return [None] * len(self._sources)
        raise InputError(
            f"backward reached {', '.join(used)}, but this model's step starts from its own loss, whose backward has "
            "already run. Expected a loss made from the model's loss alone; pass loss_mode='outputs' to go backward "
            "from any output."
        )

    def _where_not_finite(self) -> Callable[[], str]:
        """Returns what says which micro-batch has a loss that is not finite; empty: one of another rank.

        It may be asked in the next step alone, and keeps nothing of this one but losses.
        """
        program, rank = self._program, self._rank.world.rank
        stage, parts = program.split.makers[program.loss_place], program.batch.micro_batches
        losses = {m: loss for (place, m), loss in self._executor.outputs.items() if place == program.loss_place}

        def words() -> str:
            for m, loss in losses.items():
                if not loss.isfinite().all():
                    part = parts[m]
                    samples = f"samples {part.start} to {part.start + part.size - 1} of rank {part.origin}"
                    return f"the loss of micro-batch {m} ({samples}) is {loss.item()} on rank {rank}, stage {stage}"
            return ""

        return words


class SplitStep(Step):
    """A step that runs forwards in the call; where gradients are wanted, the caller's backward runs the backwards."""

    _is_over = False
    _numbers: Sequence[Tensor | None] = ()  # the outputs that may be a loss; of others nothing

    def _run(self) -> list[Tensor | None]:
        every = self._program.outputs
        places = {place: spec for place, spec in every.items() if not spec.is_kept}
        self._executor.run(self._prepare(_FORWARDS), no_gradient)
        self._collector.send(places)
        outputs = self._collector.collect(places)
        if not self._call.needs_gradient:
            return [outputs[place] if place in outputs else self._kept(place) for place in every]
        self._numbers = [output if places[k].kind is OutputKind.MEAN else None for k, output in outputs.items()]
        zeros = [output.new_zeros(()).expand(output.shape) for output in outputs.values()]
        return list(self._publish(outputs, partial(self._go_backward, zeros)).values())

    def _kept(self, place: int) -> KeptTensor:
        """Returns what stands for keys or values of a cache, whose numbers stay here and on other ranks."""
        program, spec = self._program, self._program.outputs[place]
        value: Tensor = free_value(program.traced.nodes[spec.node])
        own, batch = program.batch.num_samples_of(self._rank.world.rank), program.batch.micro_batches
        parts = {m: made for (at, m), made in self._executor.outputs.items() if at == place}
        shape = program.traced.sizes.in_call(value, own, program.lengths)
        return KeptTensor.of(shape, value.dtype, Kept(self._rank.state, program.split.makers[place], batch, parts))

    def _go_backward(self, zeros: Sequence[Tensor], gradients: Gradients, retains_graph: bool) -> Gradients:
        """Runs all backwards for the gradients of this rank's outputs."""
        rank, backwards = self._rank, self._backwards
        self._is_summed = rank.asks_for_sums()
        if rank.world.rank == 0 and not backwards.num:
            self._say_where_the_loss_is(gradients)
        backwards.record("of its outputs")
        total = None if rank.loss_scale.has_scaler else _total(gradients)
        stage = self._program.graph.plan.num_stages - 1
        where = f"the gradient of rank {rank.world.rank}'s loss is not finite at the outputs of stage {stage}"
        started = [number for number, each in zip(self._numbers, gradients, strict=True) if each is not None]
        loss = started[0] if len(started) == 1 and started[0] is not None and started[0].numel() == 1 else None
        where = where if loss is None else "the loss that forward returns is not finite"
        number = total if loss is None else loss
        rank.metrics.record(self._call.number + 1, number, lambda: where, is_loss=loss is not None)
        rank.loss_scale.record(1.0)
        backwards.show_gradients_elsewhere(self._is_summed)
        with self._guarded():
            self._exchange.spread_output_gradients(gradients, zeros)
            self._executor.retains_graphs = retains_graph
            self._executor.run(self._prepare(_BACKWARDS), self._exchange.output_gradient)
            found = self._sum()
            if self._is_summed:
                backwards.keep_totals({} if self._reaches_parameters else found.totals)
                backwards.add_kept()
            rank.world.flush()  # others wait for it, and this rank may wait for them by itself
            self._book.keep(found.own)
        self._look()
        return self._for_sources(found.totals, found.inputs)

    def _say_where_the_loss_is(self, gradients: Gradients) -> None:
        """Logs what the first backward shows: the script makes the loss of outputs, or picks it from among them."""
        specs = self._program.outputs.values()
        used = [spec for spec, gradient in zip(specs, gradients, strict=True) if gradient is not None]
        if used and all(spec.kind is not OutputKind.SAMPLES for spec in used):
            logger.info(_OF_OUTPUTS, ", ".join(spec.path for spec in used))
        elif len(self._program.batch.groups) > 1:
            logger.info(_OF_OWN_SAMPLES)


def _seed(seeds: Mapping[float, Tensor], loss_place: int, place: int, part: MicroBatch) -> Tensor | None:
    """Returns the gradient of an output from which a backward within the call starts: of the loss alone."""
    return seeds[part.weight] if place == loss_place else None


def _total(gradients: Gradients) -> Tensor | None:
    """Returns a number that is finite if, and as a rule only if, the gradients are: their sum."""
    present = [torch.view_as_real(each) if each.is_complex() else each for each in gradients if each is not None]
    return torch.stack([each.sum(dtype=WIDER.get(each.dtype)) for each in present]).sum() if present else None


def _input_key(name: str) -> str:
    """Returns the key of an input among the sources of gradients; no parameter has it."""
    return f"input:{name}"


def _copies(gradients: Mapping[Key, Tensor | None]) -> dict[Key, Tensor]:
    return {key: gradient.clone() for key, gradient in gradients.items() if gradient is not None}


def _scaled(gradients: Mapping[Key, Tensor | None], scale: float) -> dict[Key, Tensor]:
    present = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    if scale != 1.0:
        for gradient in present.values():
            gradient.mul_(scale)
    return present
