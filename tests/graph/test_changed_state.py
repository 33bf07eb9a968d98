"""What forward and scripts change of a model: once a micro-batch, once a call, from then on, or refused."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from autovaruna import AutoVaruna, InputError, RankError, TraceError
from tests.catalogue.case import Case, floats, generator
from tests.catalogue.small import CLASSES, WIDTH, Written, labelled, two_layers
from tests.graph.models import traced
from tests.products import some
from tests.reference import compare, micro_batches, plain_micro_batched, sgd
from tests.session.training import QUIET, Setup, as_plain, descend, measure, on_ranks, pipeline, refuse, train

SIZE, STEPS = 6, 2
BATCH = labelled(6, 0)[1]
ONE_RANK, REPLICAS = Setup(num_micro_batches=2), Setup(((0, 1),), num_micro_batches=2)


def layers(forward: Callable[..., Tensor], **more: Any) -> nn.Module:
    """Has two layers, a slow copy of the first that nobody trains, and a scale."""
    slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return two_layers(forward, **{"slow": slow, "scale": torch.ones(WIDTH), **more})


def scaled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Divides by a running scale, of which autograd keeps what it was."""
    x = self.first(x)
    with torch.no_grad():
        self.scale.mul_(0.5).add_(x.abs().mean(0))
    return F.cross_entropy(self.last(torch.tanh(x / self.scale.detach()) * self.scale), y)


def followed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Has a copy of its weights follow them in forward, and trains towards what that says."""
    for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
        slow.data = slow.data * 0.5 + fast.data * 0.5
    wanted = self.slow(x)
    return F.cross_entropy(self.last(torch.tanh(self.first(x))), y) + F.mse_loss(self.first(x), 2.0 * wanted)


def shrunk(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Shrinks a weight that is trained, before and after it is used."""
    self.first.weight.data.mul_(0.9)
    x = torch.tanh(self.first(x))
    with torch.no_grad():
        self.first.bias.mul_(0.9)
    return F.cross_entropy(self.last(x), y)


def normed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Turns the vectors of a spectral normalisation, and counts its calls before and after that enters the loss."""
    before = 1.0 + self.calls
    self.calls += 0.5
    return F.cross_entropy(self.last(torch.tanh(self.first(x) * before)), y) * self.calls


def twofold(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Lets an average follow another, which follows from samples, and counts calls beside that."""
    x = self.first(x)
    with torch.no_grad():
        self.calls += 1
        self.far.lerp_(self.scale, 0.1)
        self.scale.mul_(0.5).add_(x.abs().mean(0))
    return F.cross_entropy(self.last(torch.tanh(x / self.far.detach())), y)


