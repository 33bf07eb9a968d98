"""Runs one call of the model on this rank, and joins what it returns to the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from autovaruna.errors import InputError, OrderError
from autovaruna.graph.outputs import OutputKind, OutputSpec
from autovaruna.parallel.unchanged import while_unchanged
from autovaruna.runtime.exchange import GradientExchange
from autovaruna.runtime.executor import Executor
from autovaruna.runtime.gradient_sums.gradient_book import GradientBook
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.optimizers.scaler import LossScale
from autovaruna.runtime.outputs import OutputCollector
from autovaruna.runtime.publish import Finish, Gradients, follows_a_call, publish
from autovaruna.runtime.traffic import Traffic
from autovaruna.runtime.worlds.world import World
from autovaruna.schedule.instruction import Kind
from autovaruna.stage.module import ParameterUse

Key = TypeVar("Key")
_ALL = tuple(Kind)
_BACKWARDS = Kind.RECOMPUTE, Kind.BACKWARD, Kind.WEIGHT
_Found = tuple[dict[ParameterUse, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor | None]]
"""The gradients of a step: this rank's own by use, the sums, those that earlier calls kept back, and of inputs."""


def input_key(name: str) -> str:
    """Returns the key of an input among the sources of gradients; no parameter has it."""
    return f"input:{name}"


