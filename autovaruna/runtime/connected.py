"""Defines `ConnectedWorld`: all of `World` on top of a transport that moves single tensors and notices.

A transport fills the methods at the end: it posts the sending and receiving of one dense host tensor, and carries
notices to the hub and answers from it. Everything else is here once: waiting, collectives, staging, counting.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.hub import Answer, Event, Failure, Farewell, Join, Leave, Need, Notice, Report, Values
from autovaruna.runtime.message import Message
from autovaruna.runtime.reduction import GROUP_CHANNEL, Group, broadcast_in_tree
from autovaruna.runtime.staging import check_dense, empty_on_host, flat, to_host
from autovaruna.runtime.world import Done, Pending, World

if TYPE_CHECKING:
    from autovaruna.runtime.channel import TorchChannel

TENSOR_CHANNEL = 0
OBJECT_CHANNEL = 1
HEADER_CHANNEL = 3
CARRIER_CHANNEL = 4
"""Not of the transport: tensors that `TorchChannel` carries."""
CHANNELS = (TENSOR_CHANNEL, OBJECT_CHANNEL, GROUP_CHANNEL, HEADER_CHANNEL)
MAX_PART_BYTES = 1 << 30
SENDS_AT_ONCE = 16
REPORT_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""How long a rank with an error waits for the others to hear of it; then it ends them."""


