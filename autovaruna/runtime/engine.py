"""Runs calls of a planned model: a whole step for a loss, forwards alone for other outputs."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autovaruna.errors import InputError
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.tree import Opaque, Undelivered
from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.runtime.events import EventTrace
from autovaruna.runtime.gradient_sums.gradient_book import Backwards
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail
from autovaruna.runtime.optimizers.scaler import LossScale
from autovaruna.runtime.prepared import PreparedGraphs
from autovaruna.runtime.step_runner import RankParts, StepRunner
from autovaruna.runtime.weights.elsewhere import Elsewhere
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

    Attributes:
        plan: the plan.
        seed: what random nodes are seeded from.
        backwards: the caller's backwards, and the gradients that are kept back.
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
        if settings.offload and device.type != "cuda" and world.rank == 0:
            logger.info("offload=True changes nothing on %s, whose memory is the host's", device.type)
        self.plan = plan
        self.seed = seed
        self.backwards = Backwards(state, graphs.books)
        self._graphs = graphs
        self._settings = settings
        self._of_model = of_model
        own = {
            name: each
            for name, each in state.parameters().items()  # calls refuse others in their place
            if not isinstance(each, Elsewhere) and not each.is_meta
        }
        mail, delivers_all = Mail(world, device), settings.outputs == "all"
        self._rank = RankParts(world, device, mail, state, own, self.backwards, loss_scale, delivers_all, trace)

    def run(
        self,
        traced: TracedModel,
        tensors: Sequence[Tensor],
        number: int,
        batch: GlobalBatch,
        of_batch: Mapping[float, dict[str, Tensor]],
        is_synchronising: bool,
    ) -> Any:
        """Runs one call and returns what the model returns. Collective.

        Args:
            traced: The call's graph.
            tensors: This rank's mini-batch, in the order of the graph's inputs.
            number: How many calls there were before.
            batch: The micro-batches of all ranks.
            of_batch: What they are given of the whole batch, by the weight of their loss and the name of the node.
            is_synchronising: Whether gradients are summed over ranks now.
        """
        prepared = self._graphs.of(traced)
        needs_gradient = torch.is_grad_enabled() and traced.needs_gradient
        if needs_gradient and not self.plan.needs_gradient:
            raise InputError(
                "The model was planned for evaluation, in a first call without gradients and without an optimizer: got "
                "a call with gradients. Pass the optimizer to AutoVaruna, or make the first call one with gradients."
            )
        job = Job(
            split=prepared.split,
            plan=self.plan,
            batch=batch,
            needs_gradient=needs_gradient,
            seed=self.seed,
            step=number,
            graph_key=traced.key,
            is_sum=self._settings.reduction == "sum",
            recomputing=prepared.recomputing,
            splitting=prepared.splitting,
            offload=self._settings.offload,
            of_batch=of_batch,
            name=f"call {number + 1}{self._of_model}",
        )
        is_whole = needs_gradient and traced.loss is not None
        runner = StepRunner(
            job=job,
            rank=self._rank,
            stages=prepared.stages,
            traffic=prepared.traffic(batch),
            book=prepared.gradients,
            placement=self.placement,
            inputs=dict(zip(traced.inputs, tensors, strict=True)),
            is_synchronising=is_synchronising,
            factor=self._rank.loss_scale.before(prepared.is_half) if is_whole else None,
        )
        return traced.output_tree.unflatten(_stand_ins(traced, runner.run()), Undelivered)

    @property
    def placement(self) -> Placement:
        """Who holds which parameter, and which buffer that calls have changed."""
        return self._graphs.placement

    @property
    def doings(self) -> tuple[Hashable, ...]:
        """What the script has done between calls: the same on every rank."""
        return self.backwards.num, self.backwards.last_gradient, self._rank.loss_scale.words

    @property
    def words(self) -> dict[str, str]:
        """The same in words."""
        names = "the number of backwards", "the gradient of the last loss", "the scale of the GradScaler"
        return dict(zip(names, map(str, self.doings), strict=True))


def _stand_ins(traced: TracedModel, outputs: Sequence[Tensor | None]) -> list[Any]:
    """Puts an object that says why in the place of each output that is not delivered."""
    pairs = zip(outputs, traced.outputs, strict=True)
    return [Undelivered(Opaque(spec.path, "tensor")) if output is None else output for output, spec in pairs]
