"""Defines `Transport`: what a `World` needs of whatever moves bytes between its ranks.

A transport starts to send or receive single tensors, whose memory it sees as bytes, and carries the notices of the
deadlock detector. It knows nothing of collectives, waits or sums: those are `World`'s, the same for every transport.

What ranks tell each other besides tensors are plain values and records of this library, as `pack` turns them into
bytes, never code. The bytes are pickle's. Their reader makes nothing but values, so that a stranger's bytes call no
function: they are a value, or an error. (Python's documentation of `pickle`: "Restricting globals".)
"""

from __future__ import annotations

import io
import pickle
import signal
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from autovaruna._torch import rebuild_meta
from autovaruna.errors import AutoVarunaError, RankError
from autovaruna.log import error_text, write_error


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Says whether the elements of a tensor fill memory without holes or overlaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def is_dense(tensor: Tensor) -> bool:
    """Says whether a tensor fills one piece of memory."""
    return tensor.is_contiguous() or fills_memory(tensor.shape, tensor.stride())


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


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and dtype of one tensor of a message; whether it fills memory; and what travels of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_dense: bool = field(init=False, compare=False)
    num_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_dense", fills_memory(self.shape, self.strides))
        object.__setattr__(self, "num_bytes", prod(self._narrow_shape) * self.dtype.itemsize)

    @property
    def _narrow_shape(self) -> tuple[int, ...]:
        """The shape without repeats: a dimension of stride 0 is sent once."""
        pairs = zip(self.shape, self.strides, strict=True)
        return tuple(min(length, 1) if stride == 0 else length for length, stride in pairs)

    def fits(self, tensor: Tensor | None) -> TypeGuard[Tensor]:
        return (
            tensor is not None
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and (tensor.stride() == self.strides or self._steps(tensor.stride()) == self._steps(self.strides))
        )

    def _steps(self, strides: Sequence[int]) -> list[int]:
        """Returns the strides that mean something: a dimension of one element is never stepped along."""
        return [stride for stride, length in zip(strides, self.shape, strict=True) if length > 1]

    def buffer(self, device: torch.device) -> Tensor:
        """Returns memory for what travels."""
        if self.is_dense:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.empty(self._narrow_shape, dtype=self.dtype, device=device)

    @property
    def travelling(self) -> Layout:
        """The layout of what travels: this one, unless it has holes."""
        if self.is_dense:
            return self
        return Layout(self._narrow_shape, torch.empty(self._narrow_shape, device="meta").stride(), self.dtype)

    def unpack(self, buffer: Tensor) -> Tensor:
        """Returns the tensor as the sender had it, of one that is not dense."""
        tensor = torch.empty_strided(self._narrow_shape, self.strides, dtype=self.dtype, device=buffer.device)
        return tensor.copy_(buffer).expand(self.shape)


class Arrival(TensorTransfer):
    """A message that this rank has memory for: `tensor`; it comes by a way that lets it advance."""

    __slots__ = ("_num_bytes", "_source", "_way", "needs_calls", "tensor")

    def __init__(self, way: Advancing, source: int, tensor: Tensor, *, needs_calls: bool = False) -> None:
        self._way, self._source, self._num_bytes = way, source, -1
        self.tensor, self.needs_calls = tensor, needs_calls

    def has_come(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def is_done(self) -> bool:
        if self._num_bytes < 0:
            self._way.advance()
            if self._num_bytes < 0:
                return False
        check_size(self._source, self._num_bytes, self.tensor.nbytes)
        return True


class Departure(TensorTransfer):
    """A message that waits for room, and the memory that it leaves from."""

    __slots__ = ("_way", "has_left", "memory")
    needs_calls = True

    def __init__(self, way: Advancing, memory: object) -> None:
        self._way, self.memory, self.has_left = way, memory, False

    def is_done(self) -> bool:
        if not self.has_left:
            self._way.advance()
        return self.has_left


class Advancing(Protocol):
    """What messages go by that advance only while they are asked for."""

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

    def open_rings(self, pairs: Iterable[Pair], can_share: bool, gather: Gather) -> None:  # noqa: B027 - most have none
        """Opens a shorter way between ranks of one host, as `World.open_rings`."""

    def brings(self, source: int, layouts: Sequence[Layout]) -> bool:
        """Says whether tensors of `source` come by themselves, so that no receive of them is posted."""
        return False

    def bringing(self, source: int, tag: int) -> Callable[[Layout], Tensor | None]:
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

    def post_send(self, tensor: Tensor, destination: int, tag: int) -> TensorTransfer: ...

    def post_receive(self, tensor: Tensor, source: int, tag: int) -> TensorTransfer: ...

    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending | None: ...

    def start_shares(
        self, shares: Sequence[Sequence[Tensor]], ranks: tuple[int, ...], *, gathers: bool
    ) -> Pending | None: ...

    def advance(self) -> None: ...

    def close(self) -> None: ...


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


_CLASSES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(Counter, OrderedDict, defaultdict, deque),
    *(type(Path()), np.dtype, np.ndarray, torch.Size, torch.device),
)
_OF_NUMPY = {(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")}
_VALUES = {(each.__module__, each.__name__) for each in (*_CLASSES, rebuild_meta)} | _OF_NUMPY
_PACKAGE = __name__.partition(".")[0]


def pack(value: object) -> bytes:
    """Returns a value as bytes."""
    return pickle.dumps(value)


def unpack(data: bytes | bytearray) -> Any:
    """Returns the value whose bytes these are.

    Raises:
        RankError: they are no value that a rank sends.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except RankError:
        raise
    except Exception as error:
        raise RankError(f"A message is no value that a rank sends: {type(error).__name__}: {error}.") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _VALUES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.partition(".")[0] == _PACKAGE and _is_record(found := super().find_class(module, name)):
            return found
        raise RankError(
            f"A message has a {module}.{name}; ranks send each other numbers, texts, tensors and collections of these. "
            "Where it is in the state of an optimizer, keep a tensor or a number there."
        )


def _is_record(found: object) -> bool:
    """Whether this is a class of ours that holds values: a dataclass, a named tuple, an enumeration or an error."""
    if not isinstance(found, type) or found.__module__.partition(".")[0] != _PACKAGE:
        return False
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return is_named_tuple or is_dataclass(found) or issubclass(found, Enum | AutoVarunaError)
