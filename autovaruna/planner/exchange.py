"""Predicts what a step takes beside its pipeline: what the ranks exchange before, between and after its instructions.

Ranks tell each other of their calls, by way of the first one. Samples go from the rank that passed them to the stages
that use them. Where the script makes the loss of the model's outputs, these go to the ranks that passed the samples,
and their gradients come back. Between hosts that are far from each other most of a step may be this.

All of it is counted in the steady state, in which a rank begins its next call when it has ended the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan, StagePlan

_HUB = 0
"""The rank that hears of all others, and answers."""
_EAGER_BYTES = 64 << 10
"""What takes more asks the receiver first, by Open MPI's default over TCP; then it goes there and back once more."""
_MOST_LOOKED_AT = 3
"""Of the replicas of a stage, of the ranks that pass samples of a replica, and of ranks: these, and the last."""


class Exchange:
    """What the ranks of a problem exchange in a step: nothing, where it does not say who passes which samples."""

    def __init__(self, problem: Problem) -> None:
        self._cluster, self._graph, self._groups = problem.cluster, problem.graph, problem.input_groups
        self._has_turn = problem.needs_gradient and not problem.has_loss
        self._outputs = problem.graph.outputs if problem.delivers_outputs or not problem.has_loss else ()
        self._input_bytes = lru_cache(maxsize=1024)(self._count_input_bytes)
        self._output_bytes = lru_cache(maxsize=1024)(self._count_output_bytes)
        self._far = lru_cache(maxsize=1024)(lambda ranks: max(map(self._to_hub, ranks)))

    def seconds(self, plan: Plan) -> float:
        """Returns what a step of a plan takes more than its pipeline."""
        if not self._groups or self._cluster.num_ranks == 1:
            return 0.0
        turn = self._turn(plan) if self._has_turn else 0.0
        return self._late(plan) + turn + self._next_call(plan)

    def _late(self, plan: Plan) -> float:
        """Returns how much later than the first rank's call the pipeline flows, as other calls, and samples, come.

        A sample comes late if its stage could have begun with it, had it been there; and a message of the pipeline, if
        it waits on its line for samples.
        """
        start = self._far(plan.stages[0].ranks)
        late, fills = 0.0, list(accumulate((stage.forward_seconds for stage in plan.stages), initial=0.0))
        slowest = list(accumulate((stage.forward_seconds for stage in plan.stages), max))
        for number, stage in enumerate(plan.stages):
            later = max(stage.forward_seconds + stage.recompute_seconds + stage.backward_seconds - slowest[number], 0.0)
            num_bytes = self._input_bytes(stage.blocks) * plan.micro_batch_size
            for made in self._made(plan, stage) if num_bytes else ():
                sender = made.owners[0]
                if made.rank in made.owners:
                    continue
                begin = self._to_hub(sender) - start
                for turn in (0, made.count - 1):
                    comes = begin + self._seconds(sender, made.rank, num_bytes, turn + 1)
                    place = made.first + turn * made.every
                    goes = fills[number] + place * slowest[number] + max(place - stage.in_flight, 0) * later
                    late = max(late, comes - goes)
                is_free = begin + made.count * num_bytes / self._cluster.link(sender, made.rank).bytes_per_second
                late = max(late, is_free - self._first_use(plan, fills, number, sender))
        return start + late

    def _first_use(self, plan: Plan, fills: Sequence[float], number: int, sender: int) -> float:
        """Returns when the pipeline has the first message from a rank for a stage, if it has one of its neighbours."""
        if number > 0 and sender in plan.stages[number - 1].ranks:
            return fills[number]
        behind = plan.stages[number + 1 :]
        if not (behind and sender in behind[0].ranks):
            return math.inf
        forwards = fills[-1]
        if plan.schedule == "gpipe":
            forwards += (plan.num_micro_batches // len(behind[-1].ranks) - 1) * max(
                stage.forward_seconds for stage in plan.stages
            )
        return forwards + sum(stage.backward_seconds + stage.recompute_seconds for stage in behind)

    def _turn(self, plan: Plan) -> float:
        """Returns what lies between the forwards and the backwards of a step whose loss the script makes."""
        stages = [stage for stage in plan.stages if self._output_bytes(stage.blocks)]
        agreed, back = 0.0, []
        for stage in stages:
            num_bytes = self._output_bytes(stage.blocks) * plan.micro_batch_size
            agreed = max([agreed, *self._known_outputs(plan, stage)])
            for made in self._made(plan, stage):
                agreed = max(agreed, self._to_hub(made.rank))
                sender = made.owners[0]
                if made.rank in made.owners:
                    back.append(self._to_hub(made.rank))
                    continue
                goes = self._to_hub(sender)
                back.append(goes + self._seconds(sender, made.rank, num_bytes))
                hidden = (made.count - 1) * made.every * stage.backward_seconds
                back.append(goes + self._seconds(sender, made.rank, num_bytes, made.count) - hidden)
        return agreed + max(back, default=0.0)

    def _next_call(self, plan: Plan) -> float:
        """Returns how long after the end of a pipeline the first rank has heard of all others' next calls."""
        before, known = 0.0, [0.0]
        for stage in plan.stages:  # the backwards of earlier stages come last
            known.append(self._far(stage.ranks) - before)
            if not self._has_turn:
                end = -before - stage.reduce_seconds - stage.optimizer_seconds
                known += [end + each for each in self._known_outputs(plan, stage)]
                if stage is plan.stages[-1]:
                    known += [end + each for each in self._known_loss(stage)]
            before += stage.backward_seconds + stage.recompute_seconds
        return max(known)

    def _known_outputs(self, plan: Plan, stage: StagePlan) -> Iterator[float]:
        """Yields when the first rank hears of those that wait for outputs of samples, after the stage has sent them."""
        num_bytes = self._output_bytes(stage.blocks) * plan.micro_batch_size
        for made in self._made(plan, stage) if num_bytes else ():
            for owner in _some(made.owners):
                if owner != made.rank:
                    yield self._seconds(made.rank, owner, num_bytes, made.count) + self._to_hub(owner)

    def _known_loss(self, stage: StagePlan) -> Iterator[float]:
        """Yields the same of those that wait for the loss, which goes to all."""
        for rank in _some(stage.ranks):
            for other in self._ranks:
                if other != rank:
                    yield self._seconds(rank, other, 0.0) + self._to_hub(other)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """A rank of each host, of the first and of the last hosts."""
        first = {host: rank for rank, host in reversed(list(enumerate(self._cluster.hosts)))}
        return _some(sorted(first.values()))

    def _made(self, plan: Plan, stage: StagePlan) -> Iterator[_Made]:
        """Yields what ranks of a stage make of others' samples: of some ranks, for some of those that passed them."""
        count, num_groups = len(stage.ranks), len(self._groups)
        every = num_groups // math.gcd(num_groups, count)
        for index in _some(range(count)):
            num_parts = len(range(index, plan.num_micro_batches, count))
            for first in _some(range(min(every, num_parts))):
                owners = self._groups[(index + first * count) % num_groups]
                yield _Made(stage.ranks[index], owners, first, every, len(range(first, num_parts, every)))

    def _to_hub(self, rank: int) -> float:
        return 0.0 if rank == _HUB else self._cluster.link(rank, _HUB).latency_seconds

    def _seconds(self, source: int, destination: int, num_bytes: float, count: int = 1) -> float:
        """Returns when the last of some messages that are sent at once has come."""
        link = self._cluster.link(source, destination)
        asks = 2 * link.latency_seconds if num_bytes > _EAGER_BYTES else 0.0
        return asks + link.seconds(count * num_bytes)

    def _count_input_bytes(self, blocks: tuple[int, ...]) -> float:
        return sum(each.size.sample_bytes for each in self._graph.inputs if not _is_outside(each.consumers, blocks))

    def _count_output_bytes(self, blocks: tuple[int, ...]) -> float:
        return sum(each.size.sample_bytes for each in self._outputs if not _is_outside((each.producer,), blocks))


@dataclass(frozen=True)
class _Made:
    """Micro-batches that a rank runs of samples from the same owners: their places among the rank's, and number."""

    rank: int
    owners: tuple[int, ...]
    first: int
    every: int
    count: int


def _some(places: Sequence[int]) -> tuple[int, ...]:
    return (*places[:_MOST_LOOKED_AT], *places[_MOST_LOOKED_AT:][-1:])


def _is_outside(found: tuple[int, ...], blocks: tuple[int, ...]) -> bool:
    return not any(blocks[0] <= each <= blocks[-1] for each in found)
