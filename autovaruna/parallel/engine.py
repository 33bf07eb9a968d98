"""Runs calls of a planned model: a whole step for a loss, forwards alone for other outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.tree import Opaque, Undelivered
from autovaruna.parallel.acts import Digest
from autovaruna.parallel.calls import SharedCall
from autovaruna.parallel.guard import Guard
from autovaruna.parallel.prepared import PreparedGraphs
from autovaruna.parallel.shared_state import share_state
from autovaruna.parallel.step import Step
from autovaruna.parallel.totals import ValuesOfBatch
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.events import EventTrace
from autovaruna.runtime.executor import Executor
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.optimizers.scaler import LossScale
from autovaruna.runtime.weights.elsewhere import Elsewhere, note_gradients
from autovaruna.runtime.weights.placement import OwnedState, Placement
from autovaruna.runtime.worlds.world import World
from autovaruna.settings import Settings

logger = logging.getLogger(__name__)


class Engine:
    """Runs a planned model on this rank.

    Args:
        graphs: The model's graphs, split as the plan says.
        state: The model's parameters and buffers, of which this rank holds its part.
        plan: The plan.
        settings: The settings.
        world: The ranks.
        device: Where this rank computes.
        seed: What random nodes are seeded from.
        loss_scale: The scale of the caller's loop.
        of_model: Says in errors which model this is, behind other words.
        trace: Records the instructions of every step.
    """

    def __init__(
        self,
        graphs: PreparedGraphs,
        state: OwnedState,
        plan: Plan,
        settings: Settings,
        world: World,
        device: torch.device,
        seed: int,
        loss_scale: LossScale,
        of_model: str = "",
        trace: EventTrace | None = None,
    ) -> None:
        self.plan = plan
        self._graphs = graphs
        self._state = state
        self._settings = settings
        if settings.offload and device.type != "cuda" and world.rank == 0:
            logger.info("offload=True changes nothing on %s, whose memory is the host's", device.type)
        self._world = world
        self._device = device
        self.seed = seed
        self._loss_scale = loss_scale
        self._of_model = of_model
        self._mail = Mail(world, device)
        self._trace = trace
        self.is_synchronising = True
        self._num_backwards = 0
        self._last_gradient = "none"
        self._owes_gradients = False

    def run(self, traced: TracedModel, shared: SharedCall, batch: GlobalBatch, of_batch: ValuesOfBatch) -> Any:
        """Runs one call and returns what the model returns. Collective.

        Args:
            traced: The call's graph.
            shared: The call.
            batch: Its micro-batches.
            of_batch: What they are given of the whole batch.
        """
        prepared = self._graphs.of(traced)
        needs_gradient = torch.is_grad_enabled() and traced.needs_gradient
        if needs_gradient and not self.plan.needs_gradient:
            raise InputError(
                "The model was planned for evaluation, in a first call without gradients and without an optimizer: got "
                "a call with gradients. Pass the optimizer to AutoVaruna, or make the first call one with gradients."
            )
        is_whole = needs_gradient and traced.loss is not None
        job = Job(
            split=prepared.split,
            plan=self.plan,
            batch=batch,
            needs_gradient=needs_gradient,
            seed=self.seed,
            step=shared.number,
            graph_key=traced.key,
            is_sum=self._settings.reduction == "sum",
            recomputing=prepared.recomputing,
            splitting=prepared.splitting,
            offload=self._settings.offload,
            of_batch=of_batch,
            name=f"call {shared.number + 1}{self._of_model}",
        )
        inputs = dict(zip(traced.inputs, shared.tensors, strict=True))
        recorder = self._trace.recorder if self._trace else None
        traffic = prepared.traffic(batch)
        executor = Executor(job, self._world, self._mail, traffic, prepared.stages, inputs, self._device, recorder)
        guard = Guard(self._world, executor, traced.draws_or_casts, self._device, self._forget_step)
        step = Step(
            job=job,
            executor=executor,
            gradients=prepared.gradients,
            take_kept=self._take_kept,
            world=self._world,
            mail=self._mail,
            traffic=traffic,
            inputs=inputs,
            parameters=self._own,
            device=self._device,
            guard=guard,
            is_synchronising=self.is_synchronising,
            delivers_all=self._settings.outputs == "all",
            note_backward=self._note_backward,
            note_gradients=self._note_gradients,
            loss_scale=self._loss_scale,
            factor=self._loss_scale.before(prepared.is_half) if is_whole else 1.0,
        )
        with guard:
            executor.send_inputs()
            outputs = step.whole() if is_whole else step.forwards()
            if traced.changed_state:
                share_state(traced.changed_state, self._state, self.placement, self._world)
            self._world.flush()
            if self._trace is not None:
                self._trace.write_step()
        return traced.output_tree.unflatten(_stand_ins(traced, outputs), Undelivered)

    @property
    def placement(self) -> Placement:
        """Who holds which parameter, and which buffer that calls have changed."""
        return self._graphs.placement

    @property
    def doings(self) -> Digest:
        """What the script has done between calls: the same on every rank."""
        return self._num_backwards, self._last_gradient, self._loss_scale.words, self.is_synchronising

    @property
    def words(self) -> dict[str, str]:
        """The same in words."""
        num_backwards, gradient, scale, is_synchronising = self.doings
        return {
            "the number of backwards": str(num_backwards),
            "the gradient of the last loss": str(gradient),
            "the scale of the GradScaler": str(scale),
            "no_sync()": "off" if is_synchronising else "on",
        }

    def _note_backward(self, gradient: str) -> None:
        self._num_backwards += 1
        self._last_gradient = gradient

    def _note_gradients(self, is_summed: bool) -> None:
        """Shows gradients of the parameters that other ranks hold, where plain PyTorch has them."""
        self._owes_gradients = not is_summed
        if is_summed:
            note_gradients(self._away)

    def synchronise(self) -> None:
        """Sums the gradients that were kept back and adds them to ``.grad``. Collective."""
        self._add(self._kept())
        if self._owes_gradients:
            self._note_gradients(True)

    def _take_kept(self) -> dict[str, Tensor]:
        """Sums the gradients that were kept back; no backward gives a parameter its own that was frozen since."""
        kept = self._kept()
        if not kept:
            return {}
        parameters = self._state.parameters()
        self._add({name: total for name, total in kept.items() if not parameters[name].requires_grad})
        return {name: total for name, total in kept.items() if parameters[name].requires_grad}

    def _add(self, totals: Mapping[str, Tensor]) -> None:
        parameters = self._state.parameters()
        for name, total in totals.items():
            gradient = parameters[name].grad
            parameters[name].grad = total if gradient is None else gradient.add_(total)

    def _kept(self) -> dict[str, Tensor]:
        """Sums the gradients that were kept back and returns them by parameter. Collective."""
        totals: dict[str, Tensor] = {}
        for prepared in self._graphs:
            for name, total in prepared.gradients.take_kept().items():
                totals[name] = totals[name].add_(total) if name in totals else total
        return totals

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        """The parameters that this rank holds; calls refuse others in their place."""
        parameters = self._state.parameters().items()
        return {name: each for name, each in parameters if not isinstance(each, Elsewhere) and not each.is_meta}

    @cached_property
    def _away(self) -> list[Elsewhere]:
        """The parameters that other ranks hold."""
        return [each for each in self._state.parameters().values() if isinstance(each, Elsewhere)]

    def _forget_step(self) -> None:
        """Drops what a step that failed has left behind: a script on one process may catch the error and go on."""
        self._mail = Mail(self._world, self._device)
        for prepared in self._graphs:
            prepared.gradients.take()


def _stand_ins(traced: TracedModel, outputs: Sequence[Tensor | None]) -> list[Any]:
    """Puts an object that says why in the place of each output that is not delivered."""
    pairs = zip(outputs, traced.outputs, strict=True)
    return [Undelivered(Opaque(spec.path, "tensor")) if output is None else output for output, spec in pairs]
