"""Measures, in the first call, what a plan is made from: the parts of the model, the machine and the optimizer.

All ranks measure together, each part on two of them, some time apart: what else runs on a machine slows now one rank,
now another. Parts that take longer than the budget even if each runs once are measured once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import fmean, median, median_high, median_low
from time import perf_counter

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.elastic.job_folder import job_place
from autovaruna.errors import PlanError
from autovaruna.graph.random import untouched_generator
from autovaruna.graph.records import Graph
from autovaruna.graph.traced import TracedModel
from autovaruna.log import phase, progress_bar
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.profiler.cache import cache_of, link_cache_of
from autovaruna.profiler.measure import (
    Key,
    Pace,
    PartCost,
    call_seconds,
    lasting_parts,
    measure,
    measure_pace,
    merge,
    settle,
    to_profile,
)
from autovaruna.profiler.optimizer_cost import measure_step, state_factor
from autovaruna.profiler.records import Cluster, OptimizerCost, Profile
from autovaruna.ranks.torch_channel import open_to_measure
from autovaruna.ranks.world import World, gather_on_all
from autovaruna.session.links import measure_links, measure_sums
from autovaruna.session.memory import fragmentation, process_bytes_of, rank_memory
from autovaruna.session.shared_call import SharedCall

logger = logging.getLogger(__name__)
MOST_TURNS = 2
BUDGET_SECONDS = 6.0
_NOISE = 1.25  # speeds whose ratio is less than this count as equal
_CALLS_OF_AN_INSTRUCTION = 10.0
"""What the executor adds to an instruction, counted in calls of an empty piece; found from steps of tiny models."""


class SpeedWatch:
    """Samples the speeds of all ranks at several moments."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self._samples: list[list[Pace]] = []

    def sample(self) -> None:
        """Measures every rank now. Collective."""
        pace = measure_pace(self.device)
        if self.world.transport.cores_per_rank < 1.0:  # who shares its core is in the plan
            pace = replace(pace, mean=pace.typical)
        rows = self.world.gather_numbers((pace.typical, pace.mean), "measuring speeds")
        self._samples.append([Pace(*row) for row in rows])

    def speeds(self) -> tuple[float, ...]:
        """Returns the speed of each rank by all samples so far: what a step gets.

        Speed 1 is that of short samples on the typical rank. A manager has seen many steps, and less is noise to it.
        """
        speeds, place = self._relative_speeds("mean"), job_place()
        if place is None or len(place.factors) != len(speeds):
            return speeds
        return tuple(min(speed, 1.0 / factor) for speed, factor in zip(speeds, place.factors, strict=True))

    def speeds_of_samples(self) -> tuple[float, ...]:
        """Returns the speed of each rank for work so short that other programs seldom interrupt it."""
        return self._relative_speeds("typical")

    def _relative_speeds(self, kind: str) -> tuple[float, ...]:
        """Returns the speeds by one number of each `Pace`, relative to the typical rank's."""
        samples = []
        for paces in self._samples:
            typical = median_high(pace.typical for pace in paces)
            samples.append([typical / getattr(pace, kind) for pace in paces])
        return persistent_speeds(samples)


