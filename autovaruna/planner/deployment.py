"""Defines `Deployment`: a plan with what it is valid for, as a JSON file that a person may read and edit."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from autovaruna.config.files import Amount, Count, Positive, Whole, at_home, parse, read_record, shown, write_whole
from autovaruna.config.settings import Settings, Sharing, input_groups
from autovaruna.errors import AutoVarunaError, DeploymentError, PlanError
from autovaruna.graph.records import Graph
from autovaruna.log import readable
from autovaruna.planner.arrays import Costs, RangeTables
from autovaruna.planner.cut_points import resolve_cuts, stage_blocks
from autovaruna.planner.prediction import RankOrders, pipeline_of, policy_of, representative
from autovaruna.planner.rank_memory import bytes_of_ranks
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.planner.stage_memory import HoldingsOfRanges, MemoryModel
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulator import simulate

FORMAT_VERSION = 1
GLOBAL_BATCH = "global batch"
"""Where a fingerprint's shapes have the number of samples of all ranks."""
SHAPING = (  # the settings that shape a plan; a saved one is valid for their values
    "num_stages", "simplicity", "max_stages_per_rank", "num_replicas", "num_micro_batches", "micro_batch_size",
    "min_micro_batches", "max_micro_batches", "recompute", "schedule", "in_flight", "cuts", "cutpoints",
    "stage_ranks", "shard_optimizer", "inputs", "dynamic_batch", "loss_mode", "outputs",
)  # fmt: skip
_OF_OPTIMIZER = {
    "optimizer_bytes_factor": "the optimizer's state for each byte of parameters",
    "shard_optimizer": "whether replicas may share the optimizer's state",
}
_GONE_SCHEDULE, _FORMER_SCHEDULES = "zero_bubble", {"deepest_first": "interleaved"}
"""Files of version 0.2 may have them; the latter is run by another one."""
_GONE_SETTING = "compile_stages"
"""Files of version 0.2 have it among the settings that shaped a plan."""
_ROUNDING = 1e-6
"""Memory limits that differ by no more are the same; a plan fits that needs no more than that above one."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fingerprint:
    """What a plan is valid for.

    Attributes:
        shapes: shape and dtype of each input, and the number of samples, as text by what it is.
        hosts: number of ranks on each host, in the order of ranks (names of hosts change from day to day).
        memory_bytes: limit of each rank, or one number for all.
        settings: the settings that shaped the plan.
    """

    graph: str
    shapes: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    hosts: tuple[int, ...] = (1,)
    device: str = ""
    memory_bytes: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def fingerprint_of(
    graph: Graph,
    inputs: Mapping[str, str],
    settings: Settings,
    *,
    global_batch_size: int,
    hosts: tuple[str, ...],
    device: str,
    memory_bytes: tuple[float, ...],
    optimizer_bytes_factor: float,
    sharing: Sharing,
) -> Fingerprint:
    """Returns what a plan is valid for; `inputs` have shape and dtype of each, in words."""
    shapes = {f"input {name}": words for name, words in inputs.items()}
    shaping = {name: getattr(settings, name) for name in SHAPING}
    return Fingerprint(
        graph=graph.fingerprint,
        shapes={**shapes, GLOBAL_BATCH: str(global_batch_size)},
        num_ranks=len(hosts),
        hosts=host_counts(hosts),
        device=device,
        memory_bytes=memory_bytes,
        settings={**shaping, "optimizer_bytes_factor": optimizer_bytes_factor, "shard_optimizer": sharing},
    )


def host_counts(hosts: tuple[str, ...]) -> tuple[int, ...]:
    """Returns how many ranks each host has, in the order of the first rank of each."""
    return tuple(Counter(hosts).values())


def differences(saved: Fingerprint, now: Fingerprint) -> list[str]:
    """Returns a sentence for each thing that changed since a plan was saved; empty: the plan is valid.

    A smaller memory limit makes a plan stale, a greater one too, since a better plan may fit.
    """
    sentences = []
    if saved.graph != now.graph:
        sentences.append(f"the model changed (graph {saved.graph[:12]} -> {now.graph[:12]})")
    sentences += _changed("", saved.shapes, now.shapes)
    if saved.num_ranks != now.num_ranks:
        sentences.append(f"the number of ranks changed ({saved.num_ranks} -> {now.num_ranks})")
    elif saved.hosts != now.hosts:
        pair = (" + ".join(map(str, hosts)) for hosts in (saved.hosts, now.hosts))
        sentences.append(f"the ranks of each host changed ({' -> '.join(pair)})")
    if saved.device != now.device:
        sentences.append(f"the device changed ({saved.device} -> {now.device})")
    limits = zip_longest(saved.memory_bytes, now.memory_bytes, fillvalue=0.0)
    if saved.num_ranks == now.num_ranks and not all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in limits):
        sentences.append(f"the memory limit changed ({_bytes(saved.memory_bytes)} -> {_bytes(now.memory_bytes)})")
    known = ({name: each.settings[name] for name in each.settings if name != _GONE_SETTING} for each in (saved, now))
    settings = [parse(json.dumps(each, default=float)) for each in known]  # tuples are lists
    # These two follow from the optimizer, the model and the ranks: where one of those is another, so may they be.
    if saved.graph != now.graph or saved.num_ranks != now.num_ranks:
        settings = [{**each, **dict.fromkeys(_OF_OPTIMIZER)} for each in settings]
    of_optimizer = [{what: each.pop(name) for name, what in _OF_OPTIMIZER.items() if name in each} for each in settings]
    return sentences + _changed("setting ", *settings) + _changed("", *of_optimizer)


def _changed(what: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{what}{name} changed ({saved.get(name, 'not set')} -> {now.get(name, 'not set')})" for name in names]


def _bytes(limits: tuple[float, ...]) -> str:
    return ", ".join(dict.fromkeys(readable(limit) for limit in limits)) or "none"


def memory_complaint(plan: Plan, valid_for: Fingerprint, graph: Graph) -> str:
    """Returns which rank has too little memory for its stages; empty if all fit, or the plan does not say enough."""
    known = plan.block_bytes
    if known is None or len(valid_for.memory_bytes) != plan.num_ranks:
        return ""
    if not len(known.saved_bytes) == len(known.work_bytes) == len(graph.blocks):
        return ""
    size = math.ceil(plan.micro_batch_size - 1e-9)
    saved, work = (np.array(each) * (size / known.micro_batch_size) for each in (known.saved_bytes, known.work_bytes))
    none = np.zeros_like(saved)
    costs = Costs(float(size), none, none, saved, work)
    factor = float(valid_for.settings.get("optimizer_bytes_factor", 0.0))
    rules = (known.process_bytes, known.fragmentation, known.work_of_all, known.work_of_largest)
    model = MemoryModel(factor, plan.needs_gradient, *rules, most_owners=plan.num_ranks if plan.shares_state else 1)
    limits = [limit + known.process_bytes for limit in valid_for.memory_bytes]  # a limit is for what the model brings
    pipeline = representative(pipeline_of(plan, graph))
    schedule = simulate(pipeline, policy_of(plan.schedule)).schedule
    starts = [stage.blocks[0] for stage in plan.stages]
    ranges = HoldingsOfRanges(RangeTables(graph, [*starts, len(graph.blocks)]), costs)
    held = [ranges.of(s, s + 1) for s in range(plan.num_stages)]
    needed = bytes_of_ranks(plan, held, model, pipeline, schedule)
    each = enumerate(zip(needed, limits, strict=True))
    rank = next((rank for rank, (used, limit) in each if used > limit * (1 + _ROUNDING)), None)
    if rank is None:
        return ""
    own = [str(number) for number, stage in enumerate(plan.stages) if rank in stage.ranks]
    return (
        f"rank {rank} has {readable(valid_for.memory_bytes[rank])}, but its stages ({', '.join(own)}) need "
        f"{readable(needed[rank])}: move a cut, lower in_flight, let them recompute, or give the rank fewer stages"
    )


@dataclass(frozen=True)
class Deployment:
    """A saved plan: read from a file, its stages have no blocks before `plan_from` finds them in a graph.

    `cuts` names the first block of each stage but the first; edited by hand, it may be a module path.
    """

    plan: Plan
    cuts: tuple[str, ...]
    fingerprint: Fingerprint


def deployment_of(plan: Plan, graph: Graph, fingerprint: Fingerprint) -> Deployment:
    """Returns a plan as a deployment, its cuts named by block."""
    cuts = tuple(graph.blocks[stage.blocks[0]].name for stage in plan.stages[1:])
    return Deployment(plan, cuts, fingerprint)


def plan_from(deployment: Deployment, graph: Graph) -> Plan:
    """Returns the plan of a deployment for a graph.

    Raises:
        DeploymentError: if a cut names nothing in the graph, the stages cannot be, or do not fit into memory.
    """
    plan = deployment.plan
    try:
        starts = (0, *resolve_cuts(graph, deployment.cuts))
    except PlanError as error:
        raise DeploymentError(f"it does not fit the model: {error}") from error
    blocks = stage_blocks(starts, len(graph.blocks))
    stages = (replace(stage, blocks=own) for stage, own in zip(plan.stages, blocks, strict=True))
    plan = replace(plan, stages=tuple(stages))
    complaint = memory_complaint(plan, deployment.fingerprint, graph)
    if complaint:
        raise DeploymentError(f"it does not fit into memory: {complaint}")
    return plan


class _LinkRecord(msgspec.Struct):
    """A link; JSON has no infinite numbers, so a single rank's has null bytes a second."""

    latency_seconds: Amount
    bytes_per_second: Positive | None
    busy_seconds_per_byte: Amount = 0.0

    def cost(self) -> LinkCost:
        rate = math.inf if self.bytes_per_second is None else self.bytes_per_second
        return LinkCost(self.latency_seconds, rate, self.busy_seconds_per_byte)


