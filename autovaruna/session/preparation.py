"""Finds the plan for the first call: from a saved deployment that is valid, else by measuring and searching."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console

from autovaruna.config.files import at_home
from autovaruna.config.settings import Settings, Sharing
from autovaruna.elastic.ahead import Request
from autovaruna.elastic.job_folder import AHEAD, job_place
from autovaruna.errors import (
    ConfigError,
    DeploymentError,
    InputError,
    PlanError,
    RankError,
    ScheduleError,
)
from autovaruna.graph.batch.refusals import batch_norms
from autovaruna.graph.records import Graph
from autovaruna.graph.traced import TracedModel
from autovaruna.log import TRYING, phase
from autovaruna.planner.deployment import (
    GLOBAL_BATCH,
    Fingerprint,
    complaint_of_size,
    deployment_of,
    host_counts,
    read_saved_plan,
    save,
)
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan, plan_with_sharing
from autovaruna.planner.table import explain, module_range, plan_table, summary
from autovaruna.profiler.measure import device_name
from autovaruna.ranks.world import gather_on_all, on_all, on_first
from autovaruna.runtime.optimizer import sharing_of
from autovaruna.runtime.timeline import EventTrace
from autovaruna.runtime.weights import Placement, placement_of
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import replay
from autovaruna.session.agreement import SharedCall
from autovaruna.session.measuring import (
    SHAPING,
    MeasuredModel,
    SpeedWatch,
    measured_problem,
    needs_gradient,
    optimizer_factor,
)
from autovaruna.session.memory import HeldMemory, rank_memory
from autovaruna.session.model import WrappedModel
from autovaruna.session.record import NUM_TRACED_STEPS, start_record
from autovaruna.session.run import Run
from autovaruna.stage.split import Assignment, assign

GivenPlan = Plan | Callable[[Graph], Plan]
"""A plan of the user's, or what makes one for the graph of a traced model."""

logger = logging.getLogger(__name__)


def settings_with(settings: Settings, given: GivenPlan | None) -> Settings:
    """Returns settings with the number of micro-batches of a plan that is given; InputError if it is none."""
    if isinstance(given, Plan):
        return replace(settings, num_micro_batches=settings.num_micro_batches or given.num_micro_batches)
    if given is None or callable(given):
        return settings
    raise InputError(
        f"plan is {given!r}: expected a Plan, or a function that makes one of the model's graph. For the plan of a "
        "file pass deployment_file, and load_deployment=True."
    )


def fingerprint_of(
    traced: TracedModel,
    settings: Settings,
    *,
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
        shapes={**shapes, GLOBAL_BATCH: str(global_batch_size)},
        num_ranks=len(hosts),
        hosts=host_counts(hosts),
        device=device,
        memory_bytes=memory_bytes,
        settings={**shaping, "optimizer_bytes_factor": optimizer_bytes_factor, "shard_optimizer": sharing},
    )


