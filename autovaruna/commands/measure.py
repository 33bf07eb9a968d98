"""Measures a model on this machine and saves the profile."""

from __future__ import annotations

import argparse

from autovaruna.commands.printing import show
from autovaruna.commands.setting_options import add_settings, settings_of
from autovaruna.errors import ConfigError
from autovaruna.files import check_writable

HELP = "measure a model on this machine, block by block, and save the profile"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function that returns (model, args, kwargs)")
    parser.add_argument("-o", "--output", default="profile.json", metavar="FILE", help="the profile (profile.json)")
    parser.add_argument("--micro-batch-sizes", default="", metavar="1,2,4", help="samples in a micro-batch")
    add_settings(parser, ("device", "profile_iterations", "profile_cache", "batch_inputs", "dynamic_batch"))


def run(options: argparse.Namespace) -> None:
    """Measures, saves, and says what was measured."""
    from autovaruna.commands.measuring import measure_here  # imports torch
    from autovaruna.commands.target import load_target
    from autovaruna.profiler.profile_file import save_measured

    check_writable("--output", options.output)
    settings = settings_of(options)
    sizes = read_sizes(options.micro_batch_sizes)
    target = load_target(options.target, settings)
    profile, num_measured = measure_here(target, sizes or default_sizes(target.batch_size), settings)
    save_measured(options.output, profile)
    sizes_text = ", ".join(map(str, profile.micro_batch_sizes))
    show(
        f"{len(target.traced.graph.blocks)} blocks at {sizes_text} samples on {profile.device}: measured "
        f"{num_measured} distinct parts, the others were known; saved to {options.output}"
    )


def read_sizes(text: str) -> list[int]:
    """Returns micro-batch sizes from a text such as ``1,2,4``.

    Raises:
        ConfigError: it has something else.
    """
    try:
        sizes = sorted({int(size) for size in text.split(",")}) if text else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(f"--micro-batch-sizes is {text!r}; expected whole numbers above 0, as 1,2,4")
    return sizes


def default_sizes(batch_size: int) -> list[int]:
    """Returns a quarter of a batch and all of it: small micro-batches cost more for each sample."""
    return sorted({max(1, batch_size // 4), batch_size})
