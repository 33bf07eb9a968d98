"""Measures a model on this machine, alone."""

from __future__ import annotations

from collections.abc import Sequence

from autovaruna.commands.target import Target
from autovaruna.parallel.own_device import find_device
from autovaruna.profiler.environment import cache_of
from autovaruna.profiler.measure import lasting_keys, measure, merge
from autovaruna.profiler.profile import to_profile
from autovaruna.profiler.progress import progress_bar
from autovaruna.profiler.records import Profile
from autovaruna.settings import Settings


def measure_here(target: Target, sizes: Sequence[int], settings: Settings) -> tuple[Profile, int]:
    """Measures what the cache does not know.

    Args:
        target: The model.
        sizes: Samples in a micro-batch.
        settings: Say where, how often, and where costs are kept.

    Returns:
        The profile, and how many parts were measured.

    Raises:
        MeasureError: a block cannot be run.
    """
    traced, device = target.traced, find_device(target.model, settings)
    if not settings.dynamic_batch:
        sizes = [traced.sizes.batch_size]
    cache, lasting = cache_of(settings, device), lasting_keys(traced, sizes)
    known = cache.read(lasting) if cache else {}
    with progress_bar("measuring") as advance:
        fresh = measure(
            traced,
            target.model,
            sizes,
            device,
            iterations=settings.profile_iterations,
            known=known,
            inputs=target.tensors,
            on_progress=advance,
        )
    if cache:
        cache.write({key: fresh[key] for key in lasting if key in fresh})
    return to_profile(traced, merge([known, fresh]), device), len(fresh)
