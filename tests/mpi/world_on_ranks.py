"""What `test_world.py` runs on ranks: the laws of worlds, and messages of many sizes.

As a script it shows its number of threads, and ends well, at different times, with messages that nobody receives and a
caught `sys.exit`.
"""

from __future__ import annotations

import sys
import time
import traceback
from itertools import permutations

import torch

from autovaruna.ranks.environment import get_world
from autovaruna.runtime.mail import Mail, MessageKind, Stream
from tests.ranks.world_laws import LAWS


def try_laws() -> dict[str, str]:
    """Returns the traceback of each law that is broken: by MPI alone, or once there are rings between all ranks."""
    world, broken = get_world(), {}
    for way in ("MPI", "rings"):
        if way == "rings":
            world.transport.open_rings(permutations(range(world.num_ranks), 2), True, world.swap_objects)
        for name, law in LAWS.items():
            try:
                law(world)
            except Exception:
                broken[name] = f"{way}: {traceback.format_exc()}"
    return broken


def mixed_lists() -> bool:
    """Sends rank 1 lists of tensors in turn that fit into rings, and that do not; says whether they came as sent.

    Those that do not are posted ahead; then a message is looked for that has come before them.
    """
    world = get_world()
    world.transport.open_rings([(0, 1), (1, 0)], True, world.swap_objects)
    mail = Mail(world, torch.device("cpu"))
    sizes = {MessageKind("graph", Stream(0, 1, 0), size): size for size in (2, 3)}
    came = []
    for is_known in (False, True):
        if world.rank == 1 and is_known:
            for kind in sizes:
                mail.expect(kind)
        lists = [[torch.full((size * 3 << 18,), float(size)), torch.full((size,), size + 0.5)] for size in (2, 3)]
        if world.rank == 0:
            for kind, tensors in zip(sizes, lists, strict=True):
                mail.send(tensors, kind)
            world.barrier("sent")
            world.flush()
        else:
            world.barrier("sent")
            world.progress()
            came += [
                torch.equal(a, b)
                for kind, tensors in zip(sizes, lists, strict=True)
                for a, b in zip(mail.receive(kind), tensors, strict=True)
            ]
    return all(came)


def huge_message(num_bytes: int) -> bool:
    """Sends more bytes than an int counts, from rank 0 to rank 1; says whether the first, middle and last are right."""
    world = get_world()
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    places = [0, num_bytes // 2, num_bytes - 1]
    if world.rank == 0:
        tensor[places] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        world.send([tensor], 1, 0).wait()
    else:
        world.receive([tensor], 0, 0).wait()
    return tensor[places].tolist() == [1, 2, 3]


if __name__ == "__main__":
    world = get_world()
    print(torch.get_num_threads(), flush=True)
    world.send([torch.ones(1_000_000)], 1 - world.rank, 0)
    world.start_all_reduce(torch.ones(1_000_000), (0, 1))
    time.sleep(world.rank / 4)
    try:
        sys.exit(4)
    except SystemExit:
        world.barrier("going on")
