"""Defines `World`: how ranks talk, whatever carries the bytes.

Three worlds fill it: MPI (`mpi.py`), one process (`single.py`), and threads of one process (`in_process.py`).

Two kinds of calls. *Collectives* (`gather_objects`, `broadcast_object`, `agree`, `barrier`) are called by every rank in
the same order with the same label `what`; ranks that are in different ones all get a `RankError` that says who is
where. *Messages* (`send`, `receive`) and the tensor collectives of a group (`broadcast`, `all_reduce`) are called by
the ranks that take part only. Messages with the same source, destination and tag arrive in the order sent.
"""

from __future__ import annotations

import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from autovaruna.errors import AutoVarunaError, RankError

_ERRORS = AutoVarunaError.__module__


def status_after(error: BaseException) -> int:
    """Returns the status of a process that an error has ended: that of a shell after Ctrl-C, else 1."""
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


class Pending(ABC):
    """A message or a reduction that has been started. Keep it until it is done: it owns the memory on the way.

    Attributes:
        needs_calls: whether it advances only while this rank calls the transport.
    """

    __slots__ = ()
    needs_calls: bool = False

    @abstractmethod
    def is_done(self) -> bool:
        """Says whether it has finished, letting it advance; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it has finished.

        Raises:
            RankError: it can never finish, because the other rank failed or ended.
        """


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


class Brought(Pending):
    """A message that makes its own tensors: `tensors`, complete once it is done."""

    __slots__ = ()
    tensors: list[Tensor]


class Done(Pending):
    """Something that was finished when it was started."""

    __slots__ = ()

    def is_done(self) -> bool:
        """Says yes."""
        return True

    def wait(self) -> None:
        """Returns at once."""


DONE = Done()


class World(ABC):
    """The ranks of one program, seen from one of them.

    Attributes:
        rank: number of this rank.
        num_ranks: number of ranks N.
        hosts: host name of every rank.
        num_models: how many models this rank's script has called; their order tells them apart.
    """

    num_models: int = 0
    rank: int
    num_ranks: int
    hosts: tuple[str, ...]

    @abstractmethod
    def gather_objects(self, value: object, what: str) -> list[Any]:
        """Returns the values that the ranks passed, by rank; those that are alike may be one object. Collective.

        Args:
            value: a small object that pickles.
            what: what the ranks do here, for errors; must be the same on every rank.

        Raises:
            RankError: ranks came with different labels, or a rank ended its script.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, ranks: tuple[int, ...]) -> None:
        """Overwrites `tensor` with that of rank `root`, on `ranks` (ascending or not, the same order on each)."""

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Starts to overwrite `tensor` with its sum over `ranks`; every rank gets the same bits.

        Reductions of a group start in the same order on each of its ranks. bfloat16 and float16 are summed in
        float32 and rounded once; bool is a logical or.
        """

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Pending:
        """Starts to send `tensors`; never blocks. They must not change until it is done.

        Args:
            tensors: dense tensors (contiguous, in any order of dimensions) of any dtype.
            destination: the receiving rank; may be this one.
            tag: at least 0, below 2 ** 20.
        """

    @abstractmethod
    def receive(self, buffers: Sequence[Tensor], source: int, tag: int) -> Pending:
        """Posts the receive of a message into `buffers`, which are laid out as the tensors that were sent.

        The buffers are filled once it is done.

        Raises:
            RankError: in `wait`: the message has another number of bytes than the buffers.
        """

    def brings(self, source: int, blanks: Sequence[Blank]) -> bool:
        """Says whether tensors of `source` come by themselves, so that `bring` is called in place of `receive`."""
        return False

    def bring(self, blanks: Sequence[Blank], source: int, tag: int) -> Brought:
        """Waits for the next message of `source`, without memory posted for it; where `brings` says so.

        Raises:
            RankError: in `is_done` or `wait`: the message has another number of bytes than the blanks.
        """
        raise AssertionError("no message comes by itself in this world")

    @abstractmethod
    def send_object(self, value: object, destination: int, tag: int) -> Pending:
        """Starts to send an object that pickles; never blocks. Its tags are apart from those of tensors."""

    @abstractmethod
    def receive_object(self, source: int, tag: int) -> Any:
        """Returns the next object that `source` sent with `tag`; blocks."""

    @abstractmethod
    def progress(self) -> None:
        """Lets pending messages advance and forgets the finished ones; never blocks.

        Raises:
            RankError: another rank failed or ended, so that no rank can go on.
        """

    def glance(self) -> None:
        """Does as `progress` if anything is on its way that does not advance by itself; called between instructions."""
        self.progress()

    @abstractmethod
    def flush(self) -> None:
        """Blocks until everything that this rank sent has left it."""

    @abstractmethod
    def abort(self, error: BaseException, where: str) -> NoReturn:
        """Ends all ranks with `status_after`, after this rank's traceback, headed by `where`, on standard error."""

    def broadcast_object(self, value: object, root: int, what: str) -> Any:
        """Returns the value of rank `root`. Collective; raises as `gather_objects`."""
        return self.gather_objects(value if self.rank == root else None, what)[root]

    def barrier(self, what: str) -> None:
        """Returns once every rank has come. Collective; raises as `gather_objects`."""
        self.gather_objects(None, what)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Overwrites `tensor` with its sum over `ranks`, as `start_all_reduce`, and waits for it."""
        self.start_all_reduce(tensor, ranks).wait()

    def agree(self, error: BaseException | None, what: str, value: object = None) -> list[Any]:
        """Raises on every rank if any rank passes an error; returns the values that the ranks passed. Collective.

        Raises:
            BaseException: `error` itself, on the ranks that passed one.
            AutoVarunaError: on the others, with the message and traceback of the first rank that failed; of the kind
                of its error, so that a script can catch the same on every rank; RankError if it is not of our tree.
        """
        try:
            reports = self.gather_objects((None if error is None else (kind_of(error), describe(error)), value), what)
        except RankError as mismatch:
            raise mismatch if error is None else error from mismatch
        if error is not None:
            raise error
        for rank, (report, _) in enumerate(reports):
            if report is not None:
                kind, text = report
                passed_on: AutoVarunaError = kind(f"rank {rank} failed while {what}: {text}")
                passed_on.is_second_hand = True
                raise passed_on
        return [value for _, value in reports]


def kind_of(error: BaseException) -> type[AutoVarunaError]:
    """Returns the kind of error that tells other ranks of this one."""
    return type(error) if isinstance(error, AutoVarunaError) and type(error).__module__ == _ERRORS else RankError


def describe(error: BaseException) -> str:
    """Returns type, message and traceback of an error as text."""
    name = type(error).__name__
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{name}: {error}\n{trace}"
