"""What `test_failures.py` runs on ranks: scripts that end badly, each a function (``python -m ... story folder``)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autovaruna import AutoVaruna, barrier, get_rank
from autovaruna.graph.trace import trace
from autovaruna.session import traces

TEXT = "the story's error"
FAILING: set[str] = set()
"""The directions in which a trap fails on this rank."""
FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()
OWN = FOLDER / f"process-{os.getpid()}"
QUIET: dict[str, Any] = {"save_deployment": False, "progress": False, "profile_iterations": 1}


def fault() -> None:
    """Notes the time of the fault; the first rank counts."""
    path = FOLDER / "fault"
    if FOLDER.name and not path.exists():
        path.write_text(repr(time.time()))


def fail(*_: object) -> None:
    """Is the fault that a story is about."""
    fault()
    raise ValueError(TEXT)


@torch.library.custom_op("failures::trap", mutates_args=())
def trap(x: Tensor) -> Tensor:
    if "forward" in FAILING:
        fail()
    return x.clone()


@trap.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _trap_backward(_: Any, gradient: Tensor) -> Tensor:
    if "backward" in FAILING:
        fail()
    return gradient


trap.register_autograd(_trap_backward)


class Net(nn.Module):
    """Three layers, then a trap; the loss is in the model."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.output(x)
        return nn.functional.mse_loss(out, y)

    def output(self, x: Tensor) -> Tensor:
        """Returns the output that the loss is made of."""
        hidden = torch.relu(self.middle(self.first(x)))
        out: Tensor = trap(self.last(hidden))
        return out


class OutputNet(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.output(x)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2)


def wrap(model: nn.Module | None = None, **settings: Any) -> tuple[AutoVaruna, torch.optim.Optimizer]:
    """Returns a wrapped model of two stages, and its optimizer."""
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return AutoVaruna(model, optimizer, **{**QUIET, "cuts": ["last"], "stage_ranks": [[0], [1]], **settings}), optimizer


def train(model: AutoVaruna, optimizer: Any, between: Callable[[int], object] = id, steps: int = 3) -> None:
    """Trains, and calls `between(step)` before each step; `id` does nothing."""
    for step in range(steps):
        between(step)
        loss = model(*batch())
        (loss if loss.dim() == 0 else loss.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def on_rank_1(act: Callable[[], object], step: int = 1) -> Callable[[int], object]:
    """Returns what does `act` on rank 1 before a step."""
    return lambda now: act() if get_rank() == 1 and now == step else None


def set_trap(direction: str) -> Callable[[], None]:
    return lambda: FAILING.add(direction)


def hook_fails() -> None:
    model, optimizer = wrap()
    for parameter in model.module.parameters():
        parameter.register_hook(lambda gradient: fail() if get_rank() == 1 else gradient)
    train(model, optimizer)


def script_fails_behind_a_hook() -> None:
    """Has its own group of torch.distributed, whose hook for errors hides them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    barrier_fails((1,))


def script_meets_in_a_group_of_its_own() -> None:
    """Once, a rank waited for ever in a collective of a group that the script had made itself."""
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / "group"), 2), rank=get_rank(), world_size=2)

    def meet() -> None:
        fault()
        dist.barrier()

    train(*wrap(), on_rank_1(meet))


def script_shows_errors_itself() -> None:
    sys.excepthook = sys.__excepthook__
    barrier_fails((1,))


def thread_fails() -> None:
    if get_rank() == 1:
        thread = Thread(target=fail, name="reader")
        thread.start()
        thread.join()
        time.sleep(60)
    barrier()


def barrier_fails(ranks: tuple[int, ...]) -> None:
    """Fails on some ranks while the others wait for them."""
    if get_rank() in ranks:
        fail()
    barrier()


def script_raises_system_exit() -> None:
    def leave() -> None:
        fault()
        raise SystemExit(3)

    train(*wrap(), on_rank_1(leave))


def script_is_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    train(*wrap(), on_rank_1(lambda: (fault(), os.kill(os.getpid(), signal.SIGINT))))


def process_dies_while_others_compute() -> None:
    def act() -> None:
        fault()
        os.kill(os.getpid(), signal.SIGKILL) if get_rank() == 1 else time.sleep(60)

    train(*wrap(), lambda step: act() if step == 1 else None)


def script_asks_for_state_in_backward() -> None:
    """Rank 1 leaves a backward that others wait in."""
    model, _ = wrap(OutputNet())
    out = model(*batch())
    fault()
    model.state_dict() if get_rank() == 1 else out.sum().backward()


def script_never_calls() -> None:
    """Rank 1 has no batches at all, and is through before rank 0 calls for the first time."""
    model, optimizer = wrap()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        fault()
        return
    time.sleep(1)
    train(model, optimizer)


def process_is_gone_before_others_begin() -> None:
    """Rank 1 has ended well before rank 0 starts MPI, which would wait for it for ever."""
    model, optimizer = wrap()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os._exit(0)
    while len(processes := list(FOLDER.glob("process-*"))) < 2 or any(
        Path(f"/proc/{path.name.removeprefix('process-')}").exists() for path in processes if path != OWN
    ):
        time.sleep(0.05)
    fault()
    train(model, optimizer)


def tracing_fails_at_once() -> None:
    """Rank 1 fails while rank 0 traces a model that takes long."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        if get_rank() == 1:
            fail()
        time.sleep(60)
        return trace(*args, **kwargs)

    traces.trace = slow  # type: ignore[assignment]
    train(*wrap())


def error_is_swallowed() -> None:
    """A script that catches everything does not go on after a step has failed in the middle."""
    model, optimizer = wrap()
    for step in range(4):
        with suppress(Exception):
            on_rank_1(set_trap("forward"))(step)
            train(model, optimizer, steps=1)


STORIES: dict[str, Callable[[], object]] = {
    "nothing_fails": lambda: train(*wrap(load_deployment="auto", save_deployment=True)),
    "forward_fails": lambda: train(*wrap(), on_rank_1(set_trap("forward"))),
    "backward_from_outputs_fails": lambda: train(*wrap(OutputNet()), on_rank_1(set_trap("backward"))),
    "script_fails": lambda: train(*wrap(), on_rank_1(fail)),
    "setting_is_unknown_to_one": lambda: (
        fault(),
        train(*wrap(**({"num_stage": 2} if os.environ["OMPI_COMM_WORLD_RANK"] == "1" else {}))),
    ),
    "every_rank_fails": lambda: barrier_fails((0, 1)),
    "process_vanishes_well": lambda: train(*wrap(), on_rank_1(lambda: (fault(), os._exit(0)))),
}
"""The stories of one line each; others are functions of their names."""


if __name__ == "__main__":
    OWN.touch()
    STORIES.get(sys.argv[1], globals().get(sys.argv[1]))()
