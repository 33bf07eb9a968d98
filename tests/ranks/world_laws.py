"""Laws that every world keeps, on any number of ranks: `LAWS` by name. Each is called by all ranks with their world."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autovaruna.errors import PlanError, RankError
from autovaruna.ranks.world import World

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def sample(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns the tensor of one rank, which every rank can compute."""
    values = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return values > 0 if dtype is torch.bool else (values * 10).to(dtype)


def neighbours(world: World) -> tuple[int, int]:
    """Returns the next rank and the one before, in a ring."""
    return (world.rank + 1) % world.num_ranks, (world.rank - 1) % world.num_ranks


def gathers_by_rank(world: World) -> None:
    assert len(world.hosts) == world.num_ranks and 0 <= world.rank < world.num_ranks
    for turn in range(3):
        assert world.gather_objects((turn, world.rank), "law") == [(turn, r) for r in range(world.num_ranks)]
    large = world.gather_objects(bytes([world.rank]) * 300_000, "large")
    assert large == [bytes([r]) * 300_000 for r in range(world.num_ranks)]
    for root in range(world.num_ranks):
        assert world.broadcast_object({"of": world.rank}, root, "law") == {"of": root}


def agrees_on_errors(world: World) -> None:
    world.agree(None, "planning")
    failed = world.num_ranks - 1
    if world.rank == failed:
        with pytest.raises(KeyError, match="lost"):
            world.agree(KeyError("lost"), "planning")
        return
    with pytest.raises(RankError, match=f"(?s)rank {failed} failed while planning: KeyError.*lost"):
        world.agree(None, "planning")


def raises_the_same_kind_everywhere(world: World) -> None:
    with pytest.raises(PlanError, match="no plan") as raised:
        world.agree(PlanError("no plan") if world.rank == 0 else None, "planning")
    assert raised.value.is_second_hand == (world.rank > 0)


def keeps_its_own_error_when_ranks_disagree(world: World) -> None:
    if world.num_ranks == 1:
        return
    with pytest.raises(KeyError if world.rank == 1 else RankError, match=r"lost|rank 0 is in 'state_dict'"):
        if world.rank == 1:
            world.agree(KeyError("lost"), "planning")
        world.gather_objects(None, "state_dict")


def quotes_the_first_traceback(world: World) -> None:
    try:
        raise ValueError(f"bad on {world.rank}")
    except ValueError as caught:
        error = caught
    with pytest.raises(RankError if world.rank == 1 else ValueError) as raised:
        world.agree(None if world.rank == 1 else error, "tracing")
    expected = "quotes_the_first_traceback" if world.rank == 1 else f"bad on {world.rank}"
    assert expected in str(raised.value)


def tells_who_is_where(world: World) -> None:
    if world.num_ranks == 1:
        return
    label = "state_dict" if world.rank == 0 else "step 3"
    with pytest.raises(RankError, match="rank 0 is in 'state_dict', rank 1 is in 'step 3'"):
        world.gather_objects(None, label)
    world.barrier("after")


def sends_every_dtype_in_a_ring(world: World) -> None:
    after, before = neighbours(world)
    for dtype in DTYPES:
        outgoing = [sample(world.rank, size, dtype) for size in (7, 0, 1, 70_000)]
        incoming = [torch.empty_like(tensor) for tensor in outgoing]
        pending = world.receive(incoming, before, 5)
        world.send(outgoing, after, 5)
        pending.wait()
        for tensor in incoming:
            assert torch.equal(tensor, sample(before, tensor.numel(), dtype))
    world.flush()


def keeps_layouts(world: World) -> None:
    last = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for tensor in (last, torch.arange(6).view(2, 3).t(), torch.arange(10.0)[3:7], torch.tensor(3.0)):
        buffer = torch.empty_like(tensor)
        assert buffer.stride() == tensor.stride()
        pending = world.receive([buffer], world.rank, 0)
        world.send([tensor], world.rank, 0)
        pending.wait()
        assert torch.equal(buffer, tensor)


def refuses_holes(world: World) -> None:
    holes = torch.zeros(4, 4)[:, :2]
    for bad in (holes, torch.zeros(1).expand(3), torch.zeros(3, dtype=torch.complex64).conj()):
        with pytest.raises(AssertionError):
            world.send([bad], world.rank, 0)


def sends_nothing(world: World) -> None:
    """A message of no tensors, and of tensors without elements, arrives as any other does."""
    after, before = neighbours(world)
    for shapes in ((), ((0,),), ((3, 0), (0,)), ((0,),)):
        pending = world.receive([torch.empty(shape) for shape in shapes], before, 0)
        world.send([torch.empty(shape) for shape in shapes], after, 0).wait()
        pending.wait()
        assert pending.is_done()


def keeps_the_order_sent(world: World) -> None:
    after, before = neighbours(world)
    sizes = [1, 300_000, 2, 50_000, 3] * 4
    for i, size in enumerate(sizes):
        world.send([torch.full((size,), i)], after, i % 2)
    buffers = [torch.empty(size, dtype=torch.int64) for size in sizes]
    pending = [world.receive([buffer], before, i % 2) for i, buffer in enumerate(buffers)]
    for item in reversed(pending):
        item.wait()
    for i, buffer in enumerate(buffers):
        assert bool((buffer == i).all())
    world.flush()


