"""Runs a training script on every rank of some hosts, and goes on when hosts or ranks come and go."""

from __future__ import annotations

import argparse
import gc

from autovaruna.elastic.manager import start
from autovaruna.elastic.options import add_options as add_launch_options
from autovaruna.elastic.options import options_in
from autovaruna.run_varuna import choose

HELP = "run a training script, and go on when hosts come and go"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a launch."""
    add_launch_options(parser, None)


def run(options: argparse.Namespace) -> int:
    """Runs the job and returns its status."""
    gc.set_threshold(700, 10, 10)  # unlike other commands it may run for months
    return start(options_in(options), choose)