def corrected(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Corrects an average of samples by the count of its changes."""
    x = self.first(x)
    self.calls += 1
    self.scale.lerp_(x.detach().abs().mean(0), 0.1)
    return F.cross_entropy(self.last(torch.tanh(x / (self.scale / (1 - 0.9**self.calls)))), y)


def cumulative(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weighs what comes new by one count, and has another beside it."""
    x = self.first(x)
    with torch.no_grad():
        self.calls += 1
        self.seen.add_(1)
        self.scale += (x.abs().mean(0) - self.scale) / self.seen
    return F.cross_entropy(self.last(torch.tanh(x / self.scale) * torch.tanh(self.calls)), y)


def scheduled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Scales samples that were normalised by a count of calls, and normalises them again."""
    self.calls += 1
    return F.cross_entropy(self.last(self.again(torch.tanh(self.calls) * self.norm(self.first(x)))), y)


def taught(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Learns from a teacher in training mode, whose batch normalisation changes its statistics under ``no_grad``."""
    with torch.no_grad():
        wanted = self.teacher(x)
    x = torch.tanh(self.first(x))
    return F.cross_entropy(self.last(x), y) + (x - wanted).square().mean()


def averaged(self: Any, x: Tensor) -> Tensor:
    """Subtracts a mean of all that it has seen, which its count of calls weighs."""
    self.calls += 1
    self.mean.lerp_(x.detach().mean(0), 1.0 / self.calls.item())
    return x - self.mean


def with_module(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Has such a module, or another one, as ``slow``."""
    return F.cross_entropy(self.last(torch.tanh(self.slow(self.first(x)))), y)


Make = Callable[[], nn.Module]
STEADY: dict[str, Make] = {
    "followed": lambda: layers(followed),
    "shrunk": lambda: layers(shrunk),
    "normed": lambda: layers(normed, last=spectral_norm(nn.Linear(WIDTH, CLASSES)), calls=torch.zeros(())),
}
"""Models that change nothing by what is in the samples."""
MODELS: dict[str, Make] = {
    **STEADY,
    "scaled": lambda: layers(scaled),
    "twofold": lambda: layers(twofold, far=torch.ones(WIDTH), calls=torch.zeros((), dtype=torch.long)),
    "corrected": lambda: layers(corrected, calls=torch.zeros(())),
    "taught": lambda: layers(taught, teacher=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    "averaged": lambda: layers(  # the reference counts calls in integers alone
        with_module, slow=Written(averaged, mean=torch.zeros(WIDTH), calls=torch.zeros(()))
    ),
    "cumulative": lambda: layers(cumulative, seen=torch.zeros(()), calls=torch.zeros((), dtype=torch.long)),
    "scheduled": lambda: layers(
        scheduled, norm=nn.BatchNorm1d(WIDTH), again=nn.BatchNorm1d(WIDTH), calls=torch.zeros((), dtype=torch.long)
    ),
}


def case_of(name: str) -> Case:
    """Returns a case whose micro-batches change what the next one finds."""
    return Case(name, MODELS[name], labelled, has_batch_norm=True)


def test_a_counter_goes_with_the_state_that_it_weighs() -> None:
    """What follows from samples changes once a micro-batch, with its counter; all else once a call."""
    expected = {
        "followed": {"slow.weight", "slow.bias"},
        "shrunk": {"first.weight", "first.bias"},
        "normed": {"calls", "last.parametrizations.weight.0._u", "last.parametrizations.weight.0._v"},
        **{"scaled": set(), "twofold": {"calls"}, "corrected": set(), "cumulative": {"calls"}},
        "taught": {"teacher.1.num_batches_tracked"},
        "scheduled": {"calls", "norm.num_batches_tracked", "again.num_batches_tracked"},
    }
    assert {name: traced(MODELS[name](), **BATCH).steady_state for name in expected} == expected


@pytest.mark.parametrize("name", some([*MODELS], 4))
def test_a_pipeline_changes_state_as_one_process_does(name: str) -> None:
    case = case_of(name)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    plain = plain_micro_batched(case, [micro_batches(batch, 1 if name in STEADY else 3) for batch in batches])
    for recompute, shares in ((False, (0.99,)), (True, ())):
        compare(train(case, pipeline(2, recompute=recompute, shares=shares), batches), plain)


@pytest.mark.parametrize("name", some([*MODELS], 2))
def test_replicas_follow_the_first(name: str) -> None:
    """Ranks agree after each step on what each has changed; parts with such state can be measured."""
    case = case_of(name)
    record = train(case, Setup(((0, 1), (2,))), [case.batch(SIZE, step) for step in range(STEPS)])
    assert all(value.isfinite().all() for value in record.weights.values())
    measure(case)


class Optioned(nn.Module):
    """Has a number, a flag and a text that forward reads, and a module that it counts nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x) * self.scale, y)


class Holder(Optioned):
    """Reads numbers in an object, containers, an array, a tensor, a buffer, its class, and what may not be there."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config, self.by_name = SimpleNamespace(scale=1.0, unread=0), {"a": [1.0]}
        self.array, self.tensor, self.only_compared = numpy.ones(2), torch.ones(()), 1
        self.register_buffer("buffer", torch.ones(()))
        weight: Any = self.body[0].weight
        weight.gain = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = self.config.scale * self.by_name["a"][0] * float(self.array[0]) * self.tensor * self.buffer
        factor = factor * self.body[0].weight.gain
        factor = factor * self.of_class * getattr(self, "more", 1.0) * (2.0 if self.only_compared is None else 1.0)
        return super().forward(x, y) * factor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda model: setattr(model, "scale", 2.0),
    "longer body": lambda model: model.body.append(nn.Tanh()),
    "other module": lambda model: model.body.__setitem__(1, nn.ReLU()),
    "hook": lambda model: model.body[0].register_forward_hook(lambda module, given, result: -result),
    "config": lambda model: setattr(model.config, "scale", 2.0),
    "attribute of a weight": lambda model: setattr(model.body[0].weight, "gain", 2.0),
    "another config": lambda model: vars(model).update(config=SimpleNamespace(scale=3.0, unread=0)),
    "container": lambda model: model.by_name["a"].__setitem__(0, 2.0),
    "array": lambda model: model.array.fill(2.0),
    "tensor": lambda model: setattr(model, "tensor", torch.full((), 2.0)),
    "buffer": lambda model: setattr(model, "buffer", torch.full((), 2.0)),
    "number of its class": lambda model: setattr(model, "of_class", 2.0),
    "number of the wrapper": lambda wrapped: setattr(wrapped, "scale", 3.0),  # set on it, it reaches the model
    "looked for in vain": lambda model: setattr(model, "more", 2.0),
    "only compared": lambda model: setattr(model, "only_compared", None),
    "dropout": lambda model: model.body.__setitem__(1, nn.Dropout(0.0)),
    "probability": lambda model: setattr(model.body[1], "p", 1.0),
}


def test_a_change_of_what_forward_reads_counts() -> None:
    """Once, a trace kept the numbers of the first call; what is not read costs no trace."""
    model: Any = Holder()
    settings = {**QUIET, "num_micro_batches": 1, "check_trace": False}  # what is compared is the result
    wrapped: Any = AutoVaruna(model, plan=Setup(num_micro_batches=1).plan, **settings)
    last, num_traces = wrapped(**BATCH).item(), 1
    for what, change in CHANGES.items():
        change(wrapped if what == "number of the wrapper" else model)
        found, num_traces = wrapped(**BATCH).item(), num_traces + (what != "buffer")
        assert found == model(**BATCH).item() != last, what
        model.config.unread += 5
        assert wrapped(**BATCH).item() == found and wrapped.num_traces == num_traces, what
        last = found


class Annealed(nn.Module):
    """Divides by a number of its own, which its loop changes, or by an argument."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        exec(code, {"self": self, "torch": torch, "value": 1.0})

    def forward(self, x: Tensor, y: Tensor, tau: Any = None) -> Tensor:
        tau = self.tau if tau is None else tau
        return F.cross_entropy(self.last(torch.tanh(self.body(x))) / tau, y)


def annealed(model: nn.Module, code: str, arguments: str) -> list[int]:
    """Takes five steps on two stages, with plain PyTorch's losses; returns how often each rank traced the model."""

    def run(wrapped: Any, optimizer: Any, rank: int) -> int:
        plain = copy.deepcopy(model)
        descent = sgd(plain.parameters())
        for value in (1.0, 0.9, 0.8, 0.7, 0.6):
            pair = []
            for each, its in ((wrapped, optimizer), (plain, descent)):
                exec(code, {"self": each, "value": value})
                loss = each(**BATCH, **eval(f"dict({arguments})", {"torch": torch, "value": value}))
                its.zero_grad()
                loss.backward()
                its.step()
                pair.append(loss.item())
            assert pair[0] == pytest.approx(pair[1], rel=1e-5)
        return int(wrapped.num_traces)

    return on_ranks(pipeline(2, num_micro_batches=2), model, run)