class _PredictedStage(msgspec.Struct):
    forward_seconds: Amount
    backward_seconds: Amount
    recompute_seconds: Amount
    reduce_seconds: Amount
    memory_bytes: Amount
    parameter_bytes: Amount
    optimizer_seconds: Amount
    shared_bytes: Amount
    speeds: tuple[Positive, ...]
    reduce_lead_seconds: Amount = 0.0


class _Stage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A stage; `deferred` is 0 in files of versions that could split a backward, and is not written any more."""

    cut: str
    ranks: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    recompute: bool
    in_flight: Count
    predicted: _PredictedStage
    deferred: Whole = 0


class _Predicted(msgspec.Struct):
    step_seconds: Amount
    bound_seconds: Amount
    is_measured: bool
    local_link: _LinkRecord
    remote_link: _LinkRecord
    overhead_seconds: Amount
    rank_memory_bytes: tuple[Amount, ...]
    block_bytes: BlockBytes | None
    cores_per_rank: Positive = 1.0


_AS_IN_PLAN = [
    name for name in _Predicted.__struct_fields__ if name in Plan.__dataclass_fields__ and not name.endswith("_link")
]


class _ValidFor(msgspec.Struct):
    graph: str
    shapes: dict[str, str]
    num_ranks: Count
    hosts: tuple[int, ...]
    device: str
    memory_bytes: tuple[Positive, ...]
    settings: dict[str, Any]
    global_batch_size: Count
    needs_gradient: bool
    host_of: tuple[int, ...]


class _DeploymentFile(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    num_micro_batches: Count
    schedule: str
    stages: list[_Stage]
    predicted: _Predicted
    valid_for: _ValidFor
    shares_state: bool = False


def save(path: str | os.PathLike[str], deployment: Deployment) -> None:
    """Writes a deployment whole or not at all; raises DeploymentError if it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(_file(deployment), enc_hook=float), indent=2).decode()
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise DeploymentError(f"the deployment cannot be written to {path}: {error.strerror or error}") from error


