"""Decides whether the replicas of a stage share the optimizer's state, and which of them owns which parameter.

It is shared where memory is short, if a step gains by it.

A script then finds gradients of other replicas' parameters elsewhere: for time alone that is too high a price.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autovaruna.config.settings import Sharing
from autovaruna.errors import PlanError
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import least_grid_seconds

WORTH = 0.98
"""State is shared for steps that take no more than this share: each replica has all gradients otherwise."""
_GAIN = 0.99
"""Where not even the best regular grid gains so much, no plan is looked for."""
_FULL = 0.5
"""Of its memory, more than which a rank holds where less state might give another plan."""

_log = logging.getLogger(__name__)


def plan_with_sharing(problem: Problem, sharing: Sharing, make: Callable[[Problem], Plan]) -> Plan:
    """Returns the plan of a problem whose replicas share the optimizer's state, or not; auto: where memory is short.

    Raises:
        PlanError: no plan fits; says what is missing without sharing.
    """
    has_choice = problem.cluster.num_ranks > 1 and problem.constraints.num_replicas != 1 and problem.needs_gradient
    if sharing != "auto" or not has_choice:
        return make(replace(problem, shares_state=sharing is True))
    with_shares = replace(problem, shares_state=True)
    try:
        plan = make(problem)
    except PlanError:
        try:
            return make(with_shares)
        except PlanError as error:
            _log.debug("nor is there a plan with shared state: %s", error)
        raise
    if not _lacks_memory(plan, problem):
        return plan
    worth = _GAIN * least_grid_seconds(problem)
    if least_grid_seconds(with_shares, worth) > worth:
        return plan
    shared = make(with_shares)
    return shared if shared.predicted_seconds <= WORTH * plan.predicted_seconds else plan


def _lacks_memory(plan: Plan, problem: Problem) -> bool:
    pairs = zip(plan.rank_bytes(), problem.cluster.memory_bytes, strict=True)
    return any(stage.needs_recompute for stage in plan.stages) or any(held > _FULL * limit for held, limit in pairs)


def share_out(num_bytes: Mapping[str, float], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the owner of each parameter, by its bytes and holders: the largest first, to who owns least so far.

    A whole parameter has one owner, so that any optimizer may step that updates parameters by themselves. (Rajbhandari
    et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.1; theirs are equal
    ranges of elements.)

    The rank that owns most owns at most 4/3 of what it would in the best division, with equal holders. (Graham, "Bounds
    on multiprocessing timing anomalies", 1969, theorem 3.)
    """
    owned: Counter[int] = Counter()
    owners: dict[str, int] = {}
    for name in sorted(num_bytes, key=lambda name: (len(holders[name]) > 1, -num_bytes[name], name)):
        owners[name] = min(holders[name], key=lambda rank: (owned[rank], rank))
        owned[owners[name]] += num_bytes[name]  # type: ignore[assignment]
    return {name: owner for name, owner in owners.items() if len(holders[name]) > 1}
