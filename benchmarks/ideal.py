"""Runs what no pipeline can beat, in plain PyTorch: each rank's own work, and no wait but the first and the last.

    rank 0   F0 F1 B0 F2 B1 F3 B2 ........ B3 update      waits for the gradient of its last micro-batch
    rank 1      F0 B0 F1 B1 F2 B2 F3 B3 update            waits for the activation of its first one

Everything else that a stage receives lies there from the start. So a step takes what arithmetic, two messages a link
and the optimizer take, on the ranks that share this machine, with the numbers, the tensors alive and the caches of a
step: max_s [ sum_{j<s} (F_j + c) + M (F_s + B_s) + sum_{j<s} (B_j + c) ] and the update, measured rather than added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from peers import COMM
from torch import Tensor, nn
from tunable import Chain, squared

Batch = tuple[Tensor, Tensor]


class Ideal:
    """A stage of a chain with all that it will receive.

    Args:
        chain: The stages; this rank runs its own.
        batch: The global batch.
        num_micro_batches: M.
    """

    def __init__(self, chain: Chain, batch: Batch, num_micro_batches: int) -> None:
        self.rank, self.num_ranks = COMM.Get_rank(), COMM.Get_size()
        self.stage: nn.Module = chain.stages[self.rank]
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=0.0)  # what it receives is that of these weights
        parts = zip(*(tensor.chunk(num_micro_batches) for tensor in batch), strict=True)
        received = [receive(chain, self.rank, x, target, num_micro_batches) for x, target in parts]
        self.inputs = [x for x, _ in received]
        self.gradients = [gradient for _, gradient in received]
        self.targets = batch[1].chunk(num_micro_batches)
        self.share = torch.full((), 1 / num_micro_batches)
        self.depth = min(self.num_ranks - self.rank, num_micro_batches)

    @property
    def is_last(self) -> bool:
        """Whether the loss is made here."""
        return self.rank == self.num_ranks - 1

    def step(self) -> None:
        """Runs one step."""
        num, flying = len(self.inputs), []
        for m in range(num):
            flying.append(self._forward(m))
            if m >= self.depth - 1:
                self._backward(m - self.depth + 1, *flying.pop(0))
        for m in range(num - self.depth + 1, num):
            self._backward(m, *flying.pop(0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _forward(self, m: int) -> tuple[Tensor, Tensor]:
        x = self.inputs[m]
        if m == 0 and self.rank:
            COMM.Recv(x.numpy(), self.rank - 1)
        x = x.detach().requires_grad_(self.rank > 0)
        out = self.stage(x)
        if self.is_last:
            return x, squared(out, self.targets[m])
        if m == 0:
            COMM.Send(out.detach().numpy(), self.rank + 1)
        return x, out

    def _backward(self, m: int, x: Tensor, out: Tensor) -> None:
        is_end = m == len(self.inputs) - 1
        if is_end and not self.is_last:
            COMM.Recv(self.gradients[m].numpy(), self.rank + 1)
        out.backward(self.share if self.is_last else self.gradients[m])
        if is_end and self.rank:
            assert x.grad is not None
            COMM.Send(x.grad.numpy(), self.rank - 1)


def ideal_step(chain: Chain, batch: Batch, num_micro_batches: int) -> Callable[[], None]:
    """Returns a step that no pipeline of these stages, one a rank, can beat; every rank calls it."""
    return Ideal(chain, batch, num_micro_batches).step


def receive(chain: Chain, rank: int, x: Tensor, target: Tensor, num_micro_batches: int) -> tuple[Tensor, Tensor]:
    """Returns what a stage is given for a micro-batch: what comes in, and the gradient of what goes out."""
    values: list[Tensor] = [x]
    for stage in chain.stages:
        values.append(stage(values[-1]))
    sought: Sequence[Tensor] = values[1:-1]
    loss = squared(values[-1], target) / num_micro_batches
    gradients = [*torch.autograd.grad(loss, sought), torch.ones(())] if sought else [torch.ones(())]
    return values[rank].detach().clone(), gradients[rank].clone()
