"""What `test_world.py` runs on ranks: the laws of worlds, measurements, and programs that end badly (as a script)."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autovaruna.runtime.environment import get_world
from autovaruna.runtime.mail import Kind, Layout, Mail, Route
from autovaruna.runtime.world import World
from autovaruna.session.machine import measure_links, measure_sums
from tests.runtime.world_laws import LAWS


def try_laws() -> dict[str, str]:
    """Returns the traceback of each law that is broken: by MPI alone, or once there are rings between all ranks."""
    world, broken = get_world(), {}
    for way in ("MPI", "rings"):
        if way == "rings":
            world.open_rings(permutations(range(world.num_ranks), 2), True)
        for name, law in LAWS.items():
            try:
                law(world)
            except Exception:
                broken[name] = f"{way}: {traceback.format_exc()}"
    return broken


def lent_tensors(num_tensors: int) -> tuple[bool, int]:
    """Sends more than rings lend, from each rank to the other, twice; says whether all came, and how many were lent."""
    world, num_lent = get_world(), 0
    peer = 1 - world.rank
    world.open_rings([(0, 1), (1, 0)], True)
    layout = Layout((512, 513), (513, 1), torch.float32)
    assert world.brings(peer, [layout])
    for turn in range(2):
        taken = []
        for k in range(num_tensors):
            brought = world.bring([layout], peer, 3)
            world.send([torch.full(layout.shape, 100.0 * world.rank + k + turn)], peer, 3)
            brought.wait()
            taken += brought.tensors
        expected = [torch.full(layout.shape, 100.0 * peer + k + turn) for k in range(num_tensors)]
        if not all(map(torch.equal, taken, expected)):
            return False, 0
        num_lent = sum(not each.untyped_storage().resizable() for each in taken)
    world.flush()
    return True, num_lent


def mixed_lists() -> bool:
    """Sends rank 1 lists of tensors in turn that fit into rings, and that do not; says whether they came as sent.

    Those that do not are posted ahead; then a message is looked for that has come before them.
    """
    world = get_world()
    world.open_rings([(0, 1), (1, 0)], True)
    mail = Mail(world, torch.device("cpu"))
    sizes = {Kind("graph", Route(0, 1, 0), size): size for size in (2, 3)}
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
                for a, b in zip(mail.take(kind), tensors, strict=True)
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


def facts() -> dict[str, Any]:
    """Returns what is measured on 2 ranks: threads, links, and what sums take."""
    world, cpu = get_world(), torch.device("cpu")
    links = *measure_links(world, cpu), measure_sums(world, [1 << 20], cpu)
    return {"threads": torch.get_num_threads(), "links": links}


def error(world: World) -> None:
    """Fails on rank 1 while the others wait in a collective."""
    if world.rank == 1:
        raise ValueError("the story's error")
    world.barrier("step 3")


def error_behind_a_hook(world: World) -> None:
    """Fails as `error`, in a script that has its own group of torch.distributed, whose hook for errors hides them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    error(world)


def error_shown_by_another(world: World) -> None:
    """Fails as `error`, in a script that shows errors itself."""
    sys.excepthook = sys.__excepthook__
    error(world)


def error_in_thread(world: World) -> None:
    """Fails in a thread of rank 1."""
    if world.rank == 1:
        thread = threading.Thread(target=int, args=("the story's error",))
        thread.start()
        thread.join()
        time.sleep(60)
    world.receive([torch.empty(1)], 1, 0).wait()


def error_everywhere(world: World) -> None:
    raise ValueError("the story's error")


def ended_before_message(world: World) -> None:
    """Ends rank 1 while rank 0 waits for its message."""
    if world.rank == 0:
        world.receive([torch.empty(1)], 1, 4).wait()


def waiting_for_each_other(world: World) -> None:
    """Lets each rank receive before it sends."""
    peer = 1 - world.rank
    world.receive([torch.empty(1)], peer, 0).wait()
    world.send([torch.empty(1)], peer, 0)


def normal(world: World) -> None:
    """Ends well, at different times, with messages that nobody receives and a caught `sys.exit`."""
    world.send([torch.ones(1_000_000)], 1 - world.rank, 0)
    world.start_all_reduce(torch.ones(1_000_000), (0, 1))
    time.sleep(world.rank)
    try:
        sys.exit(4)
    except SystemExit:
        world.barrier("going on")


if __name__ == "__main__":
    story = globals()[sys.argv[1]]
    world = get_world()
    world.barrier("start")
    Path(sys.argv[2]).write_text(str(time.time()))
    story(world)
