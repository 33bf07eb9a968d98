"""Holds `MpiWorld` to the laws of worlds, and to how a program ends. Under mpirun, the laws run on its ranks."""

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

# Seconds from the failure until mpirun has ended.
END_SECONDS = 5.0
FAILURES = {
    "error": ["rank 1 failed:", "in error", "ValueError: the story's error"],
    "error_while_busy": ["rank 1 failed:", "ValueError: the story's error"],
    "error_in_thread": ["rank 1 failed in thread", "ValueError: invalid literal for int() with base 10: \"the story's"],
    "error_everywhere": ["rank 0 failed:", "ValueError: the story's error"],
    "agreed_error": ["rank 1 failed:", "ValueError: the story's error"],
    "exit_status": [],
    "ended": ["RankError: rank 1 ended its script while rank 0 waits in 'step 3'"],
    "ended_before_message": ["RankError: rank 1 ended its script while rank 0 waits for a message of rank 1 (tag 4)"],
    "waiting_for_each_other": ["RankError: ranks wait for each other and can never go on: rank 0 waits for a message"],
    "abort": ["rank 1, stage 2, micro-batch 5:", "ValueError: the story's error"],
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
    done = mpirun(2, HERE, story, tmp_path / "start", check=False)
    seconds = time.time() - float((tmp_path / "start").read_text())
    assert done.returncode != 0
    assert seconds < END_SECONDS, done.stderr
    for text in FAILURES[story]:
        assert text in done.stderr
    assert done.stderr.count("Traceback") == (story != "exit_status"), done.stderr


def test_a_normal_end_has_status_0(tmp_path: Path) -> None:
    done = mpirun(2, HERE, "normal", tmp_path / "start")
    assert done.stderr == ""


def test_messages_larger_than_an_int_counts() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    assert run_on_ranks(2, f"{HERE}:huge_message", (2 << 30) + 12_345) == [True, True]


@cache
def facts() -> list[dict[str, Any]]:
    return run_on_ranks(2, f"{HERE}:facts", env={"OMP_NUM_THREADS": ""})


def test_small_messages_are_fast() -> None:
    assert min(fact["ping"] for fact in facts()) < 100e-6


def test_links_are_measured() -> None:
    for fact in facts():
        local, remote, all_reduce, seconds = fact["links"]
        assert local == remote and 0 < local.latency_seconds < 1e-3
        assert local.bytes_per_second > 1e8 and all_reduce > 1e7
        assert seconds < 2.0


def test_ranks_of_a_host_share_its_cores() -> None:
    assert [fact["threads"] for fact in facts()] == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
