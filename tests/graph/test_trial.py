"""Tries graphs on a batch and on its parts where the analysis sees nothing: what is refused, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, TraceError
from autovaruna.graph import trace as tracing
from autovaruna.graph.trial import PartsTrial
from autovaruna.session import traces
from tests.catalogue.small import Written
from tests.products import some
from tests.session.training import QUIET, Setup, on_ranks, pipeline, refuse

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


class DividedBackward(torch.autograd.Function):
    """Is the identity, whose gradient goes by the size of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.shape[0]


def kept(self: Any, x: Tensor) -> Tensor:
    """Is kept whole for its branch on numbers, and holds one that it does not change; its backward mixes samples."""
    made: Tensor = DividedBackward.apply(x) * self.two
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
    "backward": lambda m, x, mark, y: m.loss(DividedBackward.apply(m.value(x)), y),
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


@pytest.fixture(autouse=True)
def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the analysis find nothing."""
    monkeypatch.setattr(tracing, "refuse_mixing", lambda *args: [])
    monkeypatch.setattr(traces, "refuse_other_losses", lambda *args: None)


def run(way: Way, **settings: Any) -> Any:
    return AutoVaruna(Series(way), plan=Setup(num_micro_batches=2).plan, **{**QUIET, **settings})(**batch())


@pytest.mark.parametrize("name", some([*MEETING], 7))
def test_samples_that_meet_are_found(name: str) -> None:
    with pytest.raises(AutoVarunaError, match=r"(mixes the samples|no mean over).* at .*test_trial.py:\d+"):
        run(MEETING[name])


@pytest.mark.parametrize("name", some([*ALONE], 5))
def test_samples_that_go_alone_are_not_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "autovaruna.graph.trial"):
        run(ALONE[name])
    assert "not compared" not in caplog.text


def test_a_sum_is_one_where_that_is_asked_for() -> None:
    run(MEETING["sum"], reduction="sum")
    with pytest.raises(AutoVarunaError, match=r"no sum over its samples: .*test_trial.py"):
        run(ALONE["dropout"], reduction="sum")


def test_a_kept_module_that_only_reads_its_buffers_is_tried() -> None:
    model = Series(lambda m, x, mark, y: m.loss(m.kept(m.value(x)), y))
    model.kept = Written(kept, two=torch.tensor(2.0))
    refuse(model, r"gradient that goes back through .* is another", batch())


@pytest.mark.parametrize("settings", [{"micro_batch_weight": lambda _: 1.0}, {"batch_statistics": "micro-batch"}])
def test_a_loss_that_may_be_any_is_tried_up_to_where_samples_are_joined(settings: dict[str, Any]) -> None:
    """Else nothing would see that gradients go by other samples: the loss alone is left to the user."""
    with pytest.raises(TraceError, match=r"gradient that goes back through .* is another .*test_trial.py:\d+"):
        run(MEETING["backward"], **settings)
    for way in (ALONE["statistics"], ALONE["counted"], ALONE["time first"], MEETING["root"], MEETING["logsumexp"]):
        run(way, **settings)


def test_one_sample_is_repeated_with_other_numbers() -> None:
    """All samples alike would hide that they meet."""
    one = {name: each[:1] for name, each in batch().items()}
    refuse(Series(MEETING["repeat"]), "mixes the samples of a batch: add", one)


def record_trials(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Returns the results of trials, to which each adds its own."""
    tried: list[Any] = []
    refusal = PartsTrial.refusal
    monkeypatch.setattr(PartsTrial, "refusal", lambda self: tried.append(refusal(self)) or tried[-1])
    return tried


def test_it_can_be_turned_off_and_what_holds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run(MEETING["repeat"], check_parts=False)
    tried = record_trials(monkeypatch)
    for settings in ({}, {}, {"reduction": "sum", "check_parts": False}):
        run(ALONE["statistics"], **settings)
        assert tried == [None]


def test_a_later_kind_of_call_is_tried_with_drawn_weights(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has all weights any more then."""
    tried, arguments = record_trials(monkeypatch), batch()

    def call(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        model(**arguments).backward()
        model.eval()
        model(**arguments)

    with caplog.at_level("INFO", "autovaruna.graph.trial"):
        on_ranks(pipeline(2, num_micro_batches=2), Series(ALONE["statistics"]), call)
    assert tried == [None, None] and "not compared" not in caplog.text
