"""Reads the plan of a saved deployment, if it is valid for this run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from autovaruna.config.settings import Settings, replicas_of
from autovaruna.errors import DeploymentError, ScheduleError
from autovaruna.graph.records import Graph
from autovaruna.planner.deployment import Deployment, Fingerprint, differences, load, plan_from
from autovaruna.planner.prediction import Orders
from autovaruna.planner.records import Plan

GLOBAL_BATCH = "global batch"
"""Where a fingerprint's shapes have the number of samples of all ranks."""

logger = logging.getLogger(__name__)


def read_saved_plan(settings: Settings, fingerprint: Fingerprint, graph: Graph) -> Plan | None:
    """Returns the plan of the deployment file; None: plan again. One line in the log says which, and why.

    Args:
        settings: Names the file, and says whether it must be used.
        fingerprint: This run.
        graph: The graph that the cuts of the file are found in.

    Raises:
        DeploymentError: ``load_deployment`` is true, and the file is missing, damaged or stale.
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
    """Keeps what may be lost when a new plan is saved; returns in words how that went."""
    try:
        shutil.copyfile(path, f"{path}.damaged")
    except OSError as error:
        return f"no copy of it can be kept: {error.strerror}"
    return f"a copy is kept as {path}.damaged"


def _runnable(deployment: Deployment, graph: Graph, settings: Settings, fingerprint: Fingerprint, path: Path) -> Plan:
    """Returns the plan of a deployment, which may have been edited by hand, if it can run."""
    plan = deployment.plan
    most = int(fingerprint.shapes[GLOBAL_BATCH])
    groups = {"replicated": 1, "per_replica": len(replicas_of(settings.stage_ranks)) if settings.stage_ranks else 1}
    least = min(groups.get(settings.inputs, plan.num_ranks), most)
    if not least <= plan.num_micro_batches <= most:
        raise DeploymentError(
            f"the deployment {path} cannot run: num_micro_batches is {plan.num_micro_batches}, expected {least} to "
            f"{most} for {most} samples on {plan.num_ranks} ranks"
        )
    try:
        plan = plan_from(deployment, graph)
        Orders(plan, graph)
        return plan
    except (DeploymentError, ScheduleError) as error:
        raise DeploymentError(f"the deployment {path} cannot run: {error}") from error
