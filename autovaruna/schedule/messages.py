"""Models messages between ranks.

A message takes the latency of its link plus its bytes over the bandwidth. Sends never block and overlap with work. The
messages of one directed pair of ranks share its bandwidth: each starts when the one sent before it has left, so
bandwidth is paid one after another while latencies overlap. Different pairs do not disturb each other. A message of a
rank to itself is free.
"""

from __future__ import annotations

from collections.abc import Callable

from autovaruna.profiler.records import LinkCost
from autovaruna.schedule.pipeline import Pipeline
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


class Wire:
    """What a message of one size costs on a line."""

    __slots__ = ("latency_seconds", "line", "transfer_seconds")

    def __init__(self, line: Line, latency_seconds: float, transfer_seconds: float) -> None:
        self.line, self.latency_seconds, self.transfer_seconds = line, latency_seconds, transfer_seconds

    @property
    def seconds(self) -> float:
        """The seconds of a message on a free line."""
        return self.latency_seconds + self.transfer_seconds

    def send(self, now: float) -> float:
        """Puts a message on the line and returns when it arrives."""
        line = self.line
        left = (now if now > line.free_seconds else line.free_seconds) + self.transfer_seconds
        line.free_seconds = left
        return left + self.latency_seconds


class Route:
    """Joins the replicas of one stage to those of another, for messages of one size.

    Attributes:
        receivers: the replicas of the receiving stage.
        inboxes: where each of them collects these messages.
        wires: ``wires[i][j]`` from replica i to replica j; None on one rank.
    """

    __slots__ = ("inboxes", "receivers", "wires")

    def __init__(self, receivers: list[Replica], inboxes: list[Inbox], wires: list[list[Wire | None]]) -> None:
        self.receivers, self.inboxes, self.wires = receivers, inboxes, wires

    def send(self, sender: int, micro_batch: int, now: float) -> tuple[Replica, float]:
        """Sends a micro-batch's message at `now`; returns who gets it and when it arrives."""
        k, j = divmod(micro_batch, len(self.receivers))
        wire = self.wires[sender][j]
        arrival = now if wire is None else wire.send(now)
        self.inboxes[j].put(k, arrival, now)
        return self.receivers[j], arrival


Wiring = Callable[[int, int, float], list[list[Wire | None]]]


def wiring(pipeline: Pipeline) -> Wiring:
    """Returns a function that gives the wires from each replica of a stage to each of another, for some bytes."""
    lines: dict[tuple[int, int], tuple[Line, LinkCost]] = {}

    def wire(source: int, destination: int, num_bytes: float) -> Wire | None:
        if source == destination:
            return None
        if (source, destination) not in lines:
            lines[source, destination] = Line(), pipeline.links(source, destination)
        line, link = lines[source, destination]
        return Wire(line, exact(link.latency_seconds), exact(num_bytes / link.bytes_per_second))

    def wires(sender: int, receiver: int, num_bytes: float) -> list[list[Wire | None]]:
        senders, receivers = pipeline.stages[sender].ranks, pipeline.stages[receiver].ranks
        return [[wire(a, b, num_bytes) for b in receivers] for a in senders]

    return wires
