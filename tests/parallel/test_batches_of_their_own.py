"""Samples that meet in what a rank passes, as the nodes of a graph do: each rank's is a batch of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from tests.parallel.training import Setup, on_ranks
from tests.reference import Record, compare, gradients_of, sgd

WIDTH, CLASSES, NODES, EDGES = 6, 4, 5, 9
Graph = tuple[Tensor, Tensor, Tensor]


class Messages(nn.Module):
    """Adds to each node what its neighbours send; returns the loss over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return F.cross_entropy(self.last(torch.tanh(h)), y)


def graph(rank: int) -> Graph:
    g = torch.Generator().manual_seed(rank)
    x, y = torch.randn(NODES, WIDTH, generator=g), torch.randint(CLASSES, (NODES,), generator=g)
    return x, torch.randint(NODES, (2, EDGES), generator=g), y


def union(one: Graph, other: Graph) -> Graph:
    """Returns two graphs as one."""
    edges = torch.cat([one[1], other[1] + NODES], 1)
    return torch.cat([one[0], other[0]]), edges, torch.cat([one[2], other[2]])


def go_backward(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
    loss = model(*graph(rank))
    loss.backward()
    return Record(losses=[loss.detach()], gradients=[gradients_of(model.module)])


def run(**settings: Any) -> list[Record]:
    setup = Setup(((0, 1),), 2, settings={"inputs": "per_rank", **settings})
    return on_ranks(setup, Messages(), go_backward, sgd)


def test_ranks_pass_graphs_of_their_own() -> None:
    model = Messages()
    loss = model(*union(graph(0), graph(1)))
    loss.backward()
    for record in run(dynamic_batch=False):
        compare(record, Record(losses=[loss.detach()], gradients=[gradients_of(model)]))


def test_who_does_not_say_so_hears_how() -> None:
    with pytest.raises(TraceError, match=r"dynamic_batch=False: .*num_micro_batches=the number of ranks"):
        run()
