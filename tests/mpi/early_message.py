"""Sends rank 1 half a MiB and is away for a second; rank 1 prints how long it waits for it. A script for two ranks."""

from __future__ import annotations

import time

import torch

from autovaruna.ranks.environment import get_world


def main() -> None:
    world, message = get_world(), torch.ones(1 << 19, dtype=torch.uint8)
    seconds = 0.0
    for _ in range(2):  # the first one opens the connection
        world.barrier("begin")
        begin = time.perf_counter()
        if world.rank == 0:
            world.send([message], 1, 5)
            time.sleep(1.0)
        else:
            world.receive([message], 0, 5).wait()
            seconds = time.perf_counter() - begin
    if world.rank == 1:
        print(seconds)


if __name__ == "__main__":
    main()
