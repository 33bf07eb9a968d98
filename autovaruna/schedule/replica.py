"""Defines `Replica`: where one rank stands with one of its stages, and the messages between replicas.

The hard rules of what may run are here, the choice among what may run is the policy's. A rank runs one instruction at
a time and every kind goes in ascending micro-batch order, so three counters say all that was done.
"""

from __future__ import annotations

import math
from collections import defaultdict

from autovaruna.schedule.pipeline import BACKWARD, FORWARD, RECOMPUTE, Kind, Pipeline, seconds_of, work_seconds


class Inbox:
    """Collects the messages of one kind that a replica waits for, by k.

    ``ready[k]`` is when the last of them is there (infinite as long as one is not yet sent), ``sent[k]`` when that last
    one was sent. The entry after the end is never ready.
    """

    __slots__ = ("latest", "missing", "ready", "sent")

    def __init__(self, num_micro_batches: int, num_sources: int) -> None:
        self.missing = [num_sources] * num_micro_batches
        self.ready = [math.inf if num_sources else 0.0] * num_micro_batches + [math.inf]
        self.latest = [0.0] * num_micro_batches
        self.sent = [0.0] * num_micro_batches


class Replica:
    """One replica of a stage: what it did and what it may do now.

    Attributes:
        index, stride: which of how many replicas of the stage; its k-th micro-batch is ``k * stride + index``.
        num_micro_batches, num_later: how many are its own, and how many stages follow its own.
        depth: most forwards not yet backwarded.
        forwards, recomputes, backwards: how many of each were started.
        can_forward, can_recompute, can_backward: whether the next one of each may start now; `can_start`: any of them.
        has_gradient: whether the gradients of the next backward are here.
        is_full: whether no forward may start before a backward: the depth is reached, or none is left.
        is_recomputed: whether the next backward's recompute was started.
        known_until: when the next message that it may wait for arrives, as far as is known (infinite if not): until
            then, what may start changes with what it starts alone.
    """

    __slots__ = (
        "activations", "backwards", "can_backward", "can_forward", "can_recompute", "can_start", "depth", "forwards",
        "gradients", "has_gradient", "index", "is_full", "is_recomputed", "known_until", "needs_gradients",
        "needs_recompute", "num_later", "num_micro_batches", "rank", "recomputes", "seconds", "stage", "stride",
    )  # fmt: skip

    def __init__(
        self, pipeline: Pipeline, stage: int, index: int, num_messages: tuple[int, int], depth: int, recomputes: bool
    ) -> None:
        """Waits for so many messages before a forward, and before a backward."""
        ranks = pipeline.stages[stage].ranks
        self.rank, self.stage, self.index, self.stride = ranks[index], stage, index, len(ranks)
        self.num_micro_batches = pipeline.share(stage, index)
        self.num_later = pipeline.num_stages - 1 - stage
        self.needs_gradients, self.needs_recompute, self.depth = pipeline.needs_gradients, recomputes, depth
        self.seconds = work_seconds(pipeline, stage, index)
        self.activations, self.gradients = (Inbox(self.num_micro_batches, number) for number in num_messages)
        self.forwards = self.recomputes = self.backwards = 0
        self.can_forward = self.can_recompute = self.can_backward = self.can_start = False
        self.has_gradient = self.is_full = self.is_recomputed = False
        self.known_until = 0.0

    @property
    def work_seconds(self) -> float:
        kinds = [FORWARD]
        if self.needs_gradients:
            kinds += [BACKWARD, *[RECOMPUTE] * self.needs_recompute]
        return self.num_micro_batches * sum(self.seconds[kind] for kind in kinds)

    @property
    def is_done(self) -> bool:
        """Whether all forwards, and all backwards if there are any, were started."""
        n = self.num_micro_batches
        return self.forwards == n and (self.backwards == n or not self.needs_gradients)

    def refresh(self, now: float) -> None:
        """Finds what may start at `now`; called when the rank is idle, and `known_until` has come."""
        f, b = self.forwards, self.backwards
        activation, gradient = self.activations.ready[f], self.gradients.ready[b]
        is_full = self.is_full = f - b >= self.depth or f == self.num_micro_batches
        can_start = self.can_forward = activation <= now and not is_full
        known_until = activation if activation > now else math.inf
        if gradient > now:
            self.has_gradient = self.can_backward = False
            known_until = gradient if gradient < known_until else known_until
        else:
            self.has_gradient = self.can_backward = b < f and self.needs_gradients
        if self.needs_recompute:
            is_recomputed = self.is_recomputed = self.recomputes > b
            self.can_recompute = b < f and not is_recomputed
            can_start = can_start or self.can_recompute
            self.can_backward = self.has_gradient and is_recomputed
        self.can_start = can_start or self.can_backward
        self.known_until = known_until

    def start(self, kind: Kind) -> int:
        """Counts one instruction as started and returns its k."""
        self.known_until = 0.0
        if kind is FORWARD:
            self.forwards += 1
            return self.forwards - 1
        if kind is BACKWARD:
            self.backwards += 1
            return self.backwards - 1
        self.recomputes += 1
        return self.recomputes - 1


class RankLine:
    """The directed line between two ranks; `free_seconds` is when its bandwidth is free again."""

    __slots__ = ("free_seconds",)

    def __init__(self) -> None:
        self.free_seconds = 0.0


Lines = defaultdict[tuple[int, int], RankLine]
"""The lines from rank to rank."""


class Wire:
    """What a message of one size costs on a line."""

    __slots__ = ("latency_seconds", "line", "transfer_seconds")

    def __init__(self, line: RankLine, latency_seconds: float, transfer_seconds: float) -> None:
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
    """

    def __init__(self, lines: Lines, pipeline: Pipeline, sender: int, receiver: int, num_bytes: float) -> None:
        super().__init__()
        self._lines, self._links, self._num_bytes = lines, pipeline.links, num_bytes
        self._senders, self._receivers = pipeline.stages[sender].ranks, pipeline.stages[receiver].ranks

    def __missing__(self, pair: tuple[int, int]) -> Wire | None:
        ends = self._senders[pair[0]], self._receivers[pair[1]]
        wire = None if ends[0] == ends[1] else Wire(self._lines[ends], *seconds_of(self._links(*ends), self._num_bytes))
        self[pair] = wire
        return wire


class Route:
    """Joins the replicas of one stage to those of another, with an inbox for each, for messages of one size."""

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
