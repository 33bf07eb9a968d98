"""Micro-batches: of one sample, very many, of batches of their own, and what normalisations count over."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, TraceError
from tests.catalogue import Batch, Case
from tests.catalogue.case import floats, generator, integers
from tests.catalogue.small import CLASSES, WIDTH, labelled, two_layers
from tests.reference import Record, compare, gradients_of
from tests.session.training import QUIET, Setup, on_ranks, pipeline, refuse, train_as_plain


class Tokens(nn.Module):
    """Takes the places of an image for tokens behind a normalisation, or before it: gradient and input differ."""

    def __init__(self, kind: str, is_before: bool) -> None:
        super().__init__()
        self.kind, self.is_before = kind, is_before
        self.kernel, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.rand(2, 2, 5) if kind == "volume" else torch.rand(4, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.kernel(x)
        if self.kind == "volume":
            hidden = hidden.unflatten(2, (2, 2))
        if not self.is_before:
            return self.last(F.layer_norm(self.normalized(hidden).flatten(2).transpose(1, 2), (6,))).square().mean()
        tokens = F.layer_norm(hidden.flatten(2).transpose(1, 2), (6,))
        hidden = self.normalized(tokens.transpose(1, 2).unflatten(2, hidden.shape[2:]))
        return F.cross_entropy(self.last((hidden * self.scale).sigmoid().flatten(2).mean(2)), y)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.is_before}"

    def normalized(self, hidden: Tensor) -> Tensor:
        norm = self.norm
        if self.kind == "instance":
            return F.instance_norm(hidden, None, None, norm.weight, norm.bias)
        return F.batch_norm(hidden, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def images(size: int, step: int) -> Batch:
    return (), {"x": floats(size, 3, 6, 7, of=generator(step)), "y": torch.arange(size) % 5}


@pytest.mark.parametrize("is_before", (False, True), ids=("behind", "before"))
@pytest.mark.parametrize("kind", ("batch", "volume", "instance"))
def test_one_sample_is_as_good_as_many(kind: str, is_before: bool) -> None:
    case = Case(f"tokens_{kind}", partial(Tokens, kind, is_before), images)
    train_as_plain(case, pipeline(2), 3, 3)


def asking(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Does something else for a batch of one sample."""
    h = torch.tanh(self.first(x))
    if x.shape[0] == 1:
        h = 5 * h
    if y.numel() - 1:
        h = h - h.mean(1, keepdim=True)
    return F.cross_entropy(self.last(h), y)


@pytest.mark.parametrize("sizes", [(3, 1, 3), (1, 3, 1)])
def test_a_branch_for_one_sample_is_taken_where_the_batch_has_one(sizes: tuple[int, ...]) -> None:
    """A micro-batch of one sample of several is not alone."""
    make = lambda: two_layers(asking)  # noqa: E731
    train_as_plain(Case("asking", make, labelled), pipeline(2, num_micro_batches=3), *sizes)


def model(is_synchronised: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return nn.SyncBatchNorm.convert_sync_batchnorm(made) if is_synchronised else made


X = floats(8, 6, of=generator(1))


def test_synchronised_statistics_are_those_of_all_or_of_a_size_that_is_set() -> None:
    """Once, they were those of each micro-batch, without a word."""
    refuse(model(True), r"1 is a SyncBatchNorm.*num_micro_batches=1.*batch_norm_samples", {"input": X}, InputError)
    for found in on_ranks(pipeline(2, num_micro_batches=1), model(True), lambda wrapped, *_: wrapped(X).detach()):
        torch.testing.assert_close(found, model()(X).detach())
    wrapped = AutoVaruna(model(), batch_norm_samples=4, **QUIET)
    plain = model()
    expected = torch.cat([plain(X[:4]), plain(X[4:])]).detach()
    torch.testing.assert_close(wrapped(X).detach(), expected)
    assert wrapped.plan is not None and wrapped.plan.num_micro_batches == 2


NODES, EDGES = 5, 9
Graph = tuple[Tensor, Tensor, Tensor]


def messages() -> nn.Module:
    """Returns a model that adds to each node what its neighbours send, with the loss over all nodes."""

    def forward(self: Any, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return F.cross_entropy(self.last(torch.tanh(h)), y)

    torch.manual_seed(0)
    return two_layers(forward)


def graph(rank: int) -> Graph:
    g = generator(rank)
    return floats(NODES, WIDTH, of=g), integers(NODES, 2, EDGES, of=g), integers(CLASSES, NODES, of=g)


def union(one: Graph, other: Graph) -> Graph:
    edges = torch.cat([one[1], other[1] + NODES], 1)
    return torch.cat([one[0], other[0]]), edges, torch.cat([one[2], other[2]])


def go_backward(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
    loss = model(*graph(rank))
    loss.backward()
    return Record(losses=[loss.detach()], gradients=[gradients_of(model.module)])


def test_ranks_pass_graphs_of_their_own_and_who_does_not_say_so_hears_how() -> None:
    model, setup = messages(), Setup(((0, 1),), 2, settings={"inputs": "per_rank"})
    loss = model(*union(graph(0), graph(1)))
    loss.backward()
    said = replace(setup, settings={**setup.settings, "dynamic_batch": False})
    for record in on_ranks(said, messages(), go_backward):
        compare(record, Record(losses=[loss.detach()], gradients=[gradients_of(model)]))
    with pytest.raises(TraceError, match=r"dynamic_batch=False: .*num_micro_batches=the number of ranks"):
        on_ranks(setup, messages(), go_backward)


def test_edges_that_name_samples_of_other_micro_batches_are_named() -> None:
    """Each half of a graph gets all of its edges."""
    model = AutoVaruna(messages(), num_micro_batches=2, dynamic_batch=False, **QUIET)
    x, edges, y = graph(0)
    with pytest.raises(IndexError) as caught:
        model(x[:4], edges, y[:4])
    said = "".join(getattr(caught.value, "__notes__", ["all of edges (2, 9) int64"]))
    assert "all of edges (2, 9) int64" in said
