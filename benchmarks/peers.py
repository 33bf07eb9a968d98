"""Makes steps of PyTorch's own ways to use several ranks, through gloo: its pipelines, and DistributedDataParallel."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO

import torch
import torch.distributed as dist
from mpi4py import MPI
from paired import seconds_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]
COMM = MPI.COMM_WORLD
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def open_gloo() -> None:
    """Starts torch.distributed with the ranks of mpirun."""
    rank, size = COMM.Get_rank(), COMM.Get_size()
    names = COMM.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(names)) == 1 else socket.gethostbyname(names[0])
    store: dist.Store
    if rank == 0:
        store = first = dist.TCPStore(address, 0, size, is_master=True, wait_for_workers=False)
        COMM.bcast(first.port)
    else:
        store = dist.TCPStore(address, COMM.bcast(None), size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def close_gloo() -> None:
    """Ends torch.distributed."""
    COMM.Barrier()
    dist.destroy_process_group()


def pipeline_step(
    part: nn.Module, loss: Loss, batch: Batch, num_micro_batches: int, schedule: str = "1f1b"
) -> Callable[[], float]:
    """Returns a step of torch.distributed.pipelining; its loss is the global one, known on the last rank alone.

    Args:
        part: This rank's part of the model.
        loss: The loss of a micro-batch.
        batch: The global batch: inputs for the first rank, targets for the last.
        num_micro_batches: M.
        schedule: One of `SCHEDULES`.
    """
    rank, size = COMM.Get_rank(), COMM.Get_size()
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    order = SCHEDULES[schedule](stage, num_micro_batches, loss_fn=loss)

    def step() -> float:
        losses: list[Tensor] = []
        inputs = (batch[0],) if rank == 0 else ()
        if rank == size - 1:
            order.step(*inputs, target=batch[1], losses=losses)
        else:
            order.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def replicated_step(model: nn.Module, batch: Batch) -> Callable[[], float]:
    """Returns a step of DistributedDataParallel, on this rank's share of the global batch."""
    rank, size = COMM.Get_rank(), COMM.Get_size()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mine = tuple(tensor.tensor_split(size)[rank].contiguous() for tensor in batch)

    def step() -> float:
        loss = wrapped(*mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def our_step(model: nn.Module, batch: Batch, **settings: object) -> Callable[[], float]:
    """Returns a step of AutoVaruna, every rank passing the global batch."""
    from autovaruna import AutoVaruna

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    quiet = {"load_deployment": False, "save_deployment": False, "progress": False, "profile_cache": False}
    given = {"inputs": "replicated", **quiet, **settings}
    wrapped = AutoVaruna(model, optimizer, **given)

    def step() -> float:
        loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    step.model = wrapped  # type: ignore[attr-defined]
    return step


def slowest(function: Callable[[], object]) -> float:
    """Calls a function on all ranks at once and returns the seconds of the slowest."""
    COMM.Barrier()
    return float(COMM.allreduce(seconds_of(function), MPI.MAX))


def fastest_of(steps: Sequence[tuple[str, Callable[[], float]]], num_times: int = 3) -> tuple[str, Callable[[], float]]:
    """Returns the step with the least median of a few, the same on every rank."""
    known = []
    for name, step in steps:
        with redirect_stdout(StringIO()):
            seconds = sorted(slowest(step) for _ in range(num_times + 1))
        known.append((seconds[num_times // 2], name, step))
    _, name, step = min(known, key=lambda each: each[0])
    return name, step
