"""Prints tables and texts to standard output, and draws a simulated step as a picture (the extra ``plot``)."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from autovaruna.config.files import check_writable
from autovaruna.errors import ConfigError, InputError
from autovaruna.schedule.pipeline import Kind
from autovaruna.schedule.simulation import Simulation

Spans = Sequence[tuple[float, float]]  # begin and length of bars, in seconds
KINDS = {"F": "forward", "R": "recompute", "B": "backward", "a": "all-reduce", "w": "wait for a message"}
"""What a bar of a step is, by the letter with which its name begins."""
COLOURS = dict(zip(KINDS.values(), ("#4c78a8", "#f2cf5b", "#54a24b", "#b279a2", "#e8e8e8"), strict=True))


def checked_plot(path: str) -> str:
    """Returns the file of a picture, a PNG if its name has no ending; ConfigError if nothing can be drawn there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'autovaruna[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known, ending = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise ConfigError(f"--plot is {path}, which ends in .{ending}; expected one of .{', .'.join(sorted(known))}")
    drawn = path if ending else f"{path}.png"
    if not Path(drawn).absolute().parent.is_dir():
        raise ConfigError(f"--plot is {path}: there is no folder {Path(path).parent}; expected one that is there")
    check_writable("--plot", drawn)
    return drawn


def plot(simulation: Simulation, ranks: Sequence[int], path: str) -> None:
    """Draws a row for each rank, time to the right."""
    rows: dict[str, dict[str, Spans]] = {}
    for rank in ranks:
        acts = simulation.acts[rank]
        reduced = [each for each in simulation.reductions if rank in each.ranks]
        rows[f"rank {rank}"] = {
            **{KINDS[kind]: [(act[0], act[1] - act[0]) for act in acts if act[3] is kind] for kind in Kind},
            KINDS["a"]: [(each.start_seconds, each.end_seconds - each.start_seconds) for each in reduced],
        }
    draw_bars(rows, path, simulation.step_seconds)


def draw_bars(rows: Mapping[str, Mapping[str, Spans]], path: str, end_seconds: float | None = None) -> None:
    """Draws rows of bars by kind, time to the right; ConfigError if the file or its format cannot be written."""
    from matplotlib.figure import Figure

    colours = {kind: colour for kind, colour in COLOURS.items() if any(row.get(kind) for row in rows.values())}
    figure = Figure(figsize=(12, 1.2 + 0.35 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    for place, row in enumerate(rows.values()):
        for kind, colour in colours.items():
            axes.broken_barh(row.get(kind, ()), (place - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
    for kind, colour in colours.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set(xlim=(0, end_seconds), xlabel="seconds", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    figure.legend(loc="outside upper center", ncols=len(colours), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot cannot draw {path}: {error}") from error


class _Console(Console):
    """A console that leaves it to the caller what becomes of a closed pipe."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def show(content: Table | str) -> None:
    """Prints a table in the width of the terminal, or a text as it is; 160 columns where there is no terminal.

    Nothing where nobody listens any more, as behind ``| head -1``: files are still written. Raises InputError if there
    is no room for it.
    """
    if sys.stdout is None:
        return
    try:
        if isinstance(content, str):
            sys.stdout.write(content + "\n")
        else:
            _Console(width=columns()).print(content)
        sys.stdout.flush()
    except BrokenPipeError:
        hush()
    except OSError as error:
        hush()
        raise InputError(f"Standard output cannot be written to: {error.strerror}. Expected a place for it.") from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option of a command to print numbers for programs."""
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def show_json(record: Mapping[str, object]) -> None:
    """Prints a record as one JSON object."""
    show(json.dumps(record, default=str))


def columns() -> int:
    """Returns the width of the terminal; 160 where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 160


def hush() -> None:
    """Lets all that is still to be printed go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
