"""Defines `World`: how ranks talk, composed of a transport, which moves bytes, and a watch, which ends hopeless waits.

*Collectives* (`exchange`, `gather_objects`, `agree`, `barrier`) are called by every rank in the same order with the
same label; where labels differ, all get a `RankError` that says who is where. *Messages* and tensor collectives of a
group are called by the ranks that take part only. Messages of the same source, destination and tag arrive in the order
sent.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from autovaruna.errors import AutoVarunaError, RankError, TraceError
from autovaruna.log import error_text
from autovaruna.ranks.deadlock import Event, Need, RankWatch
from autovaruna.ranks.exchange import FAILED, RankExchange
from autovaruna.ranks.reduction import Group, broadcast_in_tree
from autovaruna.ranks.transport.base import (
    CARRIER_CHANNEL,
    DONE,
    OBJECT_CHANNEL,
    TENSOR_CHANNEL,
    Carrier,
    Pending,
    TensorTransfer,
    Transport,
)
from autovaruna.ranks.transport.layout import MAX_PART_BYTES, Layout, check_dense, empty_on_host, split, to_host
from autovaruna.ranks.transport.values import pack, unpack

SENDS_AT_ONCE = 16
_SWAP_TAG = (1 << 20) - 2
_IS_TRUE = 2  # a flag of an exchange
_ERRORS = AutoVarunaError.__module__
NextTensor = Callable[[Layout], Tensor | None]
Ranks = tuple[int, ...]


class Message(Pending):
    """A list of tensors on the way: done when all its parts are.

    `landing` has buffers, and the memory that is copied to them at the end: often they themselves.
    """

    __slots__ = ("_count", "_event", "_landing", "_parts", "_world")

    def __init__(
        self,
        world: World,
        parts: list[TensorTransfer],
        event: Event,
        count: int,
        landing: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._world, self._parts, self._event, self._count = world, parts, event, count
        self._landing = [(buffer, landed) for buffer, landed in landing if landed is not buffer]
        if any(part.needs_calls for part in parts):
            world.lagging.append(self)

    def is_done(self) -> bool:
        parts = self._parts
        while parts:
            if not parts[-1].is_done():
                return False
            parts.pop()
        while self._landing:
            buffer, landed = self._landing.pop()
            buffer.detach().copy_(landed)
        return True

    def wait(self) -> None:
        if not self.is_done():
            self._world.watch.wait_until(self.is_done, self.waiting)

    def waiting(self) -> tuple[str, tuple[Need, ...]]:
        """Says in words and for the deadlock detector what is missing: that the other rank does its part."""
        what, other, channel, tag = self._event
        words, act = f"for a message of rank {other} (tag {tag})", "sent"
        if what == "sent":
            words, act = f"for rank {other} to receive a message (tag {tag})", "received"
        return words, (Need(other, (act, self._world.rank, channel, tag), self._count),)


class EagerMessage(Message):
    """A message that comes without a posted receive; `next_tensor` returns the next of its `tensors`, if it is here."""

    __slots__ = ("_layouts", "_next_tensor", "tensors")

    def __init__(
        self, world: World, next_tensor: NextTensor, layouts: Sequence[Layout], event: Event, count: int
    ) -> None:
        self._world, self._event, self._count = world, event, count
        self._next_tensor, self._layouts = next_tensor, layouts
        self.tensors: list[Tensor] = []

    def is_done(self) -> bool:
        tensors = self.tensors
        while len(tensors) < len(self._layouts):
            tensor = self._next_tensor(self._layouts[len(tensors)])
            if tensor is None:
                return False
            tensors.append(tensor)
        return True


class World:
    """The ranks of one program, seen from one of them.

    Attributes:
        num_models: how many models this rank's script has called; their order tells them apart.
        carrier: what moves tensors of some ranks straight between their devices, if anything.
        lagging: messages that advance only while this rank calls the transport, the oldest first; some may be done.
    """

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.num_ranks = len(transport.hosts)
        self.hosts = transport.hosts
        self.num_models = 0
        self.transport, self.abort, self.end_with = transport, transport.abort, transport.end
        self.watch = RankWatch(transport, self._advance)
        self.carrier: Carrier | None = None
        self.lagging: deque[Message] = deque()
        self._sends: deque[TensorTransfer] = deque()
        self._groups: dict[Ranks, Group] = {}

    # Collectives of all ranks.

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Returns the small values that the ranks passed, by rank; those that are alike may be one object. Collective.

        Raises:
            RankError: ranks came with different labels `what`, or a rank ended its script.
        """
        return self.watch.gather(value, what)

    def broadcast_object(self, value: object, root: int, what: str) -> Any:
        """Returns the value of rank `root`. Collective; raises as `gather_objects`."""
        return self.gather_objects(value if self.rank == root else None, what)[root]

    def barrier(self, what: str) -> None:
        """Returns once every rank has come. Collective; raises as `gather_objects`."""
        self.exchange(what)

    def is_on_any(self, value: bool, what: str, error: BaseException | None = None) -> bool:
        """Returns whether any rank passes true. Collective; raises as `agree`."""
        return bool(self.exchange(what, error, flags=_IS_TRUE * value).flags & _IS_TRUE)

    def gather_numbers(self, numbers: Iterable[float], what: str) -> list[array[float]]:
        """Returns the numbers that the ranks passed, by rank. Collective; raises as `gather_objects`."""
        return self.exchange(what, block=array("d", numbers).tobytes()).numbers()

    def exchange(
        self,
        what: str,
        error: BaseException | None = None,
        alike: bytes = b"",
        flags: int = 0,
        block: bytes | None = None,
    ) -> RankExchange:
        """Exchanges with all ranks what must be alike, flags and a block: what ranks agree on in a step. Collective.

        Raises as `agree`.
        """
        give_up = self._give_up(error, what)
        try:
            found = self.watch.exchange(what, alike, flags | FAILED * (error is not None), block, give_up)
        except RankError as mismatch:
            raise mismatch if error is None else error from mismatch
        if found.flags & FAILED:
            self.agree(error, what)
        return found

    def agree(self, error: BaseException | None, what: str, value: object = None) -> list[Any]:
        """Raises on every rank if any rank passes an error; returns the values that the ranks passed. Collective.

        A rank with an error ends those that do not come soon to hear of it. It raises that itself; the others raise an
        error of the same kind, or a `RankError`, with the message and traceback of the first rank that failed. What the
        user's forward raises by itself on every rank they raise as it is.
        """
        is_ours = isinstance(error, AutoVarunaError) and type(error).__module__ == _ERRORS
        report = None if error is None else (type(error) if is_ours else RankError, describe(error))
        try:
            reports = self.watch.gather((report, value), what, self._give_up(error, what))
        except RankError as mismatch:
            raise mismatch if error is None else error from mismatch
        own = error.own if isinstance(error, TraceError) else None
        if own is not None and all(report is not None for report, _ in reports):
            raise own
        if error is not None:
            raise error
        for rank, (report, _) in enumerate(reports):
            if report is not None:
                kind, text = report
                passed_on: AutoVarunaError = kind(f"rank {rank} failed while {what}: {text}")
                passed_on.is_second_hand = True
                raise passed_on
        return [value for _, value in reports]

    def _give_up(self, error: BaseException | None, what: str) -> Callable[[], NoReturn] | None:
        return None if error is None else partial(self.abort, error, f"rank {self.rank} failed while {what}")

    # Messages.

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send dense tensors; never blocks. They must not change until they have left."""
        carrier, channel = self.carrier, TENSOR_CHANNEL
        if carrier is not None and carrier.sends_to(destination):
            channel = CARRIER_CHANNEL
            there = [part for each in tensors for part in split(each.detach().to(carrier.device))]
            parts = [carrier.post_send(part, destination, tag) for part in there]
        elif len(tensors) == 1 and tensors[0].is_cpu and tensors[0].nbytes <= MAX_PART_BYTES:  # what most messages are
            if not tensors[0].is_contiguous() or tensors[0].is_conj() or tensors[0].is_neg():
                check_dense(tensors[0])
            parts = [self.transport.post_send(tensors[0], destination, channel, tag)]
        else:
            parts = self.transport.post_sends(list(map(to_host, tensors)), destination, channel, tag)
        return self._sent(parts, destination, channel, tag)

    def _sent(self, parts: list[TensorTransfer], destination: int, channel: int, tag: int) -> Pending:
        """Returns what has been started as a message, which is kept until it has left."""
        event, counts = ("sent", destination, channel, tag), self.watch.counts
        count = counts[event] = counts[event] + len(parts)
        if parts.count(DONE) == len(parts):
            return DONE
        message = Message(self, parts, event, count)
        self._sends.append(message)
        return message

    def receive(self, buffers: Sequence[Tensor], source: int, tag: int) -> Pending:
        """Posts the receive of a message into `buffers`, which are laid out as the tensors that were sent."""
        carrier = self.carrier
        if carrier is not None and carrier.receives_from(source):
            landing = [
                buffer if buffer.device.type == carrier.device.type else torch.empty_like(buffer, device=carrier.device)
                for buffer in buffers
            ]
            parts = [carrier.post_receive(part, source, tag) for each in landing for part in split(each)]
            return self._received(parts, source, CARRIER_CHANNEL, tag, zip(buffers, landing, strict=True))
        landing = [buffer if buffer.is_cpu else empty_on_host(buffer) for buffer in buffers]
        parts = self.transport.post_receives(landing, source, TENSOR_CHANNEL, tag)
        return self._received(parts, source, TENSOR_CHANNEL, tag, zip(buffers, landing, strict=True))

    def _received(
        self,
        parts: list[TensorTransfer],
        source: int,
        channel: int,
        tag: int,
        landing: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> Message:
        event = "received", source, channel, tag
        return Message(self, parts, event, self.watch.count(event, len(parts)), landing)

    def is_eager(self, source: int, layouts: Sequence[Layout]) -> bool:
        """Returns whether tensors of `source` come without a posted receive: `receive_eager` in place of `receive`."""
        is_carried = self.carrier is not None and self.carrier.receives_from(source)
        return not is_carried and self.transport.is_eager(source, layouts)

    def receive_eager(self, layouts: Sequence[Layout], source: int, tag: int) -> EagerMessage:
        """Returns the next message of `source`, which makes its own tensors; where messages are eager."""
        event, counts = ("received", source, TENSOR_CHANNEL, tag), self.watch.counts
        count = counts[event] = counts[event] + len(layouts)
        return EagerMessage(self, self.transport.eager_source(source, tag), layouts, event, count)

    def send_object(self, value: object, destination: int, tag: int) -> Pending:
        """Starts to send a value that can be packed; never blocks. Its tags are apart from those of tensors."""
        data = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        length = torch.tensor([data.numel()], device="cpu")
        parts = self.transport.post_sends([length], destination, OBJECT_CHANNEL, tag)
        parts += self.transport.post_sends([data], destination, OBJECT_CHANNEL, tag)  # apart, as they are received
        return self._sent(parts, destination, OBJECT_CHANNEL, tag)

    def receive_object(self, source: int, tag: int) -> Any:
        """Returns the next object that `source` sent with `tag`; blocks."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self._receive_now(length, source, tag)
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        self._receive_now(data, source, tag)
        return unpack(data.numpy().tobytes())

    def _receive_now(self, tensor: Tensor, source: int, tag: int) -> None:
        parts = self.transport.post_receives([tensor], source, OBJECT_CHANNEL, tag)
        self._received(parts, source, OBJECT_CHANNEL, tag).wait()

    def swap_objects(self, values: Mapping[int, object]) -> dict[int, Any]:
        """Sends a value to each of some ranks, and returns those that they send at the same time, by rank."""
        for rank, value in values.items():
            self.send_object(value, rank, _SWAP_TAG)
        return {rank: self.receive_object(rank, _SWAP_TAG) for rank in values}

    # Groups of ranks.

    def broadcast(self, tensor: Tensor, root: int, ranks: Ranks) -> None:
        """Overwrites `tensor` with that of rank `root`, on `ranks` (ascending or not, the same order on each)."""
        assert root in ranks, f"root {root} must be among ranks {ranks}"
        host = to_host(tensor.detach().resolve_conj().resolve_neg().contiguous())  # its bytes are elements in order
        broadcast_in_tree(self._group(ranks), host, root)
        if host.data_ptr() != tensor.data_ptr() and self.rank != root:
            tensor.detach().copy_(host)

    def all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        """Overwrites `tensor` with its sum over `ranks`, as `start_all_reduce`, and waits for it."""
        self.start_all_reduce(tensor, ranks).wait()

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Pending:
        """Starts to overwrite `tensor` with its sum over `ranks`; every rank gets the same bits.

        Sums of a group start in the same order on each of its ranks. bfloat16 and float16 are summed in float32 and
        rounded once; bool is a logical or.
        """
        check_dense(tensor)
        if len(ranks) == 1 or tensor.numel() == 0:
            return DONE
        if self.carrier is not None and tensor.device.type == self.carrier.device.type:
            carried = self.carrier.start_all_reduce(tensor, ranks)
            if carried is not None:
                return carried
        return self._group(ranks).start(tensor)

    def start_shares(self, shares: Sequence[Sequence[Tensor]], ranks: Ranks, *, gathers: bool) -> Pending:
        """Starts to sum each share on its rank (a reduce-scatter), or to copy it from there to all (an all-gather).

        A share has the tensors of one of `ranks`, dense and with elements. Of a sum, what other ranks have in its place
        is of no use afterwards; its order is that of an all-reduce.
        """
        every = [tensor for share in shares for tensor in share]
        for tensor in every:
            check_dense(tensor)
        if len(ranks) == 1 or not every:
            return DONE
        if self.carrier is not None and every[0].device.type == self.carrier.device.type:
            carried = self.carrier.start_shares(shares, ranks, gathers=gathers)
            if carried is not None:
                return carried
        return self._group(ranks).start_shares(shares, gathers=gathers)

    def _group(self, ranks: Ranks) -> Group:
        if ranks not in self._groups:
            assert self.rank in ranks, f"rank {self.rank} must be among {ranks}"
            group = Group(self.transport, self.watch, ranks)
            assert all(known.tag != group.tag for known in self._groups.values()), f"tag {group.tag} is taken"
            self._groups[ranks] = group
        return self._groups[ranks]

    # Progress.

    def progress(self) -> None:
        """Advances messages and sums, and drops sends that have left; never blocks. Raises what the watch has found."""
        for _ in range(min(len(self._sends), SENDS_AT_ONCE)):  # some of them in turn: thousands may be on their way
            message = self._sends.popleft()
            if not message.is_done():
                self._sends.append(message)
        if self.carrier is not None:
            self.carrier.advance()
        self._advance()
        self.watch.listen()
        self.watch.raise_failure()

    def poll(self) -> None:
        """Calls `progress` if something on its way does not advance by itself; a rank does it between instructions."""
        lagging = self.lagging
        while lagging and lagging[0].is_done():  # to ask for one lets all advance
            lagging.popleft()
        needs_more = len(self._sends) > SENDS_AT_ONCE or self.carrier is not None
        for group in self._groups.values():
            needs_more = needs_more or bool(group.active)
        if needs_more:
            self.progress()

    def keep(self, part: TensorTransfer) -> None:
        """Keeps what is on its way until it has left."""
        self._sends.append(part)

    def flush(self) -> None:
        """Blocks until everything that this rank sent has left it."""
        for group in self._groups.values():
            self.watch.wait_until(group.is_idle, group.waiting)
        while self._sends:
            part = self._sends.popleft()
            waiting = part.waiting if isinstance(part, Message) else lambda: ("for a message to leave", ())
            self.watch.wait_until(part.is_done, waiting)

    def _advance(self) -> None:
        """Advances sums, and what the transport moves only while it is called."""
        for group in self._groups.values():
            group.is_idle()
        self.transport.advance()

    # The end.

    @property
    def num_acts(self) -> int:
        """How often this rank has asked something of the others."""
        return sum(self.watch.counts.values())

    def leave(self) -> None:
        """Says goodbye to the other ranks, and ends the transport once all have; raises if one waits for this rank."""
        self.watch.leave()
        if self.carrier is not None:
            self.carrier.close()
        self.transport.close()


