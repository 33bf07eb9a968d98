"""Prints a saved deployment as a table, or as JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.planner.deployment import Deployment, load
from autovaruna.planner.table import plan_table

EXAMPLE = "autovaruna show deployment.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the file."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a deployment, as deployment.json")
    add_json(parser)


def run(options: argparse.Namespace) -> None:
    """Prints a saved deployment as a table."""
    deployment = load(options.file)
    if options.json:
        show_json(record_of(deployment))
        return
    valid_for = deployment.fingerprint
    show(plan_table(deployment.plan, ("(the first block)", *deployment.cuts), "starts at", has_depths=True))
    measured = "" if deployment.plan.is_measured else "; nothing was measured"
    show(f"valid for graph {valid_for.graph}, {valid_for.num_ranks} ranks, {valid_for.device}{measured}")


def record_of(deployment: Deployment) -> dict[str, object]:
    """Returns a deployment for programs, in bytes and seconds."""
    plan, cuts = deployment.plan, ("", *deployment.cuts)
    stages = [asdict(stage) | {"starts_at": cut} for stage, cut in zip(plan.stages, cuts, strict=True)]
    return asdict(plan) | {"stages": stages, "valid_for": asdict(deployment.fingerprint)}
