"""Carries tensors through torch.distributed: NCCL between GPUs (or gloo, which tests the same code without any).

A send of NCCL waits on its stream until the receiver has come to the matching receive, and two ranks that both send
first wait for ever. So each direction of each pair of ranks has a process group, and with it a stream, of its own, and
receives are posted in the order of the sender: a header of each tensor goes ahead through MPI, and the receiver, when
it sees one, posts the receive at once, into the buffer that waits for this tag or into a spare one. So nothing that is
sent can be stuck behind something else, whatever the order in which the receiver wants it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from autovaruna.runtime.channels.staging import flat
from autovaruna.runtime.channels.transfer import Nothing, Sum, Transfer
from autovaruna.runtime.transport.base import HEADER_CHANNEL, Pair, Part, Pending
from autovaruna.runtime.worlds.world import World

_TIMEOUT = timedelta(days=7)  # the deadlock detector finds waits that cannot end
_HEADER_NUMBERS = 2
_POOL_THREADS = 32

Ranks = tuple[int, ...]


class TorchChannel:
    """Process groups between pairs of ranks, and among groups. Opening one is collective.

    Args:
        world: The ranks; carries the headers.
        backend: ``nccl`` or ``gloo``.
        device: Where this rank's tensors are.
    """

    def __init__(self, world: World, backend: str, device: torch.device) -> None:
        self.is_on_host = backend == "gloo"
        self.world = world
        self._backend = backend
        self._store = self._open_store()
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "autovaruna-gloo") if self.is_on_host else None
        self.device = device
        self._out: dict[int, Any] = {}
        self._in: dict[int, Any] = {}
        self._sums: dict[Ranks, Any] = {}
        self._waiting: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)
        self._headers: dict[int, tuple[Tensor, Part]] = {}

    def is_like(self, backend: str, device: torch.device) -> bool:
        """Whether this is what carries tensors on a device by a backend."""
        return (backend, device) == (self._backend, self.device)

    def connect(self, pairs: Iterable[Pair], groups: Iterable[Ranks]) -> None:
        """Makes the process groups that are not there yet. Collective.

        Args:
            pairs: (sender, receiver) of messages, over all ranks.
            groups: The ranks of sums.
        """
        rank = self.world.rank
        new = [ends for ends in sorted(set(pairs)) if rank in ends and ends[0] != ends[1] and not self._connects(ends)]
        by_ends = {ends: self._group("pair", ends) for ends in new}
        mine = [ranks for ranks in sorted(set(groups)) if rank in ranks and len(ranks) > 1 and ranks not in self._sums]
        by_ranks = {ranks: self._group("sum", ranks) for ranks in mine}
        self._out |= {receiver: group for (sender, receiver), group in by_ends.items() if sender == rank}
        self._in |= {sender: group for (sender, receiver), group in by_ends.items() if receiver == rank}
        self._sums |= by_ranks
        if not self.is_on_host:
            self._greet(new, mine)
        for source in [sender for sender, receiver in new if receiver == rank]:
            self._await_header(source)

    def _connects(self, ends: Pair) -> bool:
        sender, receiver = ends
        return receiver in self._out if sender == self.world.rank else sender in self._in

    def sends_to(self, rank: int) -> bool:
        """Whether messages to a rank go this way; its `receives_from` says the same."""
        return rank in self._out

    def receives_from(self, rank: int) -> bool:
        """Whether messages of a rank come this way."""
        return rank in self._in

    def post_send(self, tensor: Tensor, destination: int, tag: int) -> Part:
        """Starts to send a dense tensor."""
        data = flat(tensor).view(torch.uint8)
        header = torch.tensor([tag, data.numel()], dtype=torch.int64, device="cpu")
        self.world.keep(self.world.transport.post_send(header, destination, HEADER_CHANNEL, 0))
        transfer = Transfer(self, tensor, is_send=True)
        transfer.work = self._start(self._out[destination].send, [data], 1)
        return transfer

    def post_receive(self, tensor: Tensor, source: int, tag: int) -> Part:
        """Posts the receive of a dense tensor."""
        transfer = Transfer(self, tensor, is_send=False)
        early = self._early[source, tag]
        if early:
            transfer.work, transfer.spare = early.popleft()
        else:
            self._waiting[source, tag].append(transfer)
        return transfer

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Pending | None:
        """Starts to sum over a group; None if the group was not opened."""
        group = self._sums.get(ranks)
        if group is None:
            return None
        if tensor.dtype is torch.bool:
            return None
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        result = tensor.to(torch.float32) if half else tensor
        return Sum(self, group.allreduce([flat(result)]), tensor, result)

    def advance(self) -> None:
        """Posts the receives of all tensors whose headers have come; never blocks."""
        for source in self._in:
            header, pending = self._headers[source]
            while pending.is_done():
                tag, num_bytes = header.tolist()
                self._post(source, tag, num_bytes)
                header, pending = self._await_header(source)

    def _post(self, source: int, tag: int, num_bytes: int) -> None:
        waiting = self._waiting[source, tag]
        if waiting and waiting[0].tensor.nbytes == num_bytes:
            transfer = waiting.popleft()
            transfer.work = self._start(self._in[source].recv, [flat(transfer.tensor).view(torch.uint8)], 0)
            return
        spare = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        work = self._start(self._in[source].recv, [spare], 0)
        if waiting:
            waiting[0].work, waiting[0].spare = work, spare  # of another size: its copy says so
            waiting.popleft()
        else:
            self._early[source, tag].append((work, spare))

    def _start(self, act: Any, tensors: list[Tensor], peer: int) -> Any:
        """Starts to send or receive; gloo, whose work cannot be asked whether it has finished, waits in a thread."""
        if tensors[0].numel() == 0:
            return Nothing()
        work = act(tensors, peer, 0)
        if self._pool is None:
            return work
        waiting: Future[Any] = self._pool.submit(work.wait)
        return waiting

    def _await_header(self, source: int) -> tuple[Tensor, Part]:
        header = torch.empty(_HEADER_NUMBERS, dtype=torch.int64, device="cpu")
        self._headers[source] = header, self.world.transport.post_receive(header, source, HEADER_CHANNEL, 0)
        return self._headers[source]

    def _open_store(self) -> Store:
        """Opens a store on rank 0 that the others find through the world."""
        error: Exception | None = None
        store: Any = None
        open_store: Any = dist.TCPStore  # type: ignore[attr-defined]
        if self.world.rank == 0:
            try:
                store = open_store("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            except Exception as caught:
                error = caught
        self.world.agree(error, "opening a channel")
        port = self.world.broadcast_object(None if store is None else store.port, 0, "opening a channel")
        if store is None:
            first = self.world.hosts[0]
            host = "127.0.0.1" if first == self.world.hosts[self.world.rank] else first
            store = open_store(host, port, is_master=False)
        return PrefixStore(self.world.broadcast_object(_next_name(), 0, "naming a channel"), store)

    def _group(self, kind: str, ranks: Ranks) -> Any:
        """Makes a process group of some ranks; all of them make theirs in one order."""
        store = PrefixStore("-".join([kind, *map(str, ranks)]), self._store)
        place = ranks.index(self.world.rank)
        if self.is_on_host:
            return dist.ProcessGroupGloo(store, place, len(ranks), _TIMEOUT)
        from torch.distributed import ProcessGroupNCCL  # not there in every PyTorch

        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return ProcessGroupNCCL(store, place, len(ranks), options)

    def _greet(self, pairs: Iterable[Pair], groups: Iterable[Ranks]) -> None:
        """Makes NCCL open its communicators now, in one order, where no rank waits for another in a step."""
        one = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for sender, receiver in pairs:
            is_sender = sender == self.world.rank
            work = self._out[receiver].send([one], 1, 0) if is_sender else self._in[sender].recv([one], 0, 0)
            work.wait()
        for ranks in groups:
            self._sums[ranks].allreduce([torch.zeros(1, device=self.device)]).wait()
        torch.cuda.synchronize(self.device)


_numbers = count()


def _next_name() -> str:
    return f"autovaruna-{next(_numbers)}"
