"""What forward and scripts change of a model: once a micro-batch, once a call, from then on, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from autovaruna import AutoVaruna, InputError, RankError, TraceError
from autovaruna.graph.guards import Guards
from autovaruna.runtime.world import World
from tests.catalogue.case import Batch, Case, floats, generator
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.ranks import run_ranks
from tests.reference import compare, part, plain_micro_batched, ranges, sgd
from tests.session.training import QUIET, Setup, on_ranks, pipeline, refuse, train

SIZE, STEPS = 6, 2


class Layers(nn.Module):
    """Has two layers, a slow copy of the first that nobody trains, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slow, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.slow.requires_grad_(False)
        self.register_buffer("scale", torch.ones(WIDTH))


class Scaled(Layers):
    """Divides by a running scale, of which autograd keeps what it was."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return F.cross_entropy(self.last(torch.tanh(x / self.scale.detach()) * self.scale), y)


class Followed(Layers):
    """Has a copy of its weights follow them in forward, and trains towards what that says."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = slow.data * 0.5 + fast.data * 0.5
        wanted = self.slow(x)
        return F.cross_entropy(self.last(torch.tanh(self.first(x))), y) + F.mse_loss(self.first(x), 2.0 * wanted)


class Shrunk(Layers):
    """Shrinks a weight that is trained, before and after it is used."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.first.weight.data.mul_(0.9)
        x = torch.tanh(self.first(x))
        with torch.no_grad():
            self.first.bias.mul_(0.9)
        return F.cross_entropy(self.last(x), y)


class Normed(Layers):
    """Turns the vectors of a spectral normalisation, and counts its calls before and after that enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last = parametrizations.spectral_norm(self.last)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = 1.0 + self.calls
        self.calls += 0.5
        return F.cross_entropy(self.last(torch.tanh(self.first(x) * before)), y) * self.calls


class Twofold(Layers):
    """Lets an average follow another, which follows from samples, and counts calls beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("far", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.calls += 1
            self.far.lerp_(self.scale, 0.1)
            self.scale.mul_(0.5).add_(x.abs().mean(0))
        return F.cross_entropy(self.last(torch.tanh(x / self.far.detach())), y)


class Corrected(Layers):
    """Corrects an average of samples by the count of its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.count += 1
            self.scale.lerp_(x.abs().mean(0), 0.1)
        return F.cross_entropy(self.last(torch.tanh(x / (self.scale / (1 - 0.9**self.count)))), y)


class Taught(Layers):
    """Learns from a teacher in training mode, whose batch normalisation changes its statistics under ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        x = torch.tanh(self.first(x))
        return F.cross_entropy(self.last(x), y) + (x - taught).square().mean()


class Averaged(nn.Module):
    """Subtracts a mean of all that it has seen, which its count of calls weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))  # the reference counts calls in integers alone

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0), 1.0 / self.calls.item())
        return x - self.mean


class WithAveraged(Layers):
    """Has such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Averaged()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.slow(self.first(x)))), y)


MODELS = (Scaled, Twofold, Corrected, Followed, Shrunk, Normed, Taught, WithAveraged)
STEADY = (Followed, Shrunk, Normed)
"""Models that change nothing by what is in the samples."""


def case_of(model: type[nn.Module]) -> Case:
    """Returns a case whose micro-batches change what the next one finds."""
    return Case(model.__name__.lower(), model, labelled, has_batch_norm=True)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_changes_state_as_one_process_does(model: type[nn.Module], recompute: bool) -> None:
    case = case_of(model)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    bounds = ranges(SIZE, 1 if model in STEADY else 3)
    plain = plain_micro_batched(case, [[part(batch, *each) for each in bounds] for batch in batches])
    compare(train(case, pipeline(2, recompute=recompute), batches), plain)
    compare(train(case, pipeline(2, recompute=recompute, shares=(0.99,)), batches), plain)


@pytest.mark.parametrize("model", MODELS)
def test_replicas_follow_the_first(model: type[nn.Module]) -> None:
    """Ranks agree after each step on what each has changed; parts with such state can be measured."""
    case = case_of(model)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    record = train(case, Setup(((0, 1), (2,))), batches)
    assert all(value.isfinite().all() for value in record.weights.values())
    AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1]).backward()


class Judged(nn.Linear):
    """Branches on numbers, and shrinks its weight past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Between(Layers):
    """Has such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Judged(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.first(x)), y)


def test_a_module_that_is_kept_whole_may_not_change_its_parameters() -> None:
    """Neither a later micro-batch nor a recompute would know."""
    refuse(Between(), "cannot be traced at")


BATCH = labelled(6, 0)[1]


class Optioned(nn.Module):
    """Has a number, a flag and a text that forward reads, and a module that it counts nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x) * self.scale, y)


