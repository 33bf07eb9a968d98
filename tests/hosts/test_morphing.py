"""A job with a manager goes on, whatever happens to its ranks and hosts, as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna import ElasticSampler
from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts, reason_to_skip
from tests.hosts.sampled_train import Loss, dataset
from tests.products import WHOLE, some

pytestmark = pytest.mark.timeout(600)
NOTICED_SECONDS = CLEAN_SECONDS = 10.0
STEP_SECONDS = 0.05
MOST_STEPS = 100_000
MOST_LOST = 40
START_SECONDS = 600.0
FILLING = "/dev/shm/filling"
NUM_HOSTS = 16
PATIENT = ["--start_seconds", "500", "--state_wait_seconds", "5", "--slow_factor", "100", "--checkpoint_seconds", "2"]
SAMPLED = Path(__file__).with_name("sampled_train.py")


def blamed(run: ElasticRun, strike: Callable[[], object]) -> dict[str, Any]:
    """Strikes a job that trains, and returns what it says of the end of its run, once it trains again."""
    run.wait_for_steps(5)
    since = len(run.events)
    strike()
    at = time.time()
    ended = run.wait_for_event("ended", since)
    assert ended["time"] - at < NOTICED_SECONDS, ended
    run.wait_for_event("running", since)
    return ended


def fill(run: ElasticRun) -> None:
    """Fills the memory of a host and kills a rank; once, the job was started again 31 times, and given up."""
    with open(run.hosts.path("h2", FILLING), "wb") as file:
        while (room := os.statvfs(file.fileno())).f_bavail:
            with suppress(OSError):  # ranks took some of it meanwhile
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room.f_bavail * room.f_frsize)
    run.strike(run.ranks()[0][1])


def test_a_job_survives_what_happens_to_ranks_and_hosts(hosts: Hosts):
    """One job, struck by one fault after another, each of which is said as what it was, then asked to end.

    `benchmarks/faults.py` draws from more of them: keepers that are stopped, hosts that are cut off or half there.

    What it has saved goes on in another job on other hosts, of which nothing is left when its manager is killed.
    """
    saved = str(hosts.shared / "saved")
    options, script = ["--checkpoints", saved], [SCRIPT, str(MOST_STEPS), str(STEP_SECONDS), saved]
    with closing(ElasticRun(hosts, script, [*options, "--start_seconds", "20"])) as run:
        run.wait_for_steps(5, START_SECONDS)
        for rank in some((1, 0), 1):
            ended = blamed(run, lambda rank=rank: run.strike(run.ranks()[rank][1]))
            assert f"rank {rank} was ended by SIGKILL" in ended["text"] and not ended["lost"]
        ended = blamed(run, lambda: run.strike(run.process("h1", "prterun --hostfile")))
        assert not ended["lost"] and not re.search(r"rank \d+ (was ended|ended)", ended["text"]), ended
        ended = blamed(run, lambda: run.strike(run.ranks()[2][1], signal.SIGSTOP))
        assert "rank 2 on h3 is stopped" in ended["text"] and not ended["lost"]

        since = len(run.events)
        run.strike(run.process("h2", "elastic.keeper"))
        run.wait_for_steps(20)
        assert not [event for event in run.events[since:] if event["event"] == "ended"], run.text

        run.wait_until_training_on(hosts.names)
        for host, power_loss in some((("h2", False), ("h3", True)), 1):
            ended = blamed(run, lambda host=host, power_loss=power_loss: hosts.kill(host, power_loss))
            assert ended["lost"] == [host] and f"host {host} was lost" in ended["text"]
        since = len(run.events)
        for host in some(("h2", "h3"), 1):
            hosts.boot(host)
        assert " is there" in run.wait_for_event("ended", since)["text"]
        run.wait_until_training_on(hosts.names)
        run.wait_for_steps(5)
        newest, since = run.steps[-1][1], len(run.events)
        fill(run)  # the manager may have heard of it before the next start, or in the run after that
        run.wait_for_event("running", since)
        start = next(event for event in run.events[since:] if event["event"] == "start")
        assert start.get("step", -1) > max(0, newest - MOST_LOST), run.text
        run.wait_until_training_on(["h1", "h3"])
        assert sum("h2 is left out" in line for _, line in run.lines) == 1, run.text
        hosts.path("h2", FILLING).unlink()

        run.wait_for_steps(5)
        run.command.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.text
        assert not leftovers(hosts, CLEAN_SECONDS), run.text
    first = run.steps[-1][1] + 1
    with closing(ElasticRun(hosts, script, [*options, "--keep_seconds", "1"], listed=["h1", "h2"])) as other:
        other.wait_for_steps(5, START_SECONDS)
        assert [line for _, line in other.lines if "] begin " in line] == [f"[0] begin {first}"], other.text
        other.command.send_signal(signal.SIGKILL)
        assert not leftovers(hosts, CLEAN_SECONDS), other.text
        other.lines[:0] = run.lines
        assert not [line for line in other.differences() if "weights" not in line], other.text


def test_hosts_without_names_and_two_that_do_not_reach_each_other(hosts: Hosts):
    """Once, no copies were made of such hosts, and a start on such two was tried three times, and blamed on a rank."""
    names = hosts.path("h1", "/run/hosts").read_text()
    saved = hosts.shared / "saved"
    options = ["--start_seconds", "20", "--checkpoints", str(saved), "--checkpoint_seconds", "1"]
    try:
        for host in hosts.names:
            hosts.path(host, "/run/hosts").write_text("127.0.0.1 localhost\n")
        hosts.run("h2", ["ip", "route", "add", "unreachable", hosts.address("h3")])
        listed = [hosts.address(host) for host in hosts.names]
        with closing(ElasticRun(hosts, [SCRIPT, str(MOST_STEPS), str(STEP_SECONDS)], options, listed)) as run:
            run.wait_for_steps(5, START_SECONDS)
            run.wait(lambda: run.events[-1]["event"] in ("running", "checkpoint"), "a run")
            ended = next(event for event in run.events if event["event"] == "ended")
            assert "does not reach" in ended["text"] and "rank" not in ended["text"], run.text
            starts = [event["hosts"] for event in run.events if event["event"] == "start"]
            assert starts in ([listed, listed[:2]], [listed, [listed[0], listed[2]]]), run.text
            since = len(run.events)
            run.strike(run.ranks()[1][1])
            run.wait_for_event("running", since)
            start = next(event for event in run.events[since:] if event["event"] == "start")
            assert start["step"] > 0 and run.wait_for_event("checkpoint", 0)["path"], run.text
    finally:
        for host in hosts.names:
            hosts.path(host, "/run/hosts").write_text(names)
        hosts.run("h2", ["ip", "route", "delete", "unreachable", hosts.address("h3")], check=False)


@pytest.mark.parametrize("is_late", [False, True], ids=["waited for", "later"])
def test_a_manager_that_is_killed_while_hosts_are_cut_off_is_followed_by_one_that_goes_on(hosts: Hosts, is_late: bool):
    """Once, the new one began at step 0, and then removed the newer state that the other hosts held."""
    options = ["--state_wait_seconds", "1"] if is_late else []
    with closing(ElasticRun(hosts, [SCRIPT, str(MOST_STEPS), str(STEP_SECONDS)], options)) as run:
        run.wait_until_training_on(hosts.names)
        run.wait_for_steps(20)
        for host in ("h2", "h3"):
            hosts.cut(host)
        run.command.send_signal(signal.SIGKILL)
        run.command.wait(CLEAN_SECONDS)
        newest, since = run.steps[-1][1], len(run.events)
        run.start()
        run.wait_for_event("waiting", since)
        if is_late:
            run.wait_for_event("running", since)
        for host in ("h2", "h3"):
            hosts.mend(host)
        run.wait_until_training_on(hosts.names)
        run.wait_for_steps(5)
        starts = [event for event in run.events[since:] if event["event"] == "start"]
        assert starts[0].get("step", -1) > newest - MOST_LOST or is_late, run.text
        assert starts[-1].get("step", -1) > newest - MOST_LOST, run.text
        run.stop_soon()
        assert run.finish() == 0 and not run.differences(), run.text


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_over_a_slow_link_copies_take_their_share_and_a_lost_host_costs_the_steps_that_were_told():
    """Bytes, not seconds: what a host sends in five seconds is its steps' and its share of 100 Mbit/s."""
    with Hosts(2, rate="100mbit") as hosts:
        script = [SCRIPT, str(MOST_STEPS), str(STEP_SECONDS), "nowhere", "800"]  # 15 MB of state on each host
        with closing(ElasticRun(hosts, script, ["--copy_share", "0.1"])) as run:
            run.wait_for_steps(40, START_SECONDS)
            before, since = _sent(hosts, "h1"), time.monotonic()
            time.sleep(5.0)
            own_bytes = (len(run.steps) + 200) * 4 * 16 * 800  # of steps: an activation or less each
            assert _sent(hosts, "h1") - before < 1.2 * 0.1 * 12.5e6 * (time.monotonic() - since) + own_bytes
            told = run.wait_for_event("copies", 0, START_SECONDS)
            run.wait_for_steps(int(0.8 * told["steps"]), START_SECONDS)
            at = len(run.events)
            hosts.kill("h2")
            run.wait_for_event("running", at, START_SECONDS)
            start = next(event for event in run.events[at:] if event["event"] == "start")
            newest = max(step for when, step, _ in run.steps if when < run.lines[-1][0] and step > start["step"])
            assert newest - start["step"] <= 1.3 * told["steps"] + 5, run.text


