"""Says what moves between ranks in a step, and under which tag.

Micro-batch m, which one rank has passed, at stages a and b, which an edge joins, each on a rank of its own:

    rank of the samples       rank of stage a              rank of stage b         ranks of the samples
    inputs ────────────────>  forward ── activations ───>  forward ── outputs ───> what model(...) returns
                                                                                   loss.backward()
    input gradients <──────── backward <── gradients ────  backward <── output gradients ──┘

| message           | tag              | of                                                                       |
|-------------------|------------------|--------------------------------------------------------------------------|
| activations       | 4 e              | edge e of the split                                                      |
| gradients         | 4 e + 1          | edge e; the way back                                                     |
| inputs            | 4 s + 2          | stage s                                                                  |
| outputs           | 4 o + 3          | output o; its gradient, on the way back                                  |
| rows of a trace   | 2^17             | `timeline.py`                                                            |
| input gradients   | 2^18 + i         | input i                                                                  |
| parameter sums    | 2^19             | a parameter that several stages use, from the last to the first          |
| clocks, links     | 2^20 - 2, - 1    | `timeline.py`, `session/links.py`: before the first step                 |

Sums over the replicas of a stage are no messages of this kind: they go among a group of ranks (`reduction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autovaruna.planner.records import Plan
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.mail import MessageKind, Parcel, Stream
from autovaruna.stage.split import Split, StageEdge

INPUT_GRADIENT_TAG = 1 << 18
PARAMETER_TAG = 1 << 19


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one graph under one plan; `key` tells them from those of other graphs.

    `origin` names the outputs that a backward starts from: where calls differ in that, messages on the way back do.
    """

    split: Split
    plan: Plan
    key: str

    def inputs(self, stage: int, part: MicroBatch, names: tuple[str, ...]) -> Parcel:
        """Returns the message that takes inputs to a stage; those that are no batches are the same on all ranks."""
        route = Stream(part.origin, self.plan.rank_of(stage, part.index), 4 * stage + 2)
        return Parcel(MessageKind(self.key, route, part.size), names)

    def activations(self, edge: StageEdge, part: MicroBatch) -> Parcel:
        source, destination = self._ends(edge, part)
        return Parcel(MessageKind(self.key, Stream(source, destination, 4 * edge.index), part.size), edge.values)

    def gradients(self, edge: StageEdge, part: MicroBatch, origin: str) -> Parcel:
        source, destination = self._ends(edge, part)
        route = Stream(destination, source, 4 * edge.index + 1)
        return Parcel(MessageKind(self.key + origin, route, part.size), edge.gradients)

    def output(self, place: int, part: MicroBatch, receiver: int) -> MessageKind:
        return self.numbers(place, self.maker_of(place, part), receiver, part.size)

    def numbers(self, place: int, maker: int, receiver: int, size: int) -> MessageKind:
        """Returns the message of an output without samples, of `size` micro-batches."""
        return MessageKind(self.key, Stream(maker, receiver, 4 * place + 3), size)

    def output_gradient(self, place: int, part: MicroBatch, origin: str) -> MessageKind:
        route = Stream(part.origin, self.maker_of(place, part), 4 * place + 3)
        return MessageKind(f"{self.key}/back{origin}", route, part.size)

    def input_gradient(self, name: str, part: MicroBatch, receiver: int, origin: str) -> MessageKind:
        holders = self.split.input_gradients
        tag = INPUT_GRADIENT_TAG + sorted(holders).index(name)
        return MessageKind(
            self.key + origin, Stream(self.plan.rank_of(holders[name], part.index), receiver, tag), part.size
        )

    def maker_of(self, place: int, part: MicroBatch) -> int:
        """Returns the rank that makes an output of a micro-batch."""
        return self.plan.rank_of(self.split.makers[place], part.index)

    def _ends(self, edge: StageEdge, part: MicroBatch) -> tuple[int, int]:
        return self.plan.rank_of(edge.source, part.index), self.plan.rank_of(edge.destination, part.index)