@pytest.mark.parametrize("arguments", ["", "tau=value"], ids=["attribute", "argument"])
def test_a_number_that_is_another_in_each_call_is_told_with_what_to_write(
    arguments: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, each cost a trace of seconds, in silence; the advice is followed to its end."""
    logger = logging.getLogger("autovaruna.session.traces")
    logger.addHandler(caplog.handler)
    try:
        first = "self.tau = value"
        assert annealed(Annealed(first), "" if arguments else first, arguments) == [5, 5]
    finally:
        logger.removeHandler(caplog.handler)
    (text,) = {record.getMessage() for record in caplog.records if "new trace" in record.getMessage()}
    assert text.startswith("argument tau is" if arguments else "tau is") and re.search(r" \d+\.\d s so far", text)
    if arguments:
        arguments, then = re.findall(r"Pass it as a tensor, (.*?): one", text)[0], ""
    else:
        first, then = re.findall(r"Keep it as a tensor, (.*) in __init__, and set it by (.*?): one", text)[0]
    assert annealed(Annealed(first), f"self.{then}" if then else "", arguments) == [1, 1]


@pytest.mark.parametrize("num_frozen", [1, 4], ids=["one", "all"])
def test_new_memory_of_frozen_parameters_counts(num_frozen: int) -> None:
    """An average of weights, or a quantisation, gives ``.data`` anew to parameters that need no gradient."""

    def story(model: Any, optimizer: Any) -> list[Tensor]:
        losses = []
        for _ in range(3):
            with torch.no_grad():
                losses.append(model(**BATCH))
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        return losses

    plain = Optioned()
    for parameter in list(plain.parameters())[:num_frozen]:
        parameter.requires_grad_(False)
    as_plain(REPLICAS, plain, story)


def test_what_forward_does_not_read_may_change_and_what_it_reads_must_be_the_same_on_all_ranks() -> None:
    """A counter or a clock that a script keeps in the model costs no trace."""

    def run(wrapped: Any, optimizer: Any, rank: int) -> None:
        model = wrapped.module
        model.num_steps, model.began = 0, float(rank)
        for _ in range(4):
            model.num_steps += 1
            model.clock = 0.1 * rank
            wrapped(**BATCH)
        assert wrapped.num_traces == 1
        if rank == 1:
            model.scale = 2.0
        with pytest.raises(RankError, match=r"attributes is missing on rank 0, .*scale:2\.0.* on rank 1"):
            wrapped(**BATCH)

    on_ranks(REPLICAS, Optioned(), run)


def test_another_parameter_or_a_buffer_of_another_kind_is_refused_once_the_model_is_split() -> None:
    """A parameter would not be trained; before the first call, it is taken."""
    model = Holder()
    wrapped = AutoVaruna(model, plan=ONE_RANK.plan, num_micro_batches=2, **QUIET)
    model.body[2] = nn.Linear(WIDTH, CLASSES)
    wrapped(**BATCH).backward()
    assert model.body[2].weight.grad is not None
    model.buffer = torch.ones(1)
    with pytest.raises(InputError, match=r"buffer buffer has been replaced .*got \(\(1,\).*expected \(\(\)"):
        wrapped(**BATCH)
    model.buffer = torch.ones(())
    model.body[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(InputError, match=r"\['body\.0\.weight'\]\. Expected the same ones"):
        wrapped(**BATCH)


def tabled(table: Callable[..., Tensor], **parts: Any) -> Any:
    """Returns a model that scales what a layer makes by a table of positions."""

    def forward(self: Any, values: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(values)) * table(self, values))

    return Written(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 1), length=0, **parts)


def positions(values: Tensor) -> Tensor:
    return torch.arange(values.shape[1], dtype=values.dtype).mul(0.3).cos()[:, None]


def attribute(self: Any, values: Tensor) -> Tensor:
    """Keeps a table in an attribute, with its length, and makes it anew for longer samples."""
    if self.length < values.shape[1] or self.cached is None:
        self.length, self.cached = values.shape[1], positions(values)
    return self.cached[: values.shape[1]]


def attribute_first(self: Any, values: Tensor) -> Tensor:
    """Does so, but reads the length in later calls alone."""
    if self.cached is None or self.length < values.shape[1]:
        self.length, self.cached = values.shape[1], positions(values)
    return self.cached[: values.shape[1]]


def new_buffer(self: Any, values: Tensor) -> Tensor:
    """Registers a buffer in its first call."""
    if not hasattr(self, "made"):
        self.register_buffer("made", positions(values))
    return self.made


def in_place(self: Any, values: Tensor) -> Tensor:
    """Fills what is missing of a buffer, by a frozen parameter."""
    if self.length < values.shape[1]:
        self.length = values.shape[1]
        self.made[: self.length, 0] = torch.arange(self.length) * self.rate
    return self.made[: values.shape[1]]


def choosing(self: Any, x: Tensor) -> Tensor:
    """Branches on numbers, so that it is kept whole, and has another activation from its first call on."""
    if isinstance(self.act, nn.ReLU):
        self.act = nn.Sequential(nn.Tanh(), nn.Tanh())
    return x if x.sum() > 1e9 else self.act(x)


def new_submodule(self: Any, values: Tensor) -> Tensor:
    """Has such a module, as models do that choose a kind of attention by the length of their samples.

    Once, the rank that ran it had another number of modules than the others in the second call.
    """
    return self.choosing(values.mean(-1, keepdim=True))


def by_flag(self: Any, x: Tensor) -> Tensor:
    """Sets a parameter by the samples of its first call, as an ActNorm does, and a flag that says so."""
    if self.is_set.item() == 0:
        with torch.no_grad():
            self.shift.copy_(-x.mean())
            self.is_set.fill_(1)
    return x + self.shift


RATE = nn.Parameter(torch.tensor(0.3), requires_grad=False)
WARM: dict[str, Make] = {
    "attribute": lambda: tabled(attribute, cached=None),
    "new buffer": lambda: tabled(new_buffer),
    "in place": lambda: tabled(in_place, made=torch.zeros(8, 1), rate=RATE),
    "by a flag": lambda: tabled(
        new_submodule, choosing=Written(by_flag, shift=nn.Parameter(torch.zeros(())), is_set=torch.zeros(()))
    ),
    "new submodule": lambda: tabled(new_submodule, choosing=Written(choosing, act=nn.ReLU())),
}


def values(seed: int) -> Tensor:
    return floats(4, 6, 4, of=generator(seed))


VALUES = {"values": values(0)}


def train_warm(model: Any, optimizer: Any) -> dict[str, Tensor]:
    for step in range(2):
        descend(model(values(step)).square().mean(), optimizer)
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("kind", WARM)
def test_what_a_first_call_leaves_is_made_before_the_model_is_wrapped(kind: str) -> None:
    """The refusal says so; then the model trains as in plain PyTorch."""
    warm = WARM[kind]()
    refuse(copy.deepcopy(warm), "run one batch through the model before it is wrapped", VALUES)
    warm(**VALUES)
    as_plain(pipeline(2, num_micro_batches=2), warm, train_warm)


def counted(self: Any, values: Tensor) -> Tensor:
    """Counts calls in training, and adds up time; says how long samples are."""
    if self.training:
        self.calls += 1
        self.seconds = 0.1 + self.seconds + 0.05
    self.length = values.shape[1]
    return positions(values) * self.length


def test_a_table_with_its_length_is_made_in_each_call() -> None:
    """Once, it was refused for the length, which is not read in the first call."""
    as_plain(pipeline(2, num_micro_batches=2), tabled(attribute_first, cached=None), train_warm)


@pytest.mark.parametrize("begins_with", [True, False])
def test_numbers_that_forward_changes_and_does_not_read_are_changed_once_a_call(begins_with: bool) -> None:
    """Once, any count of calls was refused. A script may set it, and evaluate first."""
    model = tabled(counted, calls=0, seconds=0.0)

    def story(wrapped: Any, optimizer: Any) -> tuple[list[Tensor], list[float]]:
        losses, numbers = [], []
        for step, is_training in enumerate((begins_with, not begins_with, True, True)):
            wrapped.train(is_training)
            loss = wrapped(values(step)).square().mean()
            descend(loss, optimizer)
            losses.append(loss.detach())
            numbers += [wrapped.calls, wrapped.seconds, wrapped.length]
            wrapped.calls += 10 * (step == 2)
        return losses, numbers

    as_plain(pipeline(2, num_micro_batches=2), model, story)


def test_a_graph_that_reads_a_number_is_none_once_another_changes_it() -> None:
    """Evaluated first, it would go by what the number was then."""

    def reading(self: Any, values: Tensor) -> Tensor:
        if self.training:
            self.length += 1
        return positions(values) * (1.0 if self.training else 0.5**self.length)

    model = AutoVaruna(tabled(reading), plan=ONE_RANK.plan, num_micro_batches=2, **QUIET)
    model.eval()(**VALUES)
    model.train()(**VALUES)
    with pytest.raises(TraceError, match=r"changes the Python number length, and goes by it at .*0\.5\*\*self\.length"):
        model.eval()(**VALUES)


def counting(self: Any, values: Tensor) -> Tensor:
    self.length += 1
    return positions(values) * self.length


def advancing(self: Any, values: Tensor) -> Tensor:
    return positions(values) * next(self.scales)


NUMBER = r"changes the Python number length, and goes by it at .*positions\(values\) \* self\.length"
NEXT = r"takes the next value of the iterator scales, and goes by it at .*next\(self\.scales\).* as a tensor"
GOING_BY: dict[str, tuple[Any, str]] = {
    "count": (tabled(counting), NUMBER),
    # once, an iterator that Python cannot copy, or whose first values are alike, kept its first value for ever
    "list": (tabled(advancing, scales=iter([1.0, 0.5, 0.25, 0.1])), NEXT),
    "generator": (tabled(advancing, scales=(1 / k for k in range(1, 9))), NEXT),
    "cycle": (tabled(advancing, scales=cycle([1.0] * 9 + [0.5])), NEXT),
}


@pytest.mark.parametrize("kind", GOING_BY)
def test_what_is_another_in_each_call_is_refused_by_its_line(kind: str) -> None:
    model, words = GOING_BY[kind]
    refuse(model, words, VALUES)
    assert model.length == 0 if kind == "count" else next(model.scales) == 1.0


def sized(self: Any, x: Tensor) -> Tensor:
    """Leaves sizes, of which none is of the batch, for a loss in the script."""
    self.sizes, self.num_samples = [x.shape[1:], (x.shape[2], "wide")], x.shape[0]
    return self.last(torch.tanh(self.first(x)))


def test_sizes_that_forward_leaves_for_the_script_are_there_after_the_call() -> None:
    """Once, they were missing; where a trace serves other lengths, a use is refused, as of a number of the batch."""
    model = AutoVaruna(Written(sized, first=nn.Linear(4, 4), last=nn.Linear(4, 4)), num_micro_batches=2, **QUIET)
    for length in (3, 3, 5, 7, 3):
        model(torch.randn(4, length, 4)).sum().backward()
        if length == 3:
            assert model.sizes == [torch.Size([3, 4]), (4, "wide")]
        else:
            with pytest.raises(InputError, match="uses sizes of the model"):
                list(model.sizes)
    with pytest.raises(InputError, match="uses num_samples of the model"):
        range(model.num_samples)
    assert model.num_traces == 2


def aliased(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Counts in one buffer, and reads it by the name of another, which are one tensor."""
    self.one.add_(1)
    return F.cross_entropy(self.last(torch.tanh(self.first(x)) / self.other), y)


def set_at_first(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Shifts by the mean of its first batch, as an ActNorm does."""
    h = self.first(x)
    self.shift.copy_(torch.where(self.is_set, self.shift, h.detach().mean(0)))
    self.is_set.fill_(True)
    return F.cross_entropy(self.last(torch.tanh(h - self.shift)), y)


ONE = torch.ones(1, 1)
OF_ITS_OWN: dict[str, tuple[nn.Module, str]] = {  # once, each trained on with other numbers
    "one tensor by two names": (two_layers(aliased, one=ONE, other=ONE), "two buffers that are one tensor"),
    "a part of another": (two_layers(aliased, one=ONE, other=ONE[0]), "forward changes one, whose memory other shares"),
    "a first batch": (
        two_layers(set_at_first, shift=torch.zeros(WIDTH), is_set=torch.tensor(False)),
        "sets is_set, shift by its first batch.*run one through it before it is wrapped",
    ),
}


@pytest.mark.parametrize("kind", OF_ITS_OWN)
def test_state_that_stages_or_micro_batches_would_not_share_is_refused(kind: str) -> None:
    refuse(*OF_ITS_OWN[kind])
