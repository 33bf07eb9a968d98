"""Measures what a plan of the first call is made from: the parts of the model, the machine and the optimizer.

All ranks measure together, each part on two of them, some time apart: what else runs on a machine slows what is
measured, now one rank, now another, for seconds at a time. Parts that take longer than the budget even if each runs
once are measured once: what disturbs for seconds disturbs a small share of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.graph.traced import TracedModel
from autovaruna.log import phase, progress_bar
from autovaruna.planner.problem import SPLIT_SCHEDULE, Constraints, Problem
from autovaruna.profiler.cache import cache_of
from autovaruna.profiler.measure import Key, PartCost, lasting_keys, measure, merge, settle, to_profile
from autovaruna.profiler.records import Profile
from autovaruna.runtime.world import gather_on_all
from autovaruna.session.calls import SharedCall
from autovaruna.session.machine import SpeedWatch, describe_cluster, optimizer_cost

logger = logging.getLogger(__name__)
_MOST_TURNS = 2
_BUDGET_SECONDS = 10.0


@dataclass(frozen=True)
class Turn:
    """What a rank measures at a time.

    Attributes:
        share: ``(k, num_ranks)``: this rank measures every num_ranks-th part from the k-th.
        iterations: samples of each measurement.
        budget_seconds: after which each part is sampled once only.
        place, num_turns: which turn this is.
    """

    share: tuple[int, int]
    iterations: int
    budget_seconds: float
    place: int
    num_turns: int

    def progress(self, advance: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Returns what is to be told of the parts of this turn, so that `advance` hears of the parts of all turns."""
        return lambda done, total: advance(self.place * total + done, self.num_turns * total)


@dataclass(frozen=True)
class Subject:
    """A model that is measured by all ranks."""

    model: nn.Module
    traced: TracedModel
    tensors: Sequence[Tensor]  # of a sample call
    settings: Settings
    watch: SpeedWatch  # looks at the ranks' speeds before each turn of measuring and after the last

    def measure(
        self,
        sizes: Sequence[int],
        known: Collection[Key],
        *,
        splits: bool = False,
        advance: Callable[[int, int], None] | None = None,
    ) -> dict[Key, PartCost]:
        """Measures what is not known, in seconds of a rank of speed 1. Collective.

        Args:
            sizes: Samples in a micro-batch.
            known: Parts that are not measured.
            splits: Whether weight gradients are measured apart, too.
            advance: Hears of the parts measured so far on this rank, and of their number.

        Returns:
            The cost of every part that was measured, the same on every rank.
        """

        def own_share(turn: Turn) -> dict[Key, PartCost]:
            return measure(
                self.traced,
                self.model,
                sizes,
                self.watch.device,
                iterations=turn.iterations,
                budget_seconds=turn.budget_seconds,
                splits=splits,
                share=turn.share,
                known=known,
                inputs=self.tensors,
                on_progress=turn.progress(advance) if advance else None,
            )

        return measure_together(self.watch, self.settings.profile_iterations, own_share)


def measure_together(
    watch: SpeedWatch, iterations: int, own_share: Callable[[Turn], dict[Key, PartCost]]
) -> dict[Key, PartCost]:
    """Measures on all ranks, by turns as far as the budget goes, and joins the results. Collective.

    Args:
        watch: Of the ranks' speeds.
        iterations: Samples of each part, over all turns.
        own_share: Measures this rank's share of a turn.
    """
    world, turns, started = watch.world, [], perf_counter()
    for turn in _turns(iterations, world.rank, world.num_ranks):
        watch.look()
        turns.append(gather_on_all(world, partial(own_share, turn), "measuring"))
        if world.broadcast_object(perf_counter() - started > _BUDGET_SECONDS, 0, "measuring"):
            break
    watch.look()
    speeds = watch.speeds_of_samples()
    joined = [merge(map(_at_speed_1, of_ranks, speeds)) for of_ranks in turns]
    return {key: settle([turn[key] for turn in joined]) for key in joined[0]}


