"""Defines `Plan`: which rank runs which part of the graph, when, what that is predicted to cost; what is simpler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from math import inf, lcm
from typing import NamedTuple

from autovaruna.config.files import Amount, Count
from autovaruna.profiler.records import LinkCost

UNKNOWN_LINK = LinkCost(1e-5, 1e10)


class Peak(NamedTuple):
    """The peak of a stage on one replica, and the part of it that other stages of its rank use in turn."""

    num_bytes: float
    shared_bytes: float


def together(peaks: Iterable[Peak]) -> float:
    """Returns the peak of a rank that holds some stages, in bytes: it runs one of them at a time."""
    every = list(peaks)
    return sum(peak.num_bytes - peak.shared_bytes for peak in every) + max(
        (peak.shared_bytes for peak in every), default=0.0
    )


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        blocks: indices into ``Graph.blocks``, ascending.
        ranks: the ordered ranks that are its replicas; micro-batch m runs on ``ranks[m % len(ranks)]``.
        needs_recompute: whether backward runs the forward again.
        in_flight: most forwards not yet backwarded on one replica.
        forward_seconds, backward_seconds: predicted, for one micro-batch on a rank of speed 1; backward without the
            recompute.
        memory_bytes: predicted peak on one replica.
        shared_bytes: the part of `memory_bytes` that other stages of the same rank use in turn.
        recompute_seconds: predicted, for one micro-batch; 0 without recompute.
        reduce_seconds: predicted all-reduce of the stage's gradients.
        optimizer_seconds: predicted optimizer step over the stage's parameters, on a rank of speed 1.
        parameter_bytes: of the parameters that the stage uses.
        speeds: relative speed of each replica; empty: all 1.
        reduce_lead_seconds: the part of `reduce_seconds` beside the stage's last backward.
    """

    blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    needs_recompute: bool
    in_flight: int
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    memory_bytes: float = 0.0
    shared_bytes: float = 0.0
    recompute_seconds: float = 0.0
    reduce_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    parameter_bytes: float = 0.0
    speeds: tuple[float, ...] = ()
    reduce_lead_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """What each block saves for backward and needs on top while it runs, for a micro-batch of so many samples.

    `process_bytes` and `fragmentation` are those of the `Cluster` that the plan was made for, `work_of_all` and
    `work_of_largest` those of the `OptimizerCost`.
    """

    micro_batch_size: Count
    saved_bytes: tuple[Amount, ...]
    work_bytes: tuple[Amount, ...]
    process_bytes: Amount = 0.0
    fragmentation: Amount = 1.0
    work_of_all: Amount = 0.0
    work_of_largest: Amount = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete plan of a step.

    `predicted_seconds` comes from the simulator; `bound_seconds` is a lower bound on the step over all plans of the
    searched kind (`bound.py`). The links, `host_of` (a host number for each rank; empty: one host) and
    `overhead_seconds` (of the executor, for each instruction) are those that the prediction was made with, as is
    `cores_per_rank`, less than 1 where ranks share cores: with them
    the plan alone gives the schedule, the same one on every rank. `is_measured` is False if the costs came from a
    roofline. `rank_memory_bytes` is the predicted peak of each rank over its instructions (empty: not known).
    `block_bytes` is what memory was predicted from, so that a plan edited by hand can be checked. With `shares_state`
    the replicas of a stage share the optimizer's state: each keeps that of its own parameters. `given_up` says what a
    faster plan has that was not chosen since this one is simpler.
    """

    stages: tuple[StagePlan, ...]
    num_ranks: int
    num_micro_batches: int
    micro_batch_size: float
    schedule: str
    predicted_seconds: float = 0.0
    bound_seconds: float = 0.0
    local_link: LinkCost = UNKNOWN_LINK
    remote_link: LinkCost = UNKNOWN_LINK
    host_of: tuple[int, ...] = ()
    overhead_seconds: float = 0.0
    cores_per_rank: float = 1.0
    needs_gradient: bool = True
    is_measured: bool = True
    rank_memory_bytes: tuple[float, ...] = ()
    block_bytes: BlockBytes | None = None
    shares_state: bool = False
    given_up: str = ""

    @property
    def num_stages(self) -> int:
        """The number of stages S."""
        return len(self.stages)

    @property
    def is_shared(self) -> bool:
        """Whether ranks hold several stages."""
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        return len(set(ranks)) < len(ranks)

    @property
    def gap(self) -> float:
        """How far the prediction lies above the bound: ``predicted / bound - 1``."""
        return self.predicted_seconds / self.bound_seconds - 1.0 if self.bound_seconds > 0 else 0.0

    def link(self, source: int, destination: int) -> LinkCost:
        """Returns the link between two ranks."""
        if not self.host_of or self.host_of[source] == self.host_of[destination]:
            return self.local_link
        return self.remote_link

    def optimizer_seconds(self) -> tuple[float, ...]:
        """Returns the predicted optimizer step of each rank, over all stages that it holds."""
        seconds = [0.0] * self.num_ranks
        for stage in self.stages:
            for rank, speed in zip(stage.ranks, stage.speeds or repeat(1.0), strict=False):
                seconds[rank] += stage.optimizer_seconds / speed
        return tuple(seconds)

    def work_seconds(self) -> dict[int, float]:
        """Returns what the stages of each rank compute in a step, by rank."""
        seconds = dict.fromkeys(range(self.num_ranks), 0.0)
        for stage in self.stages:
            each = stage.forward_seconds + stage.recompute_seconds + stage.backward_seconds
            for place, rank in enumerate(stage.ranks):
                count = len(range(place, self.num_micro_batches, len(stage.ranks)))
                seconds[rank] += count * each / (stage.speeds[place] if stage.speeds else 1.0)
        return seconds

    def rank_bytes(self) -> tuple[float, ...]:
        """Returns the predicted peak of each rank, over all stages that it holds."""
        if self.rank_memory_bytes:
            return self.rank_memory_bytes
        held: list[list[Peak]] = [[] for _ in range(self.num_ranks)]
        for stage in self.stages:
            for rank in stage.ranks:
                held[rank].append(Peak(stage.memory_bytes, stage.shared_bytes))
        return tuple(together(peaks) for peaks in held)

    def bytes_of(self, stage: StagePlan) -> float:
        """Returns the predicted peak of the ranks of a stage; where they hold several, what its depth may need."""
        each = self.rank_bytes()
        return stage.memory_bytes if self.is_shared else max(each[rank] for rank in stage.ranks)

    def samples_inside(self, stage: int, memory_bytes: float) -> float:
        """Returns how many samples a rank can run at once at a stage, forward and backward.

        `memory_bytes` is what the rank may use beside what its process holds. As many as are in flight have room at
        the least.
        """
        planned, known = self.stages[stage], self.block_bytes
        share = -(-self.num_micro_batches // len(planned.ranks))
        in_flight = planned.in_flight - (planned.in_flight >= share)  # or gradients are not there yet
        num_samples = self.micro_batch_size * (1 if planned.needs_recompute else max(1, in_flight))
        if known is None:
            return inf
        each = sum(known.saved_bytes[block] for block in planned.blocks) * known.fragmentation / known.micro_batch_size
        room = memory_bytes + known.process_bytes - self.bytes_of(planned)
        return num_samples + max(0.0, room) / max(1.0, each)

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Returns the rank that runs a micro-batch at a stage."""
        ranks = self.stages[stage].ranks
        return ranks[micro_batch % len(ranks)]

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields the ranks that a micro-batch takes from one stage to another, both ways."""
        for source, destination in combinations(range(self.num_stages), 2):
            period = lcm(len(self.stages[source].ranks), len(self.stages[destination].ranks))
            for micro_batch in range(min(period, self.num_micro_batches)):
                ends = self.rank_of(source, micro_batch), self.rank_of(destination, micro_batch)
                if ends[0] != ends[1]:
                    yield ends
                    yield ends[::-1]

    def groups(self) -> set[tuple[int, ...]]:
        """Returns the ranks of each stage that has replicas, which sum its gradients."""
        return {stage.ranks for stage in self.stages if len(stage.ranks) > 1}


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


class Simplicity(NamedTuple):
    """What makes a plan harder to read, to debug and to resume; of two plans the lesser is simpler."""

    num_stages: int
    has_unequal_replicas: bool
    has_several_a_rank: bool
    has_other_schedule: bool
    has_uneven_micro_batches: bool
    num_micro_batches: int
    seconds: float

    @classmethod
    def of(cls, plan: Plan) -> Simplicity:
        """Returns that of a plan."""
        has_unequal = len({len(stage.ranks) for stage in plan.stages}) > 1
        is_other = plan.schedule != "1f1b" and plan.num_stages > 1
        is_uneven = abs(plan.micro_batch_size - round(plan.micro_batch_size)) > 1e-9
        counts = plan.num_micro_batches, plan.predicted_seconds
        return cls(plan.num_stages, has_unequal, plan.is_shared, is_other, is_uneven, *counts)


def what_was_given_up(plan: Plan, fastest: Plan) -> str:
    """Returns what a faster plan that was not chosen has, in words; empty: there is none."""
    if plan.predicted_seconds <= fastest.predicted_seconds:
        return ""
    mine, other = Simplicity.of(plan), Simplicity.of(fastest)
    words = {
        "num_stages": f"{fastest.num_stages} stages",
        "has_unequal_replicas": "unequal replicas",
        "has_several_a_rank": "several stages a rank",
        "has_other_schedule": f"the schedule {fastest.schedule}",
        "has_uneven_micro_batches": "micro-batches of unequal sizes",
        "num_micro_batches": f"{fastest.num_micro_batches} micro-batches",
        "seconds": "other cuts",
    }
    kind = next(name for name in Simplicity._fields if getattr(mine, name) != getattr(other, name))
    return f"a plan with {words[kind]} is predicted {1 - fastest.predicted_seconds / plan.predicted_seconds:.1%} faster"