def _sent(hosts: Hosts, host: str) -> int:
    """Returns the bytes that a host has sent."""
    return int(hosts.run(host, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]).stdout)


def plain_losses(num_samples: int, batch_size: int) -> list[float]:
    """Returns the losses of an epoch in plain PyTorch."""
    torch.manual_seed(0)
    net, features = Loss(), dataset(num_samples).tensors[1]
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    found = []
    for numbers in ElasticSampler(features, batch_size, seed=5):
        loss = net(features[numbers])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_each_sample_comes_once_while_hosts_come_and_go(hosts: Hosts):
    """Three hosts, one, and three again within one epoch, by the machine list and by a notice; cold in test-whole."""
    num_samples, batch_size = 1200, 12
    script: list[str | Path] = [SAMPLED, str(num_samples), str(batch_size), "0.02"]
    slow = hosts.shared / "slow"
    with closing(ElasticRun(hosts, script, ["--no_standby"] if WHOLE else [])) as run:
        run.wait_for_steps(5, START_SECONDS)
        slow.touch()
        run.list_hosts(["h1", "h2"])
        told = hosts.run("h1", [sys.executable, "-m", "autovaruna", "notify", "h2", "--seconds", "60"])
        run.wait_until_training_on(["h1"])
        run.wait_for_steps(3)
        run.list_hosts(hosts.names)
        run.wait_until_training_on(hosts.names)
        slow.unlink()
        assert run.finish(120) == 0, f"{told.stdout}{run.text}"
        assert not leftovers(hosts, CLEAN_SECONDS), run.text
    taken = [line for _, line in run.lines if "] took " in line]
    steps: dict[int, list[int]] = {}
    for line in taken:
        step, *numbers = map(int, line.partition("] took ")[2].split())
        steps.setdefault(step, []).extend(numbers)
    order = list(ElasticSampler(range(num_samples), batch_size, seed=5))
    assert [sorted(numbers) for _, numbers in sorted(steps.items())] == [sorted(batch) for batch in order]
    losses = sorted({(step, loss) for _, step, loss in run.steps})  # a step that was done twice shall have had one
    assert [float(loss) for _, loss in losses] == pytest.approx(plain_losses(num_samples, batch_size), rel=1e-5)


