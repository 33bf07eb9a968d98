"""Defines `MpiTransport`: ranks started by mpirun, that talk through mpi4py on the tensors' own memory.

This module imports MPI without starting it; only `environment.get_world` imports this module, at the first use.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import mpi4py
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.transport.base import (
    CHANNELS,
    DONE,
    SMALL_BYTES,
    TENSOR_CHANNEL,
    Blank,
    Gather,
    Pair,
    Part,
    Transport,
    show,
    split,
    status_after,
)
from autovaruna.runtime.transport.rings import MAX_BYTES, SLOT_BYTES, RingReceiver, RingSender, open_rings

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

SPIN_SECONDS = 1e-3
YIELD_SECONDS = 3e-3
_TAG_BITS = 32
_RING_BYTES = [MAX_BYTES if channel == TENSOR_CHANNEL else SLOT_BYTES for channel in CHANNELS]
"""The largest messages that go through a ring; of sums a rank copies what comes anyway."""
SECOND_HAND_SECONDS = 0.7
LATER_RANK_SECONDS = 0.3


class MpiPart(Part):
    """One request of MPI, and the memory it works on."""

    __slots__ = ("_memory", "_request", "_status", "needs_calls")

    def __init__(self, request: MPI.Request, memory: Tensor, status: MPI.Status | None) -> None:
        self._request = request
        self._memory = memory
        self._status = status
        self.needs_calls = memory.nbytes > SMALL_BYTES

    def is_done(self) -> bool:
        """Says whether the request has finished; a receive checks the number of bytes."""
        try:
            is_done = self._request.Test(self._status)
        except MPI.Exception as error:
            raise RankError(f"a message did not fit its buffer of {self._memory.nbytes} bytes: {error}") from error
        if is_done and self._status is not None and (got := self._status.Get_count(MPI.BYTE)) != self._memory.nbytes:
            source = self._status.Get_source()
            raise RankError(f"rank {source} sent {got} bytes where {self._memory.nbytes} were expected")
        return is_done


class MpiTransport(Transport):
    """The ranks of MPI's world, on communicators of our own; between those of one host there may be rings."""

    def __init__(self) -> None:
        self._owns_mpi = not MPI.Is_initialized()
        if self._owns_mpi:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._control = MPI.COMM_WORLD.Dup()
        self._channels = [MPI.COMM_WORLD.Dup() for _ in CHANNELS]
        self.rank = self._control.Get_rank()
        self.hosts = tuple(self._control.allgather(MPI.Get_processor_name()))
        self._status = MPI.Status()
        self._notices: deque[MPI.Request] = deque()
        self._ring_pairs: set[Pair] = set()
        self._rings_to: dict[int, RingSender] = {}
        self._rings_from: dict[int, RingReceiver] = {}
        self._is_crowded = True

    def set_cores(self, num_cores: int, num_ranks: int) -> None:
        """Says that `num_ranks` ranks share `num_cores` cores, so that waiting ranks leave them to others."""
        self._is_crowded = num_ranks > num_cores

    # Messages.

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Part:
        """Starts to send the memory of a dense tensor."""
        ring = self._rings_to.get(destination)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            key = channel << _TAG_BITS | tag
            return DONE if ring.put(tensor, key) else ring.queue(tensor, key)
        return self._send_by_mpi(tensor, destination, channel, tag)

    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Part:
        """Starts to receive into the memory of a dense tensor."""
        ring = self._rings_from.get(source)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            return ring.post(tensor, channel << _TAG_BITS | tag)
        return self._receive_by_mpi(tensor, source, channel, tag)

    def post_sends(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[Part]:
        """Starts to send tensors; those beside one that is too large for a ring go its way.

        A rank posts the receive of such a list ahead, past lists that are brought: a part of it in the ring could not
        be told from theirs, which have the same key and come first.
        """
        if not _is_large(tensors, channel):
            return super().post_sends(tensors, destination, channel, tag)
        return [self._send_by_mpi(part, destination, channel, tag) for each in tensors for part in split(each)]

    def post_receives(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Part]:
        """Starts to receive the same parts."""
        if not _is_large(tensors, channel):
            return super().post_receives(tensors, source, channel, tag)
        return [self._receive_by_mpi(part, source, channel, tag) for each in tensors for part in split(each)]

    def _send_by_mpi(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Part:
        request = self._channels[channel].Isend(memory_of(tensor), destination, tag)
        return DONE if request.Test() else MpiPart(request, tensor, None)  # a small one has left by now

    def _receive_by_mpi(self, tensor: Tensor, source: int, channel: int, tag: int) -> Part:
        return MpiPart(self._channels[channel].Irecv(memory_of(tensor), source, tag), tensor, self._status)

    # Rings.

    def open_rings(self, pairs: Iterable[Pair], can_share: bool, gather: Gather) -> None:
        """Sends small messages through memory that both ranks see from now on, where a pair can. Collective."""
        new = set(pairs) - self._ring_pairs
        senders, receivers = open_rings(self.rank, self.hosts, new, can_share, gather)
        self._ring_pairs |= new
        self._rings_to |= senders
        self._rings_from |= receivers

    def brings(self, source: int, blanks: Sequence[Blank]) -> bool:
        """Says whether tensors of `source` come through a ring."""
        return source in self._rings_from and all(blank.num_bytes <= MAX_BYTES for blank in blanks)

    def bringing(self, source: int, tag: int) -> Callable[[Blank], Tensor | None]:
        """Returns what gives the next tensor of `source` that comes through a ring."""
        return partial(self._rings_from[source].bring, key=TENSOR_CHANNEL << _TAG_BITS | tag)

    def advance(self) -> None:
        """Lets what goes through rings advance."""
        for sender in self._rings_to.values():
            sender.advance()
        for receiver in self._rings_from.values():
            receiver.advance()

    # Notices.

    def send_notice(self, data: bytes, destination: int) -> None:
        """Starts to send a notice."""
        self._notices.append(self._control.Isend([data, MPI.BYTE], destination, 0))

    def take_notices(self) -> Iterator[tuple[int, bytearray]]:
        """Yields the notices that have come, each with its source."""
        while self._control.Iprobe(MPI.ANY_SOURCE, 0, self._status):
            source = self._status.Get_source()
            data = bytearray(self._status.Get_count(MPI.BYTE))
            self._control.Recv([data, MPI.BYTE], source, 0)
            yield source, data
        while self._notices and self._notices[0].Test():
            self._notices.popleft()

    def rest(self, waited_seconds: float) -> None:
        """Spins at first if there are cores enough, then yields, then sleeps."""
        if waited_seconds < SPIN_SECONDS and not self._is_crowded:
            return
        if waited_seconds < YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(50e-6 if waited_seconds < 1.0 else 500e-6)

    # The end.

    def end(self, status: int) -> NoReturn:
        """Ends all ranks with a non-zero status, at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(status)
        os._exit(status)

    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Ends all ranks with `status_after`, after this rank's traceback.

        Where one rank's error makes others fail, or all fail alike, one message is enough: ranks that only pass on
        another's error, and then ranks other than 0, give the others a moment to end this one first.
        """
        is_second_hand = isinstance(error, RankError) or getattr(error, "is_second_hand", False)
        time.sleep(SECOND_HAND_SECONDS * is_second_hand + LATER_RANK_SECONDS * (self.rank > 0))
        show(error, where)
        self.end(status_after(error))

    def close(self) -> None:
        """Ends MPI if this transport began it."""
        if self._owns_mpi and not MPI.Is_finalized():
            MPI.Finalize()


def _is_large(tensors: Sequence[Tensor], channel: int) -> bool:
    """Says whether any of some tensors is too large for a ring."""
    return any(each.nbytes > _RING_BYTES[channel] for each in tensors)


def memory_of(tensor: Tensor) -> tuple[MPI.memory, MPI.Datatype]:
    """Returns the memory of a dense tensor as MPI sees it, with no copy."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE
