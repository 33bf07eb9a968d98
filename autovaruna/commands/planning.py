"""Puts together what the planner needs from the options of the plan command, without any rank."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from autovaruna.commands.measuring import measure_here
from autovaruna.commands.setting_options import settings_of
from autovaruna.commands.target import load_target
from autovaruna.errors import ConfigError
from autovaruna.parallel.machine import host_memory, optimizer_factor
from autovaruna.parallel.problem import SHAPING, constraints_of, needs_gradient, sizes_to_measure
from autovaruna.parallel.saved import GLOBAL_BATCH
from autovaruna.planner import Plan, Problem, make_plan
from autovaruna.planner.choices import Choice, plan_choices
from autovaruna.planner.deployments.deployment import Deployment, deployment_of
from autovaruna.planner.deployments.fingerprint import Fingerprint, host_counts
from autovaruna.planner.records import UNKNOWN_LINK
from autovaruna.profiler.device_file import read_device
from autovaruna.profiler.profile_file import load_profile
from autovaruna.profiler.progress import progress_bar, status_bar
from autovaruna.profiler.records import Cluster, OptimizerCost, Profile
from autovaruna.profiler.roofline import optimizer_cost, predict

_CPU = torch.device("cpu")


class Planning:
    """One run of the plan command.

    Args:
        options: The options of the command.

    Raises:
        AutoVarunaError: an option, a file or the model cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = settings_of(options, {"memory_limit_bytes": options.memory} if options.memory else {})
        self.device = read_device(options.device) if options.device else None
        saved = load_profile(options.profile) if options.profile else None
        is_simulated = self.device is not None or saved is not None
        self.memory_bytes = self._find_memory()
        make_optimizer(options.optimizer)  # a mistake is told before the model is traced
        self.target = load_target(options.target, self.settings, _CPU if is_simulated else None)
        self.traced = self.target.traced
        optimizer = make_optimizer(options.optimizer, [*self.target.model.parameters()])
        self.optimizer_bytes_factor = optimizer_factor(optimizer, self.settings)
        self.profile = saved or self._new_profile()

    @cached_property
    def global_batch_size(self) -> int:
        """Samples of a step: the option, or what each rank passes, times the ranks that pass their own."""
        return self.options.batch_size or self.target.batch_size * self._num_calls

    @property
    def _num_calls(self) -> int:
        return 1 if self.settings.inputs == "replicated" else int(self.options.ranks)

    @property
    def num_mini_batches(self) -> int:
        """Mini-batches of a step; each is one micro-batch or more."""
        return min(self._num_calls, self.global_batch_size)

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
            local, remote = device.local_link, device.remote_link
            all_reduce = device.local_all_reduce if num_hosts == 1 else device.remote_all_reduce
            latency = device.all_reduce_latency_seconds
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
        return Problem(
            graph=self.traced.graph,
            profile=self.profile,
            cluster=self.cluster,
            global_batch_size=self.global_batch_size,
            optimizer_bytes_factor=self.optimizer_bytes_factor,
            optimizer_cost=optimizer_cost(self.device, self.optimizer_bytes_factor) if self.device else OptimizerCost(),
            needs_gradient=needs_gradient(self.traced),
            min_micro_batches_for_inputs=self.num_mini_batches,
            constraints=constraints_of(self.settings, self.traced, self.num_mini_batches),
        )

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        with status_bar() as progress:
            plan = make_plan(self.problem, progress)
        return replace(plan, is_measured=self.profile.is_measured)

    @cached_property
    def choices(self) -> list[Choice]:
        """All sensible choices, fastest first."""
        with status_bar() as progress:
            return plan_choices(self.problem, progress=progress)

    @cached_property
    def deployment(self) -> Deployment:
        """The plan with what it is valid for: a run with these settings loads it, if all of that is the same."""
        fingerprint = Fingerprint(
            graph=self.traced.graph.fingerprint,
            shapes={f"input {spec.name}": spec.words() for spec in self.traced.call.inputs}
            | {GLOBAL_BATCH: str(self.global_batch_size)},
            num_ranks=self.cluster.num_ranks,
            hosts=host_counts(self.cluster.hosts),
            device=self.device.name if self.device else self.profile.device,
            memory_bytes=self.cluster.memory_bytes,
            settings={name: getattr(self.settings, name) for name in SHAPING}
            | {"optimizer_bytes_factor": self.optimizer_bytes_factor},
        )
        return deployment_of(self.plan, self.traced.graph, fingerprint)

    @property
    def assumptions(self) -> list[str]:
        """What the plan rests on that nobody measured, in sentences."""
        told = []
        if not self.profile.is_measured:
            told.append(f"costs are a roofline of {self.profile.device}: nothing was measured")
        if self.device is None and self.cluster.num_ranks > 1:
            told.append(
                f"links are assumed: {UNKNOWN_LINK.latency_seconds * 1e6:.0f} us and "
                f"{UNKNOWN_LINK.bytes_per_second / 1e9:.0f} GB/s; name a device file with --device"
            )
        return told

    def _find_memory(self) -> float:
        """Returns what each rank may use."""
        total = float(self.settings.memory_limit_bytes)
        if not total and self.device is not None:
            total = float(self.device.memory_bytes)
        if not total and self.device is not None:
            raise ConfigError(f"The device file {self.options.device} does not say its memory; pass --memory, as 80GiB")
        per_host = self.options.ranks_per_host or self.options.ranks
        return (total or host_memory() / per_host) * (1.0 - self.settings.memory_margin)

    def _new_profile(self) -> Profile:
        sizes = sizes_to_measure(self.settings, self.traced, self.global_batch_size, self.num_mini_batches)
        if self.device is None:
            return measure_here(self.target, sizes, self.settings)[0]
        with progress_bar("predicting blocks") as advance:
            return predict(self.traced, self.target.model, sizes, self.device, advance)


def make_optimizer(text: str, parameters: Sequence[nn.Parameter] = ()) -> torch.optim.Optimizer | None:
    """Returns an optimizer, as a run has it.

    Args:
        text: A name of torch.optim in any case, with options behind a colon: ``sgd:momentum=0.9``; ``none``: none.
        parameters: What it is for; one small parameter if there are none, or if it is not for all of them.

    Raises:
        ConfigError: there is no such optimizer, or it takes no such options.
    """
    name, _, listed = text.partition(":")
    if name.lower() == "none":
        return None
    known = _optimizers()
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


def _optimizers() -> Mapping[str, Any]:
    found = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: each
        for name, each in found.items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }


def _number(text: str) -> float | bool:
    return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else float(text)