@dataclass(eq=False)
class Step:
    """One call on its way.

    Attributes:
        job: the call.
        executor: runs instructions.
        gradients: takes gradients from the stages and sums them.
        take_kept: sums the gradients that earlier calls kept back.
        world, mail: the ranks, and what carries tensors between them.
        traffic: knows the messages of this rank.
        inputs: this rank's mini-batch.
        parameters: those that this rank holds.
        device: where this rank computes.
        guard: surrounds whatever runs instructions.
        is_synchronising: whether gradients are summed over ranks now.
        delivers_all: whether a whole step returns the outputs beside the loss.
        note_backward: hears of each backward of the caller, and of the gradient that comes in.
        note_gradients: hears that parameters get gradients, and whether that is now or when they are summed.
        loss_scale: hears of the gradient that comes into the loss.
        factor: what that gradient is expected to be; the step goes backward from it.
    """

    job: Job
    executor: Executor
    gradients: GradientBook
    take_kept: Callable[[], dict[str, Tensor]]
    world: World
    mail: Mail
    traffic: Traffic
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    device: torch.device
    guard: AbstractContextManager[None]
    is_synchronising: bool
    delivers_all: bool
    note_backward: Callable[[str], None]
    note_gradients: Callable[[bool], None]
    loss_scale: LossScale
    factor: float
    _loss: Tensor | None = field(default=None, init=False)
    _found: _Found = field(default=({}, {}, {}, {}), init=False)

    @cached_property
    def specs(self) -> dict[int, OutputSpec]:
        """The model's outputs by place."""
        return dict(enumerate(self.job.split.traced.outputs))

    @cached_property
    def loss_place(self) -> int:
        """The place of the loss among the outputs."""
        return next(place for place, spec in self.specs.items() if spec.kind is OutputKind.LOSS)

    @cached_property
    def wanted(self) -> dict[int, OutputSpec]:
        """The outputs that a whole step delivers."""
        return {place: spec for place, spec in self.specs.items() if self.delivers_all or spec.kind is OutputKind.LOSS}

    @cached_property
    def collector(self) -> OutputCollector:
        """Puts outputs together."""
        return OutputCollector(self.job, self.world, self.mail, self.executor.outputs, self.device)

    @cached_property
    def exchange(self) -> GradientExchange:
        """Takes the gradients of outputs in and of inputs out."""
        return GradientExchange(self.job, self.world, self.mail, self.executor, self.inputs)

    @cached_property
    def sources(self) -> dict[str, Tensor]:
        """What gets gradients on this rank: parameters by name, inputs by `input_key`."""
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        return trained | {input_key(name): self.inputs[name] for name in self.job.split.input_gradients}

    def whole(self) -> list[Tensor | None]:
        """Runs forwards and backwards for the expected loss gradient; ``backward`` gives the gradients out, scaled."""
        self.executor.aside = self._get_ready
        self.executor.run(self.traffic.program(_ALL))
        self.collector.send(self.wanted)
        own = self.gradients.take()
        inputs = self.exchange.input_gradients()
        if not self.is_synchronising:
            self.gradients.keeps_back()
        totals = self.gradients.total(own, self.exchange.origin) if self.is_synchronising else {}
        kept = self.take_kept() if self.is_synchronising else {}
        assert self._loss is not None, "the loss is published before the first backward"
        (loss, self._loss), self._found = (self._loss, None), (own, totals, kept, inputs)
        outputs = self.collector.take(self.wanted)  # last: they have come while gradients were summed
        loss.data = outputs.pop(self.loss_place)
        published = self._publish(outputs, self._refuse) if outputs else {}
        published[self.loss_place] = loss
        return [published.get(place) for place in self.specs]

    def _get_ready(self) -> None:
        """Prepares backwards, and what is needed once the last one has ended: the loss, but for its number."""
        seeds = self.traffic.seeds(self.factor)
        is_loss = [place == self.loss_place for place in self.specs]
        self.executor.output_gradients = lambda place, part: seeds[part.share] if is_loss[place] else None
        if self.is_synchronising:
            self.executor.stage_ended = self.gradients.begin(self.exchange.origin)
        self.collector.expect(self.wanted)
        published = self._publish({self.loss_place: self.traffic.empty_loss(self.device)}, self._finish)
        self._loss = published[self.loss_place]

    def _finish(self, gradients: Gradients, is_kept: bool) -> Gradients:
        """Gives out the gradients of the step, scaled by what comes into the loss; copies if another backward may come.

        What earlier calls kept back is given out once.
        """
        own, totals, kept, inputs = self._found
        if is_kept:
            self._found = own, totals, {}, inputs
            own, totals, inputs = _copies(own), _copies(totals), {**inputs, **_copies(inputs)}
        if gradients[0] is None:
            self.note_backward("none")
            return self._for_sources({}, kept, {})
        factor = gradients[0].item()
        self.note_backward(f"{factor:g}")
        self.loss_scale.after(factor)
        self.note_gradients(self.is_synchronising)
        scale = factor / self.factor
        if not self.is_synchronising:
            self.gradients.keep(_scaled(own, scale))
        return self._for_sources(_scaled(totals, scale), kept, _scaled(inputs, scale))

    def _refuse(self, gradients: Gradients, is_kept: bool) -> Gradients:
        """Refuses to go backward from outputs beside the loss."""
        others = [spec for place, spec in self.wanted.items() if place != self.loss_place]
        self.note_backward("of other outputs")
        used = [spec.path for spec, gradient in zip(others, gradients, strict=True) if gradient is not None]
        raise InputError(
            f"backward reached {', '.join(used)}, but this model's step starts from its own loss, whose backward has "
            "already run. Expected a loss made from the model's loss alone; pass loss_mode='outputs' to go backward "
            "from any output."
        )

    def forwards(self) -> list[Tensor | None]:
        """Runs forwards; where gradients are wanted, the backwards run when the caller goes backward."""
        self.executor.run(self.traffic.program((Kind.FORWARD,)))
        outputs = self.collector.collect(self.specs)
        if not self.job.needs_gradient:
            return list(outputs.values())
        zeros = [output.new_zeros(()).expand(output.shape) for output in outputs.values()]
        return list(self._publish(outputs, partial(self._backwards, zeros)).values())

    def _backwards(self, zeros: Sequence[Tensor], gradients: Gradients, is_kept: bool) -> Gradients:
        """Runs all backwards for the gradients of this rank's outputs.

        Raises:
            OrderError: another backward may come, for which stages that split theirs keep nothing.
        """
        if is_kept and self.job.splitting:
            raise OrderError(
                "A backward with retain_graph=True: got the schedule zero_bubble, whose stages keep nothing for "
                "another one. Expected one backward, of the sum of all losses; or another schedule."
            )
        self.note_backward("of its outputs")
        self.loss_scale.after(1.0)
        self.note_gradients(self.is_synchronising)
        with self.guard:
            self.exchange.spread_output_gradients(gradients, zeros)
            self.executor.output_gradients = self.exchange.output_gradient
            self.executor.keeps_graphs = is_kept
            if self.is_synchronising:
                self.executor.stage_ended = self.gradients.begin(self.exchange.origin)
            self.executor.run(self.traffic.program(_BACKWARDS, self.exchange.origin))
            own = self.gradients.take()
            inputs = self.exchange.input_gradients()
            if not self.is_synchronising:
                self.gradients.keeps_back()
                self.gradients.keep(own)
                return self._for_sources({}, {}, inputs)
            return self._for_sources(self.gradients.total(own, self.exchange.origin), self.take_kept(), inputs)

    def _publish(self, outputs: Mapping[int, Tensor], finish: Finish) -> dict[int, Tensor]:
        carries = [self.specs[place].needs_gradient for place in outputs]
        finish = while_unchanged(finish, self.parameters, self.job.split.traced.saved_weights)
        published = publish(list(outputs.values()), carries, list(self.sources.values()), finish)
        return dict(zip(outputs, published, strict=True))

    def _as_own(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of an input; for another call, which weighs this rank's own loss itself, that of it."""
        weight = self.exchange.own_weight
        if gradient is None or weight == 1.0 or name not in self.job.split.traced.batch_inputs:
            return gradient
        return gradient / weight if follows_a_call(self.sources[input_key(name)]) else gradient

    def _for_sources(
        self, totals: Mapping[str, Tensor], kept: Mapping[str, Tensor], inputs: Mapping[str, Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the gradient of each source: of this step and, for parameters, of those kept back before it."""
        found: dict[str, Tensor | None] = dict(totals)
        for name, gradient in kept.items():
            now = found.get(name)
            found[name] = gradient if now is None else gradient.add_(now)
        found |= {input_key(name): self._as_own(name, gradient) for name, gradient in inputs.items()}
        return [found.get(name) for name in self.sources]


def _copies(gradients: Mapping[Key, Tensor | None]) -> dict[Key, Tensor]:
    return {key: gradient.clone() for key, gradient in gradients.items() if gradient is not None}


def _scaled(gradients: Mapping[Key, Tensor | None], scale: float) -> dict[Key, Tensor]:
    present = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    if scale != 1.0:
        for gradient in present.values():
            gradient.mul_(scale)
    return present
