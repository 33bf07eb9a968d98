"""Takes gradients between the ranks whose samples they belong to and the stages: of outputs in, of inputs out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autovaruna.graph.outputs import OutputKind, OutputSpec
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Kind, Mail, Route
from autovaruna.runtime.worlds.world import World

_INPUT_GRADIENT_TAG = 1 << 18


class GradientExchange:
    """Exchanges the gradients of one job that do not belong to parameters.

    Args:
        job: The call.
        world: The ranks.
        mail: Carries tensors.
        made: The gradients of inputs that this rank's stages make, by (input, micro-batch).
        inputs: This rank's mini-batch.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        mail: Mail,
        made: Mapping[tuple[str, int], Tensor | None],
        inputs: Mapping[str, Tensor],
    ) -> None:
        self._job = job
        self._world = world
        self._mail = mail
        self._made = made
        self._inputs = inputs
        self._stage = job.split.makers
        self._gradients: dict[int, Tensor | None] = {}
        self.origin = ""
        self._batch_inputs = job.split.traced.batch_inputs

    @property
    def own_weight(self) -> float:
        """The weight of this rank's own loss in that of the global batch."""
        return self._job.rank_weight(self._world.rank)

    def spread_output_gradients(self, gradients: Sequence[Tensor | None], zeros: Sequence[Tensor]) -> None:
        """Sends the gradients of this rank's outputs to the stages that made them. Collective.

        An output that some rank's loss uses has a gradient on every rank, of zeros where it is not used. `origin` says
        which those are: what follows has other messages for others.

        Args:
            gradients: One for each output of the model; None where the caller did not use it.
            zeros: Gradients of zeros.
        """
        own = [place for place, gradient in enumerate(gradients) if gradient is not None]
        what = f"agreeing on the outputs of {self._job.name} that backward starts from"
        used = set().union(*self._world.gather_objects(own, what))
        self.origin = f"/{sorted(used)}"
        self._gradients = {
            place: zero if gradient is None and place in used else gradient
            for place, (gradient, zero) in enumerate(zip(gradients, zeros, strict=True))
        }
        for part in self._job.batch.owned_by(self._world.rank):
            for place, spec in enumerate(self._job.split.traced.outputs) if part.origin == self._world.rank else ():
                is_there = self._job.batch.has(self._maker(place, part), part)
                if spec.kind is OutputKind.SAMPLES and self._gradients[place] is not None and not is_there:
                    self._mail.send([self._own_part(place, spec, part)], self._output_kind(place, part))

    def output_gradient(self, place: int, part: MicroBatch) -> Tensor | None:
        """Returns the gradient of an output for one micro-batch, at the stage that made it."""
        spec = self._job.split.traced.outputs[place]
        if self._gradients[place] is None:
            return None
        if spec.kind is OutputKind.SAMPLES:
            if self._job.batch.has(self._world.rank, part):
                return self._own_part(place, spec, part)
            return self._mail.take(self._output_kind(place, part))[0]
        gradient = self._gradients[place]
        if gradient is None or spec.kind is OutputKind.SAME:
            return gradient if part.index == min(self._job.batch.micro_batches) else None
        return gradient * part.share

    def input_gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of this rank's inputs. Every rank takes part."""
        names = sorted(self._job.split.input_gradients)
        for place, name in enumerate(names):
            if name in self._batch_inputs:
                self._send_input_gradient(place, name)
        return {
            name: self._gather_parts(place, name) if name in self._batch_inputs else self._sum_everywhere(name)
            for place, name in enumerate(names)
        }

    def _own_part(self, place: int, spec: OutputSpec, part: MicroBatch) -> Tensor | None:
        """Returns the rows of an output's gradient that belong to a micro-batch, weighted as its rank's loss is."""
        gradient = self._gradients[place]
        if gradient is None:
            return None
        num_rows = gradient.shape[spec.dimension] // self._job.batch.num_samples_of(self._world.rank)
        rows = gradient.narrow(spec.dimension, part.start * num_rows, part.size * num_rows)
        weight = self.own_weight
        return rows.contiguous() if weight == 1.0 else (rows * weight).contiguous()

    def _send_input_gradient(self, place: int, name: str) -> None:
        for part in self._job.batch.micro_batches.values():
            if (name, part.index) in self._made:
                gradient = self._made[name, part.index]
                for receiver in self._job.batch.receivers(part):
                    self._mail.send([gradient], self._input_kind(place, name, part, receiver))

    def _gather_parts(self, place: int, name: str) -> Tensor | None:
        mine = self._job.batch.owned_by(self._world.rank)
        parts = [self._mail.take(self._input_kind(place, name, part, self._world.rank))[0] for part in mine]
        if all(part is None for part in parts):
            return None
        filled = [
            torch.zeros_like(self._inputs[name][: part.size]) if gradient is None else gradient
            for part, gradient in zip(mine, parts, strict=True)
        ]
        return torch.cat(filled)

    def _sum_everywhere(self, name: str) -> Tensor:
        """Sums the gradient of a tensor that is no batch over micro-batches and ranks."""
        total = torch.zeros_like(self._inputs[name])
        for (other, _), gradient in self._made.items():
            if other == name and gradient is not None:
                total.add_(gradient)
        self._world.all_reduce(total, tuple(range(self._world.num_ranks)))
        return total

    def _output_kind(self, place: int, part: MicroBatch) -> Kind:
        route = Route(part.origin, self._maker(place, part), 4 * place + 3)
        return Kind(f"{self._job.graph_key}/back{self.origin}", route, part.size)

    def _maker(self, place: int, part: MicroBatch) -> int:
        return self._job.rank_of(self._stage[place], part.index)

    def _input_kind(self, place: int, name: str, part: MicroBatch, receiver: int) -> Kind:
        holder = self._job.rank_of(self._job.split.input_gradients[name], part.index)
        return Kind(self._job.graph_key + self.origin, Route(holder, receiver, _INPUT_GRADIENT_TAG + place), part.size)
