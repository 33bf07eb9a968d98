"""Opens rings between ranks of one host: memory without a name, which ends with the last of its processes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable
from mmap import mmap
from secrets import token_bytes
from typing import NamedTuple

from autovaruna.runtime.worlds.rings.memory import NUM_BYTES
from autovaruna.runtime.worlds.rings.receiver import RingReceiver
from autovaruna.runtime.worlds.rings.sender import RingSender
from autovaruna.runtime.worlds.world import World

Pair = tuple[int, int]
"""The rank that sends, and the one that receives."""
_TOKEN_BYTES = 16
_WHAT = "opening rings"
_CLOSED_ON_EXEC = 1
_ORDERED = ("x86_64", "AMD64")
"""Processors whose cores see each other's writes in the order in which they were made."""


class _Offer(NamedTuple):
    """Where another process finds memory of this one, and how it knows that it is the right one."""

    path: str
    token: bytes


class _Memory(NamedTuple):
    """Memory that another process may open until its file is closed."""

    memory: mmap
    offer: _Offer
    file: int


def open_rings(
    world: World, pairs: Iterable[Pair], can_share: bool
) -> tuple[dict[int, RingSender], dict[int, RingReceiver]]:
    """Opens a ring for each pair of ranks that can share memory. Collective.

    Args:
        world: The ranks.
        pairs: The same on every rank.
        can_share: Whether this rank is to share memory.

    Returns:
        The rings to other ranks, and those from other ranks, by these. Both ends have a ring, or none.
    """
    rank, hosts = world.rank, world.hosts
    near = [(i, j) for i, j in sorted(set(pairs)) if i != j and hosts[i] == hosts[j]]
    if not near:
        return {}, {}
    sources = [source for source, there in near if there == rank and can_share]
    made = {source: memory for source in sources if (memory := _memory()) is not None}
    offers = world.gather_objects({source: each.offer for source, each in made.items()}, _WHAT)
    wanted = {there: offers[there].get(rank) for source, there in near if source == rank and can_share}
    found = {there: seen for there, offer in wanted.items() if offer and (seen := _memory_of(offer)) is not None}
    reached = world.gather_objects(set(found), _WHAT)
    for each in made.values():
        os.close(each.file)
    senders = {there: RingSender(seen) for there, seen in found.items()}
    return senders, {source: RingReceiver(made[source].memory, source) for source in made if rank in reached[source]}


def _memory() -> _Memory | None:
    """Makes memory for a ring; None where it cannot be shared, or writes may be seen in another order."""
    if platform.machine() not in _ORDERED or sys.platform != "linux":
        return None
    file = -1
    try:
        file = _file_in_memory()
        os.ftruncate(file, NUM_BYTES + _TOKEN_BYTES)
        memory = mmap(file, NUM_BYTES + _TOKEN_BYTES)
    except OSError:
        if file >= 0:
            os.close(file)
        return None
    token = token_bytes(_TOKEN_BYTES)
    memory[NUM_BYTES:] = token
    return _Memory(memory, _Offer(_path(file), token), file)


def _file_in_memory() -> int:
    """Opens a new file without a name that lies in memory.

    Raises:
        OSError: the system has none, or no more.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("autovaruna")
    make = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)  # Python was built for an older system
    file = -1 if make is None else int(make(b"autovaruna", _CLOSED_ON_EXEC))
    if file < 0:
        raise OSError(ctypes.get_errno(), "there are no files in memory")
    return file


def _path(file: int) -> str:
    """Returns where other processes find an open file of this one, as long as it is open."""
    return f"/proc/{os.getpid()}/fd/{file}"


def _memory_of(offer: _Offer) -> mmap | None:
    """Returns memory of another process; None: it cannot be reached from here, or something else lies there."""
    try:
        file = os.open(offer.path, os.O_RDWR)
        try:
            memory = mmap(file, NUM_BYTES + _TOKEN_BYTES)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return memory if memory[NUM_BYTES:] == offer.token else None
