"""Carries tensors through torch.distributed: NCCL between GPUs (or gloo, which tests the same code without any).

A send of NCCL waits on its stream for the matching receive, and two ranks that both send first wait for ever. So each
direction of each pair of ranks has a process group, and with it a stream, of its own. A header of each tensor goes
ahead through the transport: the receiver posts the receive at once, into the buffer that waits for this tag or into a
spare one, so that nothing that is sent can be stuck behind something else.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from autovaruna._torch import nccl_options
from autovaruna.errors import ConfigError, RankError
from autovaruna.ranks.exchange import digest
from autovaruna.ranks.reduction import WIDER
from autovaruna.ranks.transport.base import HEADER_CHANNEL, Pair, Pending, TensorTransfer
from autovaruna.ranks.transport.layout import flat
from autovaruna.ranks.world import Ranks, World, on_all

logger = logging.getLogger(__name__)
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, on Linux
_CONNECT_SECONDS = 2.0
_NO_LIMIT = timedelta(days=7)
"""The deadlock detector finds waits that cannot end; how long others may last, a setting says."""
_POOL_THREADS = 32
_numbers = count()
_CARRIES_ALL = "Pass channel='mpi'."


class OpenStore(NamedTuple):
    """A store of torch.distributed as this rank reaches it, and the number that rank 0 gave it."""

    store: Store
    address: str
    port: int
    number: int


def open_store(world: World, what: str) -> OpenStore:
    """Opens a store on rank 0 that the others find through the world. Collective; `what` names it in errors."""
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    first = partial(make, "0.0.0.0", 0, is_master=True, wait_for_workers=False)
    store = on_all(world, lambda: None if world.rank else first(), what)
    place = None if store is None else (store.port, [world.hosts[0], *own_addresses()], next(_numbers))
    port, known, number = world.broadcast_object(place, 0, what)
    is_here = world.hosts[0] == world.hosts[world.rank]
    address = "127.0.0.1" if is_here else reachable(known, port)
    if store is None:
        store = make(address, port, is_master=False)
    return OpenStore(store, address, port, number)


class Transfer(TensorTransfer):
    """One tensor on its way; `work` is there once it has been started."""

    def __init__(self, channel: TorchChannel, tensor: Tensor, *, is_send: bool) -> None:
        self.tensor = tensor
        self.work: Any = None
        self.spare: Tensor | None = None
        self._channel, self._is_send = channel, is_send

    def is_done(self) -> bool:
        if self.work is None:
            self._channel.advance()
        if self.work is None or not self._is_finished():
            return False
        if self.spare is not None:
            if self.spare.numel() != self.tensor.nbytes:
                raise RankError(f"a rank sent {self.spare.numel()} bytes where {self.tensor.nbytes} were expected")
            flat(self.tensor).view(torch.uint8).copy_(self.spare)
            self.spare = None
        return True

    def _is_finished(self) -> bool:
        """Says whether it may be used: on a GPU a receive may as soon as the stream waits for it."""
        if self._channel.is_on_host:
            return bool(self.work.done())
        if self._is_send:
            return bool(self.work.is_completed())
        self.work.wait()
        return True


class ChannelSums(Pending):
    """Sums and copies over a group on their way: the work of each, the tensor it is for, and where it is computed."""

    def __init__(self, channel: TorchChannel, every: list[tuple[Any, Tensor, Tensor]]) -> None:
        self._channel, self._every = channel, every

    def is_done(self) -> bool:
        return all(work.is_completed() for work, _, _ in self._every)

    def wait(self) -> None:
        """Waits: the host with gloo, the stream on a GPU."""
        if self._channel.is_on_host:
            self._channel.world.watch.wait_until(self.is_done, lambda: ("for a sum over torch.distributed", ()))
        every, self._every = self._every, []
        for work, tensor, result in every:
            work.wait()
            if result is not tensor:
                tensor.copy_(result)


class TorchChannel:
    """Process groups between pairs of ranks, and among groups, by ``nccl`` or ``gloo``. Opening one is collective."""

    def __init__(self, world: World, backend: str, device: torch.device) -> None:
        self.is_on_host = backend == "gloo"
        self.world, self.backend = world, backend
        opened = open_store(world, "opening a channel")
        self._store = PrefixStore(f"autovaruna-{opened.number}", opened.store)
        self._pool = ThreadPoolExecutor(_POOL_THREADS, "autovaruna-gloo") if self.is_on_host else None
        self.device = device
        self._out: dict[int, Any] = {}
        self._in: dict[int, Any] = {}
        self._sums: dict[Ranks, Any] = {}
        self._waiting: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
        self._early: dict[tuple[int, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)
        self._headers: dict[int, tuple[Tensor, TensorTransfer]] = {}

    def connect(self, pairs: Set[Pair], groups: Set[Ranks]) -> None:
        """Makes the process groups that are not there yet, for messages and sums of any ranks. Collective."""
        rank = self.world.rank
        known = {(rank, receiver) for receiver in self._out} | {(sender, rank) for sender in self._in}
        new = [ends for ends in sorted(pairs - known) if rank in ends and ends[0] != ends[1]]
        mine = [ranks for ranks in sorted(groups - self._sums.keys()) if rank in ranks and len(ranks) > 1]
        for sender, receiver in new:
            group = self._group("pair", (sender, receiver))
            if sender == rank:
                self._out[receiver] = group
            else:
                self._in[sender] = group
        self._sums |= {ranks: self._group("sum", ranks) for ranks in mine}
        if not self.is_on_host:
            self._greet(new, mine)
        for source in [sender for sender, receiver in new if receiver == rank]:
            self._await_header(source)

    def close(self) -> None:
        """Ends the groups of gloo while Python runs: its threads may hold tensors, which only Python can free."""
        if self._pool is not None:
            self._pool.shutdown()
            for groups in (self._out, self._in, self._sums):
                groups.clear()

    def sends_to(self, rank: int) -> bool:
        return rank in self._out

    def receives_from(self, rank: int) -> bool:
        return rank in self._in

    def post_send(self, tensor: Tensor, destination: int, tag: int) -> TensorTransfer:
        data = flat(tensor).view(torch.uint8)
        header = torch.tensor([tag, data.numel()], dtype=torch.int64, device="cpu")
        self.world.keep(self.world.transport.post_send(header, destination, HEADER_CHANNEL, 0))
        transfer = Transfer(self, tensor, is_send=True)
        transfer.work = self._start(self._out[destination].send, [data], 1)
        return transfer

    def post_receive(self, tensor: Tensor, source: int, tag: int) -> TensorTransfer:
        transfer = Transfer(self, tensor, is_send=False)
        early = self._early[source, tag]
        if early:
            transfer.work, transfer.spare = early.popleft()
        else:
            self._waiting[source, tag].append(transfer)
        return transfer

    def start_all_reduce(self, tensor: Tensor, ranks: Ranks) -> Pending | None:
        """Starts to sum over a group; None if it was not opened, or for what backends cannot sum."""
        group = self._sums.get(ranks)
        if group is None or tensor.dtype is torch.bool:
            return None
        result = tensor.to(WIDER.get(tensor.dtype, tensor.dtype))
        return ChannelSums(self, [(group.allreduce([flat(result)]), tensor, result)])

    def start_shares(self, shares: Sequence[Sequence[Tensor]], ranks: Ranks, *, gathers: bool) -> Pending | None:
        """Starts to sum each share on its rank, or to copy it from there to all; None if the group was not opened.

        Backends have reduce-scatter and all-gather for equal shares alone.
        """
        group = self._sums.get(ranks)
        if group is None:
            return None
        options: Any = dist.BroadcastOptions() if gathers else dist.ReduceOptions()
        start = group.broadcast if gathers else group.reduce
        every = []
        for root, share in enumerate(shares):
            options.rootRank = root
            for tensor in share:
                result = tensor if gathers else tensor.to(WIDER.get(tensor.dtype, tensor.dtype))
                every.append((start([flat(result)], options), tensor, result))
        return ChannelSums(self, every)

    def advance(self) -> None:
        """Posts the receives of all tensors whose headers have come; never blocks."""
        for source in self._in:
            header, pending = self._headers[source]
            while pending.is_done():
                tag, num_bytes = header.tolist()
                self._post(source, tag, num_bytes)
                header, pending = self._await_header(source)

    def _post(self, source: int, tag: int, num_bytes: int) -> None:
        waiting, receive = self._waiting[source, tag], self._in[source].recv
        transfer = waiting.popleft() if waiting else None
        if transfer is not None and transfer.tensor.nbytes == num_bytes:
            transfer.work = self._start(receive, [flat(transfer.tensor).view(torch.uint8)], 0)
            return
        spare = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        work = self._start(receive, [spare], 0)
        if transfer is None:
            self._early[source, tag].append((work, spare))
        else:
            transfer.spare, transfer.work = spare, work  # of another size: its copy says so

    def _start(self, act: Any, tensors: list[Tensor], peer: int) -> Any:
        """Starts to send or receive; gloo, whose work cannot be asked whether it has finished, waits in a thread."""
        if tensors[0].numel() == 0:
            return SimpleNamespace(done=lambda: True, is_completed=lambda: True, wait=lambda: True)
        work = act(tensors, peer, 0)
        if self._pool is None:
            return work
        waiting: Future[Any] = self._pool.submit(work.wait)
        return waiting

    def _await_header(self, source: int) -> tuple[Tensor, TensorTransfer]:
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._headers[source] = header, self.world.transport.post_receive(header, source, HEADER_CHANNEL, 0)
        return self._headers[source]

    def _group(self, kind: str, ranks: Ranks) -> Any:
        store = PrefixStore("-".join([kind, *map(str, ranks)]), self._store)
        place = ranks.index(self.world.rank)
        limit = self.world.watch.stalls.limit_seconds
        timeout = timedelta(seconds=limit) if limit else _NO_LIMIT
        if self.is_on_host:
            return dist.ProcessGroupGloo(store, place, len(ranks), timeout)
        from torch.distributed import ProcessGroupNCCL  # not there in every PyTorch

        return ProcessGroupNCCL(store, place, len(ranks), nccl_options(timeout))

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


def open_channel(setting: str, pairs: Set[Pair], groups: Set[Ranks], world: World, device: torch.device) -> None:
    """Opens the channel between pairs of ranks, and for sums over groups. Collective.

    `setting` is ``auto``, ``mpi``, ``nccl`` or ``gloo``.

    Raises:
        ConfigError: NCCL or gloo is asked for where it cannot be; on every rank.
    """
    backend = _open_backend(setting, world, device, pairs, groups)
    if device.type != "cpu" and backend:
        logger.info("tensors go between ranks through %s", backend)


def open_to_measure(setting: str, world: World, device: torch.device) -> None:
    """Opens the channel for what is measured before there is a plan: neighbours talk, and all sum. Collective."""
    pairs = {pair for ends in neighbours(world.hosts) for pair in (ends, ends[::-1])}
    _open_backend(setting, world, device, pairs, {tuple(range(world.num_ranks))})


def _open_backend(setting: str, world: World, device: torch.device, pairs: Set[Pair], groups: Set[Ranks]) -> str:
    """Opens the channel for messages between pairs, and sums over groups; returns its name, empty if none is needed."""
    if world.num_ranks == 1:
        return ""
    if setting == "gloo":
        kinds = world.gather_objects(device.type, "choosing a channel")
        if others := [f"rank {rank} computes on {kind}" for rank, kind in enumerate(kinds) if kind != "cpu"]:
            raise ConfigError(f"channel='gloo' carries tensors on the CPU alone: {'; '.join(others)}. {_CARRIES_ALL}")
    lacking = [] if setting in ("mpi", "gloo") else lacking_for_nccl(world, device)
    if setting == "nccl" and lacking:
        raise ConfigError(f"channel='nccl' needs a GPU for each rank: {'; '.join(lacking)}. {_CARRIES_ALL}")
    backend = ("mpi" if lacking else "nccl") if setting == "auto" else setting
    if backend != "mpi":
        carrier = world.carrier
        if not isinstance(carrier, TorchChannel) or (carrier.backend, carrier.device) != (backend, device):
            carrier = world.carrier = TorchChannel(world, backend, device)
        carrier.connect(pairs, groups)
    elif setting == "auto":
        world.transport.open_rings(pairs, device.type == "cpu", world.swap_objects)
    return backend


def lacking_for_nccl(world: World, device: torch.device) -> list[str]:
    """Returns in words why NCCL cannot connect the ranks; nothing if it can. Collective."""
    identity = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    known = world.gather_objects((device.type, dist.is_nccl_available()), "choosing a channel")
    lacking = [f"rank {rank} computes on {kind}" for rank, (kind, _) in enumerate(known) if kind != "cuda"]
    lacking += [f"rank {rank}'s PyTorch has no NCCL" for rank, (_, has_nccl) in enumerate(known) if not has_nccl]
    prints = world.exchange("choosing a channel", block=digest(identity.encode()).to_bytes(8, "little")).blocks()
    first: dict[bytes, int] = {}
    for rank, (kind, _) in enumerate(known):
        if kind == "cuda" and first.setdefault(prints[rank], rank) != rank:
            lacking.append(f"ranks {first[prints[rank]]} and {rank} share a GPU")
    return lacking


def neighbours(hosts: tuple[str, ...]) -> list[Pair]:
    """Returns pairs of ranks: each rank with the next, and with the next one on its host."""
    ranks = range(len(hosts))
    by_host = sorted(ranks, key=lambda rank: (hosts[rank], rank))
    nexts = [*pairwise(ranks), *pairwise(by_host)]
    return sorted({(min(pair), max(pair)) for pair in nexts})


def own_addresses() -> list[str]:
    """Returns the IPv4 addresses of this host's interfaces, the loopback's left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def reachable(hosts: Sequence[str], port: int) -> str:
    """Returns the first of a host's names and addresses at which somebody listens on a port; else the first."""
    for host in hosts:
        with suppress(OSError), socket.create_connection((host, port), _CONNECT_SECONDS):
            return host
    return hosts[0]