def scale(model: Optioned) -> None:
    model.scale = 2.0


def drop(model: Optioned) -> None:
    model.body[1].p = 1.0  # type: ignore[assignment]


def append(model: Optioned) -> None:
    model.body.append(nn.Tanh())


def exchange(model: Optioned) -> None:
    model.body[1] = nn.ReLU()


def hook(model: Optioned) -> None:
    model.body[0].register_forward_hook(lambda module, given, result: -result)


def of_wrapper(model: Any) -> None:
    """Sets an attribute of the model on what wraps it."""
    model.scale = 2.0


def train_and_change(change: Callable[[Optioned], None], is_plain: bool) -> list[float]:
    """Makes a step before a change and two after it; returns the losses."""
    torch.manual_seed(0)
    model = Optioned()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = model if is_plain else AutoVaruna(model, optimizer, **QUIET, num_micro_batches=1)
    losses = []
    for step in range(3):
        loss = wrapped(**BATCH)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            change(wrapped if change is of_wrapper else model)  # type: ignore[arg-type]
    return losses


class Config:
    """Is a configuration: one number of it is read, and another one is not."""

    def __init__(self) -> None:
        self.scale, self.unread = 1.0, 0


class Holder(Optioned):
    """Reads numbers in an object, a container, an array, a buffer and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.by_name, self.array, self.tensor = Config(), {"a": [1.0]}, numpy.ones(2), torch.ones(())
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = self.config.scale * self.by_name["a"][0] * float(self.array[0]) * self.tensor * self.buffer
        return super().forward(x, y) * factor


INNER: dict[str, Callable[[Holder], Any]] = {
    "config": lambda model: setattr(model.config, "scale", 2.0),
    "another config": lambda model: vars(model).update(config=SimpleNamespace(scale=2.0)),
    "container": lambda model: model.by_name["a"].__setitem__(0, 2.0),
    "array": lambda model: model.array.fill(2.0),
    "tensor": lambda model: setattr(model, "tensor", torch.full((), 2.0)),
    "buffer": lambda model: setattr(model, "buffer", torch.full((), 2.0)),
}


def test_what_an_attribute_holds_counts() -> None:
    """Once, a trace kept the numbers that a configuration, a list or a replaced buffer had at first."""
    for name, change in INNER.items():
        model = Holder()
        wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
        before = wrapped(**BATCH).item()
        change(model)
        for _ in range(2):
            assert wrapped(**BATCH).item() == 2 * before, name
        model.config.unread = 5
        wrapped(**BATCH)
        assert wrapped._session.traces is not None and wrapped._session.traces.num_traced == 2 - (name == "buffer"), (
            name
        )


def test_a_buffer_of_another_kind_is_refused() -> None:
    model = Holder()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    wrapped(**BATCH)
    model.buffer = torch.ones(1)
    with pytest.raises(InputError, match=r"buffer buffer has been replaced .*got \(\(1,\).*expected \(\(\)"):
        wrapped(**BATCH)


@pytest.mark.parametrize(
    "change", [scale, drop, append, exchange, hook, of_wrapper], ids=lambda change: change.__name__
)
def test_a_change_counts(change: Callable[[Optioned], None]) -> None:
    assert (
        train_and_change(change, is_plain=False)
        == train_and_change(change, is_plain=True)
        != train_and_change(lambda model: None, is_plain=True)
    )


@pytest.mark.parametrize("num_frozen", [1, 4], ids=["one", "all"])
def test_new_memory_of_frozen_parameters_counts(num_frozen: int) -> None:
    """An average of weights, or a quantisation, gives ``.data`` anew to parameters that need no gradient."""

    plain = Optioned()
    for parameter in list(plain.parameters())[:num_frozen]:
        parameter.requires_grad_(False)

    def be_rank(world: World) -> list[float]:
        model = copy.deepcopy(plain)
        wrapped = model if world.num_ranks == 1 else AutoVaruna(model, **QUIET, inputs="replicated")
        losses = []
        for _ in range(3):
            with torch.no_grad():
                losses.append(wrapped(**BATCH).item())
            for parameter in wrapped.parameters():
                parameter.data = parameter.data * 0.5
        return losses

    (expected,) = run_ranks(1, be_rank)
    for losses in run_ranks(2, be_rank):
        assert losses == pytest.approx(expected)


def test_what_a_call_sets_itself_is_no_change() -> None:
    """Ranks set it apart, each on its own stages."""
    model = Optioned()
    guards = Guards(model)
    before = guards.words()
    guards.start()
    model.scale, model.body[0].seen = 3.0, 5  # type: ignore[assignment]
    guards.settle()
    assert guards.words() == before and guards.replaced() == []


def test_what_forward_does_not_read_may_change_at_every_step() -> None:
    """A counter or a clock that a script keeps in the model costs no trace, and may differ between ranks."""

    def be_rank(world: World) -> int:
        model = Optioned()
        model.num_steps = 0  # type: ignore[assignment]
        wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
        model.began = float(world.rank)  # type: ignore[assignment]
        for _ in range(4):
            model.num_steps += 1  # type: ignore[assignment, operator]
            model.clock = 0.1 * world.rank  # type: ignore[assignment]
            wrapped(**BATCH)
        assert wrapped._session.traces is not None
        return wrapped._session.traces.num_traced

    assert run_ranks(2, be_rank) == [1, 1]


def test_what_forward_looked_for_in_vain_counts_once_it_is_there() -> None:
    class Curious(Optioned):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * getattr(self, "weight_of_loss", 1.0)

    model = Curious()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    model.weight_of_loss = 4.0  # type: ignore[assignment]
    assert wrapped(**BATCH).item() == 4 * before
    del model.weight_of_loss
    assert wrapped(**BATCH).item() == before


def test_another_parameter_is_refused_once_the_model_is_split() -> None:
    """It would not be trained; before the first call, it is taken."""
    model = Optioned()
    wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
    model.body[2] = nn.Linear(WIDTH, CLASSES)
    wrapped(**BATCH).backward()
    assert model.body[2].weight.grad is not None
    model.body[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(InputError, match=r"\['body\.0\.weight'\]\. Expected the same ones"):
        wrapped(**BATCH)


def test_a_change_on_one_rank_is_told() -> None:
    """Ranks whose models differ would compute different things."""

    def be_rank(world: World) -> None:
        model = Optioned()
        wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
        wrapped(**BATCH)
        if world.rank == 1:
            model.scale = 2.0
        with pytest.raises(RankError, match=r"attributes is missing on rank 0, scale:2\.0 on rank 1"):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


class OfClass(Optioned):
    """Reads a number that its class has, until a script gives the model one of its own."""

    factor = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * self.factor


def test_a_counter_is_left_out_and_what_is_read_beside_it_counts() -> None:
    """A trace with something unusable in the place of an attribute says whether it is read, by way of its class too."""
    model = OfClass()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    for step in range(3):
        model.num_steps, model.factor = step, 2.0**step  # type: ignore[assignment]
        assert wrapped(**BATCH).item() == before * 2.0**step
    model.num_steps = 7  # type: ignore[assignment]
    wrapped(**BATCH)
    traces = wrapped._session.traces
    assert traces is not None and traces.num_traced == 4  # one for each value of the factor


def test_what_a_model_only_compares_counts() -> None:
    class Choosing(Optioned):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * (1.0 if self.shift is None else 2.0)

    model = Choosing()
    model.shift = 1  # type: ignore[assignment]
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    for value, factor in ((2, 1.0), (None, 0.5), (3, 1.0), (4, 1.0), (None, 0.5)):
        model.shift = value  # type: ignore[assignment]
        assert wrapped(**BATCH).item() == before * factor


class Tabled(nn.Module):
    """Scales what a layer makes by a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.length = 0
        self.ready = False

    def forward(self, values: Tensor) -> Tensor:
        """Returns (size, length, 1)."""
        made: Tensor = self.last(torch.relu(self.first(values)) * self.table(values))
        return made

    def table(self, values: Tensor) -> Tensor:
        """Returns (length, 1)."""
        raise NotImplementedError


