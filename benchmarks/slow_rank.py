"""Slows one rank of a job on emulated hosts down, and prints when it is named, and what the plan after that does.

A job of 12 layers of 512 features trains on 2 hosts of a rank each, each on a core of its own, under `autovaruna run`.
Another process takes a share of the core of rank 1. Beside the seconds of steps stand those that the plan predicts for
ranks of these speeds. Root only, on a machine with two cores that do little else.

python benchmarks/slow_rank.py [--share 0.25 ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hosts.elastic_run import ElasticRun
from tests.hosts.emulation import Hosts, reason_to_skip

NUM_WARM, NUM_TIMED = 200, 40
SLOWED_CORE = 1


def train() -> None:
    """Is the script of the job; it ends when it is ended."""
    import torch
    from torch import nn

    from autovaruna import AutoVaruna, get_rank

    os.sched_setaffinity(0, {get_rank() % 2})
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.Tanh())))
    optimizer = torch.optim.AdamW(net.parameters())
    model = AutoVaruna(net, optimizer, inputs="replicated", progress=False, num_replicas=1)
    first = model.resume(None).step
    for step in range(first, 10**6):
        batch = torch.randn(256, 512, generator=torch.Generator().manual_seed(step))
        started = time.perf_counter()
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if get_rank() == 0:
            print(f"loss {step} {1e3 * (time.perf_counter() - started):.2f}", flush=True)


def burn(share: float, begun: Event) -> None:
    """Takes a share of a core, for good."""
    os.sched_setaffinity(0, {SLOWED_CORE})
    os.nice(-5)
    begun.set()
    period = 0.02
    while True:
        end = time.perf_counter() + period * share
        while time.perf_counter() < end:
            pass
        time.sleep(period * (1 - share))


@contextmanager
def slowed(share: float) -> Iterator[None]:
    """Slows rank 1 down within the context."""
    at_once = multiprocessing.get_context("fork")  # nothing is imported, which would be a load of its own
    begun = at_once.Event()
    process = at_once.Process(target=burn, args=(share, begun), daemon=True)
    process.start()
    begun.wait()
    try:
        yield
    finally:
        process.kill()


def milliseconds(run: ElasticRun) -> float:
    """Returns the median of the next steps."""
    run.wait_for_steps(NUM_TIMED, 120)
    return median(float(each) for _, _, each in run.steps[-NUM_TIMED:])


def plan_of(run: ElasticRun) -> str:
    """Says what the plans of the job predict for a step, as it has printed them."""
    return "; ".join(line.partition(": ")[2] for _, line in run.lines if "the plan" in line)


def watch(run: ElasticRun, share: float) -> None:
    """Prints what becomes of a job whose rank 1 has lost a share of its core."""
    before = milliseconds(run)
    with slowed(share):
        num_events, num_steps = len(run.events), len(run.steps)
        slow = run.wait_for_event("slow", num_events, 120.0, rank=1)
        named, slow_step = len(run.steps) - num_steps, milliseconds(run)
        since = len(run.events)
        for kind in ("ended", "running"):
            run.wait_for_event(kind, since, 120.0)
        run.wait_for_steps(NUM_WARM, 120)  # the plans for one host and one rank less are made meanwhile
        after = milliseconds(run)
    print(f"{share:.0%} of its core taken: {slow['text']}, {named} steps after")
    print(f"  a step: {before:.1f} ms before, {slow_step:.1f} slowed, {after:.1f} with the plan made anew")
    print(f"  {plan_of(run)}", flush=True)


def main() -> None:
    """Prints a few lines for each share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, nargs="+", default=[0.15, 0.3], help="of the core of rank 1")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train()
    if reason := reason_to_skip():
        sys.exit(reason)
    for share in options.share:
        with Hosts(2) as hosts:
            run = ElasticRun(hosts, [__file__, "--train"])
            try:
                run.wait_for_steps(NUM_WARM, 120)
                watch(run, share)
            finally:
                run.close()


if __name__ == "__main__":
    main()
