"""Defines `Pipeline`: all that the simulator knows of a plan, as plain numbers.

The letters used all over this room: s, t stages; m micro-batch; i, j replicas of a stage; k the k-th micro-batch of one
replica. Micro-batch m is micro-batch ``k = m // num_replicas`` of replica ``i = m % num_replicas``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autovaruna.profiler.records import LinkCost

Links = Callable[[int, int], LinkCost]


def free_link(source: int, destination: int) -> LinkCost:
    """Returns a link on which messages take no time, whatever the two ranks."""
    return LinkCost(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage costs.

    Attributes:
        ranks: the ordered ranks that are its replicas.
        forward_seconds, backward_seconds: for one micro-batch on a rank of speed 1. Backward without the recompute.
        in_flight: most forwards not yet backwarded on one replica.
        needs_recompute, recompute_seconds: whether backward is preceded by a recompute, and what that takes.
        reduce_seconds: gradient all-reduce after the last backward on all replicas; 0.0: none.
        speeds: relative speed of each replica (2.0 takes half the seconds); empty: all 1.0.
        deferred: most backwards on one replica whose weight gradients are not yet computed, where a schedule splits
            them off; 0: backward is never split.
        input_seconds, weight_seconds: of the two parts of a split backward, without and with the weight gradients.
    """

    ranks: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    needs_recompute: bool = False
    recompute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    deferred: int = 0
    input_seconds: float = 0.0
    weight_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert len(set(self.ranks)) == len(self.ranks) > 0, f"ranks of a stage must be distinct: {self.ranks}"
        assert self.in_flight >= 1, f"in_flight is {self.in_flight}, needs at least 1"
        assert len(self.speeds) in (0, len(self.ranks)), f"{len(self.speeds)} speeds for {len(self.ranks)} ranks"

    def on(self, ranks: tuple[int, ...]) -> StageTimes:
        """Returns the same on other ranks, if all have one speed; quicker than `replace`, for searches."""
        assert not self.speeds, "the ranks differ in speed"
        return StageTimes(
            ranks,
            self.forward_seconds,
            self.backward_seconds,
            self.in_flight,
            self.needs_recompute,
            self.recompute_seconds,
            self.reduce_seconds,
            (),
            self.deferred,
            self.input_seconds,
            self.weight_seconds,
        )

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return len(self.ranks)

    def speed(self, replica: int) -> float:
        """Returns the relative speed of a replica."""
        return self.speeds[replica] if self.speeds else 1.0


@dataclass(frozen=True, slots=True)
class Edge:
    """A message that every micro-batch sends from one stage to a later one, and its gradient back.

    One edge for a pair of stages, however many values it carries. `needs_gradient` is False if no gradient comes back
    (integers, frozen parts): then backward of `source` does not wait for backward of `destination`.
    """

    source: int
    destination: int
    forward_bytes: float
    backward_bytes: float
    needs_gradient: bool = True


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the simulator needs of a plan.

    Attributes:
        stages: the stages, in order. A rank may hold none, one or several.
        edges: messages between stages; ``source < destination``, one edge for a pair.
        num_ranks, num_micro_batches: N and M.
        links: the cost of a message between two ranks (`Cluster.link` is one). A rank's message to itself is free.
        needs_gradients: False for evaluation: forwards alone.
        overhead_seconds: what the executor adds to each instruction.
        optimizer_seconds: of each rank; empty: none.
    """

    stages: tuple[StageTimes, ...]
    edges: tuple[Edge, ...]
    num_ranks: int
    num_micro_batches: int
    links: Links = free_link
    needs_gradients: bool = True
    overhead_seconds: float = 0.0
    optimizer_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        pairs = [(edge.source, edge.destination) for edge in self.edges]
        assert all(0 <= s < t < self.num_stages for s, t in pairs), f"edges must go to a later stage: {pairs}"
        assert len(set(pairs)) == len(pairs), f"one edge for a pair of stages, got {pairs}"
        assert all(min(s.ranks) >= 0 and max(s.ranks) < self.num_ranks for s in self.stages), "rank out of range"
        assert self.num_micro_batches >= 1, f"num_micro_batches is {self.num_micro_batches}, needs at least 1"
        assert len(self.optimizer_seconds) in (0, self.num_ranks), "optimizer_seconds: one a rank, or none"

    @property
    def num_stages(self) -> int:
        """The number of stages S."""
        return len(self.stages)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Returns the rank that runs a micro-batch at a stage."""
        ranks = self.stages[stage].ranks
        return ranks[micro_batch % len(ranks)]

    def is_last(self, stage: int) -> bool:
        """Returns whether this is the last stage, whose backward may follow its forward at once."""
        return stage == self.num_stages - 1

    def share(self, stage: int, replica: int) -> int:
        """Returns how many micro-batches a replica of a stage runs."""
        return len(range(replica, self.num_micro_batches, self.stages[stage].num_replicas))

    def recomputes(self, stage: int) -> bool:
        """Returns whether the plan has this stage recompute (never in evaluation)."""
        return self.needs_gradients and self.stages[stage].needs_recompute
