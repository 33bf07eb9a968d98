"""A job with a manager goes on, whatever happens to its ranks and hosts, as if nothing had happened."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autovaruna import ElasticSampler
from tests.hosts.elastic_run import SCRIPT, ElasticRun, leftovers
from tests.hosts.emulation import Hosts
from tests.hosts.sampled_train import Loss, dataset

pytestmark = pytest.mark.timeout(400)
NOTICED_SECONDS = CLEAN_SECONDS = 10.0
STEP_SECONDS = 0.05
MOST_STEPS = 100_000
SAMPLED = Path(__file__).with_name("sampled_train.py")


@contextmanager
def job(run: ElasticRun) -> Iterator[ElasticRun]:
    """Kills a job at the end of the context that does not end by itself."""
    try:
        yield run
    finally:
        run.end()


def blamed(run: ElasticRun, strike: Callable[[], object]) -> dict[str, Any]:
    """Strikes a job that trains, and returns what it says of the end of its run, once it trains again."""
    run.wait_for_steps(12)
    since = len(run.events)
    strike()
    at = time.time()
    ended = run.wait_for_event("ended", since)
    assert ended["time"] - at < NOTICED_SECONDS, ended
    run.wait_for_event("running", since)
    return ended


def test_a_job_survives_what_happens_to_ranks_and_hosts(hosts: Hosts):
    """One run of one job, struck by one fault after another; each is said as what it was."""
    with job(ElasticRun(hosts, [SCRIPT, str(MOST_STEPS), str(STEP_SECONDS)], ["--start_seconds", "20"])) as run:
        for rank in (1, 0):
            ended = blamed(run, lambda rank=rank: run.strike(run.ranks()[rank][1]))
            assert f"rank {rank} was ended by SIGKILL" in ended["text"] and not ended["lost"]
        ended = blamed(run, lambda: run.strike(run.process("h1", "prterun --hostfile")))
        assert not ended["lost"] and not re.search(r"rank \d+ (was ended|ended)", ended["text"]), ended
        ended = blamed(run, lambda: run.strike(run.ranks()[2][1], signal.SIGSTOP))
        assert "rank 2 on h3 is stopped" in ended["text"] and not ended["lost"]

        run.wait_for_steps(12)
        since = len(run.events)
        run.strike(run.process("h2", "elastic.keeper"))
        run.wait_for_steps(30)
        assert not [event for event in run.events[since:] if event["event"] == "ended"], run.text

        for host, power_loss in (("h2", False), ("h3", True)):
            ended = blamed(run, lambda host=host, power_loss=power_loss: hosts.kill(host, power_loss))
            assert ended["lost"] == [host] and f"host {host} was lost" in ended["text"]
        since = len(run.events)
        for host in ("h2", "h3"):
            hosts.boot(host)
        assert " is there" in run.wait_for_event("ended", since)["text"]
        run.wait_until_training_on(hosts.names)

        since = len(run.events)
        hosts.stop_sshd("h2")  # a host that is half there
        run.strike(run.ranks()[0][1])
        event = run.wait_for_event("left_out", since, host="h2")
        assert run.wait_for_event("start", run.events.index(event))["hosts"] == ["h1", "h3"]
        hosts.continue_sshd("h2")
        run.wait_until_training_on(hosts.names)
        run.stop_soon()
        assert run.finish() == 0 and run.matches_one_process(), run.text
        assert not leftovers(hosts, CLEAN_SECONDS), run.text


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
    """Three hosts, one, and three again within one epoch, by the machine list and by a notice; starts are cold."""
    num_samples, batch_size = 2400, 12
    script: list[str | Path] = [SAMPLED, str(num_samples), str(batch_size), str(STEP_SECONDS)]
    with job(ElasticRun(hosts, script, ["--no_standby"])) as run:
        run.wait_for_steps(20)
        run.list_hosts(["h1", "h2"])
        told = hosts.run("h1", [sys.executable, "-m", "autovaruna", "notify", "h2", "--seconds", "60"])
        run.wait_until_training_on(["h1"])
        run.wait_for_steps(20)
        run.list_hosts(hosts.names)
        run.wait_until_training_on(hosts.names)
        assert run.finish(120) == 0, f"{told.stdout}{run.text}"
        assert not leftovers(hosts, CLEAN_SECONDS), run.text
    taken = [line for _, line in run.lines if "] took " in line]
    steps: dict[int, list[int]] = {}
    for line in taken:
        step, *numbers = map(int, line.partition("] took ")[2].split())
        steps.setdefault(step, []).extend(numbers)
    order = list(ElasticSampler(range(num_samples), batch_size, seed=5))
    assert [sorted(numbers) for _, numbers in sorted(steps.items())] == [sorted(batch) for batch in order]
    assert [float(loss) for _, loss in run.losses()] == pytest.approx(plain_losses(num_samples, batch_size), rel=1e-5)