def keep(file: str, deployment: Deployment) -> bool:
    """Saves a deployment, or warns that it cannot be: to plan again is better than to give up what was planned."""
    path = Path(at_home(file))
    try:
        if path.is_file():
            path.open("rb").close()  # what nobody can read may be a plan that somebody has edited
        save(file, deployment)
        return True
    except DeploymentError as error:
        logger.warning("the plan is not kept: %s", error)
    except OSError as error:
        logger.warning(
            "the plan is not kept: %s is there, but cannot be read (%s), so that it is not replaced; make it "
            "readable, remove it, or name another deployment_file",
            *(path, error.strerror),
        )
    return False


def load(path: str | os.PathLike[str]) -> Deployment:
    """Reads a deployment; raises DeploymentError, which names the key, if there is none or it is damaged."""
    try:
        content = parse(Path(at_home(path)).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DeploymentError(
            f"the deployment {path} is no JSON (line {error.lineno}, column {error.colno}: {error.msg}): mend it, or "
            "delete it to plan again"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(f"the deployment {path} cannot be read: {error}") from error
    try:
        version = content.get("format_version", FORMAT_VERSION) if isinstance(content, dict) else FORMAT_VERSION
        _check(version == FORMAT_VERSION, "format_version", version, FORMAT_VERSION)
        file = read_record(content, _DeploymentFile)
        if file.schedule == _GONE_SCHEDULE:
            raise DeploymentError(
                f"the deployment {path} cannot run: its schedule, {_GONE_SCHEDULE!r}, is no longer there: delete the "
                "file to plan again"
            )
        file.schedule = _FORMER_SCHEDULES.get(file.schedule, file.schedule)
        return _deployment(file)
    except ValueError as error:
        raise DeploymentError(
            f"the deployment {path} is damaged: {error}: mend it, or delete the file to plan again"
        ) from error


def _file(deployment: Deployment) -> _DeploymentFile:
    plan = deployment.plan
    return _DeploymentFile(
        format_version=FORMAT_VERSION,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        shares_state=plan.shares_state,
        stages=[_stage(stage, cut) for stage, cut in zip(plan.stages, ("", *deployment.cuts), strict=True)],
        predicted=_Predicted(
            step_seconds=plan.predicted_seconds,
            local_link=_LinkRecord(**asdict(plan.local_link)),
            remote_link=_LinkRecord(**asdict(plan.remote_link)),
            **{name: getattr(plan, name) for name in _AS_IN_PLAN},
        ),
        valid_for=_ValidFor(
            **asdict(deployment.fingerprint),
            global_batch_size=round(plan.micro_batch_size * plan.num_micro_batches),
            needs_gradient=plan.needs_gradient,
            host_of=plan.host_of,
        ),
    )


def _stage(stage: StagePlan, cut: str) -> _Stage:
    predicted = _PredictedStage(**{name: getattr(stage, name) for name in _PredictedStage.__struct_fields__})
    return _Stage(cut, stage.ranks, stage.needs_recompute, stage.in_flight, predicted)


def _deployment(file: _DeploymentFile) -> Deployment:
    """Returns the deployment of a file; raises ValueError if parts of it contradict each other."""
    predicted, valid_for, num_ranks = file.predicted, file.valid_for, file.valid_for.num_ranks
    _check(bool(file.stages), "stages", "empty", "one stage or more")
    first, ranks = file.stages[0].cut, f"one or more different ranks from 0 to {num_ranks - 1}"
    _check(not first, "stages[0].cut", repr(first), '"": the first stage starts with the model')
    _check(file.schedule in POLICIES, "schedule", repr(file.schedule), f"one of {', '.join(sorted(POLICIES))}")
    for number, stage in enumerate(file.stages):
        are_ranks = len(set(stage.ranks)) == len(stage.ranks) and all(0 <= rank < num_ranks for rank in stage.ranks)
        _check(are_ranks, f"stages[{number}].ranks", list(stage.ranks), ranks)
    for key, numbers in (
        ("predicted.rank_memory_bytes", predicted.rank_memory_bytes),
        ("valid_for.host_of", valid_for.host_of),
    ):
        _check(len(numbers) in (0, num_ranks), key, list(numbers), f"a number for each of {num_ranks} ranks")
    factor = valid_for.settings.get("optimizer_bytes_factor", 0.0)
    is_number = isinstance(factor, int | float) and 0 <= factor < 1e18
    _check(is_number, "valid_for.settings.optimizer_bytes_factor", shown(factor), "a number of 0 or more")
    plan = Plan(
        stages=tuple(_stage_plan(stage) for stage in file.stages),
        num_ranks=num_ranks,
        num_micro_batches=file.num_micro_batches,
        micro_batch_size=valid_for.global_batch_size / file.num_micro_batches,
        schedule=file.schedule,
        shares_state=file.shares_state,
        predicted_seconds=predicted.step_seconds,
        local_link=predicted.local_link.cost(),
        remote_link=predicted.remote_link.cost(),
        host_of=valid_for.host_of,
        needs_gradient=valid_for.needs_gradient,
        **{name: getattr(predicted, name) for name in _AS_IN_PLAN},
    )
    fingerprint = Fingerprint(**{name: getattr(valid_for, name) for name in Fingerprint.__dataclass_fields__})
    return Deployment(plan, tuple(stage.cut for stage in file.stages[1:]), fingerprint)


def _stage_plan(stage: _Stage) -> StagePlan:
    predicted = msgspec.structs.asdict(stage.predicted)
    if len(stage.predicted.speeds) != len(stage.ranks):
        predicted["speeds"] = ()
    return StagePlan(
        blocks=(),
        ranks=stage.ranks,
        needs_recompute=stage.recompute,
        in_flight=stage.in_flight,
        **predicted,
    )


def _check(is_right: bool, key: str, got: object, expected: object) -> None:
    if not is_right:
        raise ValueError(f"{key} is {got}, expected {expected}")


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
    level = logging.INFO if fingerprint.num_ranks > 1 else logging.DEBUG  # one process has a plan for a setting alone
    logger.log(level, "planning again: %s", "; ".join(changed))
    return None


def _keep_copy(path: Path) -> str:
    """Copies a file that a new plan will replace; returns in words whether that worked."""
    names = (f"{path}.damaged{number or ''}" for number in count())
    copy = next(name for name in names if not os.path.lexists(name))
    try:
        shutil.copy(path, copy)
        return f"a copy is kept as {copy}"
    except OSError as error:
        return f"no copy of it can be kept: {error.strerror}"


def _runnable(deployment: Deployment, graph: Graph, settings: Settings, fingerprint: Fingerprint, path: Path) -> Plan:
    """Returns the plan of a deployment, which may have been edited by hand, if it can run."""
    num_samples = int(fingerprint.shapes[GLOBAL_BATCH])
    if complaint := complaint_of_size(deployment.plan, settings, num_samples):
        raise DeploymentError(f"the deployment {path} cannot run: {complaint}")
    try:
        plan = plan_from(deployment, graph)
        RankOrders(plan, graph)
        return plan
    except AutoVarunaError as error:
        raise DeploymentError(f"the deployment {path} cannot run: {error}") from error


def complaint_of_size(plan: Plan, settings: Settings, num_samples: int) -> str:
    """Returns why a batch cannot be cut as a plan says; empty: it can."""
    least = min(len(input_groups(settings, plan.num_ranks)), num_samples)
    if least <= plan.num_micro_batches <= num_samples:
        return ""
    return (
        f"num_micro_batches is {plan.num_micro_batches}, expected {least} to {num_samples} for {num_samples} samples "
        f"on {plan.num_ranks} ranks"
    )
