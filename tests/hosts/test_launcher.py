"""A job that runs once says truly how it ended, whose fault it was, and leaves nothing on any host."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.elastic_run import SCRIPT, leftovers, train_alone
from tests.hosts.emulation import PATH, Command, Hosts, wait_for
from tests.mpi.launch import find_mpirun, read_until
from tests.products import WHOLE, some

pytestmark = pytest.mark.timeout(300)
PAIR = ["h1", "h2"]
SHORT = (SCRIPT, "4", "0.0")
LONG = (SCRIPT, "100000", "0.05") if WHOLE else (SCRIPT.with_name("mpi_steps.py"),)
CLEAN_SECONDS = 10.0


@contextmanager
def one_run(
    hosts: Hosts, script: Sequence[str | Path], *options: str, names: Sequence[str] = PAIR, path: str = PATH
) -> Iterator[Command]:
    """Returns a run of ``run_varuna --no_morphing``, which is killed at the end of the context if it still runs."""
    (hosts.shared / "machines").write_text("".join(f"{name}\n" for name in names))
    call = [sys.executable, "-m", "autovaruna.run_varuna", "--no_morphing", "--machine_list", "machines"]
    words = [*call, "--gpus_per_node", "1", *options, *script]
    command = hosts.start("h1", words, cwd=hosts.shared, env={"PATH": path})
    try:
        yield command
    finally:
        command.end()


def finish(run: Command) -> tuple[int, str]:
    """Returns status and words of a run that ends soon."""
    out, err = run.communicate(timeout=150.0)
    return run.returncode, out + err


@pytest.mark.parametrize("is_launched", some((True, False), 1), ids=lambda each: "launcher" if each else "mpirun")
def test_ranks_of_two_hosts_train_with_the_bits_of_one_process(hosts: Hosts, is_launched: bool):
    """Names and addresses are one machine to the launcher, and the virtual environment need not be on its path."""
    alone = train_alone(*SHORT).splitlines()
    assert len(alone) == 1 + 4 + 1
    if is_launched:
        path = PATH.partition(":")[2]
        with one_run(hosts, SHORT, names=["h1", "10.77.0.1", "10.77.0.2"], path=path) as run:
            out, err = run.communicate(timeout=150.0)
        assert run.returncode == 0 and out.splitlines() == [f"[0] {line}" for line in alone], out + err
        assert not leftovers(hosts, CLEAN_SECONDS)
    else:
        place = ["-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "--bind-to", "none", "--host", "h1:2,h2:1"]
        call = [find_mpirun(), *place, sys.executable, *SHORT]
        assert hosts.run("h1", call, timeout=120, cwd=hosts.shared).stdout.splitlines() == alone


def test_a_host_that_was_lost_is_no_success(hosts: Hosts):
    with one_run(hosts, LONG) as run:
        read_until(run, "loss 2 ")
        hosts.kill("h2")
        status, words = finish(run)
    assert status not in (0, 75) and "never said that they ended: their host was lost" in words, words
    assert not leftovers(hosts, CLEAN_SECONDS)


def test_a_folder_that_another_host_has_not_is_named(hosts: Hosts):
    hosts.run("h1", ["mkdir", "/run/home/code"])
    with one_run(hosts, SHORT, "--code_dir", "/run/home/code") as run:
        status, words = finish(run)
    hosts.run("h1", ["rmdir", "/run/home/code"])
    assert status == 1 and "--code_dir /run/home/code cannot be used on h2: No such file" in words, words


def test_no_process_is_left_of_a_launcher_that_is_killed(hosts: Hosts):
    """The folder of an mpirun whose launcher has gone is removed by the next job."""
    with one_run(hosts, LONG) as run:
        read_until(run, "loss 2 ")
        run.kill()
        wait_for(lambda: all("/tmp/ompi." in each for each in leftovers(hosts, 0.0)), "the end of all", CLEAN_SECONDS)


def test_an_interrupted_launcher_leaves_nothing(hosts: Hosts):
    with one_run(hosts, LONG) as run:
        read_until(run, "loss 2 ")
        begin = time.monotonic()
        run.send_signal(signal.SIGINT)
        status, words = finish(run)
        assert status == 130 and time.monotonic() - begin < CLEAN_SECONDS, words
        assert not leftovers(hosts, CLEAN_SECONDS)
