"""Measures a model on this machine and saves the profile."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from autovaruna.commands.config import add_settings, settings_of
from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.commands.target import Target, load_target
from autovaruna.config.files import check_writable
from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError
from autovaruna.log import progress_bar
from autovaruna.profiler.cache import cache_of, save_measured
from autovaruna.profiler.measure import lasting_parts, measure, merge, to_profile
from autovaruna.profiler.records import Profile
from autovaruna.session.model import find_device

EXAMPLE = "autovaruna measure examples/gpt3.py:build --micro-batch-sizes 1,2,4 -o profile.json"


def measure_here(target: Target, sizes: Sequence[int], settings: Settings) -> tuple[Profile, int]:
    """Measures what the cache does not know; returns the profile, and how many parts that were."""
    traced, device = target.traced, find_device(target.model, settings)
    if not settings.dynamic_batch:
        sizes = [traced.sizes.batch_size]
    cache, lasting = cache_of(settings, device), lasting_parts(traced, sizes)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function that returns (model, args, kwargs)")
    parser.add_argument("-o", "--output", default="profile.json", metavar="FILE", help="the profile (profile.json)")
    parser.add_argument("--micro-batch-sizes", default="", metavar="1,2,4", help="samples in a micro-batch")
    add_json(parser)
    add_settings(
        parser, ("device", "profile_iterations", "profile_cache", "batch_inputs", "batch_dims", "dynamic_batch")
    )


def run(options: argparse.Namespace) -> None:
    """Measures a model on this machine and saves the profile."""
    check_writable("--output", options.output)
    settings = settings_of(options)
    sizes = read_sizes(options.micro_batch_sizes)
    target = load_target(options.target, settings)
    quarter, whole = max(1, target.batch_size // 4), target.batch_size  # small ones cost more for each sample
    profile, num_measured = measure_here(target, sizes or sorted({quarter, whole}), settings)
    save_measured(options.output, profile)
    if options.json:
        show_json(asdict(profile) | {"file": options.output, "num_measured": num_measured})
        return
    sizes_text = ", ".join(map(str, profile.micro_batch_sizes))
    show(
        f"{len(target.traced.graph.blocks)} blocks at {sizes_text} samples on {profile.device}: measured "
        f"{num_measured} distinct parts, the others were known; saved to {options.output}"
    )


def read_sizes(text: str) -> list[int]:
    """Returns micro-batch sizes from a text such as ``1,2,4``; ConfigError for something else."""
    try:
        sizes = sorted({int(size) for size in text.split(",")}) if text else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(f"--micro-batch-sizes is {text!r}; expected whole numbers above 0, as 1,2,4")
    return sizes
