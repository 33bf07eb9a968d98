"""Replays a trace of hosts that come and go against plans, and shows what part of the ideal throughput is kept."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields

from autovaruna.commands.plan import Planning, add_cost_options, num_bytes
from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.elastic.replay import Change, FaultCosts, Throughput, read_trace, replay
from autovaruna.errors import ConfigError, PlanError
from autovaruna.planner.deployment import load
from autovaruna.planner.table import seconds
from autovaruna.varuna.profiler import AutoConfig

EXAMPLE = "autovaruna simulate --trace hosts.csv --plan deployment.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    text = "plan this model for each number of hosts, as plan does"
    add("target", nargs="?", metavar="MODULE:FUNCTION", help=text)
    add("--trace", required=True, metavar="FILE", help="CSV: seconds,hosts or seconds,hosts,event")
    add("--plan", nargs="+", metavar="FILE", help="deployments, one for each number of hosts")
    text = "seconds of a step by number of hosts, in place of plans"
    add(*_spellings("--step-seconds"), metavar="1=S,2=S", help=text)
    text = "plan from what a Varuna Profiler wrote; with --batch-size"
    add(*_spellings("--profile-folder"), metavar="DIR", help=text)
    add(*_spellings("--ranks-per-host"), type=int, default=1, metavar="N", help="ranks on each host (1)")
    add_json(parser)
    costs = parser.add_argument_group("costs of faults")
    for cost in fields(FaultCosts):
        option = _spellings("--" + cost.name.replace("_", "-"))
        meaning, kind = f"{cost.metadata['meaning']} ({cost.default:g})", type(cost.default)
        costs.add_argument(*option, type=kind, default=cost.default, metavar="N", help=meaning)
    add_cost_options(parser)


def _spellings(option: str) -> list[str]:
    """Returns an option as our commands and as Varuna's spell it."""
    return [option, "--" + option[2:].replace("-", "_")]


def run(options: argparse.Namespace) -> None:
    """Replays a trace of hosts that come and go against plans, and shows what part of the ideal throughput is kept."""
    costs = _costs(options)
    trace = read_trace(options.trace)
    step_seconds = _step_seconds(options, {change.hosts for change in trace[:-1]} - {0})
    result = replay(trace, step_seconds, costs)
    if options.json:
        show_json(_record(result, step_seconds, costs))
        return
    show(_report(options.trace, trace, result))
    listed = ", ".join(f"{number}: {seconds(value)}" for number, value in sorted(step_seconds.items()))
    without = sorted({change.hosts for change in trace[:-1]} - {0, *step_seconds})
    none = f"; no plan for {', '.join(map(str, without))}: the best for fewer runs, or none" if without else ""
    show(f"a step by number of hosts: {listed}{none}")


def _costs(options: argparse.Namespace) -> FaultCosts:
    costs = FaultCosts(**{each.name: getattr(options, each.name) for each in fields(FaultCosts)})
    for name, value in asdict(costs).items():
        least = 1 if name.endswith("_steps") else 0
        if not least <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")
    if costs.stop_seconds > costs.change_seconds:
        raise ConfigError(
            f"--stop-seconds is {costs.stop_seconds:g}; expected a part of --change-seconds, {costs.change_seconds:g}"
        )
    if options.ranks_per_host < 1:
        raise ConfigError(f"--ranks-per-host is {options.ranks_per_host}; expected 1 or more")
    return costs


def _step_seconds(options: argparse.Namespace, hosts: set[int]) -> Mapping[int, float]:
    """Returns the seconds of a step by number of hosts, from the one thing that the options name."""
    sources: dict[str, tuple[object, Callable[[argparse.Namespace, set[int]], dict[int, float]]]] = {
        "MODULE:FUNCTION": (options.target, _of_model),
        "--plan": (options.plan, _of_deployments),
        "--step-seconds": (options.step_seconds, _of_text),
        "--profile-folder": (options.profile_folder, _of_profile_folder),
    }
    named = [name for name, (value, _) in sources.items() if value]
    if len(named) != 1:
        raise ConfigError(f"Got {' and '.join(named) or 'no plan'}; expected one of {', '.join(sources)}")
    return sources[named[0]][1](options, hosts)