class ConnectedWorld(World):
    """Several ranks that exchange messages, with a hub at rank 0 that finds waits that cannot end."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._counts: Counter[Event] = Counter()
        self._answers: deque[Answer] = deque()
        self._failure: Failure | None = None
        self._give_up: Callable[[], NoReturn] | None = None
        self._sends: deque[Pending] = deque()
        self._carrier: TorchChannel | None = None
        self._receives: set[Pending] = set()
        self._groups: dict[tuple[int, ...], Group] = {}

    # Collectives, through the hub.

    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Returns the values that the ranks passed, by rank."""
        self._raise_failure()
        join = Join(what, pickle.dumps(value))
        self.count(("joined", -1, -1, -1))
        self.tell(join)
        answer = self._await_answer(f"in {what!r}")
        if isinstance(answer, Failure):
            raise RankError(answer.text)
        assert isinstance(answer, Values), answer
        return [pickle.loads(item) for item in answer.values]

    def agree(self, error: BaseException | None, what: str, value: object = None) -> list[Any]:
        """Raises on every rank if any passes an error; ends those that do not come soon to hear of it."""
        if error is not None:
            self._give_up = partial(self.abort, error, f"rank {self.rank} failed while {what}")
        try:
            return super().agree(error, what, value)
        finally:
            self._give_up = None

    def leave(self) -> None:
        """Tells the others that this rank has come to its end, and waits until all have.

        Raises:
            RankError: another rank waits for an act of this one.
        """
        self._raise_failure()
        self.tell(Leave(dict(self._counts)))
        answer = self._await_answer("for the other ranks to end")
        assert isinstance(answer, Farewell), answer

    def _await_answer(self, words: str) -> Answer:
        self.wait_until(self._has_answer, lambda: (words, ()))
        return self._answers.popleft()

    def _has_answer(self) -> bool:
        self.listen()
        return bool(self._answers)

    def take_answer(self, answer: Answer) -> None:
        """Takes what the hub says: the answer to this rank's notice, or that no rank can go on."""
        if isinstance(answer, Failure) and answer.is_final:
            self._failure = answer
        else:
            self._answers.append(answer)

    # Messages.

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send tensors."""
        if self._carrier is not None and self._carrier.sends_to(destination):
            there = [tensor.detach().to(self._carrier.device) for tensor in tensors]
            return self.post_sends(there, destination, CARRIER_CHANNEL, tag)
        return self.post_sends([self.reachable(tensor) for tensor in tensors], destination, TENSOR_CHANNEL, tag)

    def receive(self, buffers: Sequence[Tensor], source: int, tag: int) -> Pending:
        """Posts the receive of tensors."""
        is_carried = self._carrier is not None and self._carrier.receives_from(source)
        posted = [self._landing(buffer, is_carried) for buffer in buffers]
        staged = [(buffer, other) for buffer, other in zip(buffers, posted, strict=True) if other is not buffer]
        channel = CARRIER_CHANNEL if is_carried else TENSOR_CHANNEL
        return self.post_receives(posted, source, channel, tag, (lambda: copy_all(staged)) if staged else None)

    def _landing(self, buffer: Tensor, is_carried: bool) -> Tensor:
        """Returns the memory that is received into: that of `buffer` itself, if the way leads to its device."""
        if not is_carried:
            return self.landing(buffer)
        assert self._carrier is not None
        if buffer.device.type == self._carrier.device.type:
            return buffer
        return torch.empty_strided(buffer.size(), buffer.stride(), dtype=buffer.dtype, device=self._carrier.device)

    def reachable(self, tensor: Tensor) -> Tensor:
        """Returns a tensor where the transport can send it from: on the host."""
        return to_host(tensor)

    def landing(self, buffer: Tensor) -> Tensor:
        """Returns memory into which the transport can receive what is meant for `buffer`."""
        return buffer if buffer.device.type == "cpu" else empty_on_host(buffer)

    def open_channel(
        self, backend: str, device: torch.device, pairs: Iterable[tuple[int, int]], groups: Iterable[tuple[int, ...]]
    ) -> None:
        """Sends tensors through torch.distributed from now on. Collective.

        Args:
            backend: ``nccl`` or ``gloo``.
            device: Where this rank's tensors are.
            pairs: (sender, receiver) of messages, over all ranks; others go the old way.
            groups: The ranks of sums.
        """
        from autovaruna.runtime.channel import TorchChannel  # imports torch.distributed

        self._carrier = TorchChannel(self, backend, device, pairs, groups)

    def keep(self, pending: Pending) -> None:
        """Keeps what is on its way until it has left."""
        self._sends.append(pending)

    def send_object(self, value: object, destination: int, tag: int) -> Pending:
        """Starts to send an object, as its length and its pickle."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return self.post_sends([torch.tensor([data.numel()], device="cpu"), data], destination, OBJECT_CHANNEL, tag)

    def receive_object(self, source: int, tag: int) -> Any:
        """Returns the next object that `source` sent with `tag`."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self.post_receives([length], source, OBJECT_CHANNEL, tag).wait()
        data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        self.post_receives([data], source, OBJECT_CHANNEL, tag).wait()
        return pickle.loads(data.numpy().tobytes())

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> Message:
        """Starts to send host tensors."""
        parts = self.send_parts(tensors, destination, channel, tag)
        count = self.count(("sent", destination, channel, tag), len(parts))

        def waiting() -> tuple[str, tuple[Need, ...]]:
            need = Need(destination, ("received", self.rank, channel, tag), count)
            return f"for rank {destination} to receive a message (tag {tag})", (need,)

        message = Message(self, parts, waiting)
        if not message.is_done():
            self._sends.append(message)
        return message

    def post_receives(
        self,
        buffers: Sequence[Tensor],
        source: int,
        channel: int,
        tag: int,
        finish: Callable[[], None] | None = None,
    ) -> Message:
        """Posts the receive of host tensors; `finish` runs when they have arrived."""
        parts = self.receive_parts(buffers, source, channel, tag)
        count = self.count(("received", source, channel, tag), len(parts))

        def waiting() -> tuple[str, tuple[Need, ...]]:
            need = Need(source, ("sent", self.rank, channel, tag), count)
            return f"for a message of rank {source} (tag {tag})", (need,)

        def finished(message: Message) -> None:
            self._receives.discard(message)
            if finish is not None:
                finish()

        message = Message(self, parts, waiting, finished)
        self._receives.add(message)
        return message

    def send_parts(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[Pending]:
        """Starts to send host tensors, each in parts of at most 1 GiB."""
        parts = (part for tensor in tensors for part in split(tensor))
        if channel == CARRIER_CHANNEL and self._carrier is not None:
            return [self._carrier.post_send(part, destination, tag) for part in parts]
        return [self.post_send(part, destination, channel, tag) for part in parts]

    def receive_parts(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Pending]:
        """Posts the receives of the same parts."""
        parts = (part for tensor in tensors for part in split(tensor))
        if channel == CARRIER_CHANNEL and self._carrier is not None:
            return [self._carrier.post_receive(part, source, tag) for part in parts]
        return [self.post_receive(part, source, channel, tag) for part in parts]

    def count(self, event: Event, num_times: int = 1) -> int:
        """Counts an act of this rank's script, which others may wait for; returns how often it has happened.

        Acts that happen by themselves while a rank waits, as the later messages of a reduction, are not counted:
        the hub takes it that a waiting rank does not act.
        """
        self._counts[event] += num_times
        return self._counts[event]

    # Groups of ranks.

    def broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """Overwrites `tensor` with that of rank `root`, on `ranks`."""
        check_dense(tensor)
        assert root in ranks, f"root {root} must be among ranks {ranks}"
        host = to_host(tensor)
        broadcast_in_tree(self._group(ranks), host, root)
        if host is not tensor:
            tensor.detach().copy_(host)

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Starts to overwrite `tensor` with its sum over `ranks`."""
        check_dense(tensor)
        if len(ranks) == 1 or tensor.numel() == 0:
            return Done()
        if self._carrier is not None and tensor.device.type == self._carrier.device.type:
            carried = self._carrier.start_all_reduce(tensor, ranks)
            if carried is not None:
                return carried
        return self._group(ranks).start(tensor)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._groups:
            assert self.rank in ranks, f"rank {self.rank} must be among {ranks}"
            group = Group(self, ranks)
            assert all(known.tag != group.tag for known in self._groups.values()), f"tag {group.tag} is taken"
            self._groups[ranks] = group
        return self._groups[ranks]

    # Waiting.

    def progress(self) -> None:
        """Lets messages and reductions advance; forgets finished sends."""
        self._forget_sends()
        if self._carrier is not None:
            self._carrier.advance()
        self._advance_groups()
        self.listen()
        self._raise_failure()

    def flush(self) -> None:
        """Blocks until everything that this rank sent has left it."""
        for group in self._groups.values():
            self.wait_until(group.is_idle, group.waiting)
        while self._sends:
            self._sends.popleft().wait()

    def _forget_sends(self) -> None:
        """Forgets finished sends, looking at some of them in turn: thousands may be on their way."""
        for _ in range(min(len(self._sends), SENDS_AT_ONCE)):
            message = self._sends.popleft()
            if not message.is_done():
                self._sends.append(message)

    def _advance_groups(self) -> None:
        for group in self._groups.values():
            group.is_idle()

    def wait_until(self, is_done: Callable[[], bool], waiting: Callable[[], tuple[str, tuple[Need, ...]]]) -> None:
        """Blocks until `is_done()`; after a while tells the hub `waiting()`.

        Raises:
            RankError: the hub found that it can never be done.
        """
        started, has_reported, num_turns = 0.0, False, 0
        while not is_done():
            num_turns += 1
            if num_turns & 31:
                continue
            now = time.monotonic()
            started = started or now
            self._advance_groups()
            self.listen()
            self._raise_failure()
            if not has_reported and now - started > REPORT_SECONDS:
                has_reported = True
                self.tell(Report(*waiting(), dict(self._counts)))
            if self._give_up is not None and now - started > PATIENCE_SECONDS:
                self._give_up()
            self.rest(now - started)

    def num_acts(self) -> int:
        """Returns how often this rank's script has used the world."""
        return sum(self._counts.values())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RankError(self._failure.text)

    # The transport.

    @abstractmethod
    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Pending:
        """Starts to send the memory of a dense host tensor."""

    @abstractmethod
    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Pending:
        """Starts to receive into the memory of a dense host tensor."""

    @abstractmethod
    def tell(self, notice: Notice) -> None:
        """Carries a notice to the hub; never blocks."""

    @abstractmethod
    def listen(self) -> None:
        """Passes what has come from the hub to `take_answer`; on rank 0, lets the hub work. Never blocks."""

    @abstractmethod
    def rest(self, waited_seconds: float) -> None:
        """Leaves the core to others for a moment that suits how long this rank has waited."""


def split(tensor: Tensor) -> list[Tensor]:
    """Returns a dense tensor as pieces of at most 1 GiB that share its memory: as a rule itself."""
    check_dense(tensor)
    num_elements = MAX_PART_BYTES // tensor.element_size()
    if tensor.numel() <= num_elements:
        return [tensor]
    return list(torch.split(flat(tensor), num_elements))


def copy_all(staged: list[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair's second tensor to its first."""
    with torch.no_grad():
        for tensor, host in staged:
            tensor.copy_(host)
