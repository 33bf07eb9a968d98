"""Defines `Instruction`, the unit of a schedule, and `Pipeline`: what the simulator knows of a plan, and its costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate, cycle, islice

from autovaruna.profiler.records import LinkCost

TICKS_PER_SECOND = 2.0**40


class Kind(str, Enum):
    """What an instruction does; the value is its letter in print (``2F0`` is stage 2, forward, micro-batch 0)."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"

    __hash__ = str.__hash__
    """That of `Enum` is a function of Python's, and every instruction of a step is looked up by its kind."""


FORWARD, RECOMPUTE, BACKWARD = Kind
"""Where each instruction of a step asks for them: as an attribute of an `Enum` they take ten times as long."""


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One act: a kind of work, at a stage, for a micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Schedule = tuple[tuple[Instruction, ...], ...]


def slices(mini_batch_sizes: Sequence[int], num_micro_batches: int) -> list[tuple[int, int]]:
    """Returns where each micro-batch starts in its mini-batch, and how many samples it has.

    The slices of a mini-batch are as equal as can be, the larger ones first. A mini-batch that has more slices than
    samples has empty ones; one without a slice has samples in none. `num_micro_batches` is over all mini-batches.
    """
    num_groups = len(mini_batch_sizes)
    found = [(0, 0)] * num_micro_batches
    for group, samples in enumerate(mini_batch_sizes):
        places = range(group, num_micro_batches, num_groups)
        sizes = even_sizes(samples, len(places)) if places else []
        for m, start, size in zip(places, accumulate(sizes, initial=0), sizes, strict=False):
            found[m] = start, size
    return found


def even_sizes(num_samples: int, num_parts: int) -> list[int]:
    """Returns the sizes of parts that are as equal as can be, the larger ones first."""
    each, more = divmod(num_samples, num_parts)
    return [each + (place < more) for place in range(num_parts)]


def share_of(num_micro_batches: int, num_replicas: int, replica: int) -> int:
    """Returns how many of M micro-batches a replica of a stage runs."""
    return len(range(replica, num_micro_batches, num_replicas))


def pairs_of(senders: Sequence[int], receivers: Sequence[int], num_micro_batches: int) -> Iterator[tuple[int, int]]:
    """Yields the ranks that micro-batches take from one stage to another, until they come again."""
    count = min(math.lcm(len(senders), len(receivers)), num_micro_batches)
    return islice(zip(cycle(senders), cycle(receivers), strict=False), count)


Links = Callable[[int, int], LinkCost]


def free_link(source: int, destination: int) -> LinkCost:
    return LinkCost(0.0, math.inf)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage costs.

    Attributes:
        ranks: the ordered ranks that are its replicas.
        forward_seconds, backward_seconds: for one micro-batch on a rank of speed 1. Backward without the recompute.
        in_flight: most forwards not yet backwarded on one replica.
        needs_recompute, recompute_seconds: whether backward is preceded by a recompute, and what that takes.
        reduce_seconds: gradient all-reduce, which ends after the last backward on all replicas; 0.0: none.
        speeds: relative speed of each replica (2.0 takes half the seconds); empty: all 1.0.
        reduce_lead_seconds: what of the all-reduce goes on beside that backward.
    """

    ranks: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    in_flight: int
    needs_recompute: bool = False
    recompute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    speeds: tuple[float, ...] = ()
    reduce_lead_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert len(set(self.ranks)) == len(self.ranks) > 0, f"ranks of a stage must be distinct: {self.ranks}"
        assert self.in_flight >= 1, f"in_flight is {self.in_flight}, needs at least 1"
        assert len(self.speeds) in (0, len(self.ranks)), f"{len(self.speeds)} speeds for {len(self.ranks)} ranks"

    def on(self, ranks: tuple[int, ...]) -> StageTimes:
        """Returns the same on other ranks, if all have one speed."""
        assert not self.speeds, "the ranks differ in speed"
        return replace(self, ranks=ranks)

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    def speed(self, replica: int) -> float:
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
        stages: in order; a rank may hold none, one or several.
        edges: messages between stages; ``source < destination``, one edge for a pair.
        links: the cost of a message between two ranks (`Cluster.link` is one). A rank's message to itself is free.
        needs_gradients: False for evaluation: forwards alone.
        overhead_seconds: what the executor adds to each instruction.
        optimizer_seconds: of each rank; empty: none.
        cores_per_rank: less than 1 where ranks share cores.
    """

    stages: tuple[StageTimes, ...]
    edges: tuple[Edge, ...]
    num_ranks: int
    num_micro_batches: int
    links: Links = free_link
    needs_gradients: bool = True
    overhead_seconds: float = 0.0
    optimizer_seconds: tuple[float, ...] = ()
    cores_per_rank: float = 1.0

    def __post_init__(self) -> None:
        pairs = [(edge.source, edge.destination) for edge in self.edges]
        assert all(0 <= s < t < self.num_stages for s, t in pairs), f"edges must go to a later stage: {pairs}"
        assert len(set(pairs)) == len(pairs), f"one edge for a pair of stages, got {pairs}"
        assert all(min(s.ranks) >= 0 and max(s.ranks) < self.num_ranks for s in self.stages), "rank out of range"
        assert self.num_micro_batches >= 1, f"num_micro_batches is {self.num_micro_batches}, needs at least 1"
        assert len(self.optimizer_seconds) in (0, self.num_ranks), "optimizer_seconds: one a rank, or none"

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def cores(self) -> float:
        """The cores that the ranks share; infinite: each has one."""
        return self.num_ranks * self.cores_per_rank if self.cores_per_rank < 1.0 else math.inf

    def rank_of(self, stage: int, micro_batch: int) -> int:
        ranks = self.stages[stage].ranks
        return ranks[micro_batch % len(ranks)]

    def is_last(self, stage: int) -> bool:
        """Returns whether this is the last stage, whose backward may follow its forward at once."""
        return stage == self.num_stages - 1

    def share(self, stage: int, replica: int) -> int:
        return len(range(replica, self.num_micro_batches, self.stages[stage].num_replicas))

    def recomputes(self, stage: int) -> bool:
        """Returns whether the plan has this stage recompute (never in evaluation)."""
        return self.needs_gradients and self.stages[stage].needs_recompute


