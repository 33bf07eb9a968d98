"""Writes a deployment as a JSON file and reads it back; what a person may edit stands before the predictions.

A file of an older library lacks some predictions, which are then 0; anything else that is missing or wrong is an error
that names its key.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autovaruna.errors import DeploymentError
from autovaruna.files import write_whole
from autovaruna.json_text import parse
from autovaruna.kinds import at_home
from autovaruna.planner.deployments.deployment import Deployment
from autovaruna.planner.deployments.fields import Fields
from autovaruna.planner.deployments.fingerprint import Fingerprint
from autovaruna.planner.records import BlockBytes, Plan, StagePlan
from autovaruna.profiler.records import LinkCost
from autovaruna.schedule import POLICIES

FORMAT_VERSION = 1
_KEYS = ("format_version", "num_micro_batches", "schedule", "stages", "predicted", "valid_for")
_KEYS_OF_STAGE = ("cut", "ranks", "recompute", "in_flight", "deferred", "predicted")


def save(path: str | os.PathLike[str], deployment: Deployment) -> None:
    """Writes a deployment: the file is the old one or the new one, never half of it.

    Raises:
        DeploymentError: if it cannot be written.
    """
    try:
        write_whole(path, json.dumps(_to_json(deployment), indent=2) + "\n")
    except OSError as error:
        raise DeploymentError(f"the deployment cannot be written to {path}: {error.strerror or error}") from error


def load(path: str | os.PathLike[str]) -> Deployment:
    """Reads a deployment.

    Raises:
        DeploymentError: if there is no file, or it is damaged; names the key.
    """
    try:
        text = Path(at_home(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentError(f"the deployment {path} cannot be read: {error}") from error
    try:
        content = parse(text)
    except json.JSONDecodeError as error:
        raise DeploymentError(
            f"the deployment {path} is no JSON (line {error.lineno}, column {error.colno}: {error.msg}): mend it, or "
            "delete it to plan again"
        ) from error
    return _from_json(Fields(content, str(path)))


def _to_json(deployment: Deployment) -> dict[str, Any]:
    plan, valid_for = deployment.plan, deployment.fingerprint
    return {
        "format_version": FORMAT_VERSION,
        "num_micro_batches": plan.num_micro_batches,
        "schedule": plan.schedule,
        "stages": [_stage_to_json(stage, cut) for stage, cut in zip(plan.stages, ("", *deployment.cuts), strict=True)],
        "predicted": {
            "step_seconds": plan.predicted_seconds,
            "bound_seconds": plan.bound_seconds,
            "single_bound_seconds": plan.single_bound_seconds,
            "is_measured": plan.is_measured,
            "bound_proof": plan.bound_proof,
            "local_link": _link_to_json(plan.local_link),
            "remote_link": _link_to_json(plan.remote_link),
            "overhead_seconds": plan.overhead_seconds,
            "rank_memory_bytes": list(plan.rank_memory_bytes),
            **({"block_bytes": asdict(plan.block_bytes)} if plan.block_bytes else {}),
        },
        "valid_for": asdict(valid_for)
        | {
            "global_batch_size": round(plan.micro_batch_size * plan.num_micro_batches),
            "needs_gradient": plan.needs_gradient,
            "host_of": list(plan.host_of),
        },
    }


def _stage_to_json(stage: StagePlan, cut: str) -> dict[str, Any]:
    return {
        "cut": cut,
        "ranks": list(stage.ranks),
        "recompute": stage.needs_recompute,
        "in_flight": stage.in_flight,
        "deferred": stage.deferred,
        "predicted": {name: getattr(stage, name) for name in _PREDICTED + _PREDICTED_SINCE}
        | {"speeds": list(stage.speeds)},
    }


_PREDICTED = (
    "forward_seconds",
    "backward_seconds",
    "recompute_seconds",
    "reduce_seconds",
    "memory_bytes",
    "parameter_bytes",
)
_RULES_OF_BYTES = ("process_bytes", "fragmentation", "work_of_all", "work_of_largest")
_PREDICTED_SINCE = ("optimizer_seconds", "input_seconds", "weight_seconds", "shared_bytes")
"""Files of an older library lack these two kinds; then they are 0, as they were for the plan."""


def _from_json(fields: Fields) -> Deployment:
    version = fields.get("format_version", int)
    if version != FORMAT_VERSION:
        complaint = f"is {version}, this library reads {FORMAT_VERSION}: delete the file to plan again"
        raise fields.error("format_version", complaint)
    fields.check_keys(_KEYS)
    valid_for, predicted = fields.inside("valid_for"), fields.inside("predicted")
    stages = fields.each("stages")
    if not stages:
        raise fields.error("stages", "is empty, expected one stage or more")
    if stages[0].get("cut", str):
        raise stages[0].error("cut", 'is not empty, expected "": the first stage starts with the model')
    fingerprint, count = _fingerprint(valid_for), fields.at_least("num_micro_batches", 1)
    plan = Plan(
        stages=tuple(_stage_from_json(stage, fingerprint.num_ranks) for stage in stages),
        num_ranks=fingerprint.num_ranks,
        num_micro_batches=count,
        micro_batch_size=valid_for.at_least("global_batch_size", 1) / count,
        schedule=fields.one_of("schedule", sorted(POLICIES)),
        predicted_seconds=predicted.amount("step_seconds"),
        bound_seconds=predicted.amount("bound_seconds"),
        single_bound_seconds=predicted.amount("single_bound_seconds", missing=0.0),
        bound_proof=predicted.get("bound_proof", str),
        local_link=_link(predicted.inside("local_link")),
        remote_link=_link(predicted.inside("remote_link")),
        host_of=_host_of(valid_for, fingerprint.num_ranks),
        overhead_seconds=predicted.amount("overhead_seconds", missing=0.0),
        rank_memory_bytes=_rank_memory(predicted, fingerprint.num_ranks),
        block_bytes=_block_bytes(predicted.inside("block_bytes")) if "block_bytes" in predicted.content else None,
        needs_gradient=valid_for.get("needs_gradient", bool),
        is_measured=predicted.content.get("is_measured", True) is not False,
    )
    return Deployment(plan, tuple(stage.get("cut", str) for stage in stages[1:]), fingerprint)


def _stage_from_json(fields: Fields, num_ranks: int) -> StagePlan:
    fields.check_keys(_KEYS_OF_STAGE)
    ranks = fields.numbers("ranks")
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
        raise fields.error("ranks", f"is {list(ranks)}, expected one or more different ranks from 0 to {num_ranks - 1}")
    predicted = fields.inside("predicted")
    speeds = predicted.amounts("speeds")
    return StagePlan(
        blocks=(),
        ranks=ranks,
        needs_recompute=fields.get("recompute", bool),
        in_flight=fields.at_least("in_flight", 1),
        deferred=fields.at_least("deferred", 0) if "deferred" in fields.content else 0,
        speeds=speeds if len(speeds) == len(ranks) else (),
        **{name: predicted.amount(name) for name in _PREDICTED},
        **{name: predicted.amount(name, missing=0.0) for name in _PREDICTED_SINCE},
    )


def _block_bytes(fields: Fields) -> BlockBytes:
    saved, work = (fields.amounts(name, is_positive=False) for name in ("saved_bytes", "work_bytes"))
    rules = {name: fields.amount(name) for name in _RULES_OF_BYTES}
    deferred = fields.amounts("deferred_bytes", is_positive=False) if "deferred_bytes" in fields.content else ()
    return BlockBytes(fields.at_least("micro_batch_size", 1), saved, work, **rules, deferred_bytes=deferred)


def _rank_memory(fields: Fields, num_ranks: int) -> tuple[float, ...]:
    name = "rank_memory_bytes"
    known = fields.amounts(name, is_positive=False) if name in fields.content else ()
    if known and len(known) != num_ranks:
        raise fields.error(name, f"has {len(known)} numbers, expected one for each of {num_ranks} ranks")
    return known


def _host_of(fields: Fields, num_ranks: int) -> tuple[int, ...]:
    hosts = fields.numbers("host_of")
    if hosts and len(hosts) != num_ranks:
        raise fields.error("host_of", f"is {list(hosts)}, expected a number for each of {num_ranks} ranks")
    return hosts


def _fingerprint(fields: Fields) -> Fingerprint:
    return Fingerprint(
        graph=fields.get("graph", str),
        shapes=fields.get("shapes", dict),
        num_ranks=fields.at_least("num_ranks", 1),
        hosts=fields.numbers("hosts"),
        device=fields.get("device", str),
        memory_bytes=fields.amounts("memory_bytes"),
        settings=fields.get("settings", dict),
    )


def _link_to_json(link: LinkCost) -> dict[str, float | None]:
    """Returns a link as JSON, which has no infinite numbers: a single rank's link has null bytes a second."""
    return {**asdict(link), "bytes_per_second": None if math.isinf(link.bytes_per_second) else link.bytes_per_second}


def _link(fields: Fields) -> LinkCost:
    if "bytes_per_second" in fields.content and fields.content["bytes_per_second"] is None:
        return LinkCost(fields.amount("latency_seconds"), math.inf)
    return LinkCost(fields.amount("latency_seconds"), fields.amount("bytes_per_second", is_positive=True))
