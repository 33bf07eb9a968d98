"""Compares steps of AutoVaruna with steps of torch.distributed.pipelining, on two ranks, one thread each.

Both run the same stages, cut at the same place, the same micro-batches, 1F1B; theirs talks through gloo. The sweep goes
over the arithmetic of a micro-batch and the size of its message. First the losses must agree; then steps are timed in
turn with each other and with the bound, a step in plain PyTorch that no pipeline can beat (`ideal.py`). Efficiency is
the bound over ours, the median of the rounds.

python benchmarks/pipelining.py [--quick] [--milliseconds 0.05,1,10,50] [--kibibytes 1,64,1024,4096] [--latency-ms 20]
"""

from __future__ import annotations

import argparse
import copy
from statistics import median

from paired import Pairs, hush, start_ranks, time_rounds

start_ranks(2)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from ideal import ideal_step  # noqa: E402
from peers import COMM, close_gloo, open_gloo, our_step, pipeline_step, slowest  # noqa: E402
from tunable import Chain, Shape, batch_of, cuts_of, shape_for, squared  # noqa: E402

from autovaruna import get_rank  # noqa: E402

NUM_STAGES = 2


def compare(shape: Shape, num_micro_batches: int, num_rounds: int) -> tuple[float, str]:
    """Returns their time over ours, and a line that says that and our efficiency."""
    torch.manual_seed(0)
    chain, batch = Chain(shape, NUM_STAGES), batch_of(shape, num_micro_batches)
    bound = ideal_step(copy.deepcopy(chain), batch, num_micro_batches)
    theirs = pipeline_step(copy.deepcopy(chain).stages[get_rank()], squared, batch, num_micro_batches)
    settings = {"num_stages": NUM_STAGES, "cuts": cuts_of(NUM_STAGES), "schedule": "1f1b", "recompute": "none"}
    ours = our_step(copy.deepcopy(chain), batch, num_micro_batches=num_micro_batches, max_micro_batches=0, **settings)
    for _ in range(3):
        first, second = ours(), COMM.bcast(theirs(), root=NUM_STAGES - 1)
        assert abs(first - second) <= 1e-6 * abs(second), f"the losses differ: {first} and {second}"
    least, own, other = time_rounds((bound, ours, theirs), num_rounds, clock=slowest)
    efficiency, ratio = Pairs(least, own), Pairs(other, own)
    text = (
        f"{1e3 * median(own):8.2f} ms, bound {1e3 * median(least):8.2f} ms "
        f"({1e3 * median(least) / (num_micro_batches + NUM_STAGES - 1):.3g} ms a micro-batch), "
        f"efficiency {efficiency.spread}; "
        f"theirs / ours {ratio.spread}"
    )
    return median(ratio.ratios), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings and rounds")
    parser.add_argument("--milliseconds", default="", help="forward and backward of a micro-batch at a stage")
    parser.add_argument("--kibibytes", default="", help="message of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    open_gloo()
    times = [float(each) for each in (args.milliseconds or ("0.05,1,10" if args.quick else "0.05,1,10,50")).split(",")]
    sizes = [float(each) for each in (args.kibibytes or ("1,1024" if args.quick else "1,64,1024,4096")).split(",")]
    ratios = []
    for milliseconds in times:
        for kibibytes in sizes:
            shape = shape_for(milliseconds * 1e-3, int(kibibytes * 1024))
            num_rounds = args.rounds or max(7, min(30, round((1500 if args.quick else 6000) / (milliseconds * 40 + 5))))
            ratio, text = compare(shape, args.micro_batches, num_rounds)
            ratios.append(ratio)
            if get_rank() == 0:
                print(f"{milliseconds:6g} ms a micro-batch, {kibibytes:6g} KiB a message: {text}", flush=True)
    if get_rank() == 0:
        print(f"theirs / ours over all {len(ratios)} settings: median {median(ratios):.3f}, least {min(ratios):.3f}")
    close_gloo()


if __name__ == "__main__":
    main()
