"""Compares steps of a job whose snapshots go to another host with steps of one whose hardly do.

A GPT of 12 million parameters, 150 MB of state with AdamW's, on two emulated hosts of one rank (`tests/hosts`, as root)
under `autovaruna run`. The same job runs in turn with `--copy_share` and with next to none; in each, steps count after
some, for `--seconds`. Prints the medians, their ratio, and how often there is a snapshot.

python benchmarks/copies.py [--megabits 100] [--share 0.1] [--pairs 3] [--seconds 40]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from statistics import median

from paired import Pairs

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LAYERS, HEADS, NUM_TOKENS, GLOBAL_BATCH = 448, 5, 7, 64, 16
HARDLY, WARM_UP, FIRST_SECONDS = 1e-4, 5, 180.0
TOOK = re.compile(r"\[0\] took (\S+)")


def train() -> None:
    """Trains until it is ended; rank 0 prints the seconds of each step."""
    import torch
    from gpt import GPT

    from autovaruna import AutoVaruna, get_rank

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(WIDTH, LAYERS, HEADS, NUM_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(256, (2, GLOBAL_BATCH, NUM_TOKENS)).unbind()
    wrapped = AutoVaruna(model, optimizer, inputs="replicated", progress=False, check_parts=False, recheck_trace=False)
    wrapped.resume(None)
    while True:
        began = time.perf_counter()
        wrapped(*words).backward()
        optimizer.step()
        optimizer.zero_grad()
        if get_rank() == 0:
            print(f"took {time.perf_counter() - began}", flush=True)


def step_seconds(megabits: int, share: float, seconds: float) -> tuple[float, list[str]]:
    """Returns the median step of a job, and what it told of its copies."""
    from tests.hosts.elastic_run import ElasticRun
    from tests.hosts.emulation import Hosts

    def took() -> list[float]:
        return [float(found[1]) for _, line in list(run.lines) if (found := TOOK.match(line))]

    with Hosts(2, f"{megabits}mbit") as hosts:
        run = ElasticRun(hosts, [__file__, "--train"], ["--copy_share", str(share)])
        try:
            run.wait(lambda: len(took()) > WARM_UP, "the first steps", FIRST_SECONDS)
            time.sleep(seconds)
            told = [event["message"] for event in run.events if event["event"] == "copies"]
        finally:
            run.command.end()
    return median(took()[WARM_UP:]), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    if args.train:
        train()
    from tests.hosts.emulation import reason_to_skip

    if reason_to_skip():
        print(f"skipped: {reason_to_skip()}")
        return
    rows: tuple[list[float], list[float]] = [], []
    for pair in range(args.pairs):
        for row, share in zip(rows, (args.share, HARDLY), strict=True):
            found, told = step_seconds(args.megabits, share, args.seconds)
            row.append(found)
            print(f"{pair} share {share:g}: {1e3 * found:.1f} ms a step", *told, sep="\n    ", flush=True)
    print(f"with copies over without: {Pairs(tuple(rows[0]), tuple(rows[1])).spread}")


if __name__ == "__main__":
    main()
