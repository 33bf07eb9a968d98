"""Defines `MpiTransport`: ranks started by mpirun, that talk through mpi4py on the tensors' own memory.

This module imports MPI without starting it; only `environment` imports this module, at the first use.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

import mpi4py
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.interception.ending import end_now
from autovaruna.ranks.transport.base import CHANNELS, DONE, SMALL_BYTES, TensorTransfer, check_size
from autovaruna.ranks.transport.processes import ProcessTransport

mpi4py.rc.initialize = False
from mpi4py import MPI  # noqa: E402

EAGER_BYTES = 4 << 20
"""Messages of so few bytes go out over TCP without asking the receiver first: one that computes answers late. What the
system does not take at once is on its way until it has; Open MPI's own 64 KiB are to spare the receiver's memory."""


class MpiPart(TensorTransfer):
    """One request of MPI, and the memory it works on."""

    __slots__ = ("_memory", "_request", "_status", "needs_calls")

    def __init__(self, request: MPI.Request, memory: Tensor, status: MPI.Status | None) -> None:
        self._request, self._memory, self._status = request, memory, status
        self.needs_calls = memory.nbytes > SMALL_BYTES

    def is_done(self) -> bool:
        try:
            is_done = self._request.Test(self._status)
        except MPI.Exception as error:
            raise RankError(f"a message did not fit its buffer of {self._memory.nbytes} bytes: {error}") from error
        if is_done and self._status is not None:
            check_size(self._status.Get_source(), self._status.Get_count(MPI.BYTE), self._memory.nbytes)
        return is_done


class MpiReduction(TensorTransfer):
    """One reduction by MPI itself; its request keeps the memory."""

    __slots__ = ("_request",)

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def is_done(self) -> bool:
        return self._request.Test()


class MpiTransport(ProcessTransport):
    """The ranks of MPI's world, on communicators of our own; between those of one host there may be rings."""

    def __init__(self) -> None:
        super().__init__()
        self._owns_mpi = not MPI.Is_initialized()
        if self._owns_mpi:
            os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(EAGER_BYTES))
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._control = MPI.COMM_WORLD.Dup()
        self._channels = [MPI.COMM_WORLD.Dup() for _ in CHANNELS]
        self.rank = self._control.Get_rank()
        self.hosts = tuple(self._control.allgather(MPI.Get_processor_name()))
        self._status = MPI.Status()
        self._notices: deque[MPI.Request] = deque()

    def send_far(self, tensor: Tensor, destination: int, channel: int, tag: int) -> TensorTransfer:
        request = self._channels[channel].Isend(memory_of(tensor), destination, tag)
        return DONE if request.Test() else MpiPart(request, tensor, None)  # a small one has left by now

    def receive_far(self, tensor: Tensor, source: int, channel: int, tag: int) -> TensorTransfer:
        return MpiPart(self._channels[channel].Irecv(memory_of(tensor), source, tag), tensor, self._status)

    # Exchanges.

    def start_or(self, record: bytearray) -> TensorTransfer:
        return MpiReduction(self._control.Iallreduce(MPI.IN_PLACE, [record, MPI.UINT64_T], MPI.BOR))

    def send_notice(self, data: bytes, destination: int) -> None:
        self._notices.append(self._control.Isend([data, MPI.BYTE], destination, 0))

    def are_notices_out(self) -> bool:
        while self._notices and self._notices[0].Test():
            self._notices.popleft()
        return not self._notices

    def poll_notices(self) -> Iterator[tuple[int, bytearray]]:
        while self._control.Iprobe(MPI.ANY_SOURCE, 0, self._status):
            source = self._status.Get_source()
            data = bytearray(self._status.Get_count(MPI.BYTE))
            self._control.Recv([data, MPI.BYTE], source, 0)
            yield source, data
        self.are_notices_out()

    # The end.

    def end(self, status: int) -> NoReturn:
        """Ends all ranks at once: Open MPI's mpirun does when one has ended so, and says less than about an abort."""
        sys.stdout.flush()
        sys.stderr.flush()
        if "OMPI_COMM_WORLD_SIZE" not in os.environ:
            MPI.COMM_WORLD.Abort(status)
        end_now(status)

    def close(self) -> None:
        if self._owns_mpi and not MPI.Is_finalized():
            MPI.Finalize()


def memory_of(tensor: Tensor) -> tuple[MPI.memory, MPI.Datatype]:
    """Returns the memory of a dense tensor as MPI sees it, with no copy."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE
