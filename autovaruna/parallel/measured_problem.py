"""Measures what a plan of the first call is made from: the model, the machine and the optimizer."""

from __future__ import annotations

import torch

from autovaruna.parallel.calls import SharedCall
from autovaruna.parallel.machine import describe_cluster, optimizer_cost
from autovaruna.parallel.measuring import Subject
from autovaruna.parallel.problem import constraints_of, needs_gradient, sizes_to_measure, splits_backward
from autovaruna.planner import Problem
from autovaruna.profiler.environment import cache_of
from autovaruna.profiler.measure import Key, PartCost, lasting_keys, merge
from autovaruna.profiler.profile import to_profile
from autovaruna.profiler.progress import progress_bar
from autovaruna.profiler.records import Profile
from autovaruna.runtime.worlds.on_all import gather_on_all


def measured_problem(
    subject: Subject,
    optimizer: torch.optim.Optimizer | None,
    shared: SharedCall,
    optimizer_bytes_factor: float,
    resident_before: float,
) -> Problem:
    """Measures model, machine and optimizer. Collective.

    Args:
        subject: The model.
        optimizer: Its optimizer.
        shared: The first call.
        optimizer_bytes_factor: Bytes of optimizer state for each byte of a trained parameter.
        resident_before: What this process held before the model was traced, in bytes; 0: not known.
    """
    traced, settings, watch = subject.traced, subject.settings, subject.watch
    fewest = len(shared.groups)  # every mini-batch is at least one micro-batch
    sizes = sizes_to_measure(settings, traced, shared.global_batch_size, fewest)
    profile = _measure(subject, sizes)
    batch_bytes = sum(each.nbytes for each in shared.tensors if each.device.type == watch.device.type)
    return Problem(
        graph=traced.graph,
        profile=profile,
        cluster=describe_cluster(watch, traced.graph, settings, resident_before, batch_bytes),
        global_batch_size=shared.global_batch_size,
        optimizer_bytes_factor=optimizer_bytes_factor,
        optimizer_cost=optimizer_cost(optimizer, watch.world, watch.device),
        needs_gradient=needs_gradient(traced),
        min_micro_batches_for_inputs=fewest,
        constraints=constraints_of(settings, traced, fewest),
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
