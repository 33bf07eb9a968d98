"""Steps are run again in parts, where the analysis sees nothing: what is refused, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, TraceError
from autovaruna.evidence.clock import Clock
from autovaruna.graph import trace as tracing
from autovaruna.session import traces
from tests.catalogue.drawn import draw_mixed
from tests.catalogue.small import Written, function_of
from tests.products import diagonal, some
from tests.reference import compare, plain_steps
from tests.session.training import Setup, on_ranks, pipeline, train

pytestmark = pytest.mark.usefixtures("_blind")
SAMPLES, ROWS, WIDTH, MARKS = 6, 3, 6, 4
Way = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Series(nn.Module):
    """Returns what a function makes of itself, `x` (batch, ROWS, WIDTH), `mark` (batch, MARKS), `y` (batch, ROWS)."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.norm = way, nn.BatchNorm1d(WIDTH)
        self.value, self.mark, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(MARKS, WIDTH), nn.Linear(WIDTH, 1)
        self.zero = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.zero.weight)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, mark: Tensor, y: Tensor) -> Tensor:
        return self.way(self, x, mark, y)

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return (self.last(torch.tanh(hidden)).reshape(-1) - y.reshape(-1)).square().mean()


DIVIDED = function_of(lambda gradient: gradient / gradient.shape[0])
"""Is the identity, whose gradient goes by the size of the batch."""


def kept(self: Any, x: Tensor) -> Tensor:
    """Is kept whole for its branch on numbers, and holds one that it does not change; its backward mixes samples."""
    made: Tensor = DIVIDED.apply(x) * self.two
    return made if float(x.detach().sum()) < 1e6 else x


def followed(m: Any, x: Tensor, mark: Tensor, y: Tensor) -> Tensor:
    hidden = m.value(x) - m.seen
    m.seen.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return m.loss(hidden, y)  # type: ignore[no-any-return]


