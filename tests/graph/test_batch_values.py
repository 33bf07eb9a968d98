"""What is counted over the whole batch is counted so however it is cut; counts that change results are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, TraceError
from autovaruna.evidence.sample_runs import SampleRuns
from tests.catalogue import Batch, Case
from tests.catalogue.case import floats, generator, integers
from tests.catalogue.small import Written
from tests.products import some
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, Ranks, Setup, on_ranks, pipeline, refuse, train, train_as_plain

WIDTH, LENGTH, CLASSES, SIZE = 6, 4, 5, 7
IGNORED = -100
Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def model_of(loss: Loss) -> nn.Module:
    """Returns a loss of scores ``s`` (batch, LENGTH, CLASSES), labels ``y`` and a mask ``m``, both (batch, LENGTH)."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    forward = lambda self, x, y, m: loss(self, self.layers(x), y, m)  # noqa: E731
    return Written(forward, layers=layers, weights=torch.linspace(0.5, 2.0, CLASSES))


def uneven(size: int, seed: int) -> Batch:
    """Returns samples of which the first two have no label that counts, and the last has all."""
    g = generator(seed)
    m = integers(2, SIZE, LENGTH, of=g)
    m[:2], m[-1] = 0, 1
    y = integers(CLASSES, SIZE, LENGTH, of=g).masked_fill(m == 0, IGNORED)
    return (), {"x": floats(SIZE, LENGTH, WIDTH, of=g), "y": y, "m": m}


