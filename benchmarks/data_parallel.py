"""Compares data-parallel steps of AutoVaruna with those of DistributedDataParallel through gloo, on two ranks.

One stage on both ranks, each with half of the batch; first the weights after three steps must agree.

python benchmarks/data_parallel.py [--quick]
"""

from __future__ import annotations

import argparse
import copy

from paired import hush, start_ranks, time_pairs

start_ranks(2)

import torch  # noqa: E402 - after start_ranks, which says how many threads torch may start
from peers import close_gloo, open_gloo, our_step, replicated_step, slowest  # noqa: E402
from torch import nn  # noqa: E402
from tunable import Chain, Shape, batch_of  # noqa: E402

from autovaruna import get_rank  # noqa: E402


def is_near(mine: nn.Module, theirs: nn.Module) -> bool:
    """Says whether weights agree to the order of a sum."""
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hush()
    open_gloo()
    for width, num_layers, num_rows in ((64, 4, 64), (256, 8, 128), (1024, 4, 128), (1024, 12, 64)):
        torch.manual_seed(0)
        shape = Shape(num_rows, width, num_layers, width)
        mine = Chain(shape, 1)
        theirs, batch = copy.deepcopy(mine), batch_of(shape, 2)
        num_bytes = sum(parameter.nbytes for parameter in mine.parameters())
        ours = our_step(mine, batch, num_stages=1, num_replicas=2, num_micro_batches=2, recompute="none")
        peer = replicated_step(theirs, batch)
        for _ in range(3):
            ours(), peer()
        assert is_near(mine, theirs), "the weights differ"
        pairs = time_pairs(ours, peer, 15 if args.quick else 40, clock=slowest)
        if get_rank() == 0:
            print(f"{num_bytes / 2**20:6.1f} MiB of gradients: AutoVaruna against DDP {pairs}", flush=True)
    close_gloo()


if __name__ == "__main__":
    main()
