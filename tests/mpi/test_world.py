"""Holds ranks of MPI to the laws of worlds, and to a good end. Under mpirun, the laws run on its ranks."""

from __future__ import annotations

import os
from functools import cache

import pytest

from autovaruna.ranks.environment import get_world, num_ranks_in
from tests.mpi.launch import mpirun, run_on_ranks
from tests.products import some
from tests.ranks.world_laws import LAWS

NUM_RANKS_HERE = num_ranks_in(os.environ)
HERE = "tests.mpi.world_on_ranks"


@cache
def broken_laws(num_ranks: int) -> list[dict[str, str]]:
    return run_on_ranks(num_ranks, f"{HERE}:try_laws")


@pytest.mark.parametrize("num_ranks", some([3, 2, 4], 1) if NUM_RANKS_HERE == 1 else [NUM_RANKS_HERE])
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, num_ranks: int) -> None:
    if NUM_RANKS_HERE > 1:
        LAWS[law](get_world())
    else:
        for rank, broken in enumerate(broken_laws(num_ranks)):
            assert law not in broken, f"rank {rank}: {broken[law]}"


def test_a_normal_end_has_status_0_and_ranks_of_a_host_share_its_cores() -> None:
    done = mpirun(2, HERE, env={"OMP_NUM_THREADS": ""})
    assert set(done.stderr.splitlines()) <= {"", "libgomp: Invalid value for environment variable OMP_NUM_THREADS"}
    assert done.stdout.split() == [str(max(1, len(os.sched_getaffinity(0)) // 2))] * 2


def test_messages_larger_than_an_int_counts() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    assert run_on_ranks(2, f"{HERE}:huge_message", (2 << 30) + 12_345) == [True, True]


def test_a_message_over_tcp_comes_while_its_sender_computes() -> None:
    """Open MPI would ask the receiver first, and look for the answer when the sender calls it again."""
    done = mpirun(2, "tests.mpi.early_message", env={"OMPI_MCA_btl": "self,tcp"})
    assert float(done.stdout) < 0.5


def test_lists_that_rings_bring_come_before_those_that_are_posted_ahead() -> None:
    """Micro-batches of uneven sizes: a small tensor was taken for one of a later list, whose receive was posted."""
    assert run_on_ranks(2, f"{HERE}:mixed_lists") == [True, True]