class Preparation:
    """The plan of a model, and all that the engine needs to run it. Making one is collective; all fail alike."""

    def __init__(
        self,
        traced: TracedModel,
        shared: SharedCall,
        model: WrappedModel,
        optimizer: torch.optim.Optimizer | None,
        run: Run,
        *,
        resident_before: float | None,
        given_plan: GivenPlan | None,
    ) -> None:
        self._traced, self._shared = traced, shared
        self._model, self.device = model.module, model.device
        self._optimizer = optimizer
        self._settings, self._world = settings, world = run.settings, run.world
        self._resident_before = resident_before
        self._saved_to = ""
        self.held_memory = HeldMemory(model.device, model.module, resident_before)
        seed = torch.initial_seed() if settings.seed is None else settings.seed
        self.seed = int(world.broadcast_object(seed, 0, "agreeing on the seed"))
        on_first(self._world, self._dump_graph, "writing the graph")
        self._sharing = self._try_sharing()
        self._fingerprint = self._describe_run()
        self.plan = self._checked(given_plan) if given_plan is not None else self._saved_plan() or self._new_plan()
        self._report()

    def _try_sharing(self) -> Sharing:
        """Returns whether replicas share the optimizer's state, or may. Collective, unless there are none."""
        setting = self._world.num_ranks > 1 and self._settings.shard_optimizer
        if setting is False:
            return False
        act = partial(sharing_of, self._optimizer, setting, self.device)
        with phase(logger, TRYING):
            return on_all(self._world, act, "trying the optimizer out")

    def _checked(self, given: GivenPlan) -> Plan:
        """Returns the plan that the user has given, if it can run. Collective.

        Raises:
            PlanError: it does not fit the model, the ranks or the batch.
            RankError: ranks were given other plans.
        """
        graph = self._traced.graph
        act = (lambda: given) if isinstance(given, Plan) else partial(given, graph)
        plan, *others = gather_on_all(self._world, act, "taking the given plan")
        if not isinstance(plan, Plan):
            raise InputError(f"The function that is given as plan returned {plan!r}; expected a Plan.")
        if differing := [rank for rank, each in enumerate(others, 1) if each != plan]:
            raise RankError(f"Ranks {differing} were given another plan than rank 0; expected one plan on every rank.")
        if complaint := self._complaint_of(plan):
            raise PlanError(f"The given plan cannot run: {complaint}.")
        if self._traced.loss is None and needs_gradient(self._traced):  # all forwards before the script's backward
            stages = [replace(stage, in_flight=plan.num_micro_batches) for stage in plan.stages]
            plan = replace(plan, schedule="gpipe", stages=tuple(stages))
        try:
            RankOrders(plan, graph)
        except ScheduleError as error:
            raise PlanError(f"The given plan cannot run: {error}") from error
        return plan

    def _complaint_of(self, plan: Plan) -> str:
        """Returns why a plan that is given cannot run; empty: it can."""
        settings, num_ranks, stages = self._settings, self._world.num_ranks, plan.stages
        blocks, ranks = list(range(len(self._traced.graph.blocks))), set(range(num_ranks))
        are_blocks = all(each.blocks for each in stages) and [b for each in stages for b in each.blocks] == blocks
        odd = [each.ranks for each in stages if not each.ranks or len(ranks & set(each.ranks)) < len(each.ranks)]
        num_samples = max(self._shared.global_batch_size, plan.num_micro_batches)  # empty slices are left out
        of_size = complaint_of_size(plan, settings, num_samples)
        complaints = {
            f"it is for {plan.num_ranks} ranks: got {num_ranks}": plan.num_ranks != num_ranks,
            f"stages are to have blocks 0 to {blocks[-1]} of the model, in order and each once": not are_blocks,
            f"a stage is to have different ranks from 0 to {num_ranks - 1}: got {odd}": odd,
            f"its schedule is {plan.schedule}, expected one of {', '.join(sorted(POLICIES))}": (
                plan.schedule not in POLICIES
            ),
            f"it has {plan.num_micro_batches} micro-batches, but num_micro_batches={settings.num_micro_batches}": (
                settings.num_micro_batches not in (0, plan.num_micro_batches)
            ),
            of_size: of_size,
            "it is for evaluation: got a call with gradients": needs_gradient(self._traced) > plan.needs_gradient,
            "it shares out the optimizer's state, which shard_optimizer or the optimizer refuses": (
                plan.shares_state and self._sharing is False
            ),
        }
        return next((text for text, is_wrong in complaints.items() if is_wrong), "")

    @cached_property
    def assignment(self) -> Assignment:
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
        return RankOrders(self.plan, self._traced.graph)

    def event_trace(self, run: Run) -> EventTrace | None:
        """Starts the trace of every step, or of the first ones with the record of a run, if asked for. Collective."""
        settings, pipeline, trace = self._settings, self.orders.pipeline, None
        is_recorded = settings.report_dir and not run.of_model
        if settings.trace_events or is_recorded:
            predicted, path = replay(pipeline, self.orders.planned), settings.trace_events_file
            path = str(Path(settings.report_dir, path)) if is_recorded else path
            trace = EventTrace(path, self._world, predicted, pipeline.edges)
            trace.num_steps_left = math.inf if settings.trace_events else NUM_TRACED_STEPS
        if is_recorded and trace is not None:
            stages = [module_range(stage.blocks, self._traced.graph) for stage in self.plan.stages]
            record = start_record(run, type(self._model).__name__, stages, self.save)
            trace.on_account = None if record is None else record.record_account
        return trace

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

        with phase(logger, TRYING):
            every = gather_on_all(self._world, own, "describing the run")
        limits, factors = zip(*every, strict=True)
        return fingerprint_of(
            self._traced,
            self._settings,
            global_batch_size=self._shared.global_batch_size,
            hosts=self._world.hosts,
            device=device_name(self.device),
            memory_bytes=limits,
            optimizer_bytes_factor=max(factors),
            sharing=self._sharing,
        )

    def _saved_plan(self) -> Plan | None:
        """Returns the plan of the deployment file if it is valid; rank 0 reads it for all."""
        if self._settings.load_deployment is False:
            return None
        read = partial(read_saved_plan, self._settings, self._fingerprint, self._traced.graph)
        return on_first(self._world, read, "loading the deployment")

    def _new_plan(self) -> Plan:
        """Measures, searches, and saves the deployment. Collective; rank 0 searches for all."""
        problem = self._measured_problem()
        search = partial(plan_with_sharing, problem, self._sharing, make_plan)
        with phase(logger, "planning"):
            self.plan = on_first(self._world, search, "planning")
        if self._settings.save_deployment:
            on_first(self._world, self._keep_plan, "saving the deployment")
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

    def _keep_plan(self) -> None:
        file = self._settings.deployment_file
        path = Path(at_home(file))
        try:
            if path.is_file():
                path.open("rb").close()  # what nobody can read may be a plan that somebody has edited
            self.save(file)
            self._saved_to = f", saved to {file}"
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
        logger.info("the plan%s: %s", self._saved_to, summary(self.plan, self._traced.graph))
        if logger.isEnabledFor(logging.DEBUG):
            console = Console(width=110, file=io.StringIO())
            with console.capture() as capture:
                console.print(plan_table(self.plan, self._traced.graph))
            lines = explain(self.plan, self._traced.graph) + (f"\nbatch norm      counts over {norms}" if norms else "")
            logger.debug("the plan in full:\n%s\n%s", capture.get().rstrip(), lines)
