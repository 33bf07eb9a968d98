"""Micro-batches: of one sample, very many, of batches of their own, and what normalisations count over."""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, TraceError
from autovaruna.graph.call import InputSpec
from autovaruna.runtime.batch import GlobalBatch, MicroBatch
from autovaruna.runtime.step_runner import given_whole
from autovaruna.runtime.transport.base import Part
from autovaruna.runtime.world import Message, World
from tests.catalogue import Batch, Case
from tests.ranks import run_ranks
from tests.reference import Record, compare, gradients_of, plain_steps, sgd
from tests.session.training import QUIET, Setup, on_ranks, pipeline, train, train_as_plain

KINDS = ("batch", "volume", "instance")


class Tokens(nn.Module):
    """Takes the places of an image for tokens behind a normalisation, or before it: gradient and input differ."""

    def __init__(self, kind: str, is_before: bool) -> None:
        super().__init__()
        self.kind, self.is_before = kind, is_before
        self.kernel, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
        self.norm, self.scale = (
            nn.BatchNorm2d(6),
            nn.Parameter(torch.rand(2, 2, 5) if kind == "volume" else torch.rand(4, 5)),
        )

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
    generator = torch.Generator().manual_seed(step)
    return (), {"x": torch.randn(size, 3, 6, 7, generator=generator), "y": torch.arange(size) % 5}


@pytest.mark.parametrize("is_before", (False, True), ids=("behind", "before"))
@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_is_as_good_as_many(kind: str, is_before: bool) -> None:
    case = Case(f"tokens_{kind}", partial(Tokens, kind, is_before), images)
    train_as_plain(case, pipeline(2), 3, 3)


class Asking(nn.Module):
    """Does something else for a batch of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if x.shape[0] == 1:
            hidden = 5 * hidden
        if y.numel() - 1:
            hidden = hidden - hidden.mean(1, keepdim=True)
        return F.cross_entropy(self.last(hidden), y)


def vectors(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return (), {"x": torch.randn(size, 6, generator=generator), "y": torch.arange(size) % 5}


@pytest.mark.parametrize("sizes", [(3, 1, 3), (1, 3, 1)])
def test_a_branch_for_one_sample_is_taken_where_the_batch_has_one(sizes: tuple[int, ...]) -> None:
    """A micro-batch of one sample of several is not alone."""
    case = Case("asking", Asking, vectors)
    batches = [case.batch(size, step) for step, size in enumerate(sizes)]
    compare(train(case, pipeline(2, num_micro_batches=3), batches), plain_steps(case, batches))


def model(is_synchronised: bool = False) -> nn.Module:
    """Makes a model with a normalisation."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return nn.SyncBatchNorm.convert_sync_batchnorm(made) if is_synchronised else made  # type: ignore[no-untyped-call,no-any-return]


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def output(wrapped: Any, optimizer: Any, rank: int) -> Tensor:
    """Calls the model."""
    return wrapped(X).detach()  # type: ignore[no-any-return]


def test_synchronised_statistics_of_parts_are_refused() -> None:
    """Once, they were those of each micro-batch, without a word."""

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=r"1 is a SyncBatchNorm.*num_micro_batches=1.*batch_norm_samples"):
            wrapped(X)

    on_ranks(pipeline(2, num_micro_batches=4), model(True), run)


def test_synchronised_statistics_of_all_are_exact() -> None:
    for found in on_ranks(pipeline(2, num_micro_batches=1), model(True), output):
        torch.testing.assert_close(found, model()(X).detach())


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_log_says_what_is_counted_over(num_micro_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(pipeline(2, num_micro_batches=num_micro_batches), model(), output)
    told = [
        each.getMessage()
        for each in caplog.records
        if "count over micro-batches of 4 samples, of 8;" in each.getMessage()
    ]
    assert len(told) == num_micro_batches - 1


def test_the_size_can_be_set() -> None:
    wrapped = AutoVaruna(model(), batch_norm_samples=4, load_deployment=False, save_deployment=False, progress=False)
    plain = model()
    expected = torch.cat([plain(X[:4]), plain(X[4:])]).detach()
    torch.testing.assert_close(wrapped(X).detach(), expected)
    assert wrapped.plan is not None and wrapped.plan.num_micro_batches == 2


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


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def num_calls(num_micro_batches: int) -> int:
    """Returns how many functions, of Python and of C, the third step calls."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"num_micro_batches": num_micro_batches, "max_micro_batches": num_micro_batches}
    model = AutoVaruna(net, optimizer, num_stages=1, profile_iterations=1, **settings, **QUIET)
    x, y = torch.randn(num_micro_batches, 4), torch.randn(num_micro_batches, 1)
    counter = count()

    def step() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            next(counter)

    step()
    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return next(counter)


def test_a_step_calls_as_many_functions_for_each_micro_batch() -> None:
    few, many = num_calls(50), num_calls(1000)
    assert many / 1000 <= 1.2 * few / 50


class Stuck(Part):
    """Has no room to leave."""

    needs_calls = True

    def is_done(self) -> bool:
        return False


@pytest.mark.parametrize("num_waiting", [100_000])
def test_a_glance_takes_no_longer_the_more_messages_wait(num_waiting: int) -> None:
    """All were copied into a list at every instruction: the time of a step grew with the square."""

    def run(world: World) -> tuple[float, float]:
        def seconds() -> float:
            tries = []
            for _ in range(20):
                begin = time.thread_time()
                world.glance()
                tries.append(time.thread_time() - begin)
            return min(tries)

        def wait_for(number: int) -> None:
            for _ in range(number):
                Message(world, [Stuck()], ("sent", 0, 0, 0), 1)

        wait_for(10)
        few = seconds()
        wait_for(num_waiting)
        many = seconds()
        world.lagging.clear()
        return few, many

    ((few, many),) = run_ranks(1, run)
    assert many <= 10 * few + 50e-6
