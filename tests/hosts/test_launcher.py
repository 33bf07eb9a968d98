"""A job that runs once says truly how it ended, whose fault it was, and leaves nothing on any host."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Command, Hosts, wait_for
from tests.products import some

pytestmark = pytest.mark.timeout(200)
NUM_STEPS, STEP_SECONDS = "4", "0.0"
LONG = ("100000", "0.05")
CLEAN_SECONDS = 10.0


class OneRun:
    """A run of ``run_varuna --no_morphing`` that has come to a step.

    Args:
        hosts: Where it runs.
        names: The machine list.
        words: The script's arguments.
        options: More of the launcher's options.
    """

    def __init__(
        self, hosts: Hosts, names: Sequence[str], words: Sequence[str] = LONG, options: Sequence[str] = ()
    ) -> None:
        (hosts.shared / "machines").write_text("".join(f"{name}\n" for name in names))
        call = [sys.executable, "-m", "autovaruna.run_varuna", "--no_morphing", "--machine_list", "machines"]
        call += ["--gpus_per_node", "1", *options, str(SCRIPT), *words]
        self.command: Command = hosts.start("h1", call, cwd=hosts.shared)

    def __enter__(self) -> OneRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.command.end()

    def wait_for_a_step(self) -> None:
        """Returns when a step is done."""
        assert self.command.stdout is not None
        for line in self.command.stdout:
            if "loss 2 " in line:
                return
        raise AssertionError(self.command.communicate(timeout=20.0)[1])

    def finish(self) -> tuple[int, str]:
        """Returns status and words of a run that ends within seconds."""
        out, err = self.command.communicate(timeout=60.0)
        return self.command.returncode, out + err


def rank_on(hosts: Hosts, host: str) -> int:
    """Returns the process of a host's one rank."""
    wait_for(lambda: bool(hosts.processes(host, "rank_script.py")), f"a rank on {host}")
    return hosts.processes(host, "rank_script.py")[0][0]


def test_a_lost_host_is_no_success(two_hosts: Hosts):
    with OneRun(two_hosts, ["h1", "h2"]) as run:
        run.wait_for_a_step()
        two_hosts.kill("h2")
        status, words = run.finish()
    assert status not in (0, 75) and "never said that they ended: their host was lost" in words, words
    assert not leftovers(two_hosts, CLEAN_SECONDS)


def test_the_rank_that_was_killed_is_named(two_hosts: Hosts):
    with OneRun(two_hosts, ["h1", "h2"]) as run:
        run.wait_for_a_step()
        os.kill(rank_on(two_hosts, "h2"), signal.SIGKILL)
        status, words = run.finish()
    assert status == 137 and "rank 1 was ended by SIGKILL" in words, words
    assert not leftovers(two_hosts, CLEAN_SECONDS)


def test_names_and_addresses_are_one_machine(two_hosts: Hosts):
    with OneRun(two_hosts, ["h1", "10.77.0.1", "10.77.0.2"], [NUM_STEPS, STEP_SECONDS]) as run:
        status, words = run.finish()
    assert status == 0 and "[0] weights" in words, words
    assert not leftovers(two_hosts, CLEAN_SECONDS)


def test_a_folder_that_another_host_has_not_is_named(two_hosts: Hosts):
    two_hosts.run("h1", ["mkdir", "/run/home/code"])
    with OneRun(two_hosts, ["h1", "h2"], [NUM_STEPS, STEP_SECONDS], ["--code_dir", "/run/home/code"]) as run:
        status, words = run.finish()
    two_hosts.run("h1", ["rmdir", "/run/home/code"])
    assert status == 1 and "--code_dir /run/home/code cannot be used on h2: No such file" in words, words


def test_a_virtual_environment_need_not_be_on_the_path(two_hosts: Hosts):
    path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    call = [sys.executable, "-m", "autovaruna", "run", "--machine_list", "machines", "--ranks_per_host", "1"]
    (two_hosts.shared / "machines").write_text("h1\nh2\n")
    done = two_hosts.run("h1", [*call, SCRIPT, NUM_STEPS, STEP_SECONDS], cwd=two_hosts.shared, env=path)
    assert "[0] weights" in done.stdout


def test_nothing_is_left_of_a_manager_that_is_killed(two_hosts: Hosts):
    with managed(two_hosts) as job:
        job.wait_for_steps(3)
        job.command.kill()
        assert not leftovers(two_hosts, CLEAN_SECONDS)


def test_no_process_is_left_of_a_launcher_that_is_killed(two_hosts: Hosts):
    """The folder of an mpirun whose launcher has gone is removed by the next job."""
    with OneRun(two_hosts, ["h1", "h2"]) as run:
        run.wait_for_a_step()
        run.command.kill()
        wait_for(
            lambda: all("/tmp/ompi." in each for each in leftovers(two_hosts, 0.0)), "the end of all", CLEAN_SECONDS
        )


def test_an_interrupted_launcher_leaves_nothing(two_hosts: Hosts):
    with OneRun(two_hosts, ["h1", "h2"]) as run:
        run.wait_for_a_step()
        begin = time.monotonic()
        run.command.send_signal(signal.SIGINT)
        status, words = run.finish()
        assert status == 130 and time.monotonic() - begin < CLEAN_SECONDS, words
        assert not leftovers(two_hosts, CLEAN_SECONDS)


def test_an_interrupted_manager_leaves_nothing(two_hosts: Hosts):
    with managed(two_hosts) as job:
        job.wait_for_steps(3)
        begin = time.monotonic()
        job.command.send_signal(signal.SIGINT)
        assert job.finish() == 130 and time.monotonic() - begin < CLEAN_SECONDS, job.text
        assert not leftovers(two_hosts, CLEAN_SECONDS)


@pytest.mark.parametrize("num_steps", some([2, 10], 1))
def test_a_manager_that_is_asked_to_end_saves_and_the_next_one_goes_on(two_hosts: Hosts, num_steps: int):
    alone = two_hosts.run("h1", [sys.executable, SCRIPT, "40", "0"]).stdout.splitlines()[1:]
    saved = two_hosts.shared / "saved"
    with managed(two_hosts, ["40", "0.1", str(saved)], ["--checkpoints", str(saved)]) as job:
        job.wait_for_steps(num_steps)
        job.command.send_signal(signal.SIGTERM)
        assert job.finish() == 75, job.text
        done = job.losses()
        assert not leftovers(two_hosts, CLEAN_SECONDS), job.text
    with managed(two_hosts, ["40", "0", str(saved)], ["--checkpoints", str(saved)]) as job:
        assert job.finish() == 0, job.text
        (begin,) = [line for _, line in job.lines if "] begin " in line]
        assert begin == f"[0] begin {done[-1][0] + 1}", job.text
        weights = [line.partition("] ")[2] for _, line in job.lines if "] weights" in line]
        assert [f"loss {step} {loss}" for step, loss in done + job.losses()] + weights == alone
    assert not leftovers(two_hosts, CLEAN_SECONDS)


@contextmanager
def managed(hosts: Hosts, words: Sequence[str] = LONG, options: Sequence[str] = ()) -> Iterator[ElasticRun]:
    """Returns a job with a manager, which is killed at the end of the context if it still runs."""
    run = ElasticRun(hosts, [SCRIPT, *words], options)
    try:
        yield run
    finally:
        run.end()