def balanced(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Weighs classes by how seldom they are in the batch."""
    counts = (F.one_hot(y.clamp(min=0), CLASSES) * m.unsqueeze(-1)).sum((0, 1))
    return F.cross_entropy(s.flatten(0, 1), y.flatten(), weight=counts.sum() / (CLASSES * counts.clamp(min=1)))


def seldom(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Weighs classes by the number of samples over how many there are of each."""
    counts = F.one_hot(y[:, 0].clamp(min=0), CLASSES).sum(0)
    return F.cross_entropy(s[:, 0], y[:, 0], weight=y.shape[0] / (CLASSES * counts.clamp(min=1)))


def hidden(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Writes into labels of its own which are ignored."""
    own = y.clamp(min=0)
    own[m == 0] = IGNORED
    return F.nll_loss(s.log_softmax(-1).flatten(0, 1), own.flatten())


def unseen(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Counts where no gradient is noted, and multiplies by one over a number."""
    with torch.no_grad():
        count = (y != IGNORED).sum().item()
    return F.cross_entropy(s.flatten(0, 1), y.flatten(), reduction="sum") * (1.0 / count)


def from_the_end(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Counts from the batch's greatest length: integers are those of the batch, too."""
    length = m.sum(1)
    longest = length == length.max()
    return (s.square().mean((1, 2)) * self.weights[length.max() - length] * (1 + longest)).mean()


def cut(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """Goes as far as the longest sample: all that the others have there counts in their means."""
    longest = m.sum(1).max().item()
    places = torch.arange(longest, device=m.device) < m.sum(1, keepdim=True)
    return s[:, :longest].mean(1).square().mean() + (s[:, :longest].square().sum(-1) * places).mean(1).mean()


LOSSES: dict[str, Loss] = {
    "labels": lambda m, s, y, mask: F.cross_entropy(s.flatten(0, 1), y.flatten()),
    "weighted": lambda m, s, y, mask: F.cross_entropy(s.transpose(1, 2), y, weight=m.weights, label_smoothing=0.1),
    "constant weights": lambda m, s, y, mask: F.cross_entropy(
        s.transpose(1, 2), y, weight=torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0], device=s.device)
    ),
    "balanced": balanced,
    "seldom": seldom,
    "hidden": hidden,
    "several": lambda m, s, y, mask: (
        F.cross_entropy(s[:, 0], y[:, 0]) + 0.5 * F.cross_entropy(s[:, 1], y[:, 1]) + s.square().mean()
    ),
    "masked": lambda m, s, y, mask: (s.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1),
    "cast": lambda m, s, y, mask: (s.square().sum(-1) * mask).sum() / (mask > 0).type_as(s).sum().clamp(min=1),
    "unseen": unseen,
    "picked": lambda m, s, y, mask: F.mse_loss(s[mask > 0], s.detach()[mask > 0] + 1.0) + s[mask > 0].square().mean(),
    "relative": lambda m, s, y, mask: torch.where(mask.any(), s.sum(-1) / mask.sum(1).max(), s.sum(-1)).mean(),
    "from the end": from_the_end,
    "cut": cut,
}
if torch.__version__ < "2.12":  # its torch.export cannot trace two masks of one size, which is refused
    del LOSSES["picked"]


def case_of(name: str) -> Case:
    return Case(f"over the batch, {name}", lambda: model_of(LOSSES[name]), uneven)


@pytest.mark.parametrize("name", some([*LOSSES], 6))
def test_a_count_is_that_of_the_whole_batch(name: str) -> None:
    """A micro-batch may have nothing to count: alone, its loss would be no number."""
    train_as_plain(case_of(name), pipeline(2, recompute=True), 7, 7)


@pytest.mark.parametrize("setup", [pipeline(3, num_micro_batches=4), Setup(((0,), (1, 2)), 5)], ids=str)
def test_so_it_is_in_any_pipeline(setup: Setup) -> None:
    train_as_plain(case_of("several"), setup, 7, 7)


@pytest.mark.parametrize("name", ["balanced", "relative", "cut"])
def test_ranks_count_together(name: str) -> None:
    """Each rank has samples of its own, one of them none in the second call."""
    case = case_of(name)
    batches = [case.batch(7, seed) for seed in range(3)]
    sizes = [[2, 5], [7, 0], [3, 4]]
    compare(train(case, pipeline(2, num_micro_batches=4), batches, sizes=sizes), plain_steps(case, batches))


@pytest.mark.parametrize("stage_ranks", [((0,), (1,)), ((0,), (1, 2))])
def test_a_weight_of_the_user_s_comes_first(stage_ranks: Ranks) -> None:
    """Micro-batches then count over their own samples, as weights and sums expect."""
    by_labels = {"micro_batch_weight": lambda arguments: float(arguments["m"].sum())}
    train_as_plain(case_of("labels"), Setup(stage_ranks, num_micro_batches=2, settings=by_labels), 7)


def test_labels_may_lie_in_memory_as_they_like() -> None:
    """A caller passes the words but the first, a view of all of them; a micro-batch of them is a tensor of its own."""
    viewed: Loss = lambda m, s, y, mask: F.cross_entropy(s.view(-1, CLASSES), y.view(-1))  # noqa: E731
    case = Case("viewed", lambda: model_of(viewed), uneven)
    batch = case.batch(7, 0)
    words = torch.cat([batch[1]["y"], batch[1]["y"][:, :1]], dim=1)
    view, copy = (((), {**batch[1], "y": each}) for each in (words[:, 1:], words[:, 1:].contiguous()))
    compare(train(case, pipeline(2), [view, view]), plain_steps(case, [copy, copy]))


def test_state_follows_micro_batches() -> None:
    """What becomes a buffer alone is no value of the whole batch: it would be added once a micro-batch."""

    def counting(self: nn.Module, s: Tensor, y: Tensor, m: Tensor) -> Tensor:
        self.weights += F.one_hot(y.clamp(min=0), CLASSES).sum((0, 1))
        return s.square().mean()

    train_as_plain(Case("counting", lambda: model_of(counting), uneven), pipeline(2), 7)


NUM_COUNTED, REFUSAL = (
    12,
    r"(?s)what it counts over them at .*test_batch_values.py|(whether a count|made of several) .*:\d+",
)
Way = Callable[[Any, Tensor, Tensor], Tensor]


def counting_by(way: Way) -> nn.Module:
    """Returns the loss of what a function makes of samples (batch, WIDTH) and numbers (batch,)."""

    def forward(self: Any, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(way(self, x, n)), y)

    experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    layers = {"last": nn.Linear(WIDTH, CLASSES), "norm": nn.BatchNorm1d(WIDTH)}
    return Written(forward, experts=experts, numbers=nn.Embedding(40, WIDTH), seen=torch.zeros(40), **layers)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    g = generator(0)
    n = 1 + integers(19, NUM_COUNTED, of=g)
    return floats(NUM_COUNTED, WIDTH, of=g), n, integers(CLASSES, NUM_COUNTED, of=g)


def routed(self: nn.Module, x: Tensor, room: int) -> Tensor:
    """Gives samples to experts, of which each takes no more than it has room for."""
    chosen = F.one_hot(self.experts[0](x)[:, :3].argmax(1), 3)
    place = chosen.cumsum(0) * chosen
    taken = chosen * (place <= room)
    return sum((taken[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts)), x)


def followed(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Multiplies by state that follows from samples, which hides no count of its own."""
    self.seen.mul_(0.5).add_(F.one_hot(n, 40).sum(0))
    return x[n.argsort()] * self.seen.sum()


CHANGED: dict[str, Way] = {
    "median": lambda m, x, n: x + m.numbers((n - n.median()).abs()),
    "rank": lambda m, x, n: x + m.numbers(n.argsort().argsort()),
    "in order": lambda m, x, n: x + m.numbers(n.sort(0)[0]),
    "neighbour": lambda m, x, n: x + m.numbers(n.roll(1, 0)),
    "frequency": lambda m, x, n: x / torch.bincount(n, minlength=40)[n].unsqueeze(1),
    "best half": lambda m, x, n: x * (m.experts[0](x).sum(1).detach().argsort().argsort() < x.shape[0] // 2)[:, None],
    "full experts": lambda m, x, n: routed(m, x, 2),
    "dropped": lambda m, x, n: F.dropout(x, 0.5) + torch.rand_like(x) * m.numbers(n.argsort().argsort()),
    "followed": followed,
}


@pytest.mark.parametrize("name", some([*CHANGED], 4))
def test_counts_of_several_samples_that_change_results_are_refused(name: str) -> None:
    refuse(counting_by(CHANGED[name]), REFUSAL, dict(zip("xny", batch(), strict=True)))


def sorted_and_back(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Goes through samples by their lengths, as packed sequences do."""
    lengths, order = n.sort(descending=True)
    return (self.experts[0](x[order]) / lengths.unsqueeze(1))[order.argsort()]


def together(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """Brings the samples of an expert together, with dropout, noise and statistics of the batch."""
    order = (n % 3).argsort()
    noise = torch.rand_like(x)
    h = F.dropout(self.norm(x), 0.5) + noise
    found = torch.stack([expert(h[order]) for expert in self.experts], 1)
    return found[order.argsort(), n % 3]


def roomy_experts(self: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    return routed(self, x, NUM_COUNTED)


@pytest.mark.parametrize("way", (roomy_experts, sorted_and_back, together), ids=lambda way: way.__name__)
def test_counts_that_only_say_where_samples_go_are_not(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autovaruna"):
        AutoVaruna(counting_by(way), num_micro_batches=2, **QUIET)(*batch()).backward()
    assert "counts over the samples" not in caplog.text


def test_ranks_try_out_what_they_will_train() -> None:
    """What each rank passes stands for the global batch: samples of one rank alone are too few to tell."""
    by_rank = counting_by(lambda m, x, n: x * n.argsort().argsort().unsqueeze(1))

    def call(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        with pytest.raises(TraceError, match="what it counts over them"):
            model(*(each.tensor_split(2)[rank] for each in batch()))

    on_ranks(Setup(((0, 1),), 2, settings={"inputs": "per_rank"}), by_rank, call)


def test_one_micro_batch_may_count_as_it_likes() -> None:
    model = counting_by(CHANGED["rank"])
    expected = model(*batch()).item()
    assert AutoVaruna(model, num_micro_batches=1, **QUIET)(*batch()).item() == expected


def test_what_cannot_be_tried_out_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleRuns, "whole", Mock(side_effect=MemoryError("too much")))
    with caplog.at_level(logging.WARNING, "autovaruna"):
        AutoVaruna(counting_by(roomy_experts), num_micro_batches=2, **QUIET)(*batch())
    assert "was not run again on parts of a micro-batch: MemoryError: too much" in caplog.text


@pytest.mark.parametrize("way", [lambda m, x, n: routed(m, x, 9), lambda m, x, n: x + m.numbers(n[n.argsort()])])
def test_counts_that_change_nothing_of_the_first_batch_are_refused(way: Way) -> None:
    """Once, they changed a later one: experts had room for all samples, which came in order."""
    x, n, y = batch()
    refuse(counting_by(way), REFUSAL, {"x": x, "n": n.sort().values, "y": y})
