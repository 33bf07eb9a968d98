"""Bounds what memory costs: ranks cannot run forwards from the begin on and hold all of them until a backward comes.

No backward can start before a micro-batch has gone through the whole graph, t seconds say. Until then ranks run
forwards, recompute, or are idle; each forward's activations are still there, or its stage recomputes. What can be there
is what memory leaves beside parameters and the optimizer's state, on every rank. So of the work that ranks do in t
seconds, all beyond what it has room for is idle time or forwards that run again.

A stage has recomputed one micro-batch at most whose backward has not begun, and recomputes all of them in the end: with
m micro-batches on a rank, m / (m + 1) of that work is lost. A rank that shares its stages with so many others that it
has fewer micro-batches loses more than that, for it has too little work: memory limits its stages.

How much work there is room for is a linear program over (block, share of the micro-batches that have passed it), where
no micro-batch passes a block of a path before the one that it needs; any price of a byte gives a bound of it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.cost_table import Array
from autovaruna.planner.costs import SizedProblem
from autovaruna.planner.memory.recompute_options import ROUNDING

_PRICES = np.geomspace(0.1, 10.0, 41)
"""Of a byte, as shares of what all forwards take over what they keep."""


def lost_seconds(sized: SizedProblem) -> float:
    """Returns seconds, summed over ranks of speed 1, that every plan is idle or recomputes; 0 if that is not known."""
    problem = sized.problem
    if not problem.needs_gradient:
        return 0.0
    speeds, state = problem.cluster.speeds, _state_bytes(sized)
    starts, fill = _backward_starts(sized)
    room = sum(map(max, _free_bytes(sized), [0.0] * len(speeds))) - float(state.sum())
    done = sum(speeds) * fill / max(speeds)
    lost = done - _most_held(sized, starts < fill * (1.0 - ROUNDING), max(room, 0.0))
    of_rank = _state_bytes(sized, 1.0 / problem.most_owners)
    return max(lost, 0.0) * _share_lost(sized, fill / max(speeds), of_rank)


def _free_bytes(sized: SizedProblem) -> list[float]:
    """Returns what each rank has for tensors."""
    cluster = sized.problem.cluster
    own = cluster.own_process_bytes or [cluster.process_bytes] * cluster.num_ranks
    pairs = zip(cluster.memory_bytes, own, strict=True)
    return [limit - min(process, cluster.process_bytes) for limit, process in pairs]


def _state_bytes(sized: SizedProblem, owned: float = 1.0) -> Array:
    """Returns, for each block, what lasts from step to step; what several blocks use is parted among them.

    Args:
        sized: the problem.
        owned: the share of the optimizer's state that counts.
    """
    graph, state = sized.problem.graph, np.zeros(len(sized.problem.graph.blocks))
    for parameter in graph.parameters:
        more = sized.problem.optimizer_bytes_factor * owned if parameter.needs_gradient else 0.0
        for block in parameter.blocks:
            state[block] += parameter.num_bytes * (1.0 + more) / len(parameter.blocks)
    return state


def _backward_starts(sized: SizedProblem) -> tuple[Array, float]:
    """Returns when each block's backward can start at the earliest on ranks of speed 1, and when all forwards can."""
    problem, backward = sized.problem, sized.backward_seconds.tolist()
    ends = sized.costs.forward_seconds.tolist()
    for user, producers in problem.flow.producers.items():
        ends[user] += max([ends[producer] for producer in producers])
    starts = ends.copy()
    for user, producers in reversed(problem.gradient_flow.producers.items()):
        end = starts[user] + backward[user]
        for producer in producers:
            starts[producer] = max(starts[producer], end)
    early = np.array(starts)
    early[problem.gradient_flow.is_apart & (sized.backward_seconds == 0)] = 0.0  # No gradient comes to them.
    return early, max(ends)


def _most_held(sized: SizedProblem, is_free: NDArray[np.bool_], room: float) -> float:
    """Returns the most seconds of work, on ranks of speed 1, whose activations fit into so many bytes.

    Args:
        sized: the problem.
        is_free: of each block, whether its backward may come in time, so that it needs no room.
        room: on all ranks.
    """
    forward, saved = sized.costs.forward_seconds, np.where(is_free, 0.0, sized.greatest_costs.saved_bytes)
    saved = saved * sized.model.fragmentation
    seconds = np.where(is_free, sized.step_seconds, forward)
    prices = _PRICES[:, None] * (seconds.sum() / max(float(saved.sum()), 1.0))
    gains = seconds - prices * saved
    path = [block for block in sized.problem.flow.longest_path(forward) if not is_free[block]]
    along = np.maximum(gains[:, path].cumsum(axis=1).max(axis=1, initial=0.0), 0.0)
    gains[:, path] = 0.0
    most = prices[:, 0] * room + sized.num_micro_batches * (along + np.maximum(gains, 0.0).sum(axis=1))
    return float(most.min())


def _share_lost(sized: SizedProblem, fill: float, state: Array) -> float:
    """Returns m / (m + 1) for the least micro-batches m of a rank that does not lose enough in any case."""
    problem, count = sized.problem, sized.num_micro_batches
    if True not in sized.recompute_choices:
        return 1.0
    replicas = problem.constraints.num_replicas or problem.cluster.num_ranks
    if not problem.constraints.stage_ranks:
        step = count * float(sized.step_seconds.sum()) / sum(problem.cluster.speeds)
        spare = min(problem.cluster.speeds) * (step - fill) - sized.whole_optimizer_seconds
        enough = int(spare / max(_most_work(sized, state), 1e-30)) if spare > 0 else 0
        if enough:  # With so many micro-batches or fewer, a rank is idle for as long as forwards fill.
            replicas = min(replicas, max(math.ceil(count / enough) - 1, 1))
    share = count // replicas
    return share / (share + 1)


def _most_work(sized: SizedProblem, state: Array) -> float:
    """Returns the most seconds of a micro-batch that one rank has room for, by blocks with little state first."""
    order = np.argsort(state / np.maximum(sized.step_seconds, 1e-30))
    before = np.append(0.0, state[order].cumsum())
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = (max(_free_bytes(sized)) - before[:-1]) / state[order]
    parts = np.where(state[order] > 0, parts.clip(0.0, 1.0), 1.0)
    return float((parts * sized.step_seconds[order]).sum())