def persistent_speeds(samples: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the speeds of ranks by those in each sample.

    A rank differs from the typical one, and that one from speed 1, if it does so in every sample, in the same direction
    and by more than noise: other programs that take turns on its core are gone when the model trains.
    """
    middles = list(map(median_high, samples))
    to_middle = [[speed / middle for speed in speeds] for speeds, middle in zip(samples, middles, strict=True)]
    return tuple(_where_alike(middles) * _where_alike(speeds) for speeds in zip(*to_middle, strict=True))


def _where_alike(speeds: Sequence[float]) -> float:
    is_slower = all(speed <= 1 / _NOISE for speed in speeds)
    is_faster = all(speed >= _NOISE for speed in speeds)
    return median(speeds) if is_slower or is_faster else 1.0


@dataclass(frozen=True)
class MeasuredModel:
    """A model that is measured by all ranks."""

    model: nn.Module
    traced: TracedModel
    tensors: Sequence[Tensor]  # of a sample call
    settings: Settings
    watch: SpeedWatch  # samples the ranks' speeds before each turn of measuring and after the last

    def measure(
        self,
        sizes: Sequence[int],
        known: Collection[Key],
        *,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[Key, PartCost]:
        """Returns costs of parts that are not `known`, in seconds of a rank of speed 1, the same on all. Collective."""

        world, found, started = self.watch.world, [], perf_counter()
        num_turns = min(MOST_TURNS, self.settings.profile_iterations)
        for place in range(num_turns):
            self.watch.sample()

            def tell(done: int, total: int, place: int = place) -> None:
                advance(place * total + done, num_turns * total)

            measure_own = partial(
                measure,
                self.traced,
                self.model,
                sizes,
                self.watch.device,
                iterations=-(-self.settings.profile_iterations // num_turns),
                budget_seconds=BUDGET_SECONDS / num_turns,
                share=((world.rank + place) % world.num_ranks, world.num_ranks),  # the parts that the next rank had
                known=known,
                inputs=self.tensors,
                on_progress=tell,
            )
            found.append(gather_on_all(world, measure_own, "measuring"))
            if world.broadcast_object(perf_counter() - started > BUDGET_SECONDS, 0, "measuring"):
                break
        self.watch.sample()
        joined = [self._at_speed_1(of_ranks) for of_ranks in found]
        logger.debug("measured %d parts of a model of %d blocks", len(joined[0]), len(self.traced.graph.blocks))
        return {key: settle([turn[key] for turn in joined]) for key in joined[0]}

    def _at_speed_1(self, of_ranks: Sequence[Mapping[Key, PartCost]]) -> dict[Key, PartCost]:
        """Returns what all ranks have measured in a turn, in seconds of a rank of speed 1."""
        return {
            key: cost.with_seconds(*(speed * seconds for seconds in cost.seconds))
            for costs, speed in zip(of_ranks, self.watch.speeds_of_samples(), strict=True)
            for key, cost in costs.items()
        }


def needs_gradient(traced: TracedModel) -> bool:
    """Says whether a step goes backward."""
    return torch.is_grad_enabled() and traced.needs_gradient


def constraints_of(settings: Settings, traced: TracedModel) -> Constraints:
    """Returns what the settings leave to the planner."""
    known = {each.name: getattr(settings, each.name) for each in fields(Constraints)}
    if traced.loss is None and needs_gradient(traced):
        known |= {"schedule": "gpipe", "in_flight": 0}  # all forwards come before the caller's backward
    return Constraints(**known)


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
    subject: MeasuredModel,
    optimizer: torch.optim.Optimizer | None,
    shared: SharedCall,
    optimizer_bytes_factor: float,
    resident_before: float | None,
) -> Problem:
    """Measures model, machine and optimizer for the first call. Collective."""
    traced, settings, watch = subject.traced, subject.settings, subject.watch
    fewest = len(shared.groups)  # every mini-batch is at least one micro-batch
    sizes = sizes_to_measure(settings, traced, shared.global_batch_size, fewest)
    batch_bytes = sum(each.nbytes for each in shared.tensors if each.device.type == watch.device.type)
    with phase(logger, "measuring the model, the ranks and the optimizer"):
        profile = measured_profile(subject, sizes)
        cluster = describe_cluster(watch, traced.graph, settings, resident_before, batch_bytes)
        step_cost = optimizer_cost(optimizer, watch.world, watch.device)
    batch = shared.global_batch_size, shared.groups
    return problem_of(traced, settings, profile, cluster, batch, optimizer_bytes_factor, step_cost)


def problem_of(
    traced: TracedModel,
    settings: Settings,
    profile: Profile,
    cluster: Cluster,
    batch: tuple[int, tuple[tuple[int, ...], ...]],
    optimizer_bytes_factor: float,
    optimizer_cost: OptimizerCost,
) -> Problem:
    """Returns what the planner is asked; `batch` is the global batch's samples, and the ranks that pass each part."""
    global_batch_size, groups = batch
    return Problem(
        graph=traced.graph,
        profile=profile,
        cluster=cluster,
        global_batch_size=global_batch_size,
        optimizer_bytes_factor=optimizer_bytes_factor,
        optimizer_cost=optimizer_cost,
        needs_gradient=needs_gradient(traced),
        min_micro_batches_for_inputs=min(len(groups), global_batch_size),
        constraints=constraints_of(settings, traced),
        input_groups=groups,
        has_loss=traced.loss is not None,
        delivers_outputs=settings.outputs == "all",
    )


def measured_profile(subject: MeasuredModel, sizes: list[int]) -> Profile:
    """Measures parts that no rank's cache has. Collective."""
    world, settings, device = subject.watch.world, subject.settings, subject.watch.device
    host = world.hosts[world.rank]
    cache = cache_of(settings, device, world.hosts.count(host))
    if world.hosts.index(host) != world.rank:
        cache = None  # the first rank of a host reads and writes it
    lasting = lasting_parts(subject.traced, sizes)
    known = merge(gather_on_all(world, lambda: cache.read(lasting) if cache else {}, "reading saved measurements"))
    with progress_bar("measuring", settings.progress and world.rank == 0) as advance:
        fresh = subject.measure(sizes, known, advance=advance)
    if cache:
        cache.write({key: fresh[key] for key in lasting if key in fresh})
    return to_profile(subject.traced, merge([known, fresh]), device)


def describe_cluster(
    watch: SpeedWatch, graph: Graph, settings: Settings, resident_before: float | None = None, batch_bytes: float = 0.0
) -> Cluster:
    """Measures links, as tensors will go, and speeds. Collective.

    A process held `resident_before` the model was traced (None: not known), which comes on top of a memory limit that
    the user sets; a mini-batch takes `batch_bytes` on the device.
    """
    world, device = watch.world, watch.device
    open_to_measure(settings.channel, world, device)
    cache = link_cache_of(settings) if world.hosts.index(world.hosts[world.rank]) == world.rank else None
    local, remote = measure_links(world, device, cache)
    sums = measure_sums(world, [each.num_bytes for each in graph.parameters if each.needs_gradient], device, cache)
    own_process_bytes = process_bytes_of(world, device, resident_before, batch_bytes)  # with what messages leave
    process_bytes = max(own_process_bytes)
    watch.sample()
    overhead = _CALLS_OF_AN_INSTRUCTION * fmean(call_seconds(1, device))
    memory = rank_memory(world, device, settings) + (process_bytes if settings.memory_limit_bytes else 0.0)
    cores = world.transport.cores_per_rank if device.type == "cpu" else 1.0
    known = world.gather_numbers((memory, overhead, cores), "describing the machine")
    cores = min(each for *_, each in known)  # in a sum all ranks are busy; the plan has seconds on a core each
    return Cluster(
        hosts=world.hosts,
        memory_bytes=tuple(memory for memory, *_ in known),
        speeds=watch.speeds(),
        local_link=local,
        remote_link=remote,
        all_reduce_bytes_per_second=sums.bytes_per_second / cores,
        all_reduce_latency_seconds=sums.latency_seconds * cores,
        overhead_seconds=median_low(each for _, each, _ in known),
        process_bytes=process_bytes,
        fragmentation=fragmentation(device),
        own_process_bytes=() if settings.memory_limit_bytes else own_process_bytes,
        memory_margin=settings.memory_margin,
        cores_per_rank=cores,
    )


def optimizer_factor(optimizer: torch.optim.Optimizer | None, settings: Settings) -> float:
    """Returns the bytes of optimizer state for each byte of a trained parameter, by trying the optimizer out."""
    if settings.optimizer_bytes_factor != "auto":
        return float(settings.optimizer_bytes_factor)
    if optimizer is None:
        return 0.0
    try:
        with untouched_generator(torch.device("cpu")):
            return state_factor(optimizer)
    except Exception as error:
        raise PlanError(
            f"{type(optimizer).__name__} cannot be tried out: got {type(error).__name__} from its step() alone: "
            f"{error}. Pass optimizer_bytes_factor, the bytes of its state for each byte of parameters (2 for Adam in "
            "the parameters' own dtype); and with it, for one of several steps by a closure or methods (SAM), "
            "num_stages=1 and num_replicas=the number of ranks: each then holds all parameters, as such a step wants."
        ) from error


def optimizer_cost(optimizer: torch.optim.Optimizer | None, world: World, device: torch.device) -> OptimizerCost:
    """Measures a step of the optimizer, on all ranks; nothing for one that cannot be tried out. Collective."""
    mine = OptimizerCost()
    if optimizer is not None:
        try:
            with untouched_generator(device):
                mine = measure_step(optimizer, device)
        except Exception as error:
            logger.info("the step of %s cannot be tried out, and is left out: %s", type(optimizer).__name__, error)
    numbers = mine.seconds_per_parameter, mine.seconds_per_byte, mine.work_of_all, mine.work_of_largest
    known = [OptimizerCost(*row) for row in world.gather_numbers(numbers, "measuring the optimizer")]
    return OptimizerCost(
        median_low(cost.seconds_per_parameter for cost in known),
        median_low(cost.seconds_per_byte for cost in known),
        max(cost.work_of_all for cost in known),
        max(cost.work_of_largest for cost in known),
    )