def positions(values: Tensor) -> Tensor:
    """Makes the table."""
    return torch.arange(values.shape[1], dtype=values.dtype).mul(0.3).cos()[:, None]


class Attribute(Tabled):
    """Keeps a table in an attribute, with its length."""

    cached: Tensor | None = None

    def table(self, values: Tensor) -> Tensor:
        """Makes it anew for longer samples."""
        if self.cached is None or self.length < values.shape[1]:
            self.length, self.cached = values.shape[1], positions(values)
        return self.cached[: values.shape[1]]


class NewBuffer(Tabled):
    """Registers a buffer in its first call."""

    def table(self, values: Tensor) -> Tensor:
        """Makes it once."""
        if not hasattr(self, "made"):
            self.register_buffer("made", positions(values))
        return self.get_buffer("made")


class Grown(Tabled):
    """Has a buffer that is too short, which it writes element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.zeros(1, 1))

    def table(self, values: Tensor) -> Tensor:
        """Makes a longer one."""
        if self.get_buffer("made").shape[0] < values.shape[1]:
            made = torch.empty(values.shape[1], 1)
            made[:, 0] = torch.arange(values.shape[1]) * 0.3
            self.made = made
        return self.get_buffer("made")


class InPlace(Tabled):
    """Fills a part of a buffer, by a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3), requires_grad=False)
        self.register_buffer("made", torch.zeros(8, 1))

    def table(self, values: Tensor) -> Tensor:
        """Fills what is missing."""
        if self.length < values.shape[1]:
            self.length = values.shape[1]
            self.get_buffer("made")[: self.length, 0] = torch.arange(self.length) * self.rate
        return self.get_buffer("made")[: values.shape[1]]


