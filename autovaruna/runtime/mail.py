"""Carries lists of tensors between the ranks of a pipeline, in order, with receives posted ahead.

The first message of a kind is preceded by its layouts (`Layout`); both ends remember them, so that later ones are the
bare numbers and can be received before they are needed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.layout import Layouts, fit, layouts_of
from autovaruna.runtime.world import Done, Pending, World

TensorList = list[Tensor | None]


class Route(NamedTuple):
    """A stream of messages: from one rank to another, under one tag."""

    source: int
    destination: int
    tag: int


class Kind(NamedTuple):
    """Messages with the same layouts: of one graph, on one route, for one micro-batch size."""

    graph: str
    route: Route
    micro_batch_size: int


class _Posted(NamedTuple):
    """A receive that is posted and not taken."""

    layouts: Layouts
    buffers: list[Tensor]
    pending: Pending
    num_bytes: int


class Mail:
    """Sends and receives lists of tensors.

    Args:
        world: Carries the bytes.
        device: Where received tensors live.

    `num_posted_bytes` is the memory of receives that are posted and not taken; `waited_seconds` is how long this rank
    has waited for messages in all.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self.num_posted_bytes = 0
        self.waited_seconds = 0.0
        self._layouts: dict[Kind, Layouts] = {}
        self._local: defaultdict[Route, deque[TensorList]] = defaultdict(deque)
        self._posted: defaultdict[Route, deque[_Posted]] = defaultdict(deque)
        self._expected: defaultdict[Route, deque[Kind]] = defaultdict(deque)

    @property
    def awaits_layouts(self) -> bool:
        """Whether messages are expected whose layouts are not known, and so not their bytes."""
        return any(self._expected.values())

    def send(self, tensors: Sequence[Tensor | None], kind: Kind) -> Pending:
        """Starts to send tensors; they must not change until it is done. Never blocks."""
        route = kind.route
        if route.destination == self._world.rank:
            self._local[route].append(list(tensors))
            return Done()
        layouts = self._layouts.get(kind)
        if layouts is None:
            layouts = self._layouts[kind] = layouts_of(tensors)
            self._world.send_object(layouts, route.destination, route.tag)
        elif not fit(layouts, tensors):
            raise RankError(
                f"The tensors for rank {route.destination} changed their layout within one graph: got "
                f"{layouts_of(tensors)}, expected {layouts}. An operation of the model chooses its "
                "output's layout by the numbers it gets; make that output contiguous()."
            )
        pairs = zip(layouts, tensors, strict=True)
        packed = [layout.pack(tensor) for layout, tensor in pairs if layout is not None and tensor is not None]
        return self._world.send(packed, route.destination, route.tag) if packed else Done()

    def expect(self, kind: Kind) -> None:
        """Posts the receive of the next message on a route once its layouts are known; never blocks.

        Messages are taken in the order in which they are expected.
        """
        if kind.route.source != self._world.rank:
            self._expected[kind.route].append(kind)
            self._post_known(kind.route)

    def take(self, kind: Kind) -> TensorList:
        """Returns the next message on a route; blocks until it is here."""
        route = kind.route
        if route.source == self._world.rank:
            return self._local[route].popleft()
        if not self._posted[route]:
            if not self._expected[route]:
                self.expect(kind)
            if kind not in self._layouts:
                self._layouts[kind] = self._world.receive_object(route.source, route.tag)
            self._post_known(route)
        posted = self._posted[route].popleft()
        if not posted.pending.is_done():
            begin = perf_counter()
            posted.pending.wait()
            self.waited_seconds += perf_counter() - begin
        self.num_posted_bytes -= posted.num_bytes
        filled = iter(posted.buffers)
        return [None if layout is None else layout.unpack(next(filled)) for layout in posted.layouts]

    def _post_known(self, route: Route) -> None:
        """Posts the receives of a route up to the first message whose layouts are not known."""
        expected = self._expected[route]
        while expected and (layouts := self._layouts.get(expected[0])) is not None:
            expected.popleft()
            self._post(route, layouts)

    def _post(self, route: Route, layouts: Layouts) -> None:
        buffers = [layout.buffer(self._device) for layout in layouts if layout is not None]
        pending = self._world.receive(buffers, route.source, route.tag) if buffers else Done()
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        self.num_posted_bytes += num_bytes
        self._posted[route].append(_Posted(layouts, buffers, pending, num_bytes))
