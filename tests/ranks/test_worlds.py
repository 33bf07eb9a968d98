"""Holds worlds of one process, and of threads in one, to their laws, and to what ends their waits."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from autovaruna.errors import RankError
from autovaruna.ranks.environment import single_world
from autovaruna.ranks.exchange import differences
from autovaruna.ranks.world import World
from tests.rank_threads import run_ranks
from tests.ranks.world_laws import LAWS


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, num_ranks: int) -> None:
    if num_ranks == 1:
        LAWS[law](single_world())
    else:
        run_ranks(num_ranks, LAWS[law])


def test_no_mpi_without_mpirun() -> None:
    script = (
        "import sys; from autovaruna.ranks.environment import get_world; "
        "assert get_world().num_ranks == 1; assert get_world() is get_world(); assert 'mpi4py' not in sys.modules"
    )
    variables = {"PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300, env=variables)


def test_abort_prints_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        single_world().abort(ValueError("no"), "rank 0, stage 1")
    assert capfd.readouterr().err.startswith("rank 0, stage 1:\nValueError: no")


def compute_for_ever(world: World) -> None:
    """Does nothing with other ranks, but looks now and then whether one has failed."""
    while True:
        time.sleep(0.01)
        world.progress()


def receive(world: World, source: int, tag: int = 0) -> float:
    buffer = torch.zeros(1)
    world.receive([buffer], source, tag).wait()
    return buffer.item()


WAITS: dict[str, Callable[[World], object]] = {
    "in a collective": lambda world: world.barrier("step 3"),
    "for a message": lambda world: receive(world, 1),
    "in no call": compute_for_ever,
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_first_error_ends_the_waits_of_all(wait: str) -> None:
    seen: list[str] = []

    def run(world: World) -> None:
        if world.rank == 1:
            world.abort(ValueError("no"), "rank 1, stage 2, micro-batch 1")
        try:
            WAITS[wait](world)
        except RankError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="no"):
        run_ranks(3, run)
    assert len(seen) == 2 and all(text.startswith("rank 1, stage 2, micro-batch 1: ValueError: no") for text in seen)


def wait_for_each_other(world: World) -> None:
    """Each receives before it sends; a third rank, in a collective, waits for both."""
    if world.rank == 2:
        world.barrier("step 1")
    receive(world, 1 - world.rank)


HOPELESS: dict[str, tuple[int, Callable[[World], object], str]] = {
    "a message of its own":
        (1, lambda world: receive(world, 0), "rank 0 waits for a message of rank 0"),
    "an ended rank in a collective":
        (2, lambda world: world.rank or world.barrier("step 3"),
         "rank 1 ended its script while rank 0 waits in 'step 3'"),
    "a message of an ended rank":
        (3, lambda world: world.rank or receive(world, 1, 4),
         r"rank 1 ended its script while rank 0 waits for a message of rank 1 \(tag 4"),
    "each other":
        (3, wait_for_each_other, "wait for each other .*: rank 0 waits for a message of rank 1 .*; "
         "rank 1 waits .*; rank 2 waits in 'step 1'"),
    "a message, from within a collective":
        (2, lambda world: receive(world, 0) if world.rank else world.gather_objects(None, "state_dict"),
         "rank 0 waits in 'state_dict'; rank 1 waits for a message of rank 0"),
    "a sum that a rank never starts":
        (3, lambda world: world.rank == 2 or world.all_reduce(torch.ones(10), (0, 1, 2)),
         "rank 2 ended its script while rank . waits for a sum or a copy among ranks"),
    "a rank away from a disagreement":
        (3, lambda world: compute_for_ever(world) if world.rank == 2 else world.barrier(f"call of {world.rank}"),
         "rank 1 is in 'call of 1', rank 2 is not in a collective call"),
}  # fmt: skip
"""What is waited for in vain: the number of ranks, what they do, and the words of the error."""


@pytest.mark.parametrize("what", HOPELESS)
def test_a_wait_that_cannot_end_is_an_error_that_says_who_is_where(what: str) -> None:
    num_ranks, run, words = HOPELESS[what]
    with pytest.raises(RankError, match=words):
        run_ranks(num_ranks, run)


def test_what_an_ended_rank_has_sent_still_arrives() -> None:
    def run(world: World) -> float:
        if world.rank == 1:
            world.send([torch.ones(1)], 0, 4)
            return 0.0
        time.sleep(0.8)
        return receive(world, 1, 4)

    assert run_ranks(2, run) == [1.0, 0.0]


def test_slow_ranks_are_never_accused() -> None:
    def run(world: World) -> None:
        if world.rank == 1:
            time.sleep(2.0)
            world.send([torch.ones(1)], 0, 0)
        elif world.rank == 0:
            receive(world, 1)
        world.barrier("end")

    run_ranks(3, run)


def test_a_long_difference_is_shown_where_it_begins() -> None:
    one, two = ({"attributes": f"{'same,' * 1000}scale:{value},{'more,' * 1000}"} for value in (1, 2))
    words = differences([one, two])
    assert "same,scale:1,more" in words and "same,scale:2,more" in words and len(words) < 1000
