"""Says where the time of a measured step went, on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Span = tuple[str, float, float, float]
"""An instruction; when it began, when it had what it waited for, and when it ended, on the clock of rank 0."""
Ends = tuple[float, float]
"""When a rank's last instruction ended, and when its step did."""


@dataclass(frozen=True)
class Lost:
    """The time of one rank in one step; the parts add up to the step.

    Attributes:
        work_seconds: in instructions, without waiting.
        message_seconds: waiting for messages that were on their way.
        reduce_seconds: from the last instruction to the end of the step: gradient sums, and the loss.
        overhead_seconds: between instructions.
        imbalance_seconds: idle because another rank has more work.
        bubble_seconds: idle for all other reasons.
    """

    work_seconds: float
    message_seconds: float
    reduce_seconds: float
    overhead_seconds: float
    imbalance_seconds: float
    bubble_seconds: float


def account(
    spans: Sequence[Sequence[Span]], ends: Sequence[Ends], awaited: Mapping[str, Sequence[str]]
) -> tuple[float, list[Lost]]:
    """Returns the seconds of a step, and where they went.

    Args:
        spans: The instructions of each rank.
        ends: The ends of each rank's work and step.
        awaited: For each instruction, those whose messages it waits for.
    """
    sent = {name: end for row in spans for name, _, _, end in row}
    start = min((row[0][1] for row in spans if row), default=0.0)
    step = max((end for _, end in ends), default=start) - start
    work = [sum(end - ready for _, _, ready, end in row) for row in spans]
    return step, [
        _of_rank(row, end, start, step, max(work) - own, sent, awaited)
        for row, end, own in zip(spans, ends, work, strict=True)
    ]


def _of_rank(
    row: Sequence[Span],
    ends: Ends,
    start: float,
    step: float,
    less_work: float,
    sent: Mapping[str, float],
    awaited: Mapping[str, Sequence[str]],
) -> Lost:
    work = sum(end - ready for _, _, ready, end in row)
    messages = sum(_on_its_way(span, sent, awaited) for span in row)
    overhead = sum(later[1] - earlier[3] for earlier, later in pairwise(row))
    reduce = max(0.0, ends[1] - ends[0]) if row else 0.0
    idle = max(0.0, step - work - messages - overhead - reduce)
    imbalance = min(idle, less_work)
    return Lost(work, messages, reduce, overhead, imbalance, idle - imbalance)


def _on_its_way(span: Span, sent: Mapping[str, float], awaited: Mapping[str, Sequence[str]]) -> float:
    """Returns how long an instruction waited after the last message that it needs had been sent."""
    name, begin, ready, _ = span
    last = max((sent[other] for other in awaited.get(name, ()) if other in sent), default=ready)
    return max(0.0, ready - max(begin, last))


def table(step: float, predicted_seconds: float, lost: Sequence[Lost]) -> str:
    """Returns the account as text: a line for each rank, in per cent of the step."""
    heads = ("work", "bubble", "imbalance", "messages", "all-reduce", "overhead")
    lines = [f"{1e3 * step:.2f} ms, predicted {1e3 * predicted_seconds:.2f} ms", "rank  " + "  ".join(heads)]
    for rank, each in enumerate(lost):
        seconds = (
            each.work_seconds,
            each.bubble_seconds,
            each.imbalance_seconds,
            each.message_seconds,
            each.reduce_seconds,
            each.overhead_seconds,
        )
        cells = (
            f"{value / step if step else 0.0:.1%}".rjust(len(head)) for head, value in zip(heads, seconds, strict=True)
        )
        lines.append(f"{rank:>4}  " + "  ".join(cells))
    return "\n".join(lines)
