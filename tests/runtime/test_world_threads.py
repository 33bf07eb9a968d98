"""Holds the laws of worlds for threads of one process, and what ends their waits."""

import time

import pytest
import torch

from autovaruna.errors import RankError
from autovaruna.runtime.environment import get_world
from autovaruna.runtime.transport.base import GROUP_CHANNEL, Part
from autovaruna.runtime.transport.threads import ThreadTransport
from autovaruna.runtime.world import World
from tests.ranks import run_ranks
from tests.runtime.world_laws import LAWS


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, num_ranks: int) -> None:
    run_ranks(num_ranks, LAWS[law])


class Late(Part):
    """A message that comes a while after it came."""

    def __init__(self, pending: Part) -> None:
        self.pending = pending
        self.due = time.monotonic() + 0.1

    def is_done(self) -> bool:
        return time.monotonic() > self.due and self.pending.is_done()


def test_a_sum_is_done_when_all_its_pieces_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 2 MiB and a bit: the bit is exchanged once, and came before the second exchange of the rest."""
    post_receive = ThreadTransport.post_receive

    def post(self: ThreadTransport, tensor: torch.Tensor, source: int, channel: int, tag: int) -> Part:
        pending = post_receive(self, tensor, source, channel, tag)
        return Late(pending) if channel == GROUP_CHANNEL and tag % 4 == 1 else pending

    monkeypatch.setattr(ThreadTransport, "post_receive", post)

    def run(world: World) -> bool:
        tensor = torch.full(((2 << 18) + 100,), float(1 + world.rank))
        world.all_reduce(tensor, (0, 1))
        return bool((tensor == 3).all())

    assert run_ranks(2, run) == [True, True]


def test_results_come_by_rank() -> None:
    assert run_ranks(3, lambda world: world.rank * 10) == [0, 10, 20]


def test_a_thread_finds_its_own_world() -> None:
    assert run_ranks(3, lambda world: get_world() is world) == [True] * 3
    assert get_world() is get_world()


def test_the_first_error_ends_the_waits_of_all() -> None:
    seen: list[str] = []

    def run(world: World) -> None:
        if world.rank == 1:
            raise KeyError("broken")
        try:
            world.barrier("step 3")
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="broken"):
        run_ranks(3, run)
    assert len(seen) == 2 and all(text.startswith("rank 1 failed: KeyError") for text in seen)


def test_abort_tells_the_others_where() -> None:
    def run(world: World) -> None:
        if world.rank == 0:
            world.abort(ValueError("no"), "rank 0, stage 2, micro-batch 1")
        with pytest.raises(RankError, match="rank 0, stage 2, micro-batch 1: ValueError: no"):
            world.receive([torch.empty(1)], 0, 0).wait()

    with pytest.raises(ValueError, match="no"):
        run_ranks(2, run)


def compute_for_ever(world: World) -> None:
    """Does nothing with other ranks, but looks now and then whether one has failed."""
    while True:
        time.sleep(0.01)
        world.progress()


def test_a_rank_that_only_computes_learns_of_a_failure() -> None:
    heard = []

    def run(world: World) -> None:
        if world.rank == 1:
            world.abort(ValueError("no"), "rank 1, stage 0")
        with pytest.raises(RankError) as raised:
            compute_for_ever(world)
        heard.append(str(raised.value))

    with pytest.raises(ValueError, match="no"):
        run_ranks(2, run)
    assert len(heard) == 1 and heard[0].startswith("rank 1, stage 0: ValueError: no")


def test_an_ended_rank_is_missed_in_a_collective() -> None:
    def run(world: World) -> None:
        if world.rank == 0:
            world.barrier("step 3")

    with pytest.raises(RankError, match="rank 1 ended its script while rank 0 waits in 'step 3'"):
        run_ranks(2, run)


def test_an_ended_rank_is_missed_by_a_receiver() -> None:
    def run(world: World) -> None:
        if world.rank == 0:
            world.receive([torch.empty(1)], 1, 4).wait()

    with pytest.raises(RankError, match=r"rank 1 ended its script while rank 0 waits for a message of rank 1 \(tag 4"):
        run_ranks(3, run)


def test_what_an_ended_rank_has_sent_still_arrives() -> None:
    def run(world: World) -> float:
        buffer = torch.zeros(1)
        if world.rank == 1:
            world.send([torch.ones(1)], 0, 4)
        else:
            time.sleep(0.8)
            world.receive([buffer], 1, 4).wait()
        return buffer.item()

    assert run_ranks(2, run) == [1.0, 0.0]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """Each receives before it sends; a third rank, in a collective, waits for both."""

    def run(world: World) -> None:
        if world.rank == 2:
            world.barrier("step 1")
        world.receive([torch.empty(1)], 1 - world.rank, 0).wait()

    with pytest.raises(RankError, match="wait for each other") as raised:
        run_ranks(3, run)
    for place in ("rank 0 waits for a message of rank 1", "rank 1 waits for", "rank 2 waits in 'step 1'"):
        assert place in str(raised.value)


def test_a_collective_against_a_message_is_found() -> None:
    def run(world: World) -> None:
        if world.rank == 0:
            world.gather_objects(None, "state_dict")
        else:
            world.receive([torch.empty(1)], 0, 0).wait()

    with pytest.raises(RankError, match="rank 0 waits in 'state_dict'; rank 1 waits for a message of rank 0"):
        run_ranks(2, run)


def test_a_reduction_that_a_rank_never_starts_is_found() -> None:
    def run(world: World) -> None:
        if world.rank < 2:
            world.all_reduce(torch.ones(10), (0, 1, 2))

    with pytest.raises(RankError, match=r"rank 2 ended its script while rank . waits for a sum or a copy among ranks"):
        run_ranks(3, run)


def test_slow_ranks_are_never_accused() -> None:
    def run(world: World) -> None:
        if world.rank == 1:
            time.sleep(2.0)
            world.send([torch.ones(1)], 0, 0)
        elif world.rank == 0:
            world.receive([torch.empty(1)], 1, 0).wait()
        world.barrier("end")

    run_ranks(3, run)


def test_a_rank_that_stays_away_from_a_disagreement_is_named() -> None:
    def run(world: World) -> None:
        if world.rank == 2:
            compute_for_ever(world)
        else:
            world.barrier(f"call of {world.rank}")

    with pytest.raises(RankError, match="rank 1 is in 'call of 1', rank 2 is not in a collective call"):
        run_ranks(3, run)


def test_a_late_rank_fails_the_run() -> None:
    with pytest.raises(TimeoutError, match=r"ranks .* took longer than 0.2 s"):
        run_ranks(2, lambda world: time.sleep(world.rank), timeout_seconds=0.2)