def _of_text(options: argparse.Namespace, hosts: set[int]) -> dict[int, float]:
    found = {}
    for pair in options.step_seconds.split(","):
        number, _, text = pair.partition("=")
        try:
            found[int(number)] = float(text)
        except ValueError:
            found[0] = 0.0
    if any(number < 1 or not 0 < value < math.inf for number, value in found.items()):
        raise ConfigError(f"--step-seconds is {options.step_seconds!r}; expected hosts=seconds, as 1=0.9,2=0.5")
    return found


def _of_deployments(options: argparse.Namespace, hosts: set[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for path in options.plan:
        deployment = load(path)
        number, value = len(deployment.fingerprint.hosts), deployment.plan.predicted_seconds
        if not value or number in found:
            why = f"another one is for {number} hosts, too" if value else "it predicts no seconds"
            raise ConfigError(f"--plan {path}: {why}; expected one deployment for each number of hosts")
        found[number] = value
    return found


def _of_profile_folder(options: argparse.Namespace, hosts: set[int]) -> dict[int, float]:
    if options.batch_size < 1:
        raise ConfigError("--profile-folder needs --batch-size, the samples of a step over all ranks")
    memory = num_bytes(options.memory) if options.memory else None

    def step(number: int) -> float:
        ranks, own = number * options.ranks_per_host, options.ranks_per_host
        config = AutoConfig(ranks, options.batch_size, options.profile_folder, own, memory, cutpoints="prefer")
        return config.best.seconds

    return _of_all(hosts, step)


def _of_model(options: argparse.Namespace, hosts: set[int]) -> dict[int, float]:
    if options.memory:
        options.memory = num_bytes(options.memory)
    if options.batch_size < 0:
        raise ConfigError(f"--batch-size is {options.batch_size}; expected no negative number")
    options.ranks = max(hosts) * options.ranks_per_host
    largest = Planning(options)
    return _of_all(hosts, lambda number: largest.on(number * options.ranks_per_host).plan.predicted_seconds)


def _of_all(hosts: Iterable[int], step: Callable[[int], float]) -> dict[int, float]:
    """Returns the seconds of a step for each number of hosts that has a plan; PlanError if none has."""
    found, refused = {}, None
    for number in sorted(hosts):
        try:
            found[number] = step(number)
        except PlanError as error:
            refused = error
    if refused and not found:
        raise refused
    return found


def _record(result: Throughput, step_seconds: Mapping[int, float], costs: FaultCosts) -> dict[str, object]:
    return {
        "share_of_ideal": result.of_ideal(result.done_steps),
        "lost_to_restarts": result.of_ideal(result.restart_steps),
        "lost_to_lost_steps": result.of_ideal(result.lost_steps),
        "lost_to_smaller_plans": result.of_ideal(result.smaller_steps),
        **asdict(result),
        "step_seconds": dict(step_seconds),
        "costs": asdict(costs),
    }


def _report(path: str, trace: list[Change], result: Throughput) -> str:
    counts = [change.hosts for change in trace[:-1]]
    changes = {"host losses": result.num_losses, "notices": result.num_notices}
    changes |= {"additions": result.num_additions, "kills": result.num_kills}
    happened = ", ".join(f"{count} {name}" for name, count in changes.items() if count) or "no change"
    rows = (
        ("share of the ideal", result.done_steps, f"{result.done_steps:,.0f} of {result.ideal_steps:,.0f} steps"),
        ("lost to restarts", result.restart_steps, f"{result.num_restarts} restarts"),
        ("lost to lost steps", result.lost_steps, f"{result.lost_steps:,.1f} steps"),
        ("lost to smaller plans", result.smaller_steps, "hosts were there that the plan did not use"),
    )
    away = 1.0 - result.ideal_steps / result.all_hosts_steps
    return "\n".join(
        [
            f"{path}: {result.seconds / 3600:.4g} h, {min(counts)} to {max(counts)} hosts, {happened}",
            *(f"{name:<22}{result.of_ideal(steps):8.2%}   {what}" for name, steps, what in rows),
            f"The ideal is what the hosts that are there would do without faults; hosts that are away cost {away:.1%} "
            f"of what {max(counts)} would do.",
        ]
    )
