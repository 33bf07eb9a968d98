"""Defines `Transport`: what a `World` needs of whatever moves bytes between its ranks.

A transport starts to send or receive single tensors, whose memory it sees as bytes, and carries notices, those of
exchanges and of the deadlock detector. It knows nothing of collectives, waits or sums: those are `World`'s, the same
for every transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.log import error_text, write_error
from autovaruna.ranks.transport.layout import Layout, split

TENSOR_CHANNEL, OBJECT_CHANNEL, GROUP_CHANNEL, HEADER_CHANNEL = CHANNELS = range(4)
"""Messages of each have an order and tags of their own: tensors, objects, sums of groups, headers of a carrier."""
CARRIER_CHANNEL = 4
"""Not of the transport: tensors that a carrier moves."""
SMALL_BYTES = 4 << 10
"""Messages of so few bytes are sent at once by every MPI, without an agreement with the receiver."""
EAGER_SECONDS = 3e-3
"""So long a waiting rank looks many times before it rests; then once, and leaves its core to ranks that work."""

Pair = tuple[int, int]
"""The rank that sends, and the one that receives."""
Swap = Callable[[Mapping[int, object]], dict[int, Any]]
"""Sends a value to each of some ranks, and returns those that they send at the same time."""


class TensorTransfer(ABC):
    """A tensor on its way. Keep it until it is done: it owns the memory."""

    __slots__ = ()
    needs_calls: bool = False
    """Whether it advances only while this rank calls the transport."""

    @abstractmethod
    def is_done(self) -> bool:
        """Says whether it has finished, letting it advance; never blocks. Raises if its number of bytes is another."""


class Pending(TensorTransfer):
    """A message or a sum that has been started, and can be waited for."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it has finished, or raises a `RankError` if it never can."""


class Done(Pending):
    """Something that was finished when it was started."""

    __slots__ = ()

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


DONE = Done()


class Arrival(TensorTransfer):
    """A message that this rank has memory for: `tensor`."""

    __slots__ = ("_carrier", "_num_bytes", "_source", "needs_calls", "tensor")

    def __init__(self, carrier: Advancing, source: int, tensor: Tensor, *, needs_calls: bool = False) -> None:
        self._carrier, self._source, self._num_bytes = carrier, source, -1
        self.tensor, self.needs_calls = tensor, needs_calls

    def has_come(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def is_done(self) -> bool:
        if self._num_bytes < 0:
            self._carrier.advance()
            if self._num_bytes < 0:
                return False
        check_size(self._source, self._num_bytes, self.tensor.nbytes)
        return True


class Departure(TensorTransfer):
    """A message that waits for room, and the memory that it leaves from."""

    __slots__ = ("_carrier", "has_left", "memory")
    needs_calls = True

    def __init__(self, carrier: Advancing, memory: object) -> None:
        self._carrier, self.memory, self.has_left = carrier, memory, False

    def is_done(self) -> bool:
        if not self.has_left:
            self._carrier.advance()
        return self.has_left


class Advancing(Protocol):
    """Carries messages that advance only while they are asked for."""

    def advance(self) -> None: ...


def check_size(source: int, num_bytes: int, expected: int) -> None:
    """Raises a `RankError` unless a message has as many bytes as the memory that it was to go to."""
    if num_bytes != expected:
        raise RankError(f"rank {source} sent {num_bytes} bytes where {expected} were expected")


class Transport(ABC):
    """Moves tensors and notices between the ranks of a program. No method but `open_rings` and `close` blocks.

    To add one, fill the abstract methods, which is all that a `World` needs, and let `environment.get_world` choose it.
    `hosts` are the host names of all ranks.
    """

    rank: int
    hosts: tuple[str, ...]
    cores_per_rank = 1.0
    """Less than 1 where ranks share cores, so that one that waits leaves its core to others."""
    host_cores = 0
    """Cores that the ranks of this rank's host may use together; 0: not known."""

    def are_apart(self, ranks: Iterable[int]) -> bool:
        """Returns whether some ranks are of several hosts."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    @abstractmethod
    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        """Starts to send the memory of a dense tensor of the host; each channel and tag keeps its order."""

    @abstractmethod
    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        """Starts to receive into the memory of a dense tensor of the host."""

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[TensorTransfer]:
        """Starts to send tensors, each in parts of at most 1 GiB."""
        return [self.post_send(part, destination, channel, tag) for each in tensors for part in split(each)]

    def post_receives(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[TensorTransfer]:
        """Starts to receive the same parts."""
        return [self.post_receive(part, source, channel, tag) for each in tensors for part in split(each)]

    def open_rings(self, pairs: Iterable[Pair], can_share: bool, swap: Swap) -> None:  # noqa: B027 - most have none
        """Sends messages between pairs of ranks of one host through rings from now on, if it can.

        All ranks pass the same pairs. `can_share`: all that this rank sends and receives lies in memory of the host.
        """

    def is_eager(self, source: int, layouts: Sequence[Layout]) -> bool:
        """Returns whether tensors of `source` come without a posted receive."""
        return False

    def eager_source(self, source: int, tag: int) -> Callable[[Layout], Tensor | None]:
        """Returns a function that returns the next such tensor, None as long as it is not here."""
        raise AssertionError("no message comes by itself over this transport")

    def advance(self) -> None:  # noqa: B027 - as a rule all does by itself
        """Lets messages advance that do not by themselves."""

    def start_or(self, record: bytearray) -> TensorTransfer | None:
        """Starts to join a record of 64-bit words with those of all ranks, in place, by bitwise or; None: cannot."""
        return None

    @abstractmethod
    def send_notice(self, data: bytes, destination: int) -> None:
        """Starts to send a notice; those of one rank arrive in order."""

    def are_notices_out(self) -> bool:
        """Says whether all notices of this rank have left, so that they arrive whatever it does; lets them advance."""
        return True

    @abstractmethod
    def poll_notices(self) -> Iterable[tuple[int, bytes | bytearray]]:
        """Returns the notices that have come, each with its source."""

    @abstractmethod
    def rest(self, waited_seconds: float) -> None:
        """Leaves the core to others for a moment that suits how long this rank has waited."""

    @abstractmethod
    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Ends all ranks, after this rank's traceback, headed by `where`, on standard error."""

    def end(self, status: int) -> NoReturn:
        """Ends all ranks with a non-zero status, at once."""
        raise SystemExit(status)

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends the transport, once all ranks have said goodbye."""


class Carrier(Protocol):
    """Moves tensors of some pairs and groups of ranks straight between their devices."""

    device: torch.device

    def sends_to(self, rank: int) -> bool: ...

    def receives_from(self, rank: int) -> bool: ...

    def post_send(self, tensor: Tensor, destination: int, tag: int) -> TensorTransfer: ...

    def post_receive(self, tensor: Tensor, source: int, tag: int) -> TensorTransfer: ...

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending | None: ...

    def start_shares(
        self, shares: Sequence[Sequence[Tensor]], ranks: tuple[int, ...], *, gathers: bool
    ) -> Pending | None: ...

    def advance(self) -> None: ...

    def close(self) -> None: ...


def show(error: BaseException, where: str) -> str:
    """Writes what an error says, headed by `where`, on standard error; returns it."""
    text = f"{where}:\n{error_text(error)}"
    write_error(text)
    return text
