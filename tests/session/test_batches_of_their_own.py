"""Samples that meet in what a rank passes, as the nodes of a graph do: each rank's is a batch of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.graph.call import InputSpec
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.step_runner import given_whole
from tests.reference import Record, compare, gradients_of, sgd
from tests.session.training import QUIET, Setup, on_ranks

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


def test_edges_that_name_samples_of_other_micro_batches_are_named() -> None:
    """Each half of a graph gets all of its edges."""
    model = AutoVaruna(Messages(), num_micro_batches=2, dynamic_batch=False, **QUIET)
    x, edges, y = graph(0)
    with pytest.raises(IndexError) as caught:
        model(x[:4], edges, y[:4])
    said = "".join(getattr(caught.value, "__notes__", ["all of edges (2, 9) int64"]))
    assert "all of edges (2, 9) int64" in said


def test_a_micro_batch_that_is_all_that_a_rank_passes_has_no_inputs_of_others() -> None:
    edges = InputSpec("edges", (2, EDGES), torch.long, is_batch=False, needs_gradient=False)
    parts = {index: MicroBatch(index, index % 2, 0, NODES, 0.5) for index in range(2)}
    assert not given_whole([edges], parts[0], GlobalBatch(parts, ((0,), (1,))))
    halves = {index: MicroBatch(index, 0, index * 2, 2, 0.5) for index in range(2)}
    assert "num_micro_batches=1" in given_whole([edges], halves[0], GlobalBatch(halves, ((0,),)))