def lose_all_but_two(run: ElasticRun, lost: list[str]) -> None:
    """Brings four of the lost hosts of sixteen back, stops a rank, and kills all but two once they are cut off."""
    hosts = run.hosts
    for host in lost[:4]:
        hosts.boot(host)
    twelve = [host for host in hosts.names if host not in lost[4:]]
    run.wait_until_training_on(twelve, START_SECONDS)
    run.wait_for_steps(20, START_SECONDS)

    since = len(run.events)
    run.strike(run.ranks()[5][1], signal.SIGSTOP)
    ended = run.wait_for_event("ended", since, START_SECONDS)
    assert "rank 5" in ended["text"] and "is stopped" in ended["text"] and not ended["lost"], run.text
    run.wait_until_training_on(twelve, START_SECONDS)
    run.wait_for_steps(60, START_SECONDS)

    for host in twelve[2:]:
        hosts.cut(host)
    for host in twelve[2:]:
        hosts.kill(host)
    run.wait_until_training_on(twelve[:2], START_SECONDS)


@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_half_of_sixteen_hosts_are_lost_at_once():
    """What half of them held is in memory of the others; what only those had that are lost at last is on disk.

    In test-whole four come, one hangs, and all but two are lost.
    """
    with Hosts(NUM_HOSTS) as hosts:
        last = str(hosts.shared / "last")
        script = [SCRIPT, "100000", "0.05", last, "32", str(NUM_HOSTS)]
        with closing(ElasticRun(hosts, script, [*PATIENT, "--checkpoints", last])) as run:
            run.wait_until_training_on(hosts.names, START_SECONDS)
            run.wait_for_steps(20, START_SECONDS)
            half, newest = hosts.names[1::2], run.steps[-1][1]
            for host in half:
                hosts.kill(host)
            left = [host for host in hosts.names if host not in half]
            run.wait_until_training_on(left, START_SECONDS)
            starts = [event for event in run.events if event["event"] == "start"]
            assert starts[-1]["step"] > newest - MOST_LOST and set(starts[-1]["from"]) <= set(left), run.text
            lost = [host for event in run.events if event["event"] == "ended" for host in event["lost"]]
            assert lost and set(lost) <= set(half), run.text  # the rest die while the job ends for the first of them

            if WHOLE:
                lose_all_but_two(run, half)
            run.stop_soon()
            assert run.finish(START_SECONDS) == 0 and not run.differences(), run.text
            assert not leftovers(hosts, 20.0), run.text
