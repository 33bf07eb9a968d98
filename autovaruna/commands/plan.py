"""Plans a model for ranks that need not be there, shows the plan, and saves it as a deployment."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from autovaruna.commands.config import add_settings, settings_of
from autovaruna.commands.measure import load_target, measure_here
from autovaruna.commands.printing import add_json, checked_plot, columns, plot, show, show_json
from autovaruna.commands.show import record_of
from autovaruna.config.files import at_home, check_writable
from autovaruna.config.settings import BYTES, REFUSALS, Sharing, input_groups
from autovaruna.errors import ConfigError
from autovaruna.heap import keep_freed_memory
from autovaruna.log import progress_bar, readable, status_bar
from autovaruna.planner.deployment import SHAPING, Deployment, deployment_of, fingerprint_of, save
from autovaruna.planner.prediction import pipeline_of, policy_of, short_enough
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import UNKNOWN_LINK, Plan
from autovaruna.planner.search import plan_and_choices, plan_with_sharing
from autovaruna.planner.table import explain, module_range, plan_table, seconds
from autovaruna.profiler.cache import load_measured
from autovaruna.profiler.records import Cluster, OptimizerCost, Profile
from autovaruna.profiler.roofline import optimizer_cost, predict, read_device
from autovaruna.runtime.optimizer import sharing_of
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.simulation import render
from autovaruna.schedule.simulator import simulate
from autovaruna.session.measuring import optimizer_factor, problem_of, sizes_to_measure
from autovaruna.session.memory import host_memory

_CPU = torch.device("cpu")
_MOST_ROWS = 24
EXAMPLE = "autovaruna plan train.py:build --ranks 16 --ranks-per-host 8 --device h100 -o deployment.json"
_SETTINGS = (
    *SHAPING,
    "memory_margin",
    "optimizer_bytes_factor",
    "batch_inputs",
    "batch_dims",
    "profile_iterations",
    "profile_cache",
)


class Planning:
    """One run of the plan command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        memory = num_bytes(options.memory) if options.memory else 0
        self.settings = settings_of(options, {"memory_limit_bytes": memory} if memory else {})
        self.device = read_device(options.device) if options.device else None
        self.memory_bytes = self._find_memory()
        saved = load_measured(options.profile, Profile) if options.profile else None
        is_simulated = self.device is not None or saved is not None
        make_optimizer(options.optimizer)  # a mistake is told before the model is traced
        device = _CPU if is_simulated else None
        self.target = load_target(options.target, self.settings, device, has_weights=not is_simulated)
        self.traced = self.target.traced
        optimizer = make_optimizer(options.optimizer, [*self.target.model.parameters()])
        self.optimizer_bytes_factor = optimizer_factor(optimizer, self.settings)
        self._may_share = sharing_of(optimizer, self.settings.shard_optimizer, _CPU)
        self.profile = saved or self._new_profile()

    @property
    def sharing(self) -> Sharing:
        """Whether replicas share the optimizer's state, or may."""
        return self._may_share if self.options.ranks > 1 else False

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that pass the same mini-batch."""
        return input_groups(self.settings, self.options.ranks)

    @cached_property
    def global_batch_size(self) -> int:
        """Samples of a step: the option, or those of the call, times the mini-batches."""
        return int(self.options.batch_size) or self.target.batch_size * len(self.groups)

    @cached_property
    def cluster(self) -> Cluster:
        """The ranks, all alike, host after host."""
        num_ranks = self.options.ranks
        per_host = self.options.ranks_per_host or num_ranks
        device, num_hosts = self.device, -(-num_ranks // per_host)
        if device is None:
            local = remote = UNKNOWN_LINK
            all_reduce, latency = UNKNOWN_LINK.bytes_per_second, 0.0
        else:
            local, remote = device.local_link.cost, device.remote_link.cost
            rates = device.all_reduce
            all_reduce = rates.local_bytes_per_second if num_hosts == 1 else rates.remote_bytes_per_second
            latency = rates.latency_seconds
        return Cluster(
            hosts=tuple(f"host{rank // per_host}" for rank in range(num_ranks)),
            memory_bytes=(self.memory_bytes,) * num_ranks,
            speeds=(1.0,) * num_ranks,
            local_link=local,
            remote_link=remote,
            all_reduce_bytes_per_second=all_reduce,
            all_reduce_latency_seconds=latency,
            fragmentation=device.fragmentation if device else 1.0,
            memory_margin=self.settings.memory_margin,
        )

    @cached_property
    def problem(self) -> Problem:
        """What the planner is asked."""
        factor, batch = self.optimizer_bytes_factor, (self.global_batch_size, self.groups)
        cost = optimizer_cost(self.device, factor) if self.device else OptimizerCost()
        return problem_of(self.traced, self.settings, self.profile, self.cluster, batch, factor, cost)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.plan_and_choices[0]

    @cached_property
    def plan_and_choices(self) -> tuple[Plan, list[Plan]]:
        """The plan, and the best plan of every regular grid, fastest first."""
        choices: dict[bool, list[Plan]] = {}

        def make(problem: Problem) -> Plan:
            has_all_rows = self.options.table
            found, choices[problem.shares_state] = plan_and_choices(problem, progress, has_all_rows=has_all_rows)
            return found

        with status_bar() as progress:
            plan = plan_with_sharing(self.problem, self.sharing, make)
        return replace(plan, is_measured=self.profile.is_measured), choices[plan.shares_state]

    @cached_property
    def deployment(self) -> Deployment:
        """The plan with what it is valid for: a run with these settings loads it, if all of that is the same."""
        cluster, device = self.cluster, self.device.name if self.device else self.profile.device
        fingerprint = fingerprint_of(
            self.traced.graph,
            {spec.name: spec.words() for spec in self.traced.call.inputs},
            self.settings,
            global_batch_size=self.global_batch_size,
            hosts=cluster.hosts,
            device=device,
            memory_bytes=cluster.memory_bytes,
            optimizer_bytes_factor=self.optimizer_bytes_factor,
            sharing=self.sharing,
        )
        return deployment_of(self.plan, self.traced.graph, fingerprint)

    @property
    def assumptions(self) -> list[str]:
        """What the plan rests on that nobody measured, in sentences."""
        sentences = []
        if not self.profile.is_measured:
            sentences.append(f"costs are a roofline of {self.profile.device}: nothing was measured")
        if self.device is None and self.cluster.num_ranks > 1:
            latency, speed = UNKNOWN_LINK.latency_seconds * 1e6, UNKNOWN_LINK.bytes_per_second / 1e9
            sentences.append(
                f"links are assumed: {latency:.0f} us and {speed:.0f} GB/s; name a device file with --device"
            )
        return sentences

    def _find_memory(self) -> float:
        """Returns what each rank may use."""
        total = float(self.settings.memory_limit_bytes or (self.device.memory_bytes if self.device else 0))
        if not total and self.device is not None:
            raise ConfigError(f"The device file {self.options.device} does not say its memory; pass --memory, as 80GiB")
        per_host = self.options.ranks_per_host or self.options.ranks
        return (total or host_memory() / per_host) * (1.0 - self.settings.memory_margin)

    def _new_profile(self) -> Profile:
        sizes = sizes_to_measure(self.settings, self.traced, self.global_batch_size, len(self.groups))
        if self.device is None:
            return measure_here(self.target, sizes, self.settings, is_asked=self.options.measure)[0]
        with progress_bar("predicting blocks") as advance:
            return predict(self.traced, self.target.model, sizes, self.device, advance)


def make_optimizer(text: str, parameters: Sequence[nn.Parameter] = ()) -> torch.optim.Optimizer | None:
    """Returns an optimizer, as a run has it, of one small parameter if it gets none or is not for all of them.

    `text` is a name of torch.optim in any case, with options behind a colon: ``sgd:momentum=0.9``; ``none``: none.
    Raises ConfigError if there is no such optimizer, or it takes no such options.
    """
    name, _, listed = text.partition(":")
    if name.lower() == "none":
        return None
    base = torch.optim.Optimizer
    types = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, base)]
    known: dict[str, Any] = {each.__name__.lower(): each for each in types if each is not base}
    if name.lower() not in known:
        raise ConfigError(f"--optimizer is {text!r}; expected none, {', '.join(sorted(known))}")
    try:
        options = {key: _number(value) for key, value in (pair.split("=") for pair in listed.split(",") if pair)}
        make = partial(known[name.lower()], **{"lr": 0.1, **options})
        made: torch.optim.Optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--optimizer is {text!r}, which cannot be made: {error}; as sgd:momentum=0.9") from error
    try:
        return make(parameters) if parameters else made
    except ValueError:  # Muon is for matrices alone
        return made


def _number(text: str) -> float | bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else float(text)


def report(planning: Planning) -> None:
    """Plans, and shows and saves what the options ask for."""
    options, graph, (plan, choices) = planning.options, planning.traced.graph, planning.plan_and_choices
    if options.output:
        save(options.output, planning.deployment)
    pipeline = short_enough(pipeline_of(plan, graph))
    simulation = simulate(pipeline, policy_of(plan.schedule))
    drawn = shown_ranks(pipeline)
    if options.plot:
        plot(simulation, drawn, options.plot)
    if options.json:
        record = record_of(planning.deployment) | {"notes": planning.assumptions}
        show_json(record | ({"choices": [asdict(each) for each in choices]} if options.table else {}))
        return
    if options.table:
        show(choices_table(choices) if choices else "choices: none to list beside this plan\n")
    show(plan_table(plan, [module_range(stage.blocks, graph) for stage in plan.stages]))
    show(explain(plan, graph))
    names = _names(plan, pipeline)
    drawing = render(simulation, columns(), {rank: names[rank] for rank in drawn})
    left = f"\n{len(drawn)} of {plan.num_ranks} ranks are drawn; the others are more replicas, or stages, or have none"
    show(f"\n{drawing}{left if len(drawn) < plan.num_ranks else ''}")
    for assumption in planning.assumptions:
        show(f"note: {assumption}")
    if options.output:
        show(f"saved {options.output}")
    if options.plot:
        show(f"drew {options.plot}")


def choices_table(choices: Sequence[Plan]) -> Table:
    """Returns choices as a table, in their order."""
    table = Table(title="choices, fastest first", box=box.SIMPLE_HEAD)
    sizes = ("stages", "replicas", "micro-batch", "micro-batches")
    for name in (*sizes, "schedule", "step", "samples/s", "memory", "recompute"):
        table.add_column(name, justify="right")
    for plan in choices:
        num_samples, step = plan.micro_batch_size * plan.num_micro_batches, plan.predicted_seconds
        table.add_row(
            str(plan.num_stages),
            str(len(plan.stages[0].ranks)),
            str(math.ceil(plan.micro_batch_size - 1e-9)),
            str(plan.num_micro_batches),
            plan.schedule,
            seconds(step),
            f"{num_samples / step if step else math.inf:.4g}",
            readable(max(plan.rank_bytes())),
            f"{sum(stage.needs_recompute for stage in plan.stages)} of {plan.num_stages}",
        )
    return table


def shown_ranks(plan: Pipeline) -> list[int]:
    """Returns the ranks to draw: all, or of many the first replica of each stage, or of some stages."""
    used = sorted({rank for stage in plan.stages for rank in stage.ranks})
    if len(used) <= _MOST_ROWS:
        return used
    firsts = list(dict.fromkeys(stage.ranks[0] for stage in plan.stages))
    if len(firsts) <= _MOST_ROWS:
        return firsts
    return [firsts[round(k * (len(firsts) - 1) / (_MOST_ROWS - 1))] for k in range(_MOST_ROWS)]


def _names(plan: Plan, pipeline: Pipeline) -> Sequence[int]:
    """Returns the plan's rank for each rank of a pipeline, which may be made of every n-th replica alone."""
    if pipeline.num_ranks == plan.num_ranks:
        return range(plan.num_ranks)
    parts = len(plan.stages[0].ranks) // len(pipeline.stages[0].ranks)
    return [rank for stage in plan.stages for rank in stage.ranks[::parts]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("target", metavar="MODULE:FUNCTION", help="a function that returns (model, args, kwargs)")
    add("--ranks", type=int, required=True, metavar="N", help="the number of ranks")
    add("--ranks-per-host", type=int, default=0, metavar="N", help="ranks on each host (all of them)")
    add("-o", "--output", default="", metavar="FILE", help="save the plan as a deployment")
    add("--plot", type=at_home, default="", metavar="FILE", help="draw a step as a picture: step.png")
    add("--table", action="store_true", help="list all sensible choices, best first")
    add_json(parser)
    add("--memory", metavar="BYTES", help="memory of a rank, as 80GiB (what the device file says)")
    add("--device", metavar="FILE", help="a device file, as h100.toml; without one, this machine")
    add("--profile", metavar="FILE", help="what the measure command saved, in place of a prediction")
    text = "without a device, measure a model here even if that takes more than ten minutes"
    add("--measure", action="store_true", help=text)
    text = "samples of all ranks together (the call's, times ranks)"
    add("--batch-size", type=int, default=0, metavar="N", help=text)
    add("--optimizer", default="adamw", metavar="NAME", help="one of torch.optim, as sgd or sgd:momentum=0.9 (adamw)")
    add_settings(parser, _SETTINGS)


def run(options: argparse.Namespace) -> None:
    """Plans a model for ranks that need not be there, shows the plan, and saves it as a deployment."""
    if options.ranks < 1 or options.ranks_per_host < 0 or options.batch_size < 0:
        raise ConfigError(
            f"--ranks is {options.ranks}, --ranks-per-host {options.ranks_per_host}, --batch-size "
            f"{options.batch_size}; expected 1 or more ranks, and no negative number"
        )
    if options.output:
        check_writable("--output", options.output)
    if options.plot:
        options.plot = checked_plot(options.plot)
    keep_freed_memory()  # the planner makes and frees matrices of megabytes by the thousand
    report(Planning(options))


def num_bytes(text: str) -> int:
    """Returns the memory of a rank; ConfigError if it is no number of bytes, or 0."""
    try:
        value = BYTES.read(text)
    except REFUSALS:
        value = 0
    if not (isinstance(value, int) and value):
        raise ConfigError(f"--memory is {text!r}; expected {BYTES.expected}, and more than 0")
    return value
