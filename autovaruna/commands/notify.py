"""Tells the jobs of this user that a host will be taken away: they finish the step, and go on without it in time."""

from __future__ import annotations

import argparse

from autovaruna.elastic.notices import notify_manager_preempt

HELP = "tell running jobs that a host will be taken away"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the host and its time."""
    parser.add_argument("host", metavar="HOST", help="as the machine list has it")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="after which it goes (30)")


def run(options: argparse.Namespace) -> None:
    """Tells them."""
    notify_manager_preempt(options.host, options.seconds)
