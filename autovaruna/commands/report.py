"""Makes one page of HTML of a run: its plan, a step measured beside predicted, memory, the loss, what to try next."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from autovaruna.commands.printing import COLOURS, show
from autovaruna.commands.trace import Bar, read_bars
from autovaruna.config.files import at_home, check_writable, write_whole
from autovaruna.errors import ConfigError
from autovaruna.planner.deployment import Deployment, load
from autovaruna.planner.infeasible import ranks_text, readable
from autovaruna.planner.records import predicted_seconds
from autovaruna.planner.table import seconds

EXAMPLE = "autovaruna report runs/today"
_KINDS = {"F": "forward", "R": "recompute", "B": "backward", "W": "weight gradients", "a": "all-reduce", "w": "wait"}
_WIDTH, _HEIGHT, _MOST_POINTS = 1000.0, 200.0, 400  # of a curve
_BUBBLE, _MESSAGES, _SUMS, _LONGER, _FULL, _SLOWER = 0.1, 0.15, 0.15, 1.15, 0.9, 1.3
"""From which share of a step, or ratio, something is worth a word."""
_NOT_EVENTS = {"step", "account"}
_PARTS = ("work", "bubble", "imbalance", "messages", "all-reduce", "overhead")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("run", type=at_home, metavar="RUN", help="the folder of a run (setting report_dir)")
    parser.add_argument(
        "--output", type=at_home, default="", metavar="FILE", help="the page (default: RUN/report.html)"
    )


def run(options: argparse.Namespace) -> None:
    """Makes one page of HTML of a run with report_dir; it needs neither a server nor a network."""
    output = options.output or str(Path(options.run, "report.html"))
    check_writable("--output", output)
    write_whole(output, page(RunFolder(Path(options.run))))
    show(f"wrote {output}")


@dataclass(frozen=True)
class RunFolder:
    """What a run has left in its folder."""

    path: Path

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All lines; ConfigError if there are none, or one but the last is damaged."""
        file = self.path / "events.jsonl"
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}); expected the folder of a run with report_dir"
            ) from error
        events = []
        for place, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                events.append({"time": float(event["time"]), "event": str(event["event"]), **event})
            except (ValueError, TypeError, KeyError) as error:
                if place < len(lines):
                    raise ConfigError(f"line {place} of {file} is none that a run writes: {error!r}") from error
        return events

    @cached_property
    def start(self) -> dict[str, Any]:
        """The start of the last attempt."""
        starts = [each for each in self.events if each["event"] == "start"]
        if not starts:
            raise ConfigError(f"{self.path / 'events.jsonl'} has no start of a run; expected one with report_dir")
        return starts[-1]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The steps; of those that an attempt has done again, the last."""
        kept: dict[int, dict[str, Any]] = {}
        for each in self.events:
            if each["event"] == "step":
                for later in (
                    [step for step in kept if step >= each["step"]] if each["step"] <= max(kept, default=0) else ()
                ):
                    del kept[later]
                kept[each["step"]] = each
        return list(kept.values())

    @cached_property
    def account(self) -> dict[str, Any] | None:
        """Where the seconds of the last step that was looked at in full have gone; None: of none."""
        found: dict[str, Any] | None = None
        for each in self.events:
            found = each if each["event"] == "account" else None if each["event"] == "start" else found
        return found

    @cached_property
    def deployment(self) -> Deployment | None:
        """The plan; None: the model ran as it is."""
        file = self.path / "deployment.json"
        return load(file) if file.exists() and self.start["stages"] else None

    @cached_property
    def bars(self) -> list[Bar]:
        """The bars of the last step that has predicted ones; none without a trace."""
        files = sorted(self.path.glob("*.trace.json")) if self.deployment else []
        bars = read_bars(files[0]) if files else []
        chosen = max((bar.args.step for bar in bars if bar.pid == 1), default=0)
        return [bar for bar in bars if bar.args.step == chosen]

    @cached_property
    def step_seconds(self) -> float:
        """The median of the steps behind the first ones."""
        found = [each["seconds/step"] for each in self.steps if "seconds/step" in each]
        return median(found[len(found) // 4 :]) if found else 0.0

    @cached_property
    def shares(self) -> list[dict[str, float]]:
        """The share of a step that each rank spent on what."""
        account = self.account or {"ranks": []}
        return [{name: each.get(name, 0.0) / account["seconds"] for name in _PARTS} for each in account["ranks"]]

    @cached_property
    def memory(self) -> list[dict[str, float]]:
        """For each rank the bytes measured, predicted and allowed; 0: not known."""
        last = self.steps[-1] if self.steps else {}
        deployment, count = self.deployment, self.start["num_ranks"]
        predicted = deployment.plan.rank_bytes() if deployment else ()
        limits = deployment.fingerprint.memory_bytes if deployment else ()
        rows = []
        for rank in range(count):
            measured = last.get(f"memory_bytes/rank_{rank}", 0.0)
            of_plan = [each[rank] if rank < len(each) else 0.0 for each in (predicted, limits)]
            rows.append({"measured": measured, "predicted": of_plan[0], "limit": of_plan[1]})
        return rows


def advice(run: RunFolder) -> list[str]:
    """Returns what to try next, in words, the most important first."""
    words, start, deployment = list[str](), run.start, run.deployment
    if odd := [each["step"] for each in run.steps if not math.isfinite(each.get("loss", 0.0))]:
        words.append(f"The loss is not a number from step {odd[0]} on: lower the learning rate, or clip gradients.")
    on_host = max(start["hosts"].count(host) for host in start["hosts"])
    if on_host * start["num_threads"] > start["num_cores"]:
        words.append(
            f"{on_host} ranks of one host, with {start['num_threads']} threads each, share {start['num_cores']} cores: "
            "what they do takes turns. Start fewer ranks a host, or set OMP_NUM_THREADS lower."
        )
    if deployment is not None:
        words += _about_stages(run, deployment)
    for rank, each in enumerate(run.memory):
        most = max(each["measured"], each["predicted"])
        if each["limit"] and most > _FULL * each["limit"]:
            words.append(
                f"Rank {rank} uses {readable(most)} of {readable(each['limit'])}: recompute='all', more stages or "
                "smaller micro-batches leave more room."
            )
            break
    return words or ["Nothing stands out: the step is about what was predicted, and memory fits."]


def _about_stages(run: RunFolder, deployment: Deployment) -> list[str]:
    """Returns what the plan and the time of ranks suggest."""
    words, plan = list[str](), deployment.plan
    mean = (
        {name: fmean(each[name] for each in run.shares) for name in _PARTS}
        if run.shares
        else dict.fromkeys(_PARTS, 0.0)
    )
    if plan.num_stages > 1 and mean["bubble"] > _BUBBLE:
        words.append(
            f"Ranks wait for other stages in {mean['bubble']:.0%} of the step (the bubble). More micro-batches make it "
            f"shorter: num_micro_batches={2 * plan.num_micro_batches}, now {plan.num_micro_batches}, or a larger batch."
        )
    busy = [each * run.account["seconds"] for each in (row["work"] for row in run.shares)] if run.account else []
    longest = max(range(len(busy)), key=busy.__getitem__, default=0)
    if len(busy) > 1 and busy[longest] > _LONGER * fmean(busy):
        own = [number for number, stage in enumerate(plan.stages) if longest in stage.ranks]
        expected = predicted_seconds(plan)
        planned = expected[longest] > _LONGER * fmean(expected.values())
        cure = "Move a cut (cuts=[...])" if planned else "Was it measured while others used the machine? Plan again"
        stage = f"stage {own[0]}: {run.start['stages'][own[0]]}" if own else "no stage"
        words.append(
            f"Rank {longest} ({stage}) computes {busy[longest] / fmean(busy) - 1:.0%} longer than the mean of ranks. "
            f"{cure}: the step is as long as the longest stage."
        )
    if mean["messages"] > _MESSAGES:
        words.append(
            f"Messages between stages take {mean['messages']:.0%} of the step: fewer stages, cuts where less is passed "
            "on, or neighbouring stages on one host."
        )
    if mean["all-reduce"] > _SUMS:
        words.append(
            f"Sums of gradients over replicas take {mean['all-reduce']:.0%} of the step: a larger batch, or several "
            "calls for each step of the optimizer within no_sync()."
        )
    if plan.predicted_seconds and run.step_seconds > _SLOWER * plan.predicted_seconds:
        words.append(
            f"A step takes {run.step_seconds / plan.predicted_seconds:.1f} times what was predicted: other programs "
            "use the machine, or the script does something between the call and the step of the optimizer."
        )
    return words


def page(run: RunFolder) -> str:
    """Returns the page."""
    environment = Environment(
        loader=PackageLoader("autovaruna.commands", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"bytes": readable, "seconds": seconds, "time": _time, "percent": lambda x: f"{x:.1%}"}
    plan = run.deployment.plan if run.deployment else None
    return environment.get_template("report.html").render(
        name=run.path.resolve().name,
        start=run.start,
        advice=advice(run),
        plan=plan,
        plan_rows=_plan_rows(run),
        step_seconds=run.step_seconds,
        timelines=timelines(run.bars),
        colours={kind: COLOURS.get(kind, "") for kind in _KINDS.values()},
        parts=_PARTS,
        shares=run.shares,
        memory=run.memory,
        most_bytes=max((max(each.values()) for each in run.memory), default=0.0),
        curves=[each for each in (curve(run, "loss"), curve(run, "samples_per_second")) if each],
        last=run.steps[-1] if run.steps else {},
        events=[each for each in run.events if each["event"] not in _NOT_EVENTS],
    )


def _plan_rows(run: RunFolder) -> list[dict[str, str]]:
    """Returns a row for each stage, by the head of its column."""
    rows, deployment = [], run.deployment
    for number, stage in enumerate(deployment.plan.stages) if deployment else ():
        assert deployment is not None
        rows.append(
            {
                "stage": str(number),
                "layers": run.start["stages"][number],
                "ranks": ranks_text(stage.ranks),
                "parameters": readable(stage.parameter_bytes),
                "forward": seconds(stage.forward_seconds),
                "backward": seconds(stage.backward_seconds),
                "memory": readable(deployment.plan.bytes_of(stage)),
                "recompute": "yes" if stage.needs_recompute else "no",
            }
        )
    return rows


def timelines(bars: Sequence[Bar]) -> Mapping[str, Any]:
    """Returns the bars of a step as boxes on a common scale: for measured and predicted, by rank."""
    starts = [min((bar.ts for bar in bars if bar.pid == process), default=0.0) for process in (0, 1)]
    end = max((bar.ts + bar.dur - starts[bar.pid] for bar in bars), default=0.0)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {"measured": {}, "predicted": {}}
    for bar in sorted(bars, key=lambda bar: (bar.tid, bar.ts)):
        kind = _KINDS.get(bar.kind, "wait")
        if kind != "wait":
            box = {"x": round(_WIDTH * (bar.ts - starts[bar.pid]) / end, 2), "width": round(_WIDTH * bar.dur / end, 2)}
            text = f"{bar.name}: {seconds(1e-6 * bar.dur)}"
            found[("measured", "predicted")[bar.pid]].setdefault(bar.tid, []).append(
                {**box, "kind": kind, "text": text}
            )
    return {"rows": found, "end": 1e-6 * end, "ticks": [1e-6 * end * k / 4 for k in range(5)]} if bars else {}


def curve(run: RunFolder, name: str) -> dict[str, Any] | None:
    """Returns a number over the steps, as points; None: it is not known."""
    points = [(each["step"], each[name]) for each in run.steps if math.isfinite(each.get(name, math.nan))]
    if len(points) < 2:
        return None
    stride = -(-len(points) // _MOST_POINTS)
    shown = [*points[::stride], *(points[-1:] if (len(points) - 1) % stride else ())]
    (first, _), (last, _) = shown[0], shown[-1]
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    places = [
        (_WIDTH * (step - first) / (last - first), _HEIGHT * (high - value) / ((high - low) or 1.0))
        for step, value in shown
    ]
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return {"name": name.replace("_", " "), "points": text, "low": low, "high": high, "first": first, "last": last}


def _time(value: float) -> str:
    return datetime.fromtimestamp(value, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
