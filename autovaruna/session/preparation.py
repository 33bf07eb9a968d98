"""Finds the plan for the first call: from a saved deployment that is valid, else by measuring and searching."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from torch import nn

from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError, DeploymentError
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.candidate import priced
from autovaruna.planner.deployment import Fingerprint, deployment_of, host_counts, save
from autovaruna.planner.prediction import Orders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.planner.table import explain, plan_table
from autovaruna.profiler.measure import device_name
from autovaruna.runtime.collective import on_all
from autovaruna.runtime.trace import EventTrace
from autovaruna.runtime.weights.placement import Placement, placement_of
from autovaruna.runtime.world import World
from autovaruna.schedule.simulator import replay
from autovaruna.session.calls import SharedCall
from autovaruna.session.machine import SpeedWatch, optimizer_factor, rank_memory
from autovaruna.session.measuring import SHAPING, Subject, measured_problem
from autovaruna.session.saved_plan import GLOBAL_BATCH, read_saved_plan
from autovaruna.stage.split import Assignment, assign

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Preparation:
    """The plan of a model, and all that the engine needs to run it. Making one is collective.

    Args:
        traced: The graph of the first call.
        model: The model.
        optimizer: Its optimizer, to find out what state it keeps.
        shared: The first call.
        settings: The settings.
        world: The ranks.
        device: Where this rank computes.
        resident_before: What this process held before the model was traced, in bytes; 0: not known.

    Raises:
        AutoVarunaError: measuring or planning failed on a rank, or a deployment does not fit; on every rank.
    """

    def __init__(
        self,
        traced: TracedModel,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        shared: SharedCall,
        settings: Settings,
        world: World,
        device: torch.device,
        resident_before: float = 0.0,
    ) -> None:
        self._resident_before = resident_before
        self._traced = traced
        self._model = model
        self._optimizer = optimizer
        self._shared = shared
        self._settings = settings
        self._world = world
        self.device = device
        self.seed = int(world.broadcast_object(_seed(settings), 0, "agreeing on the seed"))
        self._on_all(self._dump_graph, "writing the graph")
        self._fingerprint = self._describe_run()
        self.plan = self._saved_plan() or self._new_plan()
        self._report()

    @cached_property
    def assignment(self) -> Assignment:
        """The stage of each node."""
        return assign(self._traced, [stage.blocks for stage in self.plan.stages])

    @cached_property
    def placement(self) -> Placement:
        """The ranks that hold each parameter."""
        return placement_of(self.assignment, self.plan)

    @cached_property
    def orders(self) -> Orders:
        """The instructions of every rank."""
        return Orders(self.plan, self._traced.graph)

    def event_trace(self) -> EventTrace | None:
        """Starts the trace of every step, if it is asked for. Collective."""
        if not self._settings.trace_events:
            return None
        pipeline = self.orders.pipeline
        predicted = replay(pipeline, self.orders.planned)
        return EventTrace(self._settings.trace_events_file, self._world, predicted, pipeline.edges)

    def _dump_graph(self) -> None:
        """Writes the traced graph as JSON, if it is asked for."""
        path = self._settings.dump_graph
        if path and self._world.rank == 0:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps(asdict(self._traced.graph), indent=1), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"dump_graph: {path} cannot be written ({error.strerror}); name a file that can be"
                ) from error
            logger.info("wrote the graph to %s", path)

    def save(self, path: str) -> None:
        """Writes the deployment to a file.

        Raises:
            DeploymentError: it cannot be written.
        """
        save(path, deployment_of(self.plan, self._traced.graph, self._fingerprint))

    def _describe_run(self) -> Fingerprint:
        """Returns what the plan is valid for; known without measuring. Collective."""
        mine = self._on_all(
            lambda: (
                rank_memory(self._world, self.device, self._settings),
                optimizer_factor(self._optimizer, self._settings),
            ),
            "describing the run",
        )
        limits, factors = zip(*self._world.gather_objects(mine, "describing the run"), strict=True)
        return Fingerprint(
            graph=self._traced.graph.fingerprint,
            shapes={f"input {spec.name}": spec.words() for spec in self._traced.call.inputs}
            | {GLOBAL_BATCH: str(self._shared.global_batch_size)},
            num_ranks=self._world.num_ranks,
            hosts=host_counts(self._world.hosts),
            device=device_name(self.device),
            memory_bytes=limits,
            settings={name: getattr(self._settings, name) for name in SHAPING}
            | {"optimizer_bytes_factor": max(factors)},
        )

    def _saved_plan(self) -> Plan | None:
        """Returns the plan of the deployment file if it is valid; rank 0 reads it for all."""
        if self._settings.load_deployment is False:
            return None

        def read() -> Plan | None:
            return (
                read_saved_plan(self._settings, self._fingerprint, self._traced.graph)
                if self._world.rank == 0
                else None
            )

        plan = self._on_all(read, "loading the deployment")
        return self._world.broadcast_object(plan, 0, "sharing the deployment")  # type: ignore[no-any-return]

    def measured_again(self) -> Plan:
        """Returns the plan as it is predicted by what is measured now; nothing changes. Collective."""
        return priced(self.plan, self._measured_problem())

    def _new_plan(self) -> Plan:
        """Measures, searches, and saves the deployment. Collective; rank 0 searches for all."""
        problem = self._measured_problem()
        plan = self._on_all(lambda: make_plan(problem) if self._world.rank == 0 else None, "planning")
        self.plan = self._world.broadcast_object(plan, 0, "sharing the plan")
        if self._settings.save_deployment:
            self._on_all(self._save_on_first, "saving the deployment")
        return self.plan

    def _save_on_first(self) -> None:
        if self._world.rank > 0:
            return
        try:
            self.save(self._settings.deployment_file)
            logger.info("saved the deployment to %s", self._settings.deployment_file)
        except DeploymentError as error:  # to plan again next time is better than to give up what was planned
            logger.warning("the plan is not kept: %s", error)

    def _measured_problem(self) -> Problem:
        """Measures model, machine and optimizer. Collective."""
        watch = SpeedWatch(self._world, self.device)
        subject = Subject(self._model, self._traced, self._shared.tensors, self._settings, watch)
        factor = float(self._fingerprint.settings["optimizer_bytes_factor"])
        return measured_problem(subject, self._optimizer, self._shared, factor, self._resident_before)

    def _on_all(self, act: Callable[[], Result], what: str) -> Result:
        """Does something on every rank; an error on one is an error on all."""
        return on_all(self._world, act, what)

    def _report(self) -> None:
        if self._world.rank == 0 and logger.isEnabledFor(logging.INFO):
            console = Console(width=110, file=io.StringIO())
            with console.capture() as capture:
                console.print(plan_table(self.plan, self._traced.graph))
            logger.info("the plan:\n%s\n%s", capture.get().rstrip(), explain(self.plan, self._traced.graph))


def _seed(settings: Settings) -> int:
    return torch.initial_seed() if settings.seed is None else settings.seed
