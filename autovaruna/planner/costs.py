"""Holds what a problem costs at one number of micro-batches: by block, by range of segments, and all-reduces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autovaruna.planner.arrays import Array, Costs, RangeTables
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Peak, StagePlan
from autovaruna.planner.stage_memory import Holdings, HoldingsOfRanges, MemoryModel, StageBytes
from autovaruna.profiler.records import Cluster, LinkCost
from autovaruna.schedule.pipeline import share_of

_MOST_TABLES = 64
"""Tables of a formula that are kept: those of the stages of one grid, and of unequal replicas."""
EARLY_BYTES = 1 << 20
"""Gradients of so many bytes are summed at once, beside the backward that makes others."""
_BESIDE = 0.9
"""What a link carries then: a rank looks after messages where it has made a gradient, and not in between."""


class AllReduces:
    """All-reduces on a cluster.

    `all_reduce_bytes_per_second` was measured over all ranks, so over the slowest link there is. A ring that stays
    within one of several hosts is faster in the ratio of a local message to a remote one.
    """

    def __init__(self, cluster: Cluster) -> None:
        local, remote = cluster.local_link.bytes_per_second, cluster.remote_link.bytes_per_second
        self.cluster = cluster
        self._local_gain = local / remote if len(set(cluster.hosts)) > 1 and local > remote else 1.0
        self.is_local = cache(lambda ranks: len({cluster.hosts[rank] for rank in ranks}) == 1)

    def seconds(self, ranks: tuple[int, ...], num_bytes: float) -> float:
        """Returns the predicted seconds to all-reduce `num_bytes` over some ranks."""
        latency, seconds_per_byte = self.cost(len(ranks), is_local=self.is_local(ranks))
        return latency + seconds_per_byte * num_bytes

    def cost(self, num_ranks: int, *, is_local: bool) -> tuple[float, float]:
        """Returns what a ring of so many ranks takes, in seconds: once, and for each byte; nothing for one rank."""
        if num_ranks < 2:
            return 0.0, 0.0
        bandwidth = self.cluster.all_reduce_bytes_per_second * (self._local_gain if is_local else 1.0)
        latency = self.cluster.all_reduce_latency_seconds * num_ranks
        return latency, 2 * (num_ranks - 1) / num_ranks / bandwidth

    def free_seconds(self, num_ranks: int, *, is_local: bool) -> float:
        """Returns what of the seconds for each byte processors compute in; none between ranks that share memory."""
        _, seconds_per_byte = self.cost(num_ranks, is_local=is_local)
        busy = 4 * (num_ranks - 1) / num_ranks * self.cluster.remote_link.busy_seconds_per_byte  # sent, and received
        return 0.0 if is_local else max(0.0, seconds_per_byte - busy)


@dataclass(frozen=True)
class SizedProblem:
    """A problem at M micro-batches.

    `peaks` and `made_stages` keep what was made of stages, by all that it follows from (what they hold by identity),
    since plans of a search share most of it.
    """

    problem: Problem
    tables: RangeTables
    num_micro_batches: int
    peaks: dict[tuple[int, bool, int, int], Peak] = field(default_factory=dict, init=False)
    made_stages: dict[tuple[int, int, tuple[int, ...], bool, int, float], StagePlan] = field(
        default_factory=dict, init=False
    )

    @property
    def micro_batch_size(self) -> float:
        """The mean number of samples of a micro-batch."""
        return self.problem.global_batch_size / self.num_micro_batches

    @cached_property
    def costs(self) -> Costs:
        """The cost of each block, at the mean micro-batch size (bytes are those of the greatest one)."""
        return self.problem.cost_table.at(self.micro_batch_size)

    @cached_property
    def step_seconds(self) -> Array:
        """Forward and backward seconds of each block, as far as they run."""
        return np.asarray(self.costs.forward_seconds + self.backward_seconds, dtype=np.float64)

    @cached_property
    def backward_seconds(self) -> Array:
        """Seconds of each block's backward, as far as it runs."""
        costs = self.costs.backward_seconds
        return costs if self.problem.needs_gradient else np.zeros_like(costs)

    @cached_property
    def waits(self) -> tuple[Array, Array]:
        """What a stage that starts at each block waits for others on the fastest ranks, before its first forward and
        after its last backward; one entry more for the end of the graph.
        """
        problem, speed = self.problem, max(self.problem.cluster.speeds)
        before = problem.flow.fill_seconds(self.costs.forward_seconds / speed)
        after = problem.gradient_flow.fill_seconds(self.backward_seconds / speed)
        return np.append(before, 0.0), np.append(after, 0.0)

    @cached_property
    def work(self) -> Array:
        """Forward and backward seconds of each range on a rank of speed 1, without recompute."""
        return _forbid_empty(self.tables.add_up(self.step_seconds))

    @cached_property
    def held(self) -> Holdings[Array]:
        """What each range holds."""
        return self._by_range.all()

    @property
    def greatest_costs(self) -> Costs:
        """The cost of each block for the greatest micro-batch."""
        return self.problem.cost_table.at(math.ceil(self.micro_batch_size - 1e-9))

    @cached_property
    def _by_range(self) -> HoldingsOfRanges:
        return HoldingsOfRanges(self.tables, self.greatest_costs)

    @cached_property
    def held_by(self) -> Callable[[int, int], Holdings[float]]:
        """Says what the range of the segments i .. j-1 holds; the search asks for the same ones again and again."""
        return cache(self._by_range.of)

    @cached_property
    def model(self) -> MemoryModel:
        problem, cluster = self.problem, self.problem.cluster
        return MemoryModel(
            problem.optimizer_bytes_factor,
            problem.needs_gradient,
            cluster.process_bytes,
            cluster.fragmentation,
            problem.optimizer_cost.work_of_all,
            problem.optimizer_cost.work_of_largest,
            problem.most_owners,
        )

    def owned_share(self, num_replicas: int, held: Holdings[float] | None = None) -> float:
        """Returns the share of a stage's optimizer step that one of so many replicas makes; of any stage, at least."""
        if held is not None and held.trained:
            return self.model.owned(held, num_replicas) / held.trained
        return 1.0 / min(num_replicas, self.problem.most_owners)

    @cached_property
    def all_reduces(self) -> AllReduces:
        return AllReduces(self.problem.cluster)

    def reduce_seconds(self, num_replicas: int, trained_bytes: Array, *, is_local: bool) -> Array:
        """Returns the all-reduce seconds of ranges; where state is shared, of its two halves, which start apart."""
        if not self.problem.needs_gradient:
            return np.zeros_like(trained_bytes)
        latency, seconds_per_byte = self.all_reduces.cost(num_replicas, is_local=is_local)
        latency *= 1 + self.problem.shares_state
        return np.where(trained_bytes > 0, latency + seconds_per_byte * trained_bytes, 0.0)

    def lead_seconds(self, num_replicas: int, *, is_local: bool) -> Array:
        """Returns what of the all-reduces of ranges goes on beside their last backwards.

        Behind each block's gradients comes the rest of the backward, beside which those of later blocks are summed:

            lead = the least, over the blocks, of  later blocks' all-reduce + earlier blocks' backward

        State that is shared comes back after the optimizer; on a device, or beside ranks on one core, nothing is free.
        """
        problem, cluster = self.problem, self.problem.cluster
        is_beside = problem.needs_gradient and problem.profile.device.startswith("cpu") and cluster.cores_per_rank >= 1
        seconds_per_byte = self.all_reduces.free_seconds(num_replicas, is_local=is_local) if is_beside else 0.0
        return self._leads(seconds_per_byte / (1 + problem.shares_state))

    @cached_property
    def _leads(self) -> Callable[[float], Array]:
        return lru_cache(_MOST_TABLES)(self._lead_table)

    def _lead_table(self, seconds_per_byte: float) -> Array:
        num_bytes = self.tables.trained_bytes
        if not seconds_per_byte:
            return np.zeros_like(num_bytes)
        summed = seconds_per_byte * num_bytes
        earlier = self.tables.add_up(self.backward_seconds) / max(self.problem.cluster.speeds)
        waits = summed - np.pad(earlier, ((0, 0), (1, 0)))[:, :-1]  # of what ends with each segment
        lead = summed - np.maximum.accumulate(np.where(_is_range(summed), waits, -np.inf), axis=1)
        return _BESIDE * np.clip(lead, 0.0, seconds_per_byte * np.maximum(num_bytes - EARLY_BYTES, 0.0))

    @cached_property
    def optimizer_seconds(self) -> Array:
        """Seconds of the optimizer step over the parameters of each range, on a rank of speed 1."""
        return np.asarray(self.optimizer_seconds_at(), dtype=np.float64)

    def optimizer_seconds_at(self, where: Any = ...) -> Any:
        """Returns the table, or one entry of it, which is known much sooner."""
        cost, num_trained, trained = self.problem.optimizer_cost, self.tables.num_trained, self.tables.trained_bytes
        each = cost.seconds_per_parameter * num_trained[where] + cost.seconds_per_byte * trained[where]
        return each if self.problem.needs_gradient else each * 0.0

    @cached_property
    def seconds_of(self) -> Callable[[int, int], tuple[float, float]]:
        """Says what forward and backward of the blocks of the segments i .. j-1 take."""
        return cache(self._seconds_of)

    def _seconds_of(self, i: int, j: int) -> tuple[float, float]:
        costs, blocks = self.costs, slice(*self.tables.positions[[i, j]])
        return float(costs.forward_seconds[blocks].sum()), float(costs.backward_seconds[blocks].sum())

    @cached_property
    def overhead_seconds(self) -> float:
        """What the executor adds to the forward and the backward of a micro-batch at one stage."""
        return self.problem.cluster.overhead_seconds * (2 if self.problem.needs_gradient else 1)

    @property
    def recompute_choices(self) -> tuple[bool, ...]:
        """Whether stages may run without recompute, with it, or both; the better one first."""
        if not self.problem.needs_gradient:
            return (False,)
        return {"auto": (False, True), "all": (True,), "none": (False,)}[self.problem.constraints.recompute]

    @cached_property
    def recompute_options(self) -> list[tuple[Array, StageBytes[Array]]]:
        """Seconds and bytes of ranges without recompute, and with it, the fastest first."""
        options = []
        for again in self.recompute_choices:
            work = _forbid_empty(self.work + self.tables.add_up(self.costs.forward_seconds)) if again else self.work
            options.append((work, self.model.of_stage(self.held, again)))
        return options


