"""Is the command line: ``python -m autovaruna config`` and ``python -m autovaruna show FILE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autovaruna.conf_files import PACKAGED
from autovaruna.config import resolve
from autovaruna.errors import AutoVarunaError
from autovaruna.planner.deployment import load
from autovaruna.planner.infeasible import readable
from autovaruna.planner.records import StagePlan
from autovaruna.planner.table import ranks_text, seconds
from autovaruna.settings import declarations

_STAGE_COLUMNS = (
    "stage",
    "starts at",
    "ranks",
    "parameters",
    "forward",
    "backward",
    "memory",
    "recompute",
    "in flight",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status, 1 after an error that the user can put right."""
    options = _parser().parse_args(arguments)
    try:
        table = _show(options.file) if options.command == "show" else _config()
    except AutoVarunaError as error:
        sys.stderr.write(f"autovaruna: {error}\n")
        return 1
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m autovaruna", description="Shows what AutoVaruna would use.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("config", help="print each setting, its value, and where the value came from")
    show = commands.add_parser("show", help="print a saved deployment as a table")
    show.add_argument("file", type=Path, metavar="FILE", help="a deployment, as deployment.json")
    return parser


def _config() -> Table:
    settings = resolve()
    table = Table("setting", "value", "from", "meaning", caption=f"A conf.toml to start from: {PACKAGED / 'conf.toml'}")
    for each in declarations():
        value = getattr(settings, each.name)
        cells = (each.name, "auto" if value is None else str(value), settings.source_of(each.name))
        table.add_row(*(Text(cell) for cell in (*cells, each.metadata["meaning"])))
    return table


def _show(file: Path) -> Table:
    deployment = load(file)
    plan, valid_for = deployment.plan, deployment.fingerprint
    title = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size:.3g} samples, {plan.schedule}"
    title += f": predicted {seconds(plan.predicted_seconds)} a step"
    table = Table(
        title=title, caption=f"Valid for graph {valid_for.graph}, {valid_for.num_ranks} ranks, {valid_for.device}"
    )
    for name in (
        "stage",
        "starts at",
        "ranks",
        "parameters",
        "forward",
        "backward",
        "memory",
        "recompute",
        "in flight",
    ):
        table.add_column(name, overflow="fold")
    for number, (stage, cut) in enumerate(zip(plan.stages, ("(the first block)", *deployment.cuts), strict=True)):
        table.add_row(*(Text(cell) for cell in (str(number), cut, *_cells(stage))))
    return table


def _cells(stage: StagePlan) -> tuple[str, ...]:
    return (
        ranks_text(stage.ranks),
        readable(stage.parameter_bytes),
        seconds(stage.forward_seconds),
        seconds(stage.backward_seconds),
        readable(stage.memory_bytes),
        "yes" if stage.needs_recompute else "no",
        str(stage.in_flight),
    )


if __name__ == "__main__":
    sys.exit(main())
