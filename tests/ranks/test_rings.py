"""Tests rings in one process: both ends see the same memory, as two ranks do."""

from __future__ import annotations

import gc
import os
import platform
import random
from collections import defaultdict, deque
from collections.abc import Callable
from mmap import mmap

import pytest
import torch
from torch import Tensor

from autovaruna.ranks.transport import rings
from autovaruna.ranks.transport.base import DONE, Arrival, TensorTransfer
from autovaruna.ranks.transport.layout import Layout
from autovaruna.ranks.transport.rings import MAX_BYTES, NUM_BYTES, SLOT_BYTES, RingReceiver, RingSender
from autovaruna.ranks.world import World
from tests.rank_threads import run_ranks

LARGE = Layout((600, 700), (700, 1), torch.float32)


def make_ring() -> tuple[RingSender, RingReceiver]:
    """Returns both ends of a ring."""
    memory = mmap(-1, NUM_BYTES)
    return RingSender(memory), RingReceiver(memory, 0)


def send(sender: RingSender, tensor: Tensor, key: int) -> TensorTransfer:
    """Sends a tensor at once or when there is room, as the transport does."""
    return DONE if sender.put(tensor, key) else sender.queue(tensor, key)


def borrowed(receiver: RingReceiver, layout: Layout = LARGE, key: int = 0) -> Tensor:
    """Returns the next message, which must be there."""
    tensor = receiver.borrow(layout, key)
    assert tensor is not None
    return tensor


def layout_of(size: int) -> Layout:
    return Layout((size,), (1,), torch.uint8)


class Traffic:
    """Random messages of some sizes, in bytes. Those of keys 0 and 1 are borrowed, those of 2 posted."""

    def __init__(self, seed: int, sizes: list[int]) -> None:
        self.random = random.Random(seed)
        self.sizes = sizes
        self.sender, self.receiver = make_ring()
        self.sent: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self.leaving: list[TensorTransfer] = []
        self.posted: list[tuple[Arrival, Tensor, Tensor]] = []
        self.kept: list[tuple[Tensor, Tensor]] = []

    def send(self) -> None:
        """Sends a message that says by its numbers which one it is."""
        key, size = self.random.randrange(3), self.random.choice(self.sizes)
        tensor = torch.full((size,), self.random.randrange(256), dtype=torch.uint8)
        self.sent[key].append(tensor)
        self.leaving.append(send(self.sender, tensor, key))

    def take(self) -> None:
        """Takes a message that was sent, if it is there, or posts its receive."""
        keys = [key for key, tensors in self.sent.items() if tensors]
        if not keys:
            return
        key = self.random.choice(keys)
        expected = self.sent[key][0]
        if key == 2:
            tensor = torch.empty_like(self.sent[key].popleft())
            self.posted.append((self.receiver.post(tensor, key), tensor, expected))
        elif (arrived := self.receiver.borrow(layout_of(len(expected)), key)) is not None:
            self.kept.append((arrived, self.sent[key].popleft()))

    def look(self) -> None:
        """Looks for messages whose receive was posted."""
        for arrival, tensor, expected in self.posted:
            if arrival.is_done():
                assert torch.equal(tensor, expected)
        self.posted = [each for each in self.posted if not each[0].is_done()]

    def drop(self) -> None:
        """Forgets some of what has come, once it is known to be what was sent."""
        for _ in range(self.random.randrange(len(self.kept) + 1)):
            tensor, expected = self.kept.pop(self.random.randrange(len(self.kept)))
            assert torch.equal(tensor, expected)

    def end(self) -> None:
        """Lets all messages come that were sent."""
        for _ in range(10_000):
            if not any(self.sent.values()) and not self.posted:
                break
            self.take()
            self.look()
            self.sender.advance()
        assert not any(self.sent.values()) and not self.posted and all(each.is_done() for each in self.leaving)
        for tensor, expected in self.kept:
            assert torch.equal(tensor, expected)


@pytest.mark.parametrize("seed", range(6))
def test_messages_arrive_in_order_whatever_each_end_does(seed: int) -> None:
    sizes = [0, 1, 1000, SLOT_BYTES, SLOT_BYTES + 1, 300_001, 5_000_000, MAX_BYTES]
    traffic = Traffic(seed, sizes if seed % 2 else sizes[:6])
    acts: list[Callable[[], None]] = [traffic.send, traffic.send, traffic.take, traffic.look, traffic.drop]
    for _ in range(150):
        traffic.random.choice(acts)()
    traffic.end()