def batch() -> dict[str, Tensor]:
    shapes = {"x": (SAMPLES, ROWS, WIDTH), "mark": (SAMPLES, MARKS), "y": (SAMPLES, ROWS)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


MEETING: dict[str, Way] = {
    "repeat": lambda m, x, mark, y: m.loss(m.value(x.reshape(-1, WIDTH)) + m.mark(mark.repeat(ROWS, 1)), y),
    "expand": lambda m, x, mark, y: m.loss(m.value(x.flatten(0, 1)) + m.mark(mark.expand(3, -1, -1).flatten(0, 1)), y),
    "labels": lambda m, x, mark, y: m.loss(m.value(x), y.t()),
    "cumsum": lambda m, x, mark, y: m.loss(m.value(x.flatten(0, 1)).cumsum(0), y),
    "detached": lambda m, x, mark, y: m.loss(m.value(x) - m.value(x).mean(0).detach(), y),
    "chance": lambda m, x, mark, y: m.loss(x + torch.bernoulli(m.value(x).softmax(0).detach()), y),
    "behind zeros": lambda m, x, mark, y: m.loss(x + m.zero(m.value(x).roll(1, 0)), y),
    "backward": lambda m, x, mark, y: m.loss(DIVIDED.apply(m.value(x)), y),
    "outputs": lambda m, x, mark, y: (m.value(x.reshape(-1, WIDTH)) + m.mark(mark.repeat(ROWS, 1))).view(x.shape),
    "root": lambda m, x, mark, y: m.loss(m.value(x), y).sqrt(),
    "sum": lambda m, x, mark, y: m.loss(m.value(x), y) * x.shape[0],
    "distances": lambda m, x, mark, y: torch.cdist(m.value(x[:, 0]), m.value(x[:, 0])).mean(),
    "neighbours": lambda m, x, mark, y: m.loss(
        m.value(x)[torch.cdist(x[:, 0], x[:, 0]).topk(2, largest=False).indices].mean(1), y
    ),
    "logsumexp": lambda m, x, mark, y: m.last(m.value(x)).sum((1, 2)).logsumexp(0),
}
ALONE: dict[str, Way] = {
    "repeat_interleave": lambda m, x, mark, y: m.loss(
        m.value(x.reshape(-1, WIDTH)) + m.mark(mark.repeat_interleave(ROWS, 0)), y
    ),
    "statistics": lambda m, x, mark, y: m.loss(m.norm(m.value(x).flatten(0, 1)), y),
    "dropout": lambda m, x, mark, y: m.loss(F.dropout(m.value(x), 0.5) + torch.randn_like(x), y),
    "followed": followed,
    "counted": lambda m, x, mark, y: (m.value(x).square().sum(2) * (y > 0)).sum() / (y > 0).sum(),
    "outputs": lambda m, x, mark, y: m.value(x) + m.mark(mark)[:, None],
}
ALONE["time first"] = lambda m, x, mark, y: m.loss(
    m.value(x.transpose(0, 1).reshape(-1, WIDTH)) + m.mark(mark.repeat(ROWS, 1)) + torch.rand(ROWS * x.shape[0], WIDTH),
    y.t(),
)


@pytest.fixture
def _blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the analysis find nothing."""
    monkeypatch.setattr(tracing, "refuse_mixing", lambda *args: [])
    monkeypatch.setattr(tracing, "thresholds", lambda *args: ())
    monkeypatch.setattr(traces, "refuse_other_losses", lambda *args: None)
    yield


def steps(model: nn.Module, setup: Setup, *changes: Any, **inputs: Tensor) -> list[Any]:
    """Runs a step after each change of the model; returns the losses of each rank."""
    torch.manual_seed(0)
    given = inputs or batch()

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> list[float]:
        found = []
        for change in changes or (lambda model: None,):
            change(wrapped.module)
            loss = wrapped(**given)
            loss.sum().backward()
            optimizer.step()
            found.append(loss.detach())
        return found

    return on_ranks(setup, model, run)


ALWAYS = {"recheck_trace": 0.99}  # however long a step takes here
SETUPS = tuple(pipeline(num, num_micro_batches=2, settings=ALWAYS) for num in (1, 2))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "autovaruna.runtime.witness"]


@pytest.mark.parametrize("name", some([*MEETING], 7))
def test_samples_that_meet_are_refused_at_the_first_step(name: str) -> None:
    for setup in SETUPS:
        with pytest.raises(AutoVarunaError, match=r"(mixes the samples|no mean over).* at .*test_witness.py:\d+"):
            steps(Series(MEETING[name]), setup)


@pytest.mark.parametrize("seed", range(0, 1000, 25))
def test_a_drawn_model_that_may_mix_samples_is_right_or_refused(seed: int) -> None:
    """By the steps alone, which see most of what the analysis sees; `test_drawn` has both look at such models."""
    case = draw_mixed(seed)
    batch = case.batch(7, seed)
    with suppress(AutoVarunaError):
        got = train(replace(case, name=f"blind {seed}"), Setup(num_micro_batches=3), [batch])
        compare(got, plain_steps(case, [batch]), rtol=2e-4)


@pytest.mark.parametrize("name", some([*ALONE], 4))
def test_samples_that_go_alone_are_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for setup in SETUPS:
        steps(Series(ALONE[name]), setup)
    assert not warnings(caplog)


def test_what_cannot_be_tried_is_told_once_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """A rank has three samples here, and two neighbours are none of one."""
    steps(Series(MEETING["neighbours"]), Setup(((0, 1),), 2, settings=ALWAYS), *[lambda model: None] * 3)
    (text,) = warnings(caplog)
    assert "topk" in text and "test_witness.py" in text


def test_a_sum_is_one_where_that_is_asked_for() -> None:
    setup = pipeline(1, num_micro_batches=2, settings={"reduction": "sum"})
    steps(Series(MEETING["sum"]), setup)
    with pytest.raises(AutoVarunaError, match=r"no sum over its samples: .*test_witness.py"):
        steps(Series(ALONE["dropout"]), setup)


def test_a_kept_module_that_only_reads_its_buffers_is_tried() -> None:
    model = Series(lambda m, x, mark, y: m.loss(m.kept(m.value(x)), y))
    model.kept = Written(kept, two=torch.tensor(2.0))
    with pytest.raises(TraceError, match=r"gradient that goes back through .* is another"):
        steps(model, SETUPS[0])


@pytest.mark.parametrize("settings", [{"micro_batch_weight": lambda _: 1.0}, {"batch_statistics": "micro-batch"}])
def test_a_loss_that_may_be_any_is_looked_at_up_to_where_samples_are_joined(settings: dict[str, Any]) -> None:
    """Else nothing would see that gradients go by other samples: the loss alone is left to the user."""
    setup = pipeline(1, num_micro_batches=2, settings=settings)
    with pytest.raises(TraceError, match=r"gradient that goes back through .* is another .*test_witness.py:\d+"):
        steps(Series(MEETING["backward"]), setup)
    for way in (ALONE["statistics"], ALONE["counted"], ALONE["time first"], MEETING["root"], MEETING["logsumexp"]):
        steps(Series(way), setup)


def test_a_rank_that_has_one_sample_makes_another_of_its_numbers() -> None:
    with pytest.raises(TraceError, match="mixes the samples of a batch"):
        steps(Series(MEETING["repeat"]), Setup(((0, 1),), 2), **{name: each[:2] for name, each in batch().items()})


def test_ranks_of_samples_are_refused_where_a_rank_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, each sample was there twice, and an order that changes by chance was no difference."""
    monkeypatch.undo()  # the analysis is needed: it knows of counts
    way: Any = lambda m, x, mark, y: m.loss(  # noqa: E731
        m.value(x) + m.value(x).sum((1, 2)).argsort().argsort()[:, None, None], y
    )
    with pytest.raises(TraceError, match=r"what it counts over them at .*test_witness.py:\d+"):
        steps(Series(way), Setup(((0, 1),), 4, settings=ALWAYS | {"inputs": "per_rank"}))


@pytest.mark.parametrize("turns", [2, 3])
def test_numbers_that_go_by_every_second_or_third_place_are_refused(turns: int) -> None:
    """Once, six samples were cut where their places began anew; a later batch of another size was wrong, silently."""
    way: Any = lambda m, x, mark, y: m.loss(m.value(x) * (1 + torch.arange(x.shape[0]) % turns)[:, None, None], y)  # noqa: E731
    double = {name: torch.cat([each, each]) for name, each in batch().items()}
    with pytest.raises(TraceError, match=r"mixes the samples.* at .*test_witness.py:\d+"):
        steps(Series(way), SETUPS[0], **double)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_call_without_gradients_is_looked_at_once(num_stages: int, caplog: pytest.LogCaptureFixture) -> None:
    way: Any = lambda m, x, mark, y: m.loss(m.value(x), y) if m.training else m.value(x) - m.value(x).mean(0)  # noqa: E731

    def evaluate(model: nn.Module) -> None:
        model.train(len(seen) < num_stages)
        seen.append(model)

    seen: list[nn.Module] = []
    with pytest.raises(TraceError, match=r"mixes the samples.* at .*test_witness.py:\d+"), torch.no_grad():
        steps(Series(way), pipeline(num_stages, num_micro_batches=2), evaluate, evaluate)
    assert num_stages < len(seen) <= 2 * num_stages and not warnings(caplog)


def test_what_is_cut_later_is_looked_at_then_and_it_can_be_turned_off() -> None:
    """A step whose batch is in one says nothing of one in several; nor does the share of later looks."""
    first = {name: each[:1] for name, each in batch().items()}

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        model(**first).backward()
        model(**batch()).backward()

    for settings in ({}, {"recheck_trace": False}):
        with pytest.raises(TraceError, match="mixes the samples of a batch: add"):
            on_ranks(pipeline(1, num_micro_batches=2, settings=settings), Series(MEETING["repeat"]), run)
    on_ranks(pipeline(1, num_micro_batches=2, settings={"check_parts": False}), Series(MEETING["repeat"]), run)


def test_what_comes_of_samples_from_another_stage_must_stay_their_mean() -> None:
    def way(m: Any, x: Tensor, mark: Tensor, y: Tensor, last: Any) -> Tensor:
        hidden = m.value(x)
        return m.loss(torch.tanh(m.zero(torch.tanh(hidden))), y) + last(hidden.square().mean())  # type: ignore[no-any-return]

    steps(Series(partial(way, last=lambda mean: 0.5 * mean)), SETUPS[1])
    with pytest.raises(AutoVarunaError, match=r"no mean over its samples.* at .*test_witness.py:\d+"):
        steps(Series(partial(way, last=torch.sqrt)), SETUPS[1])


BROUGHT_IN: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda h: h / h.detach().abs().max(),
    "mean": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "sort": lambda h: h.sort(0).values,
    "order": lambda h: h[h[:, 0, 0].argsort()],
    "neighbour": lambda h: h.roll(1, 0),
}