def batch(size: int, seed: int) -> Batch:
    """Returns samples of six positions."""
    return (floats(size, 6, 4, of=generator(seed)),), {}


def train_warm(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Makes two steps, after a call that leaves what it leaves."""
    for step in range(3):
        model(*batch(4, step)[0]).square().mean().backward()
        if step:
            optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("kind", [Attribute, NewBuffer, Grown, InPlace])
def test_what_a_first_call_leaves_is_made_before_the_model_is_wrapped(kind: type[Tabled]) -> None:
    """The refusal says so; then the model trains as in plain PyTorch."""
    torch.manual_seed(0)
    plain = kind()
    warm, cold = copy.deepcopy(plain), copy.deepcopy(plain)
    with pytest.raises(TraceError, match="run one batch through the model before it is wrapped"):
        AutoVaruna(cold, num_micro_batches=2, **QUIET)(*batch(4, 0)[0])
    warm(*batch(4, 0)[0])
    found = on_ranks(
        pipeline(2, num_micro_batches=2), warm, lambda model, optimizer, rank: train_warm(model, optimizer)
    )
    expected = train_warm(plain, sgd(plain.parameters()))
    for state in found:
        torch.testing.assert_close(state, expected)


class Counting(Tabled):
    """Counts its calls, and returns something else in each."""

    def table(self, values: Tensor) -> Tensor:
        self.length += 1
        return positions(values) * self.length


def test_a_count_of_calls_is_refused() -> None:
    """Afterwards the model is as it was before."""
    model = Counting()
    with pytest.raises(TraceError, match="changes the Python number length"):
        AutoVaruna(model, num_micro_batches=2, **QUIET)(*batch(4, 0)[0])
    assert model.length == 0