def test_memory_is_lent_again_once_no_tensor_and_no_view_lies_there() -> None:
    sender, receiver = make_ring()
    send(sender, torch.full(LARGE.shape, -1.0), 0)
    kept = borrowed(receiver).view(-1)[10:20].detach()
    gc.collect()
    places = set()
    for turn in range(50):
        send(sender, torch.full(LARGE.shape, float(turn)), 0)
        view = borrowed(receiver)[3:, 5:]
        places.add(view.data_ptr())
        assert bool((view == turn).all())
    assert len(places) <= 2 and bool((kept == -1).all())


def test_a_message_comes_past_others_that_nobody_takes() -> None:
    """However full all memory is, for what waits there is copied."""
    sender, receiver = make_ring()
    pending = [send(sender, torch.full(LARGE.shape, float(turn)), 1) for turn in range(30)]
    pending.append(send(sender, torch.full(LARGE.shape, 99.0), 0))
    for _ in range(100):
        if (tensor := receiver.borrow(LARGE, 0)) is not None:
            break
        sender.advance()
    assert tensor is not None and bool((tensor == 99).all())
    assert all(bool((borrowed(receiver, key=1) == turn).all()) for turn in range(30))


def test_what_two_micro_batches_send_over_a_cut_with_skips_leaves_at_once() -> None:
    """It waited for room until the receiver had ended what it computed: a U-Net took an eighth longer for a step."""
    sender, receiver = make_ring()
    skips = [torch.zeros(num_bytes, dtype=torch.uint8) for num_bytes in (MAX_BYTES, 4 << 20, 2 << 20, 1 << 20)]
    sent = [send(sender, each, 0) for each in (*skips, *skips)]
    assert all(each.is_done() for each in sent)
    kept = [borrowed(receiver, layout_of(each.numel())) for each in skips]
    assert all(0 <= each.data_ptr() - receiver.shared.address < NUM_BYTES for each in kept), "where both ends see it"


def test_a_forked_process_gives_nothing_back() -> None:
    """It holds copies of the tensors, which it may forget, as a loader's worker does."""
    sender, receiver = make_ring()
    send(sender, torch.ones(LARGE.shape), 0)
    tensor = borrowed(receiver)
    child = os.fork()
    if not child:
        del tensor
        os._exit(0)
    os.waitpid(child, 0)
    send(sender, torch.zeros(LARGE.shape), 0)
    receiver.advance()
    assert bool((tensor == 1).all())


def rings_between(num_ranks: int, pairs: list[tuple[int, int]], can_share: Callable[[int], bool]) -> list[str]:
    """Opens rings on ranks of one process, tries each, and says which each rank has."""

    def tried(world: World) -> str:
        own, hosts, swap = world.rank, world.hosts, world.swap_objects
        senders, receivers = rings.open_rings(own, hosts, pairs, can_share(own), swap)
        for there, ring in senders.items():
            send(ring, torch.tensor([world.rank, there]), 0)
        world.barrier("sent")
        for source, ring in receivers.items():
            buffer = torch.empty(2, dtype=torch.int64)
            assert ring.post(buffer, 0).is_done()
            assert buffer.tolist() == [source, world.rank]
        return f"to {sorted(senders)} from {sorted(receivers)}"

    return run_ranks(num_ranks, tried)


def test_both_ends_have_a_ring_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python was built for an older system, as that of conda is: its `os` has no files in memory."""
    monkeypatch.delattr(os, "memfd_create")
    pairs = [(0, 1), (1, 0), (1, 2), (2, 0), (2, 2)]
    assert rings_between(3, pairs, lambda rank: True) == ["to [1] from [1, 2]", "to [0, 2] from [0]", "to [0] from [1]"]
    assert rings_between(3, pairs, lambda rank: rank != 1) == ["to [] from [2]", "to [] from []", "to [0] from []"]
    assert rings_between(2, [], lambda rank: True) == ["to [] from []"] * 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (rings, "_path", lambda file: "/proc/self/nothing"),
        (rings, "_path", lambda file: __file__),  # something else lies there
        (platform, "machine", lambda: "aarch64"),
        (rings, "memory_file", lambda name: os.open("/nowhere", os.O_RDONLY)),
        (os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError("no space"))),
    ],
)
def test_there_are_no_rings_where_memory_cannot_be_shared(
    owner: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between containers with a host name in common, on processors that reorder what they write, and without memory."""
    monkeypatch.setattr(owner, name, value)
    assert rings_between(2, [(0, 1), (1, 0)], lambda rank: True) == ["to [] from []"] * 2