def textbook_depth(num_stages: int, stage: int, num_replicas: Sequence[int] = ()) -> int:
    """Returns the depth of textbook 1F1B: one micro-batch in every replica from `stage` to the last stage.

    With equal replicas this is S - s. Any depth of at least 1 is free of deadlock; a smaller one leaves ranks idle.
    `num_replicas` is of each stage; empty: equally many everywhere.
    """
    replicas = num_replicas or (1,) * num_stages
    return -(-sum(replicas[stage:]) // replicas[stage])


def latency_depth(num_stages: int, stage: int, num_replicas: Sequence[int] = ()) -> int:
    """Returns the depth that also hides messages which take no longer than a stage.

    With equal replicas this is 2(S - 1 - s) + 1: one micro-batch in every later replica, and one on every link.
    """
    replicas = num_replicas or (1,) * num_stages
    return 1 - (-2 * sum(replicas[stage + 1 :]) // replicas[stage])


def deepest_in_flight(pipeline: Pipeline, stage: int) -> int:
    """Returns the depth beyond which none matters: the micro-batches of the stage's busiest replica (gpipe's depth)."""
    return max(1, pipeline.share(stage, 0))


def exact(seconds: float) -> float:
    """Rounds to 2**-40 seconds (a picosecond).

    Sums of such numbers are exact in floating point up to 8,192 seconds, so equal times are equal whatever the order
    of their sums, and a schedule does not depend on rounding.
    """
    return round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


def seconds_of(link: LinkCost, num_bytes: float) -> tuple[float, float]:
    """Returns the seconds of a message's latency and of its bytes on a link."""
    return exact(link.latency_seconds), exact(num_bytes / link.bytes_per_second)


def work_seconds(pipeline: Pipeline, stage: int, replica: int) -> Mapping[Kind, float]:
    """Returns the seconds of each kind of instruction on one replica, executor overhead included."""
    times = pipeline.stages[stage]
    each = times.forward_seconds, times.recompute_seconds, times.backward_seconds
    return _by_kind(*each, times.speed(replica), pipeline.overhead_seconds)


@lru_cache(maxsize=1 << 12)
def _by_kind(forward: float, recompute: float, backward: float, speed: float, overhead: float) -> Mapping[Kind, float]:
    """Returns the seconds by kind; the pipelines of a search have the same few stages."""
    more = exact(overhead)
    return {
        Kind.FORWARD: exact(forward / speed) + more,
        Kind.RECOMPUTE: exact(recompute / speed) + more,
        Kind.BACKWARD: exact(backward / speed) + more,
    }