class StageFormula:
    """Says about what a step takes that has some ranges as a stage, for all ranges; infinite: it does not fit.

        others' forwards | micro-batches: their work, or their messages | all-reduce and optimizer, or others' backwards

    With the others' is what their messages take. A rank with several stages gives each its part of time and memory.
    """

    def __init__(self, sized: SizedProblem) -> None:
        self.sized, hosts = sized, sized.problem.cluster.hosts
        self._before, self._after = (each[sized.tables.positions, None] for each in sized.waits)
        self._has_neighbours = len(set(hosts)) < len(hosts)
        self._messages = cache(self._message_seconds)
        self._table = lru_cache(_MOST_TABLES)(self._build)

    def seconds(
        self, ranks: Sequence[int], num_behind: int, before: Sequence[int], behind: Sequence[int], num_held: int = 1
    ) -> Array:
        """Returns the table of a stage.

        Args:
            ranks: its replicas.
            num_behind: ranks of this stage and of those behind it, which is what its in-flight depth follows from.
            before, behind: the last rank of the stage before, and the first of the one behind.
            num_held: the stages of a rank.
        """
        cluster, constraints = self.sized.problem.cluster, self.sized.problem.constraints
        count, replicas, hosts = self.sized.num_micro_batches, len(ranks), [cluster.hosts[rank] for rank in ranks]
        share, speeds = -(-count // replicas), [cluster.speeds[rank] for rank in ranks]
        deepest = share if constraints.schedule == "gpipe" else constraints.in_flight or -(-num_behind // replicas)
        depth = min(deepest, share)
        load = max(share_of(count, replicas, k) / speed for k, speed in enumerate(speeds))
        own = min(cluster.memory_bytes[rank] for rank in ranks) - cluster.process_bytes
        limit = own / num_held + cluster.process_bytes
        is_apart = replicas == 1 or not self._has_neighbours
        links = [
            cluster.remote_link
            if is_apart and any(cluster.hosts[rank] != hosts[0] for rank in others)
            else cluster.local_link
            for others in (before, behind)
        ]
        return self._table(
            replicas, depth, load * num_held, min(speeds), limit, share * num_held, len(set(hosts)) == 1, *links
        )

    def _build(
        self,
        replicas: int,
        depth: int,
        load: float,
        slowest: float,
        limit: float,
        num_messages: int,
        is_local: bool,
        before: LinkCost,
        behind: LinkCost,
    ) -> Array:
        """Returns the table; `load` is the micro-batches of a replica over its speed, at most."""
        share = -(-self.sized.num_micro_batches // replicas)
        seconds = self._work_within(limit, share, depth) * load
        seconds += num_messages * (self.sized.overhead_seconds + self._busy_seconds(before, behind))
        np.maximum(seconds, num_messages * self._messages(before, behind), out=seconds)
        first, last = self._fill_seconds(before)
        seconds += self._before + first
        reduce = self.sized.reduce_seconds(replicas, self.sized.tables.trained_bytes, is_local=is_local)
        reduce -= self.sized.lead_seconds(replicas, is_local=is_local)
        optimizer = self.sized.optimizer_seconds * (self.sized.owned_share(replicas) / slowest)
        seconds += np.maximum(self._after + last, reduce + optimizer)
        return seconds

    def _work_within(self, limit: float, share: int, in_flight: int) -> Array:
        """Returns the seconds of each range in the best way that fits, infinite if none does.

        A range that only fits with one micro-batch in flight waits for each of them in proportion.
        """
        best = np.full_like(self.sized.work, np.inf)
        for depth in sorted({in_flight, 1}, reverse=True):
            for seconds, num_bytes in self.sized.recompute_options:
                fits = num_bytes.at(depth, share) <= limit
                np.minimum(best, seconds * (in_flight / depth), out=best, where=fits)
        return best

    def _fill_seconds(self, before: LinkCost) -> tuple[Array, Array]:
        """Returns what the first activations of every range are on their way, and its last gradients."""
        held = self.sized.held
        received, sent = (
            np.where(each > 0, before.latency_seconds + each / before.bytes_per_second, 0.0)
            for each in (held.received, held.gradients_sent)
        )
        return received, sent

    def _busy_seconds(self, before: LinkCost, behind: LinkCost) -> Array:
        """Returns what the messages of every range take of its processor for a micro-batch."""
        held = self.sized.held
        first = (held.received + held.gradients_sent) * before.busy_seconds_per_byte
        return first + (held.sent + held.gradients_received) * behind.busy_seconds_per_byte

    def _message_seconds(self, before: LinkCost, behind: LinkCost) -> Array:
        """Returns what the messages of every range take for a micro-batch, over the links to its neighbours."""
        held = self.sized.held
        first = np.maximum(held.received, held.gradients_sent) / before.bytes_per_second
        return np.maximum(first, held.gradients_received / behind.bytes_per_second)


def _forbid_empty(table: Array) -> Array:
    return np.where(_is_range(table), table, np.inf)


def _is_range(table: Array) -> NDArray[np.bool_]:
    """Returns for each entry whether it is of segments i .. j-1, which are some."""
    places = np.arange(len(table))
    return places[:, None] < places
