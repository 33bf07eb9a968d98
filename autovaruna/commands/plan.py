"""Plans a model for ranks that need not be there, shows the plan, and saves it as a deployment."""

from __future__ import annotations

import argparse

from autovaruna.commands.plot import checked_plot
from autovaruna.commands.setting_options import add_settings
from autovaruna.errors import ConfigError
from autovaruna.files import check_writable
from autovaruna.kinds import BYTES, REFUSALS, at_home

HELP = "plan a model for any number of ranks, none of which has to be there"
_SETTINGS = (
    "num_stages",
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
    "memory_margin",
    "optimizer_bytes_factor",
    "inputs",
    "batch_inputs",
    "dynamic_batch",
    "loss_mode",
    "profile_iterations",
    "profile_cache",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function that returns (model, args, kwargs)")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="the number of ranks")
    parser.add_argument("--ranks-per-host", type=int, default=0, metavar="N", help="ranks on each host (all of them)")
    parser.add_argument("--memory", metavar="BYTES", help="memory of a rank, as 80GiB (what the device file says)")
    parser.add_argument("--device", metavar="FILE", help="a device file, as h100.toml; without one, this machine")
    parser.add_argument("--profile", metavar="FILE", help="what the measure command saved, in place of a prediction")
    parser.add_argument(
        "--batch-size", type=int, default=0, metavar="N", help="samples of all ranks together (the call's, times ranks)"
    )
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="one of torch.optim, as sgd or sgd:momentum=0.9 (adamw)"
    )
    parser.add_argument("-o", "--output", default="", metavar="FILE", help="save the plan as a deployment")
    parser.add_argument("--plot", type=at_home, default="", metavar="FILE", help="draw a step as a picture: step.png")
    parser.add_argument("--table", action="store_true", help="list all sensible choices, best first")
    add_settings(parser, _SETTINGS)


def run(options: argparse.Namespace) -> None:
    """Plans, and shows and saves what comes out."""
    if options.ranks < 1 or options.ranks_per_host < 0 or options.batch_size < 0:
        raise ConfigError(
            f"--ranks is {options.ranks}, --ranks-per-host {options.ranks_per_host}, --batch-size "
            f"{options.batch_size}; expected 1 or more ranks, and no negative number"
        )
    if options.memory:
        options.memory = num_bytes(options.memory)
    if options.output:
        check_writable("--output", options.output)
    if options.plot:
        options.plot = checked_plot(options.plot)
    from autovaruna.commands.planning import Planning  # imports torch
    from autovaruna.commands.report import report
    from autovaruna.parallel.machine import keep_freed_memory

    keep_freed_memory()  # the planner makes and frees matrices of megabytes by the thousand
    report(Planning(options), options)


def num_bytes(text: str) -> object:
    """Returns the memory of a rank.

    Raises:
        ConfigError: it is no number of bytes, or 0.
    """
    try:
        value = BYTES.read(text)
    except REFUSALS:
        value = 0
    if not value:
        raise ConfigError(f"--memory is {text!r}; expected {BYTES.expected}, and more than 0")
    return value
