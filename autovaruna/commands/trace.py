"""Shows a trace that a run with trace_events wrote: steps measured and predicted, as a table or a picture."""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from rich.table import Table

from autovaruna.commands.printing import KINDS, checked_plot, draw_bars, show
from autovaruna.config.files import Amount, Whole, at_home, parse, read_record
from autovaruna.errors import ConfigError

EXAMPLE = "autovaruna trace events.trace.json --plot step.png"
_PROCESSES = ("measured", "predicted")


class _Arguments(msgspec.Struct):
    step: Whole


class Bar(msgspec.Struct):
    """A row's stretch of time as the format of Chrome's traces has it, in microseconds."""

    name: Annotated[str, msgspec.Meta(pattern="^[0-9]*[A-Za-z]")]
    pid: Annotated[int, msgspec.Meta(ge=0, le=1)]  # of `_PROCESSES`
    tid: Whole  # the rank
    ts: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]
    dur: Amount
    args: _Arguments

    @property
    def kind(self) -> str:
        """The first letter of the instruction, or of ``wait`` or ``all-reduce``."""
        return self.name.lstrip("0123456789")[0]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("file", type=at_home, metavar="FILE", help="the trace (setting trace_events_file)")
    add("--step", type=int, default=0, metavar="n", help="the step to draw (default: the last one with predicted rows)")
    add("--plot", type=at_home, default="", metavar="FILE", help="draw a step into this file (png, pdf, svg)")


def run(options: argparse.Namespace) -> None:
    """Shows a trace that a run with trace_events wrote: steps measured and predicted, as a table or a picture."""
    if options.plot:
        options.plot = checked_plot(options.plot)
    bars = read_bars(Path(options.file))
    steps = sorted({bar.args.step for bar in bars})
    predicted = (bar.args.step for bar in bars if _PROCESSES[bar.pid] == "predicted")
    chosen = options.step or max(predicted, default=steps[-1])
    if chosen not in steps:
        raise ConfigError(f"--step is {chosen}; {options.file} has steps {steps[0]} to {steps[-1]}")
    show(summary(bars))
    if options.plot:
        draw([bar for bar in bars if bar.args.step == chosen], options.plot)


def read_bars(path: Path) -> list[Bar]:
    """Reads the instructions of a trace, whose last line may be cut off; ConfigError if it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    bars = []
    for place, line in enumerate(lines, 2):
        try:
            event = parse(line.rstrip(" ,]"))
            if not isinstance(event, dict) or event.get("ph") == "X":
                bars.append(read_record(event, Bar))
        except ValueError as error:
            if place <= len(lines):
                raise ConfigError(f"line {place} of {path} is not of a trace that AutoVaruna wrote: {error}") from error
    if not bars:
        raise ConfigError(f"{path} has no step; expected the trace of a run with trace_events=true")
    return bars


def summary(bars: list[Bar]) -> Table:
    """Returns the median seconds of each kind of work on each rank, measured beside predicted."""
    seconds: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for bar in bars:
        seconds[bar.tid, bar.kind, bar.pid].append(1e-6 * bar.dur)
    caption = "median milliseconds of one, over all steps"
    table = Table("rank", "what", "times a step", *(f"{name} ms" for name in _PROCESSES), caption=caption)
    num_steps = len({bar.args.step for bar in bars})
    for rank, kind in sorted({(rank, kind) for rank, kind, _ in seconds}):
        both = [seconds.get((rank, kind, process), []) for process in (0, 1)]
        cells = (f"{1e3 * median(each):.3f}" if each else "" for each in both)
        table.add_row(str(rank), KINDS.get(kind, kind), f"{len(both[0]) / num_steps:.1f}", *cells)
    return table


def draw(bars: list[Bar], path: str) -> None:
    """Draws one step: for each rank a row as measured and one as predicted, time to the right."""
    start = min(bar.ts for bar in bars)
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for bar in sorted(bars, key=lambda bar: (bar.tid, bar.pid)):
        row = rows.setdefault(f"rank {bar.tid} {_PROCESSES[bar.pid]}", defaultdict(list))
        row[KINDS.get(bar.kind, bar.kind)].append((1e-6 * (bar.ts - start), 1e-6 * bar.dur))
    draw_bars(rows, path)
