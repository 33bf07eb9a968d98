"""Defines `Transport`: what a `World` needs of whatever moves bytes between its ranks.

A transport starts to send or receive single tensors, whose memory it sees as bytes, and carries the notices of the
deadlock detector. It knows nothing of collectives, waits or sums: those are `World`'s, the same for every transport.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from autovaruna.log import error_text, write_error


def is_dense(tensor: Tensor) -> bool:
    """Says whether the elements fill one piece of memory without holes or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def check_dense(tensor: Tensor) -> None:
    """Asserts that the memory of `tensor` is its value: dense, and no lazy conjugate or negative."""
    assert tensor.is_contiguous() or is_dense(tensor), (
        f"tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()} is not dense; copy it"
    )
    assert not tensor.is_conj() and not tensor.is_neg(), "resolve the lazy conjugate or negative first"


def flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a dense tensor in the order of memory, sharing it; shape (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def to_host(tensor: Tensor) -> Tensor:
    """Returns `tensor` itself on the CPU, else a copy in pinned memory with the same layout."""
    if tensor.device.type == "cpu":
        return tensor
    host = empty_on_host(tensor)
    host.copy_(tensor.detach())
    return host


def rows_on_host(tensor: Tensor) -> Tensor:
    """Returns `tensor` itself if it is contiguous and on the CPU, else a copy of which this is so.

    Its bytes are then its elements in order, however ranks lay out their memory.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return to_host(tensor.detach().resolve_conj().resolve_neg().contiguous())


def distinct(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor whose elements lie in memory of their own: of what is expanded, the original."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def empty_on_host(tensor: Tensor) -> Tensor:
    """Returns uninitialised host memory laid out as `tensor`, pinned where the device is CUDA."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)


TENSOR_CHANNEL, OBJECT_CHANNEL, GROUP_CHANNEL, HEADER_CHANNEL = CHANNELS = range(4)
"""Messages of each have an order and tags of their own: tensors, objects, sums of groups, headers of a carrier."""
CARRIER_CHANNEL = 4
"""Not of the transport: tensors that a carrier moves."""
MAX_PART_BYTES = 1 << 30
SMALL_BYTES = 4 << 10
"""Messages of so few bytes are sent at once by every MPI, without an agreement with the receiver."""

Pair = tuple[int, int]
"""The rank that sends, and the one that receives."""
Gather = Callable[[object, str], list[Any]]
"""Returns the objects that all ranks pass, by rank, for a collective of a label."""


class Part(ABC):
    """A tensor on its way. Keep it until it is done: it owns the memory.

    Attributes:
        needs_calls: whether it advances only while this rank calls the transport.
    """

    __slots__ = ()
    needs_calls: bool = False

    @abstractmethod
    def is_done(self) -> bool:
        """Says whether it has finished, letting it advance; never blocks.

        Raises:
            RankError: the message has another number of bytes than the memory it was to go to.
        """


class Pending(Part):
    """A message or a sum that has been started, and can be waited for."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it has finished.

        Raises:
            RankError: it can never finish, because the other rank failed or ended.
        """


class Done(Pending):
    """Something that was finished when it was started."""

    __slots__ = ()

    def is_done(self) -> bool:
        """Says yes."""
        return True

    def wait(self) -> None:
        """Returns at once."""


DONE = Done()


class Blank(Protocol):
    """The layout of a dense tensor that is to come."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_bytes(self) -> int: ...


class Transport(ABC):
    """Moves tensors and notices between the ranks of a program. No method but `open_rings` and `close` blocks.

    To add one, fill the abstract methods, which is all that a `World` needs, and let `environment.get_world` choose it.

    Attributes:
        rank: number of this rank.
        hosts: host name of every rank.
    """

    rank: int
    hosts: tuple[str, ...]

    @abstractmethod
    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Part:
        """Starts to send the memory of a dense tensor of the host; each channel and tag keeps its order."""

    @abstractmethod
    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Part:
        """Starts to receive into the memory of a dense tensor of the host."""

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[Part]:
        """Starts to send tensors, each in parts of at most 1 GiB."""
        return [self.post_send(part, destination, channel, tag) for each in tensors for part in split(each)]

    def post_receives(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Part]:
        """Starts to receive the same parts."""
        return [self.post_receive(part, source, channel, tag) for each in tensors for part in split(each)]

    def open_rings(self, pairs: Iterable[Pair], can_share: bool, gather: Gather) -> None:  # noqa: B027 - most have none
        """Opens a shorter way between ranks of one host, as `World.open_rings`."""

    def brings(self, source: int, blanks: Sequence[Blank]) -> bool:
        """Says whether tensors of `source` come by themselves, so that no receive of them is posted."""
        return False

    def bringing(self, source: int, tag: int) -> Callable[[Blank], Tensor | None]:
        """Returns what gives the next tensor that comes by itself, None as long as it is not here."""
        raise AssertionError("no message comes by itself over this transport")

    def advance(self) -> None:  # noqa: B027 - as a rule all does by itself
        """Lets what is on its way advance, as far as it does not by itself."""

    @abstractmethod
    def send_notice(self, data: bytes, destination: int) -> None:
        """Starts to send a notice; those of one rank arrive in order."""

    def are_notices_out(self) -> bool:
        """Says whether all notices of this rank have left, so that they arrive whatever it does; lets them advance."""
        return True

    @abstractmethod
    def take_notices(self) -> Iterable[tuple[int, bytes | bytearray]]:
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
    """A second way for the tensors of some pairs and groups of ranks, straight between their devices."""

    device: torch.device

    def sends_to(self, rank: int) -> bool: ...

    def receives_from(self, rank: int) -> bool: ...

    def post_send(self, tensor: Tensor, destination: int, tag: int) -> Part: ...

    def post_receive(self, tensor: Tensor, source: int, tag: int) -> Part: ...

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending | None: ...

    def advance(self) -> None: ...


def split(tensor: Tensor) -> list[Tensor]:
    """Returns a dense tensor as pieces of at most 1 GiB that share its memory: as a rule itself."""
    check_dense(tensor)
    if tensor.nbytes <= MAX_PART_BYTES:
        return [tensor]
    return list(torch.split(flat(tensor), MAX_PART_BYTES // tensor.element_size()))


def status_after(error: BaseException) -> int:
    """Returns the status of a process that an error has ended: that of a shell after Ctrl-C, else 1."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def show(error: BaseException, where: str) -> str:
    """Writes what an error says, headed by `where`, on standard error; returns it."""
    text = f"{where}:\n{error_text(error)}"
    write_error(text)
    return text
