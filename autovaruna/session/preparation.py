"""Finds the plan for the first call: from a saved deployment that is valid, else by measuring and searching."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from autovaruna.config.files import at_home
from autovaruna.config.settings import Settings, Sharing, replicas_of
from autovaruna.elastic.ahead import Request
from autovaruna.elastic.progress import AHEAD, job_place
from autovaruna.errors import AutoVarunaError, ConfigError, DeploymentError
from autovaruna.graph.batch.state import batch_norms
from autovaruna.graph.records import Graph
from autovaruna.graph.traced import TracedModel
from autovaruna.log import phase
from autovaruna.planner.candidate import priced
from autovaruna.planner.deployment import (
    Deployment,
    Fingerprint,
    deployment_of,
    differences,
    host_counts,
    load,
    plan_from,
    save,
)
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan, plan_with_sharing
from autovaruna.planner.table import explain, plan_table
from autovaruna.profiler.measure import device_name
from autovaruna.runtime.optimizer import sharing_of
from autovaruna.runtime.timeline import EventTrace
from autovaruna.runtime.weights import Placement, placement_of
from autovaruna.runtime.world import gather_on_all, on_all
from autovaruna.schedule.simulator import replay
from autovaruna.session.calls import SharedCall
from autovaruna.session.machine import rank_memory
from autovaruna.session.measuring import SHAPING, MeasuredModel, SpeedWatch, measured_problem, optimizer_factor
from autovaruna.session.wrapped import Wrapped
from autovaruna.stage.split import Assignment, assign

Result = TypeVar("Result")
_GLOBAL_BATCH = "global batch"  # where a fingerprint's shapes have the number of samples of all ranks

logger = logging.getLogger(__name__)


def read_saved_plan(settings: Settings, fingerprint: Fingerprint, graph: Graph) -> Plan | None:
    """Returns the plan of the deployment file; None: plan again. One line in the log says which, and why.

    Raises DeploymentError if ``load_deployment`` is true, and the file is missing, damaged or stale.
    """
    path = Path(settings.deployment_file)
    is_required = settings.load_deployment is True
    if not path.exists() and not is_required:
        return None
    try:
        deployment = load(path)
        changed = differences(deployment.fingerprint, fingerprint)
        if not changed:
            plan = _runnable(deployment, graph, settings, fingerprint, path)
            logger.info("using the saved deployment %s", path)
            return plan
    except DeploymentError as error:
        if is_required:
            raise
        changed = [str(error)]
        if settings.save_deployment:
            changed.append(_keep_copy(path))
    if is_required:
        raise DeploymentError(
            f"The deployment {path} is stale: {'; '.join(changed)}. Expected one for this run; delete it, or pass "
            "load_deployment='auto' to plan again."
        )
    logger.info("planning again: %s", "; ".join(changed))
    return None


def _keep_copy(path: Path) -> str:
    """Keeps what would be lost when a new plan is saved, in a new file; returns in words how that went."""
    names = (f"{path}.damaged{number or ''}" for number in count())
    copy = next(name for name in names if not os.path.lexists(name))
    try:
        shutil.copy(path, copy)
        return f"a copy is kept as {copy}"
    except OSError as error:
        return f"no copy of it can be kept: {error.strerror}"


def _runnable(deployment: Deployment, graph: Graph, settings: Settings, fingerprint: Fingerprint, path: Path) -> Plan:
    """Returns the plan of a deployment, which may have been edited by hand, if it can run."""
    plan = deployment.plan
    most = int(fingerprint.shapes[_GLOBAL_BATCH])
    groups = {"replicated": 1, "per_replica": len(replicas_of(settings.stage_ranks)) if settings.stage_ranks else 1}
    least = min(groups.get(settings.inputs, plan.num_ranks), most)
    if not least <= plan.num_micro_batches <= most:
        raise DeploymentError(
            f"the deployment {path} cannot run: num_micro_batches is {plan.num_micro_batches}, expected {least} to "
            f"{most} for {most} samples on {plan.num_ranks} ranks"
        )
    try:
        plan = plan_from(deployment, graph)
        RankOrders(plan, graph)
        return plan
    except AutoVarunaError as error:
        raise DeploymentError(f"the deployment {path} cannot run: {error}") from error


def fingerprint_of(
    traced: TracedModel,
    settings: Settings,
    global_batch_size: int,
    hosts: tuple[str, ...],
    device: str,
    memory_bytes: tuple[float, ...],
    optimizer_bytes_factor: float,
    sharing: Sharing,
) -> Fingerprint:
    """Returns what a plan is valid for."""
    shapes = {f"input {spec.name}": spec.words() for spec in traced.call.inputs}
    shaping = {name: getattr(settings, name) for name in SHAPING}
    return Fingerprint(
        graph=traced.graph.fingerprint,
        shapes={**shapes, _GLOBAL_BATCH: str(global_batch_size)},
        num_ranks=len(hosts),
        hosts=host_counts(hosts),
        device=device,
        memory_bytes=memory_bytes,
        settings={**shaping, "optimizer_bytes_factor": optimizer_bytes_factor, "shard_optimizer": sharing},
    )


class Preparation:
    """The plan of a model, and all that the engine needs to run it. Making one is collective; all fail alike."""

    def __init__(
        self, traced: TracedModel, wrapped: Wrapped, shared: SharedCall, resident_before: float | None
    ) -> None:
        self._traced = traced
        self._model = wrapped.module
        self._optimizer = wrapped.raw_optimizer
        self._shared = shared
        self._resident_before = resident_before
        self._settings = settings = wrapped.settings
        self._world = world = wrapped.world
        self.device = wrapped.device
        seed = torch.initial_seed() if settings.seed is None else settings.seed
        self.seed = int(world.broadcast_object(seed, 0, "agreeing on the seed"))
        self._on_first(self._dump_graph, "writing the graph")
        self._sharing = self._try_sharing()
        self._fingerprint = self._describe_run()
        self.plan = self._saved_plan() or self._new_plan()
        self._report()

    def _try_sharing(self) -> Sharing:
        """Returns whether replicas share the optimizer's state, or may. Collective, unless there are none."""
        setting = self._world.num_ranks > 1 and self._settings.shard_optimizer
        if setting is False:
            return False
        act = partial(sharing_of, self._optimizer, setting, self.device)
        with phase(logger, "finding out whether replicas may share the optimizer's state"):
            return on_all(self._world, act, "trying the optimizer out")

    @cached_property
    def assignment(self) -> Assignment:
        """The stage of each node."""
        return assign(self._traced, [stage.blocks for stage in self.plan.stages])

    @cached_property
    def placement(self) -> Placement:
        """The ranks that hold each parameter, and its owner if the optimizer's state is shared out."""
        trained = {each.name: each.num_bytes for each in self._traced.graph.parameters if each.needs_gradient}
        return placement_of(self.assignment, self.plan, trained if self._is_shared else None)

    @property
    def _is_shared(self) -> bool:
        """Whether the replicas of a stage share the optimizer's state."""
        return self.plan.shares_state or self._sharing is True

    @cached_property
    def orders(self) -> RankOrders:
        """The instructions of every rank."""
        return RankOrders(self.plan, self._traced.graph)

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
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps(asdict(self._traced.graph), indent=1), encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"dump_graph: {path} cannot be written ({error.strerror}); name a file that can be"
                ) from error
            logger.info("wrote the graph to %s", path)

    def save(self, path: str) -> None:
        """Writes the deployment to a file; raises DeploymentError if it cannot."""
        save(path, deployment_of(self.plan, self._traced.graph, self._fingerprint))

    def _describe_run(self) -> Fingerprint:
        """Returns what the plan is valid for; known without measuring. Collective."""

        def own() -> tuple[float, float]:
            memory = rank_memory(self._world, self.device, self._settings)
            return memory, optimizer_factor(self._optimizer, self._settings)

        with phase(logger, "finding out what state the optimizer keeps"):
            every = gather_on_all(self._world, own, "describing the run")
        limits, factors = zip(*every, strict=True)
        hosts, device = self._world.hosts, device_name(self.device)
        batch_size = self._shared.global_batch_size
        return fingerprint_of(
            self._traced, self._settings, batch_size, hosts, device, limits, max(factors), self._sharing
        )

    def _saved_plan(self) -> Plan | None:
        """Returns the plan of the deployment file if it is valid; rank 0 reads it for all."""
        if self._settings.load_deployment is False:
            return None
        read = partial(read_saved_plan, self._settings, self._fingerprint, self._traced.graph)
        return self._on_first(read, "loading the deployment")

    def measured_again(self) -> Plan:
        """Returns the plan as it is predicted by what is measured now; nothing changes. Collective."""
        return priced(self.plan, replace(self._measured_problem(), shares_state=self._is_shared))

    def _new_plan(self) -> Plan:
        """Measures, searches, and saves the deployment. Collective; rank 0 searches for all."""
        problem = self._measured_problem()
        search = partial(plan_with_sharing, problem, self._sharing, make_plan)
        with phase(logger, "searching for a plan"):
            self.plan = self._on_first(search, "planning")
        if self._settings.save_deployment:
            self._on_first(self._keep_plan, "saving the deployment")
            self._ask_for_fewer(problem)
        return self.plan

    def _ask_for_fewer(self, problem: Problem) -> None:
        """Lets the keeper of this host have plans made for fewer ranks, if the manager gives each number a file."""
        place, path = job_place(), Path(at_home(self._settings.deployment_file)).absolute()
        if place is None or path.name != place.deployment or self._world.rank > 0:
            return
        shares_memory = self.device.type == "cpu" and not self._settings.memory_limit_bytes
        request = Request(problem, self._fingerprint, self._sharing, str(path.parent), shares_memory)
        with suppress(OSError):  # it would only save time
            request.write(Path(place.folder, AHEAD))

    def _on_first(self, act: Callable[[], Result], what: str) -> Result:
        """Returns on every rank what `act` returns on rank 0. Collective."""
        return gather_on_all(self._world, lambda: act() if self._world.rank == 0 else None, what)[0]  # type: ignore[return-value]

    def _keep_plan(self) -> None:
        file = self._settings.deployment_file
        path = Path(at_home(file))
        try:
            if path.is_file():
                path.open("rb").close()  # what nobody can read may be a plan that somebody has edited
            self.save(file)
            logger.info("saved the deployment to %s", file)
        except DeploymentError as error:  # to plan again next time is better than to give up what was planned
            logger.warning("the plan is not kept: %s", error)
        except OSError as error:
            logger.warning(
                "the plan is not kept: %s is there, but cannot be read (%s), so that it is not replaced; make it "
                "readable, remove it, or name another deployment_file",
                *(path, error.strerror),
            )

    def _measured_problem(self) -> Problem:
        watch = SpeedWatch(self._world, self.device)
        subject = MeasuredModel(self._model, self._traced, self._shared.tensors, self._settings, watch)
        factor = float(self._fingerprint.settings["optimizer_bytes_factor"])
        return measured_problem(subject, self._optimizer, self._shared, factor, self._resident_before)

    def _report(self) -> None:
        if self._world.rank > 0:
            return
        norms, total = "", self._shared.global_batch_size
        if self._sharing is True and sum(each.needs_gradient for each in self._traced.graph.parameters) < 2:
            logger.info(
                "shard_optimizer has nothing to share out: one replica has the state of the only parameter to train"
            )
        if self.plan.num_micro_batches > 1 and batch_norms(self._traced):
            norms = f"micro-batches of {-(-total // self.plan.num_micro_batches)} samples, of {total}"
            logger.warning(
                "batch normalisations count over %s; plain PyTorch, over the whole batch. Pass batch_norm_samples to "
                "say over how many",
                norms,
            )
        if logger.isEnabledFor(logging.INFO):
            console = Console(width=110, file=io.StringIO())
            with console.capture() as capture:
                console.print(plan_table(self.plan, self._traced.graph))
            lines = explain(self.plan, self._traced.graph) + (f"\nbatch norm      counts over {norms}" if norms else "")
            logger.info("the plan:\n%s\n%s", capture.get().rstrip(), lines)
