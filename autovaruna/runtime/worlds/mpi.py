"""Defines `MpiWorld`: ranks started by mpirun, that talk through mpi4py on the tensors' own memory.

This module imports MPI, which starts it; only `environment.get_world` imports this module, at the first use.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.planner.memory.lent import MAX_BYTES
from autovaruna.runtime.worlds.connected import ConnectedWorld
from autovaruna.runtime.worlds.hub import Answer, Hub, Notice, decoded, encoded
from autovaruna.runtime.worlds.mpi_part import MPI, Part, memory_of
from autovaruna.runtime.worlds.posting import CHANNELS, TENSOR_CHANNEL, split
from autovaruna.runtime.worlds.rings.memory import SLOT_BYTES
from autovaruna.runtime.worlds.rings.opening import Pair, open_rings
from autovaruna.runtime.worlds.rings.receiver import RingReceiver
from autovaruna.runtime.worlds.rings.ring_message import RingMessage
from autovaruna.runtime.worlds.rings.sender import RingSender
from autovaruna.runtime.worlds.world import DONE, Blank, Pending, status_after

SPIN_SECONDS = 1e-3
YIELD_SECONDS = 3e-3
_TAG_BITS = 32
_RING_BYTES = {channel: MAX_BYTES if channel == TENSOR_CHANNEL else SLOT_BYTES for channel in CHANNELS}
"""The largest messages that go through a ring; of sums a rank copies what comes anyway."""
SECOND_HAND_SECONDS = 0.7
LATER_RANK_SECONDS = 0.3


class MpiWorld(ConnectedWorld):
    """The ranks of MPI's world, on communicators of our own."""

    def __init__(self) -> None:
        self._owns_mpi = not MPI.Is_initialized()
        if self._owns_mpi:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._control = MPI.COMM_WORLD.Dup()
        self._channels = [MPI.COMM_WORLD.Dup() for _ in CHANNELS]
        super().__init__(self._control.Get_rank(), self._control.Get_size())
        self._status = MPI.Status()
        self._notices: deque[MPI.Request] = deque()
        self._hub = Hub(self.num_ranks, self._answer_all) if self.rank == 0 else None
        self._ring_pairs: set[Pair] = set()
        self._rings_to: dict[int, RingSender] = {}
        self._rings_from: dict[int, RingReceiver] = {}
        self._is_crowded = True
        self._is_cuda_aware = is_cuda_aware()
        self.hosts = tuple(self.gather_objects(MPI.Get_processor_name(), "start"))

    def set_cores(self, num_cores: int, num_ranks: int) -> None:
        """Says that `num_ranks` ranks share `num_cores` cores, so that waiting ranks leave them to others."""
        self._is_crowded = num_ranks > num_cores

    def open_rings(self, pairs: Iterable[Pair], has_host_memory: bool) -> None:
        """Sends small messages through memory that both ranks see from now on, where a pair can. Collective.

        Args:
            pairs: (sender, receiver), the same on every rank.
            has_host_memory: Whether all that this rank sends and receives lies in the host's memory.
        """
        new = set(pairs) - self._ring_pairs
        senders, receivers = open_rings(self, new, has_host_memory)
        self._ring_pairs |= new
        self._rings_to |= senders
        self._rings_from |= receivers

    def advance(self) -> None:
        """Lets reductions advance, and what goes through rings."""
        super().advance()
        for sender in self._rings_to.values():
            sender.advance()
        for receiver in self._rings_from.values():
            receiver.advance()

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send tensors; what most messages are takes a short way, for small stages wait for each line."""
        ring = self._rings_to.get(destination)
        if ring is not None and len(tensors) == 1:
            tensor = tensors[0]
            is_plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            if is_plain and tensor.nbytes <= MAX_BYTES and ring.put(tensor, TENSOR_CHANNEL << _TAG_BITS | tag):
                self._counts["sent", destination, TENSOR_CHANNEL, tag] += 1
                return DONE
        return super().send(tensors, destination, tag)

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Pending:
        """Starts to send the memory of a dense host tensor."""
        ring = self._rings_to.get(destination)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            return ring.send(tensor, channel << _TAG_BITS | tag)
        return self._send_by_mpi(tensor, destination, channel, tag)

    def post_receive(self, tensor: Tensor, source: int, channel: int, tag: int) -> Pending:
        """Starts to receive into the memory of a dense host tensor."""
        ring = self._rings_from.get(source)
        if ring is not None and tensor.nbytes <= _RING_BYTES[channel]:
            return ring.post(tensor, channel << _TAG_BITS | tag)
        return self._receive_by_mpi(tensor, source, channel, tag)

    def send_parts(self, tensors: Sequence[Tensor], destination: int, channel: int, tag: int) -> list[Pending]:
        """Starts to send host tensors; those beside one that is too large for a ring go its way."""
        if not is_mixed(tensors, channel):
            return super().send_parts(tensors, destination, channel, tag)
        return [self._send_by_mpi(part, destination, channel, tag) for each in tensors for part in split(each)]

    def receive_parts(self, tensors: Sequence[Tensor], source: int, channel: int, tag: int) -> list[Pending]:
        """Posts the receives of the same parts."""
        if not is_mixed(tensors, channel):
            return super().receive_parts(tensors, source, channel, tag)
        return [self._receive_by_mpi(part, source, channel, tag) for each in tensors for part in split(each)]

    def _send_by_mpi(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Pending:
        request = self._channels[channel].Isend(memory_of(tensor), destination, tag)
        return DONE if request.Test() else Part(request, tensor, None)  # a small one has left by now

    def _receive_by_mpi(self, tensor: Tensor, source: int, channel: int, tag: int) -> Pending:
        return Part(self._channels[channel].Irecv(memory_of(tensor), source, tag), tensor, self._status)

    def brings(self, source: int, blanks: Sequence[Blank]) -> bool:
        """Says whether tensors of `source` come through a ring."""
        return source in self._rings_from and all(blank.num_bytes <= MAX_BYTES for blank in blanks)

    def bring(self, blanks: Sequence[Blank], source: int, tag: int) -> RingMessage:
        """Waits for the next message of `source` that comes through a ring."""
        event = "received", source, TENSOR_CHANNEL, tag
        count = self._counts[event] = self._counts[event] + len(blanks)
        return RingMessage(self, self._rings_from[source], TENSOR_CHANNEL << _TAG_BITS | tag, blanks, event, count)

    def reachable(self, tensor: Tensor) -> Tensor:
        """Returns a tensor where MPI can send it from: a GPU's own memory, if this MPI reaches it."""
        if not (tensor.is_cuda and self._is_cuda_aware):
            return super().reachable(tensor)
        torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows no streams
        return tensor.detach()

    def landing(self, buffer: Tensor) -> Tensor:
        """Returns memory that MPI can receive into: a GPU's own, if this MPI reaches it."""
        if not (buffer.is_cuda and self._is_cuda_aware):
            return super().landing(buffer)
        torch.cuda.current_stream(buffer.device).synchronize()  # an earlier owner of the memory may still be read
        return buffer

    def tell(self, notice: Notice) -> None:
        """Carries a notice to the hub."""
        if self._hub is not None:
            self._hub.take(0, notice)
        else:
            self._post_notice(0, encoded(notice))

    def listen(self) -> None:
        """Passes on what has come from the hub; on rank 0, passes what has come to the hub."""
        while self._control.Iprobe(MPI.ANY_SOURCE, 0, self._status):
            source = self._status.Get_source()
            data = bytearray(self._status.Get_count(MPI.BYTE))
            self._control.Recv([data, MPI.BYTE], source, 0)
            if self._hub is not None:
                self._hub.take(source, decoded(data))
            else:
                self.take_answer(decoded(data))
        if self._hub is not None:
            self._hub.tick()
        while self._notices and self._notices[0].Test():
            self._notices.popleft()

    def _answer_all(self, answer: Answer) -> None:
        data = encoded(answer)
        for rank in range(1, self.num_ranks):
            self._post_notice(rank, data)
        self.take_answer(answer)

    def _post_notice(self, rank: int, data: bytes) -> None:
        self._notices.append(self._control.Isend([data, MPI.BYTE], rank, 0))

    def rest(self, waited_seconds: float) -> None:
        """Spins at first if there are cores enough, then yields, then sleeps."""
        if waited_seconds < SPIN_SECONDS and not self._is_crowded:
            return
        if waited_seconds < YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(50e-6 if waited_seconds < 1.0 else 500e-6)

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
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        sys.stderr.write(f"{where}:\n{trace}")
        self.end(status_after(error))

    def finalize(self) -> None:
        """Says goodbye to the other ranks, and ends MPI if this world began it.

        Raises:
            RankError: another rank waits for an act of this one.
        """
        self.leave()
        if self._owns_mpi and not MPI.Is_finalized():
            MPI.Finalize()


def is_mixed(tensors: Sequence[Tensor], channel: int) -> bool:
    """Says whether tensors cannot all go through a ring; then none does.

    A rank posts the receive of such a list ahead, past lists that are brought: a part of it in the ring could not be
    told from theirs, which have the same key and come first.
    """
    return channel == TENSOR_CHANNEL and len(tensors) > 1 and any(each.nbytes > MAX_BYTES for each in tensors)


def is_cuda_aware() -> bool:
    """Says whether this MPI reads and writes the memory of GPUs; Open MPI and MPICH say so by an extension."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and torch.cuda.is_available() and bool(query())
