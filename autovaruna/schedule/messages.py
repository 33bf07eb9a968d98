"""Says which messages a stage waits for, and what instructions cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.pipeline import Pipeline, StageTimes
from autovaruna.schedule.replica import Inbox, Replica

TICKS_PER_SECOND = 2.0**40


def exact(seconds: float) -> float:
    """Rounds to 2**-40 seconds (a picosecond).

    Sums of such numbers are exact in floating point up to 8,192 seconds, so equal times are equal whatever the order
    of their sums, and a schedule does not depend on rounding.
    """
    return round(seconds * TICKS_PER_SECOND) / TICKS_PER_SECOND


class Line:
    """The directed line between two ranks; `free_seconds` is when its bandwidth is free again."""

    __slots__ = ("free_seconds",)

    def __init__(self) -> None:
        self.free_seconds = 0.0


Lines = defaultdict[tuple[int, int], Line]
"""The lines from rank to rank."""


class Wire:
    """What a message of one size costs on a line."""

    __slots__ = ("latency_seconds", "line", "transfer_seconds")

    def __init__(self, line: Line, latency_seconds: float, transfer_seconds: float) -> None:
        self.line, self.latency_seconds, self.transfer_seconds = line, latency_seconds, transfer_seconds

    def send(self, now: float) -> float:
        """Puts a message on the line and returns when it arrives."""
        line = self.line
        left = (now if now > line.free_seconds else line.free_seconds) + self.transfer_seconds
        line.free_seconds = left
        return left + self.latency_seconds


class Wires(dict[tuple[int, int], "Wire | None"]):
    """The wires from replica i of a stage to replica j of another, by (i, j); None on one rank.

    Each is made when the first message goes through it: of many replicas, few pairs ever meet.

    Args:
        lines: from rank to rank, for all wires of a pipeline.
        pipeline: the pipeline.
        sender, receiver: the stages.
        num_bytes: of a message.
    """

    def __init__(self, lines: Lines, pipeline: Pipeline, sender: int, receiver: int, num_bytes: float) -> None:
        super().__init__()
        self._lines, self._links, self._num_bytes = lines, pipeline.links, num_bytes
        self._senders, self._receivers = pipeline.stages[sender].ranks, pipeline.stages[receiver].ranks

    def __missing__(self, pair: tuple[int, int]) -> Wire | None:
        """Makes the wire between two replicas."""
        ends = self._senders[pair[0]], self._receivers[pair[1]]
        wire = None if ends[0] == ends[1] else Wire(self._lines[ends], *seconds_of(self._links(*ends), self._num_bytes))
        self[pair] = wire
        return wire


class Route:
    """Joins the replicas of one stage to those of another, for messages of one size.

    Attributes:
        num_senders, num_receivers: how many replicas the two stages have.
        receivers: the replicas of the receiving stage.
        inboxes: where each of them collects these messages.
        wires: between them.
    """

    __slots__ = ("inboxes", "num_receivers", "num_senders", "receivers", "wires")

    def __init__(self, num_senders: int, receivers: list[Replica], inboxes: list[Inbox], wires: Wires) -> None:
        self.num_senders, self.num_receivers = num_senders, len(receivers)
        self.receivers, self.inboxes, self.wires = receivers, inboxes, wires

    def send(self, sender: int, k: int, now: float) -> tuple[int, float]:
        """Sends the message of a replica's k-th micro-batch at `now`; returns the rank that gets it, and when."""
        j = sender
        if self.num_senders != self.num_receivers:
            k, j = divmod(k * self.num_senders + sender, self.num_receivers)
        wire = self.wires[sender, j]
        arrival = now if wire is None else wire.send(now)
        inbox, receiver = self.inboxes[j], self.receivers[j]
        if arrival >= inbox.latest[k]:
            inbox.latest[k], inbox.sent[k] = arrival, now
        inbox.missing[k] -= 1
        if not inbox.missing[k]:
            inbox.ready[k] = inbox.latest[k]
        if arrival < receiver.known_until:
            receiver.known_until = arrival
        return receiver.rank, arrival


def seconds_of(link: LinkCost, num_bytes: float) -> tuple[float, float]:
    """Returns the seconds of a message's latency and of its bytes on a link."""
    return exact(link.latency_seconds), exact(num_bytes / link.bytes_per_second)


def work_seconds(pipeline: Pipeline, stage: int, replica: int, *, is_split: bool = False) -> Mapping[Kind, float]:
    """Returns the seconds of each kind of instruction on one replica, executor overhead included.

    Args:
        pipeline: The pipeline.
        stage: The stage.
        replica: Which of its replicas.
        is_split: Whether weight gradients are computed apart from backward.
    """
    times = pipeline.stages[stage]
    backward = times.input_seconds if is_split else times.backward_seconds
    each = times.forward_seconds, times.recompute_seconds, backward, times.weight_seconds
    return _by_kind(*each, times.speed(replica), pipeline.overhead_seconds)


@lru_cache(maxsize=1 << 12)
def _by_kind(
    forward: float, recompute: float, backward: float, weight: float, speed: float, overhead: float
) -> Mapping[Kind, float]:
    """Returns the seconds by kind; the pipelines of a search have the same few stages."""
    more = exact(overhead)
    return {
        Kind.FORWARD: exact(forward / speed) + more,
        Kind.RECOMPUTE: exact(recompute / speed) + more,
        Kind.BACKWARD: exact(backward / speed) + more,
        Kind.WEIGHT: exact(weight / speed) + more,
    }


def distinct_replicas(times: StageTimes) -> range:
    """Returns replicas of a stage that stand for all: the first one, where all have one speed."""
    return range(times.num_replicas if times.speeds else 1)