def scheduled(m: Any, x: Tensor, mark: Tensor, y: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Has a part that a number brings in, in a buffer or a trace anew."""
    h = m.value(x)
    if isinstance(m.beta, Tensor) or m.beta:
        h = (1 - m.beta) * h + m.beta * act(h)
    return m.loss(h, y)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("is_buffer", "name"), diagonal([False, True], [*BROUGHT_IN]))
def test_what_a_schedule_brings_in_is_refused_in_that_step(is_buffer: bool, name: str) -> None:
    seen, model = [], Series(partial(scheduled, act=BROUGHT_IN[name]))
    if is_buffer:
        model.register_buffer("beta", torch.zeros(()))
    else:
        model.beta = 0.0  # type: ignore[assignment]

    def change(model: Any) -> None:
        seen.append(model)
        if len(seen) > 2:  # the second step, on both ranks
            model.beta = torch.tensor(0.5) if is_buffer else 0.5

    with pytest.raises(TraceError, match=r"mixes the samples.* at .*\.py:\d+"):
        steps(model, SETUPS[1], change, change)
    assert 2 < len(seen) <= 4


def test_each_of_several_scalars_counts() -> None:
    """Once, the loss alone did, and of a dictionary of losses nothing."""
    way: Any = lambda m, x, mark, y: {  # noqa: E731
        "box": (e := (m.value(x).mean(2) - y).square()).where(e > e.mean(), 0).mean(), "class": m.value(x).mean()
    }  # fmt: skip

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        sum(wrapped(**given).values()).backward()

    given = batch()
    with pytest.raises(TraceError, match=r"box.*differ by"):
        on_ranks(SETUPS[0], Series(way), run)


def test_a_step_is_looked_at_often_at_first_and_seldom_later() -> None:
    clock, looks = Clock(0.01, 1.0), []
    for step in range(1, 1001):
        if clock.begin("graph"):
            looks.append(step)
            clock.record("graph", seconds=[0.3, 0.1], step_seconds=1.0, trace_seconds=0.0)
    assert looks[:8] == [1, 2, 3, 5, 9, 17, 33, 65] and len(looks) == 17 and clock.is_due("another")
    dear = Clock(0.01, 1.0)
    took: dict[str, Any] = {"seconds": [8.0], "step_seconds": 1.0, "trace_seconds": 0.0}
    looks = [step for step in range(1, 4000) if dear.begin("graph") and not dear.record("graph", **took)]
    assert looks == [1, 2, 3, 5, 3200]


def test_a_step_whose_time_is_not_known_yet_does_not_put_off_the_next_look() -> None:
    """Once, a plan that the script gave said nothing of it, and the second look came after a million steps."""
    clock = Clock(0.01, 0.0)
    assert clock.begin("graph")
    clock.record("graph", seconds=[0.3], step_seconds=0.0, trace_seconds=0.0)
    assert clock.begin("graph")
