"""Finds the plan for the first call: from a saved deployment that is valid, else by measuring and searching."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from autovaruna.config.files import at_home
from autovaruna.config.settings import Settings, Sharing
from autovaruna.elastic.ahead import Request
from autovaruna.elastic.job_folder import AHEAD, job_place
from autovaruna.errors import ConfigError, InputError, PlanError, RankError, ScheduleError
from autovaruna.graph.batch.refusals import batch_norms
from autovaruna.graph.records import Graph
from autovaruna.graph.traced import TracedModel
from autovaruna.log import TRYING, phase
from autovaruna.planner.deployment import (
    Fingerprint,
    complaint_of_size,
    deployment_of,
    fingerprint_of,
    keep,
    read_saved_plan,
    save,
)
from autovaruna.planner.prediction import RankOrders
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan, plan_with_sharing
from autovaruna.planner.table import explain, module_range, plan_table, summary
from autovaruna.profiler.measure import device_name
from autovaruna.ranks.world import World, gather_on_all, on_all, on_first
from autovaruna.runtime.optimizer import sharing_of
from autovaruna.runtime.weights import Placement, placement_of
from autovaruna.schedule.registry import POLICIES
from autovaruna.session.measuring import MeasuredModel, SpeedWatch, measured_problem, needs_gradient, optimizer_factor
from autovaruna.session.memory import HeldMemory, rank_memory
from autovaruna.session.model import WrappedModel
from autovaruna.session.shared_call import SharedCall
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


@dataclass(frozen=True)
class FirstCall:
    """What a plan is made for: a call, its graph, and the model and optimizer as they are before the split.

    Attributes:
        resident_before: bytes that this process held before the model was traced; None: not known.
    """

    traced: TracedModel
    shared: SharedCall
    model: WrappedModel
    optimizer: torch.optim.Optimizer | None
    settings: Settings
    world: World
    resident_before: float | None = None

    def problem(self, optimizer_bytes_factor: float) -> Problem:
        """Returns what the planner is asked, by what is measured now. Collective."""
        watch = SpeedWatch(self.world, self.model.device)
        subject = MeasuredModel(self.model.module, self.traced, self.shared.tensors, self.settings, watch)
        return measured_problem(subject, self.optimizer, self.shared, optimizer_bytes_factor, self.resident_before)


@dataclass(frozen=True)
class Prepared:
    """How a model and its copies run.

    Attributes:
        fingerprint: what the plan is valid for.
        placement: the ranks that hold each parameter, and its owner if the optimizer's state is shared out.
        orders: the instructions of every rank.
        seed: what random nodes draw from.
    """

    graph: Graph
    plan: Plan
    fingerprint: Fingerprint
    assignment: Assignment
    placement: Placement
    orders: RankOrders
    device: torch.device
    seed: int
    held_memory: HeldMemory

    def save(self, path: str) -> None:
        """Writes the deployment to a file; raises DeploymentError if it cannot."""
        save(path, deployment_of(self.plan, self.graph, self.fingerprint))


def prepare(call: FirstCall, given_plan: GivenPlan | None) -> Prepared:
    """Finds the plan: the one that is given, a saved one that is valid, or a new one. Collective; all fail alike."""
    traced, settings, world, device = call.traced, call.settings, call.world, call.model.device
    held_memory = HeldMemory(device, call.model.module, call.resident_before)
    seed = torch.initial_seed() if settings.seed is None else settings.seed
    seed = int(world.broadcast_object(seed, 0, "agreeing on the seed"))
    on_first(world, partial(_dump_graph, traced.graph, settings.dump_graph), "writing the graph")
    sharing = _sharing(call)
    fingerprint = _fingerprint(call, sharing)
    plan, saved_to = _plan(call, given_plan, sharing, fingerprint)
    if world.rank == 0:
        _report(plan, traced, call.shared.global_batch_size, sharing, saved_to)
    assignment = assign(traced, [stage.blocks for stage in plan.stages])
    trained = {each.name: each.num_bytes for each in traced.graph.parameters if each.needs_gradient}
    placement = placement_of(assignment, plan, trained if plan.shares_state or sharing is True else None)
    orders = RankOrders(plan, traced.graph)
    return Prepared(traced.graph, plan, fingerprint, assignment, placement, orders, device, seed, held_memory)


def _dump_graph(graph: Graph, path: str) -> None:
    """Writes the traced graph as JSON, if it is asked for."""
    if path:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(asdict(graph), indent=1), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"dump_graph: {path} cannot be written ({error.strerror}); name a file that can be"
            ) from error
        logger.info("wrote the graph to %s", path)


def _sharing(call: FirstCall) -> Sharing:
    """Returns whether replicas share the optimizer's state, or may. Collective, unless there are none."""
    setting = call.world.num_ranks > 1 and call.settings.shard_optimizer
    if setting is False:
        return False
    act = partial(sharing_of, call.optimizer, setting, call.model.device)
    with phase(logger, TRYING):
        return on_all(call.world, act, "trying the optimizer out")


def _fingerprint(call: FirstCall, sharing: Sharing) -> Fingerprint:
    """Returns what the plan is valid for; known without measuring. Collective."""
    settings, world, device = call.settings, call.world, call.model.device

    def own() -> tuple[float, float]:
        return rank_memory(world, device, settings), optimizer_factor(call.optimizer, settings)

    with phase(logger, TRYING):
        every = gather_on_all(world, own, "describing the run")
    limits, factors = zip(*every, strict=True)
    return fingerprint_of(
        call.traced.graph,
        {spec.name: spec.words() for spec in call.traced.call.inputs},
        settings,
        global_batch_size=call.shared.global_batch_size,
        hosts=world.hosts,
        device=device_name(device),
        memory_bytes=limits,
        optimizer_bytes_factor=max(factors),
        sharing=sharing,
    )


