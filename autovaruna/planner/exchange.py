"""Predicts what ranks exchange in a step beside its pipeline: what calls are, samples, outputs and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autovaruna.graph.records import Size
from autovaruna.planner.problem import Problem
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.schedule.pipeline import Pipeline

_EAGER_BYTES = 4 << 20
"""What takes more asks the receiver first (`ranks/transport/mpi.py`); then it goes there and back once more."""
_MOST_LOOKED_AT = 3
"""Of the replicas of a stage, and of the ranks that pass samples of a replica: these, and the last."""
_OF_A_STEP, _OF_A_MESSAGE = 34, 5
"""What the engine takes of a processor beside instructions, counted in what it adds to one; found from steps of small
models. Where a rank has a core of its own, a message is its latency; else sending, waiting and receiving take cores."""


@dataclass(frozen=True)
class _Made:
    """Micro-batches that a rank runs of samples from the same owners: their places among the rank's, and number."""

    rank: int
    owners: tuple[int, ...]
    first: int
    every: int
    count: int


class Exchange:
    """What the ranks of a problem exchange in a step: nothing, where it does not say who passes which samples.

        all agree | samples come, forwards | outputs go, all agree, gradients come back | backwards | all agree

    Ranks agree on each call in log2(N) rounds (`ranks/exchange.py`): all have then heard of the last one. Outputs go
    to the ranks that passed the samples where the script makes the loss of them. A rank begins its next call when it
    has ended the last. Between hosts that are far from each other most of a step may be this.
    """

    def __init__(self, problem: Problem) -> None:
        self._cluster, self._groups = problem.cluster, problem.input_groups
        self._script_makes_loss = problem.needs_gradient and not problem.has_loss
        outputs = problem.graph.outputs if problem.delivers_outputs or not problem.has_loss else ()
        self._input_bytes = _bytes_of_blocks([(each.consumers, each.size) for each in problem.graph.inputs])
        self._output_bytes = _bytes_of_blocks([((each.producer,), each.size) for each in outputs])
        hosts = set(self._cluster.hosts)
        self._latency = (self._cluster.remote_link if len(hosts) > 1 else self._cluster.local_link).latency_seconds
        self._agreement_seconds = math.ceil(math.log2(self._cluster.num_ranks)) * self._latency

    def seconds(self, plan: Plan) -> float:
        """Returns what a step of a plan takes more than its pipeline."""
        if not self._groups or self._cluster.num_ranks == 1:
            return 0.0
        turn = self._turn_seconds(plan) if self._script_makes_loss else 0.0
        return self._late_seconds(plan) + turn + self._next_call_seconds(plan)

    def _heard_by(self, first: int, rank: int) -> float:
        """Returns how long after a rank's call the first rank of the pipeline has heard of it, and the other way."""
        return self._agreement_seconds if rank != first else 0.0

    def _late_seconds(self, plan: Plan) -> float:
        """Returns how much later than the first rank's call the pipeline flows, as samples come.

        The first and the last of a rank's samples are late if its stage could have begun with them before.
        """
        late = fill = slowest = 0.0
        for stage in plan.stages:
            slowest = max(slowest, stage.forward_seconds)
            later = max(stage.forward_seconds + stage.recompute_seconds + stage.backward_seconds - slowest, 0.0)
            num_bytes = self._input_bytes(stage.blocks) * plan.micro_batch_size
            for made in self._made(plan, stage) if num_bytes else ():
                for turn in (0, made.count - 1) if made.rank not in made.owners else ():
                    sender, place = made.owners[0], made.first + turn * made.every
                    sent = self._heard_by(plan.stages[0].ranks[0], sender)
                    comes = sent + self._message_seconds(sender, made.rank, num_bytes, turn + 1)
                    late = max(late, comes - fill - place * slowest - max(place - stage.in_flight, 0) * later)
            fill += stage.forward_seconds
        return late

    def _turn_seconds(self, plan: Plan) -> float:
        """Returns what lies between the forwards and the backwards of a step whose loss the script makes."""
        there, back = 0.0, 0.0
        for stage in plan.stages:
            num_bytes = self._output_bytes(stage.blocks) * plan.micro_batch_size
            there = max([there, *(seconds for _, seconds in self._outputs_come(plan, stage))])
            for made in self._made(plan, stage) if num_bytes else ():
                if made.rank not in made.owners:
                    back = max(back, self._message_seconds(made.owners[0], made.rank, num_bytes))
        return there + self._agreement_seconds + back

    def _next_call_seconds(self, plan: Plan) -> float:
        """Returns how long after the end of a pipeline its first rank has heard of all others' next calls."""
        before, known, first = 0.0, [0.0], plan.stages[0].ranks[0]
        for stage in plan.stages:  # the backwards of earlier stages come last
            known.append(max(self._heard_by(first, rank) for rank in stage.ranks[:2]) - before)
            if not self._script_makes_loss:
                end = -before - (stage.reduce_seconds - stage.reduce_lead_seconds) - stage.optimizer_seconds
                known += [end + each + self._heard_by(first, rank) for rank, each in self._outputs_come(plan, stage)]
                if stage is plan.stages[-1]:  # it has the loss, which goes to all
                    known.append(end + self._latency + self._agreement_seconds)
            before += stage.backward_seconds + stage.recompute_seconds
        return max(known)

    def _outputs_come(self, plan: Plan, stage: StagePlan) -> Iterator[tuple[int, float]]:
        """Yields ranks that wait for outputs of their samples, and how long after the stage's end they have them."""
        num_bytes = self._output_bytes(stage.blocks) * plan.micro_batch_size
        for made in self._made(plan, stage) if num_bytes else ():
            for owner in _some(made.owners):
                if owner != made.rank:
                    yield owner, self._message_seconds(made.rank, owner, num_bytes, made.count)

    def _made(self, plan: Plan, stage: StagePlan) -> Iterator[_Made]:
        """Yields what ranks of a stage make of samples: of some ranks, for some of those that passed them."""
        count, num_groups = len(stage.ranks), len(self._groups)
        every = num_groups // math.gcd(num_groups, count)
        for index in _some(range(count)):
            num_parts = len(range(index, plan.num_micro_batches, count))
            for first in _some(range(min(every, num_parts))):
                owners = self._groups[(index + first * count) % num_groups]
                yield _Made(stage.ranks[index], owners, first, every, len(range(first, num_parts, every)))

    def _message_seconds(self, source: int, destination: int, num_bytes: float, count: int = 1) -> float:
        """Returns when the last of some messages that are sent at once has come."""
        link = self._cluster.link(source, destination)
        asks = 2 * link.latency_seconds if num_bytes > _EAGER_BYTES else 0.0
        return asks + link.seconds(count * num_bytes)


def engine_seconds(pipeline: Pipeline) -> float:
    """Returns what the engine takes in a step beside instructions: of each rank's core, or of those that are shared."""
    if pipeline.cores == math.inf:
        return _OF_A_STEP * pipeline.overhead_seconds
    num_messages = sum(1 + each.needs_gradient for each in pipeline.edges) * pipeline.num_micro_batches
    num_messages += 2 * pipeline.num_ranks  # each rank waits for the agreement and for the loss as well
    count = _OF_A_STEP * pipeline.num_ranks + _OF_A_MESSAGE * num_messages
    return count * pipeline.overhead_seconds / pipeline.cores


def _some(places: Sequence[int]) -> tuple[int, ...]:
    return (*places[:_MOST_LOOKED_AT], *places[_MOST_LOOKED_AT:][-1:])


def _bytes_of_blocks(things: Sequence[tuple[Sequence[int], Size]]) -> Callable[[tuple[int, ...]], float]:
    """Returns what says the bytes of a sample of all things that some blocks, which follow each other, have."""

    @lru_cache(maxsize=1024)
    def of(blocks: tuple[int, ...]) -> float:
        first, last = blocks[0], blocks[-1]
        return sum(size.sample_bytes for users, size in things if any(first <= user <= last for user in users))

    return of
