"""Defines `Policy`, which chooses the next instruction of a rank, and the schedules: one a policy, with a drawing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from autovaruna.errors import ScheduleError
from autovaruna.schedule.pipeline import BACKWARD, FORWARD, RECOMPUTE, Kind, Pipeline, deepest_in_flight
from autovaruna.schedule.replica import Replica

Choice = tuple[Replica, Kind]
_MAY = {FORWARD: "can_forward", RECOMPUTE: "can_recompute", BACKWARD: "can_backward"}


class Policy(ABC):
    """Chooses the order of instructions; one policy is one schedule.

    A policy that never waits while something may run (*work-conserving*) cannot deadlock, for any placement and any
    depth of at least 1. Proof: take the smallest micro-batch m with something left to do. If a forward is left, the
    earliest such stage has its inputs, has forwarded all smaller micro-batches, and holds none in flight, since those
    are done; so it may run. Otherwise the latest stage with a backward left has its gradients, and may run.
    """

    name: str

    @abstractmethod
    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        """Chooses a replica and the kind of its next instruction for an idle rank; None: it waits.

        Args:
            replicas: the rank's stages, deepest first; their ``can_*`` say what may run now.
        """

    def depth(self, pipeline: Pipeline, stage: int, replica: int) -> int:
        """Returns the most forwards not yet backwarded that the policy lets one replica hold.

        Raises:
            ScheduleError: the plan's depth is too small for this policy.
        """
        return pipeline.stages[stage].in_flight

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        """Returns whether this policy runs a recompute before each backward of the stage."""
        return pipeline.recomputes(stage)

    def num_instructions(self, pipeline: Pipeline) -> int:
        stages = range(pipeline.num_stages)
        backward = (1 + self.recomputes(pipeline, s) for s in stages)
        return pipeline.num_micro_batches * (len(stages) + (sum(backward) if pipeline.needs_gradients else 0))


def first(replicas: Sequence[Replica], kind: Kind) -> Choice | None:
    """Chooses the first stage that may run an instruction of a kind."""
    may = _MAY[kind]
    for replica in replicas:
        if getattr(replica, may):
            return replica, kind
    return None


def pick_in_turn(
    backwards: Sequence[Replica], forwards: Sequence[Replica], *, is_turn: bool | None = None
) -> Choice | None:
    """Chooses a backward whose turn it is, else the first forward, else any backward, else a recompute.

    `is_turn` says whether stages are to go backward before anything goes forward; None: those that are full. One that
    has recomputed is so anyway.
    """
    for replica in backwards:
        if replica.has_gradient and (replica.is_recomputed or (replica.is_full if is_turn is None else is_turn)):
            return _backward(replica)
    for replica in forwards:
        if replica.can_forward:
            return replica, FORWARD
    for replica in backwards:
        if replica.has_gradient:
            return _backward(replica)
    for replica in backwards:
        if replica.can_recompute:
            return replica, RECOMPUTE
    return None


def _backward(replica: Replica) -> Choice:
    return replica, BACKWARD if replica.can_backward else RECOMPUTE


class GPipe(Policy):
    """Runs all forwards, then all backwards.

        rank 0 | 0F0 0F1 0F2 0F3  .   .   .   .  0B0 0B1 0B2 0B3
        rank 1 |  .  1F0 1F1 1F2 1F3  .   .  1B0 1B1 1B2 1B3  .
        rank 2 |  .   .  2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3  .   .

    Backwards go in ascending order of micro-batches, unlike in the paper (Huang et al., NeurIPS 2019), so that
    gradients are summed in the order of one process. The depth is the number of micro-batches. The one way to run a
    model that returns outputs instead of a loss.
    """

    name = "gpipe"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        choice = first(replicas, FORWARD)
        if choice or any(replica.forwards < replica.num_micro_batches for replica in replicas):
            return choice
        return first(replicas, BACKWARD) or first(replicas, RECOMPUTE)

    def depth(self, pipeline: Pipeline, stage: int, replica: int) -> int:
        allowed, needed = pipeline.stages[stage].in_flight, deepest_in_flight(pipeline, stage)
        if allowed < needed:
            raise ScheduleError(
                f"stage {stage}: gpipe holds {needed} micro-batches in flight, the plan allows {allowed}; "
                "use 1f1b or varuna, or plan with more memory"
            )
        return needed


class VarunaPolicy(Policy):
    """Runs what frees memory first: backward, then recompute, then forward; never waits.

        rank 0 | 0F0 0F1 0F2 0R0  .  0B0 0F3 0R1 0B1 0R2 0B2 0R3  .   .  0B3
        rank 1 |  .  1F0 1F1 1R0 1B0 1F2 1R1 1B1 1R2 1B2 1F3 1R3  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2  .   .   .  2F3 2B3  .   .

    A recompute goes before forwards once its gradient is here. Before that it fills the time in which neither forward
    nor backward may run, and so overlaps with the backward of the next stage. The last stage goes backward right after
    each forward, so it never recomputes. While a gradient is late the rank runs ahead with forwards, as far as the
    depth allows.

    The paper (Athlur et al., EuroSys 2022, section 3.2) starts a recompute, before any forward, as soon as the next
    stage has begun its backward. In simulations of uneven chains of 2 to 8 stages that was slower everywhere, by 1 to
    6 %: it holds up the forwards that the next stages wait for. For the same reason `1f1b` is often faster than this.
    """

    name = "varuna"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        awaited = [replica for replica in replicas if replica.has_gradient]
        choice = first(replicas, BACKWARD) or first(awaited, RECOMPUTE)
        return choice or first(replicas, FORWARD) or first(replicas, RECOMPUTE)

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        return pipeline.recomputes(stage) and not pipeline.is_last(stage)


class OneFOneB(Policy):
    """Runs forwards up to the in-flight depth (warm-up), then one backward and one forward in turn.

        rank 0 | 0F0 0F1 0F2  .   .  0B0 0F3 0B1  .  0B2  .  0B3
        rank 1 |  .  1F0 1F1  .  1B0 1F2 1B1 1F3 1B2  .  1B3  .
        rank 2 |  .   .  2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3  .   .

    The turn is the depth's doing: a stage at its depth goes backward, one below it goes forward, and one that cannot
    have its turn takes the other. A rank with several stages first serves those whose turn is backward, deepest first.
    A last stage of depth 1 goes backward right after each forward, so it never recomputes; more depth there pays only
    if its rank has other stages. Elsewhere a recompute goes right before its backward, or earlier if there is nothing
    else to do. The drawing has depth S - s (Narayanan et al., PipeDream, SOSP 2019); `latency_depth` is for slow links.
    """

    name = "1f1b"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        return pick_in_turn(replicas, replicas)

    def recomputes(self, pipeline: Pipeline, stage: int) -> bool:
        return pipeline.recomputes(stage) and not (pipeline.is_last(stage) and pipeline.stages[stage].in_flight == 1)


class Interleaved(Policy):
    """Takes as many micro-batches through a stage as there are ranks before any goes through the rank's next stage.

        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  .  2B2  .  2B3 0B2 0B3
        rank 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3  .

    Such a *round* keeps a stage at work while its activations arrive one by one. Of several stages that of the earliest
    round goes first; within a round the first stage forward, the last one backward. Each rank takes turns as a whole:
    forwards run until the last of its stages has begun and a gradient can have come back to it (two for each stage
    behind), then both in turn. What is late gives way to whatever else may run, so each stage keeps to its own depth.
    With equal stages, v of them on each of P ranks in turn, a step takes ``(P - 1) / v`` micro-batches longer than the
    work alone, for P - 1 with one stage a rank. Micro-batches that are no multiple of P make longer rounds, where
    Narayanan et al., SC 2021, section 2.2, have a fixed table for multiples.
    """

    name = "interleaved"

    def pick(self, replicas: Sequence[Replica]) -> Choice | None:
        backwards = [each for each in replicas if each.has_gradient or each.can_recompute]
        forwards = [each for each in replicas if each.can_forward]
        if not (backwards or forwards):
            return None
        num_rounds = _num_rounds(replicas)
        if len(backwards) > 1:
            backwards.sort(key=lambda each: (_round(each, each.backwards, num_rounds), -each.stage))
        if len(forwards) > 1:
            forwards.sort(key=lambda each: (_round(each, each.forwards, num_rounds), each.stage))
        is_turn = bool(backwards) and _is_ahead(replicas, num_rounds)
        return pick_in_turn(backwards, forwards, is_turn=is_turn)


def _num_rounds(replicas: Sequence[Replica]) -> int:
    """Returns how many rounds a rank makes, each of as many micro-batches as lie stages between two of its own."""
    deepest, first = replicas[0], replicas[-1]
    apart = (deepest.stage - first.stage) // max(1, len(replicas) - 1)
    return max(1, first.num_micro_batches // max(1, apart))


def _round(replica: Replica, k: int, num_rounds: int) -> int:
    """Returns the round of a replica's k-th micro-batch; rounds differ by one micro-batch at most."""
    return ((k + 1) * num_rounds - 1) // max(1, replica.num_micro_batches)


def _is_ahead(replicas: Sequence[Replica], num_rounds: int) -> bool:
    """Returns whether a rank runs forwards no longer: its last stage has begun, and gradients can be on their way."""
    deepest = replicas[0]
    longest = -(-deepest.num_micro_batches // num_rounds)
    needed = 1 + (len(replicas) - 1) * longest + 2 * deepest.num_later
    return sum([each.forwards - each.backwards for each in replicas]) >= needed


POLICIES: dict[str, Policy] = {policy.name: policy for policy in (GPipe(), OneFOneB(), VarunaPolicy(), Interleaved())}