def _turns(iterations: int, rank: int, num_ranks: int) -> list[Turn]:
    """Returns the turns of a rank; each takes the parts that the next rank had."""
    num_turns = min(_MOST_TURNS, iterations)
    samples, budget = -(-iterations // num_turns), _BUDGET_SECONDS / num_turns
    return [Turn(((rank + k) % num_ranks, num_ranks), samples, budget, k, num_turns) for k in range(num_turns)]


def _at_speed_1(costs: dict[Key, PartCost], speed: float) -> dict[Key, PartCost]:
    """Returns costs that a rank of some speed has measured in seconds of a rank of speed 1."""
    return {key: cost.with_seconds(speed * seconds for seconds in cost.seconds) for key, cost in costs.items()}


SHAPING = (
    "num_stages",
    "simplicity",
    "max_stages_per_rank",
    "num_replicas",
    "num_micro_batches",
    "micro_batch_size",
    "min_micro_batches",
    "max_micro_batches",
    "recompute",
    "schedule",
    "in_flight",
    "cuts",
    "cutpoints",
    "stage_ranks",
    "shard_optimizer",
    "inputs",
    "dynamic_batch",
)
"""The settings that shape a plan; a saved one is valid for their values."""

_SPLIT_RANKS = 4


def needs_gradient(traced: TracedModel) -> bool:
    """Whether a step goes backward."""
    return torch.is_grad_enabled() and traced.needs_gradient


def constraints_of(settings: Settings, traced: TracedModel) -> Constraints:
    """Returns what the settings leave to the planner."""
    own = {each.name for each in fields(Constraints)} - {"may_split"}
    known = {name: getattr(settings, name) for name in own}
    if traced.loss is None and needs_gradient(traced):
        known |= {"schedule": "gpipe", "in_flight": 0}  # all forwards come before the caller's backward
    return Constraints(**known, may_split=settings.compile_stages is False)


def splits_backward(settings: Settings, num_ranks: int) -> bool:
    """Whether plans that compute weight gradients apart are looked for: of few ranks they gain too little."""
    is_wanted = settings.schedule == SPLIT_SCHEDULE or (settings.schedule == "auto" and num_ranks >= _SPLIT_RANKS)
    return is_wanted and settings.compile_stages is False


def sizes_to_measure(
    settings: Settings, traced: TracedModel, global_batch_size: int, num_mini_batches: int
) -> list[int]:
    """Returns micro-batch sizes that span those a plan may choose."""
    if traced.sizes.symbol is None:
        return [traced.sizes.batch_size]
    if settings.micro_batch_size:
        return [min(settings.micro_batch_size, global_batch_size)]
    if settings.num_micro_batches:
        return [max(1, round(global_batch_size / settings.num_micro_batches))]
    largest = max(1, global_batch_size // num_mini_batches)
    return sorted({max(1, largest // 4), largest})


def measured_problem(
    subject: Subject,
    optimizer: torch.optim.Optimizer | None,
    shared: SharedCall,
    optimizer_bytes_factor: float,
    resident_before: float | None,
) -> Problem:
    """Measures model, machine and optimizer for the first call. Collective."""
    traced, settings, watch = subject.traced, subject.settings, subject.watch
    fewest = len(shared.groups)  # every mini-batch is at least one micro-batch
    sizes = sizes_to_measure(settings, traced, shared.global_batch_size, fewest)
    with phase(logger, "measuring the parts of the model"):
        profile = _measure(subject, sizes)
    batch_bytes = sum(each.nbytes for each in shared.tensors if each.device.type == watch.device.type)
    with phase(logger, "measuring links, memory and speeds of the ranks"):
        cluster = describe_cluster(watch, traced.graph, settings, resident_before, batch_bytes)
    with phase(logger, "trying the optimizer out"):
        step_cost = optimizer_cost(optimizer, watch.world, watch.device)
    return Problem(
        graph=traced.graph,
        profile=profile,
        cluster=cluster,
        global_batch_size=shared.global_batch_size,
        optimizer_bytes_factor=optimizer_bytes_factor,
        optimizer_cost=step_cost,
        needs_gradient=needs_gradient(traced),
        min_micro_batches_for_inputs=fewest,
        constraints=constraints_of(settings, traced),
        input_groups=shared.groups,
        has_loss=traced.loss is not None,
        delivers_outputs=settings.outputs == "all",
    )


def _measure(subject: Subject, sizes: list[int]) -> Profile:
    """Measures what no rank knows already."""
    world, settings, device = subject.watch.world, subject.settings, subject.watch.device
    splits = splits_backward(settings, world.num_ranks)
    cache = cache_of(settings, device, world.hosts.count(world.hosts[world.rank]), splits=splits)
    lasting = lasting_keys(subject.traced, sizes)
    is_first_of_host = world.hosts.index(world.hosts[world.rank]) == world.rank

    def known_here() -> dict[Key, PartCost]:
        return cache.read(lasting) if cache and is_first_of_host else {}

    known = merge(gather_on_all(world, known_here, "reading saved measurements"))
    with progress_bar("measuring", settings.progress and world.rank == 0) as advance:
        fresh = subject.measure(sizes, known, splits=splits, advance=advance)
    if cache and is_first_of_host:
        cache.write({key: fresh[key] for key in lasting if key in fresh})
    return to_profile(subject.traced, merge([known, fresh]), device)
