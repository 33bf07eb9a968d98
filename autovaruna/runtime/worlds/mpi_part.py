"""Defines `Part`: one request of MPI.

This module imports MPI, and keeps it from starting by that.
"""

from __future__ import annotations

import time

import mpi4py
from torch import Tensor

from autovaruna.errors import RankError
from autovaruna.runtime.worlds.message import SMALL_BYTES
from autovaruna.runtime.worlds.world import Pending

mpi4py.rc.initialize = False
from mpi4py import MPI as MPI  # noqa: E402


class Part(Pending):
    """One MPI request, and the memory it works on."""

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

    def wait(self) -> None:
        """Blocks until it has finished; messages wait for all their parts together instead, and watch the others."""
        while not self.is_done():
            time.sleep(0)


def memory_of(tensor: Tensor) -> tuple[MPI.memory, MPI.Datatype]:
    """Returns the memory of a dense host tensor as MPI sees it, with no copy."""
    return MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE
