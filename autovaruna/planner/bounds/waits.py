"""Bounds what a stage waits for: before its first forward, between a forward and its backward, after its last backward.

All three hold for every split into consecutive stages with one stage a rank: they count only work and messages that lie
between stages wherever the cuts are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autovaruna.planner.bounds.fill import Flow
from autovaruna.planner.costs import Array
from autovaruna.planner.sized import Sized
from autovaruna.profiler.records import Cluster, LinkCost


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds by block p, one entry more for the end of the graph.

    Attributes:
        before: of a stage that starts at p, before its first forward.
        after: of a stage that starts at p, after its last backward, until the step ends.
        trip: of a stage that ends before p, between a forward and its backward.
        messages: what of `before` and `after` together is messages to and from the stage that starts at p.
        activation, gradient: of the line between the stages that meet at p, for each of their messages.
    """

    before: Array
    after: Array
    trip: Array
    messages: Array
    activation: Array
    gradient: Array


def waits_of(sized: Sized) -> Waits:
    """Returns the least waits of a problem, on its fastest ranks and links."""
    problem, costs = sized.problem, sized.costs
    cluster, flow, back = problem.cluster, problem.flow, problem.gradient_flow
    speed, link, each = max(cluster.speeds), fastest_link(cluster), cluster.overhead_seconds
    activation = flow.neighbour_bytes(sized.micro_batch_size) / link.bytes_per_second
    gradient = back.neighbour_bytes(sized.micro_batch_size) / link.bytes_per_second
    before = np.append(flow.fill_seconds(costs.forward_seconds / speed), 0.0)
    after = np.append(back.fill_seconds(sized.backward_seconds / speed), 0.0)
    there, back_again = link.latency_seconds + activation, link.latency_seconds + gradient
    return Waits(
        before=np.where(before > 0, before + link.latency_seconds + activation + each, 0.0),
        after=np.where(after > 0, after + link.latency_seconds + gradient + each, 0.0),
        trip=_trips(back, sized.urgent_seconds / speed, 2 * (link.latency_seconds + each) + activation + gradient),
        messages=np.where(before > 0, there, 0.0) + np.where(after > 0, back_again, 0.0),
        activation=activation,
        gradient=gradient,
    )


def fastest_link(cluster: Cluster) -> LinkCost:
    """Returns a link as good as the best between two ranks, in latency and in bandwidth."""
    hosts = cluster.hosts
    links = [cluster.local_link] if len(set(hosts)) < len(hosts) else []
    links += [cluster.remote_link] if len(set(hosts)) > 1 else []
    links = links or [cluster.local_link]
    return LinkCost(min(link.latency_seconds for link in links), max(link.bytes_per_second for link in links))


def _trips(gradients: Flow, block_seconds: Array, messages: Array) -> Array:
    """Returns the least seconds of later stages between a forward and its backward.

    A stage that ends before p waits for the one that starts at p if block p needs something that block p - 1 has. That
    one ends anywhere, and waits in its turn.
    """
    n, holders = gradients.num_blocks, gradients.last_holders
    work, each = [0.0, *np.cumsum(block_seconds).tolist()], messages.tolist()
    trips = [0.0] * (n + 1)
    earliest = work[n]
    for p in range(n - 1, 0, -1):
        if holders[p] == p - 1:
            trips[p] = earliest - work[p] + each[p]
        earliest = min(earliest, work[p] + trips[p])
    return np.array(trips)
