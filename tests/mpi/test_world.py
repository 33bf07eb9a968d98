"""Holds ranks of MPI to the laws of worlds, and to how a program ends. Under mpirun, the laws run on its ranks."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autovaruna.runtime.environment import get_world, num_ranks_in
from tests.mpi.launch import mpirun, run_on_ranks
from tests.runtime.world_laws import LAWS

NUM_RANKS_HERE = num_ranks_in(os.environ)
HERE = "tests.mpi.world_on_ranks"

# Seconds from the failure until mpirun has ended; where a job takes longer to start than it should, more.
END_SECONDS = 5.0
START_SECONDS = 5.0
NUM_TRIES = 3
FAILURES = {
    "error": ["rank 1 failed:", "in error", "ValueError: the story's error"],
    "error_behind_a_hook": ["rank 1 failed:", "in error", "ValueError: the story's error"],
    "error_shown_by_another": ["in error", "ValueError: the story's error"],
    "error_in_thread": ["rank 1 failed in thread", "ValueError: invalid literal for int() with base 10: \"the story's"],
    "error_everywhere": ["rank 0 failed:", "ValueError: the story's error"],
    "ended_before_message": ["RankError: rank 1 ended its script while rank 0 waits for a message of rank 1 (tag 4)"],
    "waiting_for_each_other": ["RankError: ranks wait for each other and can never go on: rank 0 waits for a message"],
}


@cache
def broken_laws(num_ranks: int) -> list[dict[str, str]]:
    return run_on_ranks(num_ranks, f"{HERE}:try_laws")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, num_ranks: int) -> None:
    if NUM_RANKS_HERE == num_ranks > 1:
        LAWS[law](get_world())
    elif NUM_RANKS_HERE > 1:
        pytest.skip(f"on {NUM_RANKS_HERE} ranks")
    else:
        for rank, broken in enumerate(broken_laws(num_ranks)):
            assert law not in broken, f"rank {rank}: {broken[law]}"


@pytest.mark.parametrize("story", FAILURES)
def test_a_failure_ends_every_rank(story: str, tmp_path: Path) -> None:
    """With one message and in time, in one try of several: a busy machine may hold up the rank that speaks first."""
    tries = []
    for _ in range(NUM_TRIES):
        tries.append(unwanted(story, tmp_path / "start"))
        if not tries[-1]:
            return
    pytest.fail("\n\n".join(tries))


def unwanted(story: str, file: Path) -> str:
    """Runs a story, and returns what ended too late, or said too much; the rest holds in every try."""
    began = time.time()
    done = mpirun(2, HERE, story, file, check=False, is_warm=story != "error")
    started, ended = float(file.read_text()), time.time()
    assert done.returncode != 0
    assert all(text in done.stderr for text in FAILURES[story]), done.stderr
    is_one = done.stderr.count("Traceback") == 1
    is_in_time = ended - started < END_SECONDS * max(1.0, (started - began) / START_SECONDS)
    return "" if is_one and is_in_time else f"{ended - started:.1f} s\n{done.stderr}"


def test_a_normal_end_has_status_0(tmp_path: Path) -> None:
    done = mpirun(2, HERE, "normal", tmp_path / "start")
    assert done.stderr == ""


def test_messages_larger_than_an_int_counts() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    assert run_on_ranks(2, f"{HERE}:huge_message", (2 << 30) + 12_345) == [True, True]


def test_what_is_lent_comes_back() -> None:
    """What finds no room among what is lent is copied, and what was lent makes room once its tensors are gone."""
    for has_arrived, num_lent in run_on_ranks(2, f"{HERE}:lent_tensors", 60):
        assert has_arrived
        assert 20 < num_lent < 60


def test_lists_that_rings_bring_come_before_those_that_are_posted_ahead() -> None:
    """Micro-batches of uneven sizes: a small tensor was taken for one of a later list, whose receive was posted."""
    assert run_on_ranks(2, f"{HERE}:mixed_lists") == [True, True]


@cache
def facts() -> list[dict[str, Any]]:
    return run_on_ranks(2, f"{HERE}:facts", env={"OMP_NUM_THREADS": ""})


def test_links_are_measured() -> None:
    for fact in facts():
        local, remote, sums = fact["links"]
        assert local == remote and 0 < local.latency_seconds < float("inf")
        assert local.bytes_per_second > 0 and sums.bytes_per_second > 0


def test_ranks_of_a_host_share_its_cores() -> None:
    assert [fact["threads"] for fact in facts()] == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
