"""Carries what moves between the ranks of a pipeline: lists of tensors, in order, with receives posted ahead.

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
| input gradients   | 2^18 + i         | input i; without gradients, the i-th that stages have kept of a cache     |
| parameter sums    | 2^19             | a parameter that several stages use, from the last to the first          |
| clocks, links     | 2^20 - 2, - 1    | `timeline.py`, `session/links.py`: before the first step                 |

Sums over the replicas of a stage are no messages of this kind: they go among a group of ranks (`reduction.py`).

A message keeps the memory layout of its tensors: with other strides kernels could change the last bit. The first
message of a kind is preceded by its layouts; both ends remember them, so that later ones are the bare numbers and can
be received before they are needed. Posting a receive takes time, too: as a rule a rank does it while it waits. Eager
messages, those between ranks of one host (`transport/rings.py`), come without a posted receive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.planner.records import Plan
from autovaruna.ranks.transport.base import DONE, Pending
from autovaruna.ranks.transport.layout import Layout, distinct
from autovaruna.ranks.world import World
from autovaruna.runtime.batch import MicroBatch
from autovaruna.stage.split import Split, StageEdge

INPUT_GRADIENT_TAG = 1 << 18
PARAMETER_TAG = 1 << 19
AHEAD = 3
"""Instructions whose receives are posted before they start."""
SMALL_AHEAD, SMALL_BYTES = 32, 1 << 20
"""The same while a rank waits and all that is posted is known to be less than these bytes."""

Layouts = tuple[Layout | None, ...]
TensorList = list[Tensor | None]


def packed(layouts: Layouts, tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Returns what of a message travels; None: it has other layouts."""
    if len(layouts) != len(tensors):
        return None
    if len(layouts) == 1 and (only := layouts[0]) is not None and only.is_dense and only.fits(tensors[0]):
        return [tensors[0]]  # what most messages are
    travelling = []
    for layout, tensor in zip(layouts, tensors, strict=True):
        if layout is not None and layout.fits(tensor):
            travelling.append(tensor if layout.is_dense else distinct(tensor).contiguous())
        elif layout is not None or tensor is not None:  # without both, a gradient is not there
            return None
    return travelling


