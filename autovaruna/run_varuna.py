"""Starts jobs over `autovaruna.elastic`: ``autovaruna run``, and Varuna's launcher with the same options.

``python -m autovaruna.run_varuna --machine_list FILE ... script.py arguments`` is the latter.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import NoReturn

from autovaruna.elastic.host_list import check_requeue, requeue
from autovaruna.elastic.job import Grid, handling
from autovaruna.elastic.manager import start
from autovaruna.elastic.options import LaunchOptions, options_in, read_options
from autovaruna.elastic.options import add_options as add_launch_options
from autovaruna.elastic.rank_script import SAVED
from autovaruna.errors import AutoVarunaError, ConfigError

EXAMPLE = "autovaruna run --machine_list hosts --ranks_per_host 8 train.py --epochs 3"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a launch."""
    text = "after status 75, have Slurm put the batch job that this is into its queue again"
    parser.add_argument("--requeue", action="store_true", help=text)
    add_launch_options(parser, None)


def run(options: argparse.Namespace) -> int:
    """Runs a training script on every rank of some hosts, and goes on when hosts or ranks come and go."""
    gc.set_threshold(700, 10, 10)  # unlike other commands it may run for months
    if options.requeue:
        check_requeue()
    try:
        with handling(_end_early):
            status = start(options_in(options), choose)
    except _AskedEarly:
        status = SAVED
    if status == SAVED and options.requeue:
        sys.stderr.write("autovaruna: asking Slurm to put this job into its queue again\n")
        requeue()
    return status


class _AskedEarly(BaseException):
    """SIGUSR1 has come before there was a job that hears it."""


def _end_early(number: int, frame: FrameType | None) -> NoReturn:
    raise _AskedEarly if number == signal.SIGUSR1 else KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job and returns its status: that of its first rank that failed, 128 and more for a signal."""
    try:
        return start(read_options(arguments), choose)
    except AutoVarunaError as error:
        sys.stderr.write(f"run_varuna: {error}\n")
        return 2


def choose(options: LaunchOptions) -> tuple[LaunchOptions, Grid | None]:
    """Returns the options with stages and micro-batch size, and the ranks of each stage; None: the script finds them.

    Raises ConfigError if a profile needs the batch size, too, PlanError if nothing fits.
    """
    if not options.num_stages and options.profile_folder:
        if options.batch_size is None:
            raise ConfigError("--profile_folder needs --batch_size, the samples of a step over all ranks")
        from autovaruna.varuna.profiler import AutoConfig  # needs torch, which takes seconds

        found = AutoConfig(
            options.num_ranks, options.batch_size, options.profile_folder, chunk_size=options.chunk_size
        ).best
        sys.stderr.write(
            f"run_varuna: found {found.num_stages} stages of {found.num_replicas} replicas, micro-batches of "
            f"{found.micro_batch_size} samples: {found.seconds:.4g} s a step\n"
        )
        options = replace(options, num_stages=found.num_stages, chunk_size=found.micro_batch_size)
    if not options.num_stages:
        return options, None
    num_replicas = options.num_ranks // options.num_stages
    if options.batch_size is not None and options.batch_size < num_replicas:
        raise ConfigError(
            f"--batch_size is {options.batch_size} for {num_replicas} replicas; expected at least one sample for each"
        )
    left = options.num_ranks - options.num_stages * num_replicas
    if left:
        sys.stderr.write(f"run_varuna: {left} of {options.num_ranks} ranks are left over by --nstages\n")
    from autovaruna.varuna.grid import grid_of

    return options, grid_of(options.num_stages, num_replicas)


if __name__ == "__main__":
    sys.exit(main())
