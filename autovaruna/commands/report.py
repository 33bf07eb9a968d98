"""Makes one page of HTML of a run: its plan, a step measured beside predicted, memory, the loss, what to try next."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from autovaruna.commands.printing import COLOURS, KINDS, show
from autovaruna.commands.trace import Bar, read_bars
from autovaruna.config.files import at_home, check_writable, write_whole
from autovaruna.errors import ConfigError
from autovaruna.log import readable
from autovaruna.planner.deployment import Deployment, load
from autovaruna.planner.infeasible import ranks_text
from autovaruna.planner.records import Plan
from autovaruna.planner.table import seconds
from autovaruna.session.record import DEPLOYMENT, EVENTS

EXAMPLE = "autovaruna report runs/today"
_SHOWN = {letter: name for letter, name in KINDS.items() if letter != "w"}
_WIDTH, _HEIGHT, _MOST_POINTS = 1000.0, 200.0, 400  # of a curve
_BUBBLE, _MESSAGES, _SUMS, _LONGER, _FULL, _SLOWER = 0.1, 0.15, 0.15, 1.15, 0.9, 1.3
"""From which share of a step, or ratio, something is worth a word."""
_PARTS = ("work", "bubble", "imbalance", "messages", "all-reduce", "overhead")
_FILTERS = {
    "bytes": readable,
    "seconds": seconds,
    "ranks": ranks_text,
    "time": lambda value: datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("run", type=at_home, metavar="RUN", help="the folder of a run (setting report_dir)")
    add("--output", type=at_home, default="", metavar="FILE", help="the page (default: RUN/report.html)")


def run(options: argparse.Namespace) -> None:
    """Makes one page of HTML of a run with report_dir; it needs neither a server nor a network."""
    output = options.output or str(Path(options.run, "report.html"))
    check_writable("--output", output)
    write_whole(output, page(RunFolder(Path(options.run))))
    show(f"wrote {output}")


@dataclass(frozen=True)
class RunFolder:
    """What a run has left in its folder, as `autovaruna.session.record` writes it."""

    path: Path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All of them; ConfigError if there are none, or a line but the last is damaged."""
        file, events = self.path / EVENTS, []
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            for place, line in enumerate(lines, 1):
                try:
                    event = json.loads(line)
                    events.append({**event, "time": float(event["time"]), "event": str(event["event"])})
                except (ValueError, TypeError, KeyError):
                    if place < len(lines):
                        raise ValueError(f"line {place} is none that a run writes") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}; expected the folder of a run with report_dir") from error
        return events

    @cached_property
    def attempt(self) -> list[dict[str, Any]]:
        """The events of the last attempt, from its start on; ConfigError if there was none."""
        starts = [place for place, each in enumerate(self.events) if each["event"] == "start"]
        if not starts:
            raise ConfigError(f"{self.path / EVENTS} has no start of a run; expected one with report_dir")
        return self.events[starts[-1] :]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The steps; of those that an attempt has done again, the last."""
        kept = list[dict[str, Any]]()
        for each in self.events:
            if each["event"] == "step":
                while kept and kept[-1]["step"] >= each["step"]:
                    kept.pop()
                kept.append(each)
        return kept

    @cached_property
    def deployment(self) -> Deployment | None:
        """The plan; None: the model ran as it is."""
        return load(self.path / DEPLOYMENT) if self.attempt[0]["stages"] else None

    @cached_property
    def step_seconds(self) -> float:
        """The median of the steps behind the first ones."""
        known = [each["seconds/step"] for each in self.steps if "seconds/step" in each]
        return median(known[len(known) // 4 :]) if known else 0.0

    @cached_property
    def time_fractions(self) -> list[dict[str, float]]:
        """The share of a step that each rank spent on what, in the last one that was looked at; none: none was."""
        accounts = [each for each in self.attempt if each["event"] == "account"][-1:]
        return [{name: row[name] / each["seconds"] for name in _PARTS} for each in accounts for row in each["ranks"]]

    @cached_property
    def memory(self) -> list[dict[str, float]]:
        """For each rank the bytes measured, predicted and allowed; 0: not known."""
        last, ranks = self.steps[-1] if self.steps else {}, range(self.attempt[0]["num_ranks"])
        rows = [
            {"measured": last.get(f"memory_bytes/rank_{rank}", 0.0), "predicted": 0.0, "limit": 0.0} for rank in ranks
        ]
        if self.deployment is not None:
            plan, limits = self.deployment.plan, self.deployment.fingerprint.memory_bytes
            beside = plan.block_bytes.process_bytes if plan.block_bytes else 0.0  # what a limit does not count
            for row, predicted, limit in zip(rows, plan.rank_bytes(), limits, strict=False):
                row |= {"predicted": predicted, "limit": limit + beside}
        return rows


def advice(run: RunFolder) -> list[str]:
    """Returns what to try next, in words, the most important first."""
    words, start = list[str](), run.attempt[0]
    if odd := [each["step"] for each in run.steps if not math.isfinite(each.get("loss", 0.0))]:
        words.append(f"The loss is not a number from step {odd[0]} on: lower the learning rate, or clip gradients.")
    on_host = start["hosts"].count(start["hosts"][0])  # rank 0 has told the cores of its own
    threads = start["num_threads"]
    if on_host * threads > start["num_cores"]:
        words.append(
            f"{on_host} ranks of one host share {start['num_cores']} core{'s' * (start['num_cores'] > 1)} and work in "
            f"turns (threads: {threads}). "
            f"Start fewer ranks a host{', or set OMP_NUM_THREADS=1' if threads > 1 else ''}."
        )
    if run.deployment is not None:
        words += _about_stages(run, run.deployment.plan)
    full = [each for each in run.memory if max(each["measured"], each["predicted"]) > _FULL * each["limit"] > 0]
    for each in full[:1]:
        words.append(
            f"Rank {run.memory.index(each)} uses {readable(max(each['measured'], each['predicted']))} of "
            f"{readable(each['limit'])}: recompute='all', more stages or smaller micro-batches leave more room."
        )
    return words or ["Nothing stands out: the step is about what was predicted, and memory fits."]


def _about_stages(run: RunFolder, plan: Plan) -> Iterator[str]:
    """Yields what the plan and the time of ranks suggest."""
    work = [each["work"] for each in run.time_fractions] or [0.0]
    mean = {name: fmean(each[name] for each in run.time_fractions) if run.time_fractions else 0.0 for name in _PARTS}
    if plan.num_stages > 1 and mean["bubble"] > _BUBBLE:
        yield (
            f"Ranks wait for other stages in {mean['bubble']:.0%} of the step (the bubble). More micro-batches make it "
            f"shorter: num_micro_batches={2 * plan.num_micro_batches}, now {plan.num_micro_batches}, or a larger batch."
        )
    if max(work) > _LONGER * fmean(work):
        longest, planned = work.index(max(work)), plan.work_seconds()
        stage = next((k for k, stage in enumerate(plan.stages) if longest in stage.ranks), 0)
        layers = run.attempt[0]["stages"][stage]
        is_planned = planned[longest] > _LONGER * fmean(planned.values())
        cure = "Move a cut: cuts=[...]." if is_planned else "It was not expected: plan again on a quiet machine."
        yield (
            f"Rank {longest} (stage {stage}: {layers}) computes {max(work) / fmean(work) - 1:.0%} "
            f"longer than the mean of ranks, and a step is as long as its longest stage. {cure}"
        )
    if mean["messages"] > _MESSAGES:
        yield (
            f"Messages between stages take {mean['messages']:.0%} of the step: fewer stages, cuts where less is passed "
            "on, or neighbouring stages on one host."
        )
    if mean["all-reduce"] > _SUMS:
        yield (
            f"Sums of gradients over replicas take {mean['all-reduce']:.0%} of the step: a larger batch, or several "
            "calls for each step of the optimizer within no_sync()."
        )
    if run.step_seconds > _SLOWER * plan.predicted_seconds > 0:
        yield (
            f"A step takes {run.step_seconds / plan.predicted_seconds:.1f} times what was predicted: other programs "
            "use the machine, or the script does something between the call and the step of the optimizer."
        )


def page(run: RunFolder) -> str:
    """Returns the page."""
    loader = PackageLoader("autovaruna.commands", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= _FILTERS
    traces = sorted(run.path.glob("*.trace.json")) if run.deployment else []
    return environment.get_template("report.html").render(
        name=run.path.resolve().name,
        run=run,
        start=run.attempt[0],
        plan=run.deployment.plan if run.deployment else None,
        advice=advice(run),
        timelines=timelines(read_bars(traces[0])) if traces else {},
        colours={kind: COLOURS[kind] for kind in _SHOWN.values()},
        parts=_PARTS,
        most_bytes=max(max(each.values()) for each in run.memory),
        curves=[each for each in (curve(run, "loss"), curve(run, "samples_per_second")) if each],
        last=run.steps[-1] if run.steps else {},
    )


def timelines(bars: Sequence[Bar]) -> Mapping[str, Any]:
    """Returns the last step with predicted bars as boxes on one scale, measured and predicted, by rank."""
    chosen = max((bar.args.step for bar in bars if bar.pid == 1), default=0)
    bars = [bar for bar in bars if bar.args.step == chosen and bar.kind in _SHOWN]
    starts = [min((bar.ts for bar in bars if bar.pid == process), default=0.0) for process in (0, 1)]
    ends = [max((bar.ts + bar.dur for bar in bars if bar.pid == process), default=0.0) for process in (0, 1)]
    lengths = [last - first for first, last in zip(starts, ends, strict=True)]
    if not (end := max(lengths)):
        return {}
    found: tuple[dict[int, list[Any]], ...] = {}, {}
    for bar in sorted(bars, key=lambda bar: (bar.tid, bar.ts)):
        place = (_WIDTH * each / end for each in (bar.ts - starts[bar.pid], bar.dur))
        text = f"{bar.name}: {seconds(1e-6 * bar.dur)}"
        found[bar.pid].setdefault(bar.tid, []).append((*place, _SHOWN[bar.kind], text))
    names = ("measured", "predicted")
    return {
        "rows": dict(zip(names, found, strict=True)),
        "seconds": {name: 1e-6 * length for name, length in zip(names, lengths, strict=True)},
        "step": chosen,
    }


def curve(run: RunFolder, name: str) -> dict[str, Any] | None:
    """Returns a number over the steps, as points; None: it is not known."""
    points = [(each["step"], each[name]) for each in run.steps if math.isfinite(each.get(name, math.nan))]
    if len(points) < 2:
        return None
    shown = [*points[: -1 : -(-len(points) // _MOST_POINTS)], points[-1]]
    (first, _), (last, _) = shown[0], shown[-1]
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    across, up = _WIDTH / (last - first), _HEIGHT / ((high - low) or 1.0)
    text = " ".join(f"{across * (step - first):.1f},{up * (high - value):.1f}" for step, value in shown)
    return {"name": name.replace("_", " "), "points": text, "low": low, "high": high, "first": first, "last": last}
