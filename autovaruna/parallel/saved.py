"""Reads the plan of a saved deployment, if it is valid for this run."""

from __future__ import annotations

import logging
from pathlib import Path

from autovaruna.errors import DeploymentError
from autovaruna.graph.records import Graph
from autovaruna.planner.deployment import load, plan_from
from autovaruna.planner.fingerprint import Fingerprint, differences
from autovaruna.planner.records import Plan
from autovaruna.settings import Settings

logger = logging.getLogger(__name__)


def read_plan(settings: Settings, fingerprint: Fingerprint, graph: Graph) -> Plan | None:
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
            plan = plan_from(deployment, graph)
            logger.info("using the saved deployment %s", path)
            return plan
    except DeploymentError as error:
        if is_required:
            raise
        changed = [str(error)]
    if is_required:
        raise DeploymentError(
            f"The deployment {path} is stale: {'; '.join(changed)}. Expected one for this run; delete it, or pass "
            "load_deployment='auto' to plan again."
        )
    logger.info("planning again: %s", "; ".join(changed))
    return None
