"""Reads and writes a deployment, the plan as JSON that a person may edit."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from autovaruna.config.files import Amount, Count, Positive, Whole, at_home, parse, read_record, write_whole
from autovaruna.errors import DeploymentError
from autovaruna.planner.deployment import Deployment, Fingerprint
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.registry import POLICIES

FORMAT_VERSION = 1


class _Link(msgspec.Struct):
    """A link; JSON has no infinite numbers, so a single rank's has null bytes a second."""

    latency_seconds: Amount
    bytes_per_second: Positive | None

    def cost(self) -> LinkCost:
        return LinkCost(self.latency_seconds, math.inf if self.bytes_per_second is None else self.bytes_per_second)


class _PredictedStage(msgspec.Struct):
    forward_seconds: Amount
    backward_seconds: Amount
    recompute_seconds: Amount
    reduce_seconds: Amount
    memory_bytes: Amount
    parameter_bytes: Amount
    optimizer_seconds: Amount
    input_seconds: Amount
    weight_seconds: Amount
    shared_bytes: Amount
    speeds: tuple[Positive, ...]


class _Stage(msgspec.Struct, forbid_unknown_fields=True):
    cut: str
    ranks: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    recompute: bool
    in_flight: Count
    predicted: _PredictedStage
    deferred: Whole = 0


class _Predicted(msgspec.Struct):
    step_seconds: Amount
    bound_seconds: Amount
    single_bound_seconds: Amount
    is_measured: bool
    bound_proof: str
    local_link: _Link
    remote_link: _Link
    overhead_seconds: Amount
    rank_memory_bytes: tuple[Amount, ...]
    block_bytes: BlockBytes | None


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


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    num_micro_batches: Count
    schedule: str
    stages: list[_Stage]
    predicted: _Predicted
    valid_for: _ValidFor


def save(path: str | os.PathLike[str], deployment: Deployment) -> None:
    """Writes a deployment: the file is the old one or the new one, never half of it.

    Raises:
        DeploymentError: if it cannot be written.
    """
    try:
        write_whole(
            path, msgspec.json.format(msgspec.json.encode(_file(deployment), enc_hook=float), indent=2).decode() + "\n"
        )
    except OSError as error:
        raise DeploymentError(f"the deployment cannot be written to {path}: {error.strerror or error}") from error


def load(path: str | os.PathLike[str]) -> Deployment:
    """Reads a deployment.

    Raises:
        DeploymentError: if there is no file, or it is damaged; names the key.
    """
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
        return _deployment(read_record(content, _File))
    except ValueError as error:
        raise DeploymentError(
            f"the deployment {path} is damaged: {error}: mend it, or delete the file to plan again"
        ) from error


def _file(deployment: Deployment) -> _File:
    plan = deployment.plan
    return _File(
        format_version=FORMAT_VERSION,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        stages=[_stage(stage, cut) for stage, cut in zip(plan.stages, ("", *deployment.cuts), strict=True)],
        predicted=_Predicted(
            step_seconds=plan.predicted_seconds,
            local_link=_Link(**asdict(plan.local_link)),
            remote_link=_Link(**asdict(plan.remote_link)),
            block_bytes=plan.block_bytes,
            **{name: getattr(plan, name) for name in _PREDICTED},
        ),
        valid_for=_ValidFor(
            **asdict(deployment.fingerprint),
            global_batch_size=round(plan.micro_batch_size * plan.num_micro_batches),
            needs_gradient=plan.needs_gradient,
            host_of=plan.host_of,
        ),
    )


_PREDICTED = (
    "bound_seconds",
    "single_bound_seconds",
    "is_measured",
    "bound_proof",
    "overhead_seconds",
    "rank_memory_bytes",
)


def _stage(stage: StagePlan, cut: str) -> _Stage:
    predicted = _PredictedStage(**{name: getattr(stage, name) for name in _PredictedStage.__struct_fields__})
    return _Stage(cut, stage.ranks, stage.needs_recompute, stage.in_flight, predicted, stage.deferred)


def _deployment(file: _File) -> Deployment:
    """Returns the deployment of a file.

    Raises:
        ValueError: parts of it contradict each other; names the key.
    """
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
    plan = Plan(
        stages=tuple(_stage_plan(stage) for stage in file.stages),
        num_ranks=num_ranks,
        num_micro_batches=file.num_micro_batches,
        micro_batch_size=valid_for.global_batch_size / file.num_micro_batches,
        schedule=file.schedule,
        predicted_seconds=predicted.step_seconds,
        local_link=predicted.local_link.cost(),
        remote_link=predicted.remote_link.cost(),
        host_of=valid_for.host_of,
        block_bytes=predicted.block_bytes,
        needs_gradient=valid_for.needs_gradient,
        **{name: getattr(predicted, name) for name in _PREDICTED},
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
        deferred=stage.deferred,
        **predicted,
    )


def _check(is_right: bool, key: str, got: object, expected: object) -> None:
    if not is_right:
        raise ValueError(f"{key} is {got}, expected {expected}")