def describe(error: BaseException) -> str:
    """Returns type, message and traceback of an error as text."""
    return f"{type(error).__name__}: {error}\n{error_text(error)}"


Result = TypeVar("Result")


def on_all(
    world: World, act: Callable[[], Result], what: str, *, fails_as: type[AutoVarunaError] | None = None
) -> Result:
    """Returns what `act`, which talks to no other rank, returns; else as `gather_on_all`. Collective."""
    results: list[Result] = []
    gather_on_all(world, lambda: results.append(act()), what, fails_as=fails_as)
    return results[0]


def on_first(
    world: World, act: Callable[[], Result], what: str, *, fails_as: type[AutoVarunaError] | None = None
) -> Result:
    """Returns on every rank what `act` returns on rank 0; else as `gather_on_all`. Collective."""
    there = act if world.rank == 0 else lambda: None
    return gather_on_all(world, there, what, fails_as=fails_as)[0]  # type: ignore[return-value]


def gather_on_all(
    world: World, act: Callable[[], Result], what: str, *, fails_as: type[AutoVarunaError] | None = None
) -> list[Result]:
    """Returns what `act` returns on each rank; an error on one rank is an error on all. Collective.

    With `fails_as`, as of files, `act` may take long and raise anything: ranks that are done wait for those that are
    still at work, and what is no error of AutoVaruna's becomes one of this kind, the same to catch on every rank.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = act()
    except Exception as raised:
        error = raised
        if fails_as is not None and not isinstance(raised, AutoVarunaError):
            error = fails_as(f"{what} failed: {type(raised).__name__}: {raised!s:.500}")
            error.__cause__ = raised
    if fails_as is not None:
        world.barrier(what)
    return world.agree(error, what, result)