def _plan(call: FirstCall, given: GivenPlan | None, sharing: Sharing, fingerprint: Fingerprint) -> tuple[Plan, str]:
    """Returns the plan, and the file where a new one was saved, if it was. Collective; rank 0 reads and searches."""
    world, settings, graph = call.world, call.settings, call.traced.graph
    if given is not None:
        return _checked(call, given, sharing), ""
    if settings.load_deployment is not False:
        read = partial(read_saved_plan, settings, fingerprint, graph)
        if (saved := on_first(world, read, "loading the deployment")) is not None:
            return saved, ""
    problem = call.problem(float(fingerprint.settings["optimizer_bytes_factor"]))
    with phase(logger, "planning"):
        plan = on_first(world, partial(plan_with_sharing, problem, sharing, make_plan), "planning")
    if not settings.save_deployment:
        return plan, ""
    act = partial(keep, settings.deployment_file, deployment_of(plan, graph, fingerprint))
    is_saved = on_first(world, act, "saving the deployment")
    if world.rank == 0:
        shares_memory = call.model.device.type == "cpu" and not settings.memory_limit_bytes
        _ask_for_fewer(problem, fingerprint, sharing, Path(at_home(settings.deployment_file)), shares_memory)
    return plan, settings.deployment_file if is_saved else ""


def _ask_for_fewer(
    problem: Problem, fingerprint: Fingerprint, sharing: Sharing, path: Path, shares_memory: bool
) -> None:
    """Lets the keeper of this host have plans made for fewer ranks, if the manager gives each number a file."""
    place = job_place()
    if place is not None and path.name == place.deployment:
        request = Request(problem, fingerprint, sharing, str(path.absolute().parent), shares_memory)
        with suppress(OSError):  # it would only save time
            request.write(Path(place.folder, AHEAD))


def _checked(call: FirstCall, given: GivenPlan, sharing: Sharing) -> Plan:
    """Returns the plan that the user has given, if it can run. Collective.

    Raises:
        PlanError: it does not fit the model, the ranks or the batch.
        RankError: ranks were given other plans.
    """
    traced, graph = call.traced, call.traced.graph
    act = (lambda: given) if isinstance(given, Plan) else partial(given, graph)
    plan, *others = gather_on_all(call.world, act, "taking the given plan")
    if not isinstance(plan, Plan):
        raise InputError(f"The function that is given as plan returned {plan!r}; expected a Plan.")
    if differing := [rank for rank, each in enumerate(others, 1) if each != plan]:
        raise RankError(f"Ranks {differing} were given another plan than rank 0; expected one plan on every rank.")
    if complaint := _complaint_of(plan, call, sharing):
        raise PlanError(f"The given plan cannot run: {complaint}.")
    if traced.loss is None and needs_gradient(traced):  # all forwards before the script's backward
        stages = [replace(stage, in_flight=plan.num_micro_batches) for stage in plan.stages]
        plan = replace(plan, schedule="gpipe", stages=tuple(stages))
    try:
        RankOrders(plan, graph)
    except ScheduleError as error:
        raise PlanError(f"The given plan cannot run: {error}") from error
    return plan


def _complaint_of(plan: Plan, call: FirstCall, sharing: Sharing) -> str:
    """Returns why a plan that is given cannot run; empty: it can."""
    settings, num_ranks, stages = call.settings, call.world.num_ranks, plan.stages
    blocks, ranks = list(range(len(call.traced.graph.blocks))), set(range(num_ranks))
    are_blocks = all(each.blocks for each in stages) and [b for each in stages for b in each.blocks] == blocks
    odd = [each.ranks for each in stages if not each.ranks or len(ranks & set(each.ranks)) < len(each.ranks)]
    num_samples = max(call.shared.global_batch_size, plan.num_micro_batches)  # empty slices are left out
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
        "it is for evaluation: got a call with gradients": needs_gradient(call.traced) > plan.needs_gradient,
        "it shares out the optimizer's state, which shard_optimizer or the optimizer refuses": (
            plan.shares_state and sharing is False
        ),
    }
    return next((text for text, is_wrong in complaints.items() if is_wrong), "")


def _report(plan: Plan, traced: TracedModel, num_samples: int, sharing: Sharing, saved_to: str) -> None:
    """Logs the plan, and what it means for the numbers of the model."""
    graph, norms = traced.graph, ""
    if sharing is True and sum(each.needs_gradient for each in graph.parameters) < 2:
        logger.info(
            "shard_optimizer has nothing to share out: one replica has the state of the only parameter to train"
        )
    if plan.num_micro_batches > 1 and batch_norms(traced):
        norms = f"micro-batches of {-(-num_samples // plan.num_micro_batches)} samples, of {num_samples}"
        logger.warning(
            "batch normalisations count over %s; plain PyTorch, over the whole batch. Pass batch_norm_samples to "
            "say over how many",
            norms,
        )
    logger.info("the plan%s: %s", f", saved to {saved_to}" if saved_to else "", summary(plan, graph))
    if logger.isEnabledFor(logging.DEBUG):
        console = Console(width=110, file=io.StringIO())
        with console.capture() as capture:
            console.print(plan_table(plan, [module_range(stage.blocks, graph) for stage in plan.stages]))
        lines = explain(plan, graph) + (f"\nbatch norm      counts over {norms}" if norms else "")
        logger.debug("the plan in full:\n%s\n%s", capture.get().rstrip(), lines)