def unpacked(layouts: Layouts, travelled: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns a message as the sender had it, from what of it has travelled."""
    if len(travelled) == len(layouts) == 1 and (only := layouts[0]) is not None and only.is_dense:
        return [travelled[0]]  # what most messages are
    arrived = iter(travelled)
    return [None if layout is None else layout.unpack(next(arrived)) for layout in layouts]


def layouts_of(tensors: Sequence[Tensor | None]) -> Layouts:
    """Returns the layouts of a message; None stands for a gradient that is not there."""
    return tuple(
        None if tensor is None else Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors
    )


class Stream(NamedTuple):
    """A stream of messages: from one rank to another, under one tag."""

    source: int
    destination: int
    tag: int


class MessageKind(NamedTuple):
    """Messages with the same layouts: of one graph, on one route, for one size of micro-batch or number of them."""

    graph: str
    route: Stream
    size: int


class Parcel(NamedTuple):
    """Tensors that travel together: the kind of their message, and their names."""

    kind: MessageKind
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages of one graph under one plan; `key` tells them from those of other graphs.

    `root_names` names the outputs that a backward starts from: where calls differ in that, messages on the way back do.
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

    def gradients(self, edge: StageEdge, part: MicroBatch, root_names: str) -> Parcel:
        source, destination = self._ends(edge, part)
        route = Stream(destination, source, 4 * edge.index + 1)
        return Parcel(MessageKind(self.key + root_names, route, part.size), edge.gradients)

    def output(self, place: int, part: MicroBatch, receiver: int) -> MessageKind:
        return self.numbers(place, self.maker_of(place, part), receiver, part.size)

    def numbers(self, place: int, maker: int, receiver: int, size: int) -> MessageKind:
        """Returns the message of an output: one without samples goes for `size` micro-batches at once."""
        return MessageKind(self.key, Stream(maker, receiver, 4 * place + 3), size)

    def output_gradient(self, place: int, part: MicroBatch, root_names: str) -> MessageKind:
        route = Stream(part.origin, self.maker_of(place, part), 4 * place + 3)
        return MessageKind(f"{self.key}/back{root_names}", route, part.size)

    def input_gradient(self, name: str, part: MicroBatch, receiver: int, root_names: str) -> MessageKind:
        holders = self.split.input_gradients
        tag = INPUT_GRADIENT_TAG + sorted(holders).index(name)
        route = Stream(self.plan.rank_of(holders[name], part.index), receiver, tag)
        return MessageKind(self.key + root_names, route, part.size)

    def kept(self, place: int, source: int, destination: int, part: MicroBatch) -> MessageKind:
        """Returns the message that takes a part of a cache from the stage that made it to one that uses it."""
        return MessageKind(f"{self.key}/kept", Stream(source, destination, INPUT_GRADIENT_TAG + place), part.size)

    def maker_of(self, place: int, part: MicroBatch) -> int:
        """Returns the rank that makes an output of a micro-batch."""
        return self.plan.rank_of(self.split.makers[place], part.index)

    def _ends(self, edge: StageEdge, part: MicroBatch) -> tuple[int, int]:
        return self.plan.rank_of(edge.source, part.index), self.plan.rank_of(edge.destination, part.index)


_Posted = tuple[Layouts, list[Tensor], Pending, int]
"""A receive that is posted: its layouts, their memory, the message, and its bytes."""


class Mail:
    """Sends and receives lists of tensors.

    Attributes:
        num_posted_bytes: memory of receives that are posted and have not returned.
        waited_seconds: how long this rank has waited for messages in all.
        due: the first position in the program that more receives have to be posted for.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world, self._device, self._carrier = world, device, world.carrier
        self.num_posted_bytes = 0
        self.waited_seconds = 0.0
        self.due = 0
        self._program: Sequence[Sequence[Parcel]] = ()
        self._position = self._next = 0
        self._layouts: dict[MessageKind, Layouts] = {}
        self._eager: dict[MessageKind, tuple[Layout, ...]] = {}
        self._local: defaultdict[Stream, deque[TensorList]] = defaultdict(deque)
        self._posted: defaultdict[Stream, deque[_Posted]] = defaultdict(deque)
        self._expected: defaultdict[Stream, deque[MessageKind]] = defaultdict(deque)

    def forget(self, graph: str) -> None:
        """Forgets the layouts of a graph's messages, on all ranks at the same call; they are sent again."""
        for kind in [each for each in self._layouts if each.graph.startswith(graph)]:
            del self._layouts[kind]
            self._eager.pop(kind, None)

    def follow(self, program: Sequence[Sequence[Parcel]]) -> None:
        """Takes what each instruction receives, in order; posts that of the first one and, later, that of others."""
        self._program, self._next = program, 0
        if self._carrier is not self._world.carrier:  # another model has opened one, which moves what came by itself
            self._carrier, is_eager = self._world.carrier, self._world.is_eager
            self._eager = {kind: each for kind, each in self._eager.items() if is_eager(kind.route.source, each)}
        self.go_to(0, ahead=0)  # more once the first instruction has ended: others wait for what it sends

    def go_to(self, position: int, ahead: int = AHEAD) -> None:
        """Posts what instruction `position` of the program receives, and what the next ones do; never blocks."""
        self._position = position
        end = min(position + 1 + ahead, len(self._program))
        while self._next < end:
            self._expect_next()
        self.due = self._next - AHEAD

    def _expect_next(self) -> None:
        for parcel in self._program[self._next]:
            self.expect(parcel.kind)
        self._next += 1

    def send(self, tensors: Sequence[Tensor | None], kind: MessageKind) -> Pending:
        """Starts to send tensors; they must not change until it is done. Never blocks."""
        route = kind.route
        if route.destination == self._world.rank:
            self._local[route].append(list(tensors))
            return DONE
        layouts = self._layouts.get(kind)
        if layouts is None:
            layouts = self._layouts[kind] = layouts_of(tensors)
            self._world.send_object(layouts, route.destination, route.tag)
        travelling = packed(layouts, tensors)
        if travelling is None:
            raise RankError(
                f"The tensors for rank {route.destination} changed their layout within one graph: got "
                f"{layouts_of(tensors)}, expected {layouts}. An operation of the model chooses its "
                "output's layout by the numbers it gets; make that output contiguous()."
            )
        return self._world.send(travelling, route.destination, route.tag) if travelling else DONE

    def expect(self, kind: MessageKind) -> None:
        """Posts the receive of the next message on a route once its layouts are known; never blocks.

        Messages of a route come in the order in which they are expected. Those that come by themselves need no post.
        """
        route = kind.route
        if route.source == self._world.rank or kind in self._eager:
            return
        expected = self._expected[route]
        if not expected and (layouts := self._layouts.get(kind)) is not None:
            self._post(route, layouts)
        else:
            expected.append(kind)
            self._post_known(route)

    def receive(self, kind: MessageKind) -> TensorList:
        """Returns the next message on a route; blocks until it is here."""
        route = kind.route
        if route.source == self._world.rank:
            return self._local[route].popleft()
        if kind not in self._eager and not self._posted[route]:
            if not self._expected[route]:
                self.expect(kind)
            if kind not in self._layouts:
                self._learn(kind)
            self._post_known(route)
        if (blanks := self._eager.get(kind)) is not None:
            message = self._world.receive_eager(blanks, route.source, route.tag)
            self._await(message)
            return unpacked(self._layouts[kind], message.tensors)
        layouts, buffers, pending, num_bytes = self._posted[route].popleft()
        self._await(pending)
        self.num_posted_bytes -= num_bytes
        return unpacked(layouts, buffers)

    def _await(self, pending: Pending) -> None:
        """Waits for a message; posts small receives of more instructions meanwhile."""
        if pending.is_done():
            return
        begin = perf_counter()
        end = min(self._position + 1 + SMALL_AHEAD, len(self._program))
        while self._next < end and self.num_posted_bytes < SMALL_BYTES and not any(self._expected.values()):
            self._expect_next()  # what is still without layouts may become large all at once
        self.due = self._next - AHEAD
        pending.wait()
        self.waited_seconds += perf_counter() - begin

    def _post_known(self, route: Stream) -> None:
        """Posts the receives of a route up to the first message whose layouts are not known."""
        expected = self._expected[route]
        while expected and (layouts := self._layouts.get(expected[0])) is not None:
            if expected.popleft() not in self._eager:
                self._post(route, layouts)

    def _learn(self, kind: MessageKind) -> None:
        """Receives the layouts of a kind of messages, and finds how they come."""
        route = kind.route
        layouts: Layouts = self._world.receive_object(route.source, route.tag)
        self._layouts[kind] = layouts
        blanks = tuple(layout.travelling for layout in layouts if layout is not None)
        if blanks and self._world.is_eager(route.source, blanks):
            self._eager[kind] = blanks

    def _post(self, route: Stream, layouts: Layouts) -> None:
        buffers, num_bytes = [], 0
        for layout in layouts:
            if layout is not None:
                buffer = layout.buffer(self._device)
                buffers.append(buffer)
                num_bytes += buffer.nbytes
        pending = self._world.receive(buffers, route.source, route.tag) if buffers else DONE
        self.num_posted_bytes += num_bytes
        self._posted[route].append((layouts, buffers, pending, num_bytes))