def sends_objects(world: World) -> None:
    after, before = neighbours(world)
    sent = [{"from": world.rank}, None, list(range(100_000))]
    for item in sent:
        world.send_object(item, after, 9)
    world.send([torch.ones(2)], after, 9)
    assert [world.receive_object(before, 9) for _ in sent] == [{"from": before}, None, list(range(100_000))]
    buffer = torch.empty(2)
    world.receive([buffer], before, 9).wait()
    assert buffer.tolist() == [1.0, 1.0]


def forgets_finished_sends(world: World) -> None:
    pending = [world.receive([torch.empty(1)], world.rank, 1) for _ in range(20)]
    sends = [world.send([torch.ones(1)], world.rank, 1) for _ in range(20)]
    for item in pending:
        item.wait()
    world.progress()
    assert all(item.is_done() for item in sends)


def in_order(parts: list[Tensor]) -> Tensor:
    """Returns the sum of the parts, first to last, as the contract has it."""
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total | part if wide is torch.bool else total + part
    return total.to(parts[0].dtype)


def sums_every_dtype_in_one_order(world: World) -> None:
    ranks = tuple(range(world.num_ranks))
    for dtype in DTYPES:
        for size in (0, 1, 5, 4_999, 30_001, *[1_200_017] * (dtype is torch.float32)):  # the largest goes in pieces
            tensor = sample(world.rank, size, dtype)
            world.all_reduce(tensor, ranks)
            assert torch.equal(tensor, in_order([sample(rank, size, dtype) for rank in ranks])), (dtype, size)


def sums_in_groups_at_once(world: World) -> None:
    groups = [tuple(range(world.num_ranks)), tuple(reversed(range(world.num_ranks))), (world.rank,)]
    tensors = [[sample(world.rank, size, torch.float32) for size in (3, 200_000, 9)] for _ in groups]
    pending = [world.start_all_reduce(t, ranks) for row, ranks in zip(tensors, groups, strict=True) for t in row]
    for item in reversed(pending):
        item.wait()
    for row, ranks in zip(tensors, groups, strict=True):
        for tensor in row:
            assert torch.equal(tensor, in_order([sample(r, tensor.numel(), torch.float32) for r in ranks]))


def shares_of(world: World, whose: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Returns tensors of every rank, as `whose` has them: of no, one and several pieces, and of unlike sizes."""
    sizes = ((5, 700_001), (), (30_001,), (1, 2))
    return [[sample(whose, size, dtype) for size in sizes[rank % 4]] for rank in range(world.num_ranks)]


def sums_each_share_on_its_rank(world: World) -> None:
    ranks = tuple(range(world.num_ranks))
    for dtype in (torch.float32, torch.bfloat16):
        own = shares_of(world, world.rank, dtype)
        world.start_shares(own, ranks, gathers=False).wait()
        expected = [shares_of(world, rank, dtype)[world.rank] for rank in ranks]
        for place, tensor in enumerate(own[world.rank]):
            assert torch.equal(tensor, in_order([share[place] for share in expected]))


def gives_each_share_to_all(world: World) -> None:
    ranks = tuple(reversed(range(world.num_ranks)))
    shares = shares_of(world, world.rank, torch.float32)
    world.start_shares(shares, ranks, gathers=True).wait()
    for place, rank in enumerate(ranks):
        for tensor, expected in zip(shares[place], shares_of(world, rank, torch.float32)[place], strict=True):
            assert torch.equal(tensor, expected)


def sums_by_itself_while_others_wait(world: World) -> None:
    """A reduction that was started before a collective goes on while the ranks wait in it, and is there after."""
    tensor = torch.ones(100_000)
    pending = world.start_all_reduce(tensor, tuple(range(world.num_ranks)))
    world.barrier("between")
    pending.wait()
    assert bool((tensor == world.num_ranks).all())


def keeps_the_layout_of_sums(world: World) -> None:
    tensor = torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    expected = tensor * world.num_ranks
    world.all_reduce(tensor, tuple(range(world.num_ranks)))
    assert torch.equal(tensor, expected)


def broadcasts_among_some(world: World) -> None:
    for ranks in {tuple(range(world.num_ranks)), tuple(reversed(range(world.num_ranks))), (world.rank,)}:
        for root in ranks:
            for size in (1001, 0):
                tensor = sample(world.rank, size, torch.bfloat16)
                world.broadcast(tensor, root, ranks)
                assert torch.equal(tensor, sample(root, size, torch.bfloat16))


def refuses_another_size(world: World) -> None:
    if world.num_ranks == 1:
        return
    for sent, expected in ((4, 3), (3, 4)):
        if world.rank == 0:
            world.send([torch.zeros(sent)], 1, 77)
        elif world.rank == 1:
            with pytest.raises(RankError, match=f"{4 * expected}"):
                world.receive([torch.zeros(expected)], 0, 77).wait()
    world.barrier("after")


def raises_what_does_not_pickle(world: World) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        world.gather_objects(lambda: None, "law")
    world.barrier("after")


LAWS: dict[str, Callable[[World], None]] = {
    name: each
    for name, each in globals().items()
    if getattr(each, "__annotations__", {}) == {"world": "World", "return": "None"}
}
"""All functions above that a world is given, and that return nothing."""
