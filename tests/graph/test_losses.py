"""Losses that are means, sums or neither: averaged, added up or refused, with the size of the whole batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from autovaruna.errors import AutoVarunaError
from autovaruna.ranks.world import World
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.products import some
from tests.rank_threads import run_ranks
from tests.reference import compare, micro_batches, plain_micro_batched
from tests.session.training import QUIET, Setup, pipeline, refuse, train, train_as_plain

Loss = Callable[[Any, Tensor, Tensor], Any]
SUM, MICRO_BATCH = {"reduction": "sum"}, {"batch_statistics": "micro-batch"}


class Model(nn.Module):
    """Returns a loss of itself, its scores and the labels; or, `whole`, of its inputs and the labels."""

    def __init__(self, loss: Loss, whole: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.weight = nn.Parameter(torch.tensor(0.3))
        self.loss, self.whole = loss, whole

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss(self, x if self.whole else self.layers(x), y)

    def losses(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers[2](torch.tanh(hidden)), y, reduction="none")

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y, reduction="sum") / 10

    def penalty(self) -> Tensor:
        return self.layers[0].weight.square().mean() + self.layers[0].bias.sum()


def case_of(name: str, loss: Loss, whole: bool = False) -> Case:
    return Case(f"loss, {name}, {whole}", lambda: Model(loss, whole), labelled)


def overlap(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Divides one sum by another, as the Dice loss does."""
    p, t = s.softmax(1), F.one_hot(y, CLASSES).float()
    return 1.0 - 2.0 * (p * t).sum() / (p.square().sum() + t.sum())


def balance(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Multiplies two means, as losses of routers do."""
    p = s.softmax(1)
    return F.cross_entropy(s, y) + 0.1 * (p.mean(0) * p.mean(0)).sum()


NO_MEANS: dict[str, Loss] = {
    "root": lambda m, s, y: s.square().mean().sqrt(),
    "norm": lambda m, s, y: (s - 1.0).norm() / 10.0,
    "overlap": overlap,
    "balance": balance,
    "spread": lambda m, s, y: F.cross_entropy(s, y) - s.std(0).mean(),
    "mean against another number": lambda m, s, y: F.cross_entropy(s, y) + F.mse_loss(s.mean(0), m.layers[2].bias),
    "samples that scores pick": lambda m, s, y: F.cross_entropy(s, y, reduction="none")[s.amax(1) > 0].mean(),
    "one sample": lambda m, s, y: F.cross_entropy(s, y) + s[0].square().sum(),
    "greatest sample": lambda m, s, y: F.cross_entropy(s, y) + s.max(0)[0].mean(),
    "five largest numbers": lambda m, s, y: s.flatten().topk(5)[0].mean(),
    "directions": lambda m, s, y: F.cosine_similarity(s[:, 0], s[:, 1], dim=0),
    "numbers": lambda m, s, y: s.masked_fill((y == 1)[:, None], float("nan")).nanmean(),
    "weight by a mean": lambda m, s, y: torch.lerp(F.cross_entropy(s, y), s.square().mean(), s.mean().sigmoid()),
    "product": lambda m, s, y: torch.addcmul(F.cross_entropy(s, y), s.square().mean(), s.abs().mean(), value=0.5),
    "quotient": lambda m, s, y: torch.addcdiv(F.cross_entropy(s, y), m.weight, s.abs().mean()),
    "with its variance": lambda m, s, y: F.cross_entropy(s, y) + torch.var_mean(s, 0)[1].mean(),
    "switch": lambda m, s, y: torch.where((loss := F.cross_entropy(s, y)) > 1.7, loss, 0.5 * loss),
    "share of right ones": lambda m, s, y: F.cross_entropy(s, y, reduction="sum") / ((s.argmax(1) == y).sum() + 1),
    "unbiased": lambda m, s, y: F.cross_entropy(s, y, reduction="sum") / (y.shape[0] - 1),
    "own labels": lambda m, s, y: F.cross_entropy(s, torch.where(s.detach().amax(1) > 0, y, -100)),
}


@pytest.mark.parametrize("name", some([*NO_MEANS], 8))
def test_a_loss_that_is_no_mean_is_refused(name: str) -> None:
    case = case_of(name, NO_MEANS[name])
    refuse(case, r"no mean over its samples: .*test_losses.py:\d+.*num_micro_batches=1", error=InputError)


def test_a_sum_over_a_bounded_size_is_no_mean() -> None:
    """Once, sizes up to eight were tried alone: micro-batches divided by their own, where the batch divides by 16."""
    case = case_of("bounded", lambda m, s, y: F.cross_entropy(s, y) + s.square().sum() / min(s.shape[0], 16))
    batch = case.batch(40, 0)[1]
    refuse(case, r"no mean over its samples: .*test_losses.py:\d+", batch, InputError, num_micro_batches=4)


def test_it_is_refused_before_anything_is_measured() -> None:
    """Once, the two hardest samples were looked for in one, as it was measured: the error was one of topk."""
    case = case_of("hardest", lambda m, s, y: F.cross_entropy(s, y, reduction="none").topk(2)[0].mean())

    def be_rank(world: World) -> None:
        with pytest.raises(InputError, match="no mean over its samples"):
            AutoVaruna(case.model(), **QUIET)(**case.batch(2, world.rank)[1])

    run_ranks(2, be_rank)


def routed(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Multiplies, for each expert, the share of tokens that it gets by its mean probability, as Switch does."""
    p = s.softmax(1)
    density = F.one_hot(p.argmax(1), CLASSES).float().mean(0)
    return F.cross_entropy(s, y) + 0.1 * CLASSES * (density * p.mean(0)).sum()


def routed_to_two(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Divides sums over the tokens by their number, as Mixtral does with a mask."""
    p = s.softmax(1)
    mask = torch.ones_like(p[:, :1])
    chosen = F.one_hot(p.topk(2)[1], CLASSES).float() * mask[..., None]
    tokens = chosen.sum(0) / mask.sum()
    return F.cross_entropy(s, y) + 0.1 * (tokens * ((p * mask).sum(0) / mask.sum())[None]).sum()


def by_counts(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Divides the product of two sums by the square of how many tokens there are."""
    p, n = s.softmax(1), s.shape[0]
    chosen = F.one_hot(p.argmax(1), CLASSES).sum(0)
    return F.cross_entropy(s, y) + 0.1 * CLASSES * (chosen * p.sum(0)).sum() / n**2


@pytest.mark.parametrize("loss", (balance, routed, routed_to_two, by_counts), ids=lambda loss: loss.__name__)
def test_a_load_balance_is_taken_of_micro_batches_where_that_is_asked_for(loss: Loss) -> None:
    """Its average is that over the micro-batches, however long they are."""
    case = case_of(loss.__name__, loss)
    batches = [case.batch(size, step) for step, size in enumerate((7, 6))]
    refuse(case, r"test_losses.py:\d+.*batch_statistics='micro-batch'", error=InputError)
    plain = plain_micro_batched(case, [micro_batches(batch, 3) for batch in batches])
    compare(train(case, pipeline(2, settings=MICRO_BATCH), batches), plain)


def scaled(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Scales by parameters and constants, adds, picks, and turns into other types."""
    first, second = F.cross_entropy(s, y), torch.einsum("bc,bc->", s, s) / s.shape[0]
    both = torch.stack([first, second.double().float()])
    return (both * torch.exp(-m.weight)).sum() + m.weight.square() - 0.1 * both[0]


def by_sample(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Takes roots and products of each sample's own numbers, before the mean."""
    p = s.softmax(1).gather(1, y[:, None]).squeeze(1)
    return (s.norm(dim=1) * (1.0 - p).pow(2) + s.square().mean(1).sqrt()).mean()


def unlisted(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Adds samples up with operations that have other names."""
    products = torch.tensordot(s, s, dims=([0, 1], [0, 1])) + torch.linalg.vecdot(s, s, dim=0).sum()
    return products / s.shape[0]


def guarded(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Leaves out what is not finite, weighs by what is the same for all, and labels by what the model says."""
    first, second = F.cross_entropy(s, s.detach().argmax(1)), s.square().mean()
    loss = first + 0.3 * second * m.weight
    return torch.where(loss.isfinite().all(), loss, torch.zeros_like(loss))


def masked(m: Any, s: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).float()
    return (F.cross_entropy(s, y, reduction="none") * kept).sum() / kept.sum().clamp(min=1.0)


def by_number(m: Any, s: Tensor, y: Tensor) -> Tensor:
    """Divides by the samples in several ways, and multiplies again."""
    total = (s @ s.new_ones(CLASSES)).sum() / torch.scalar_tensor(y.shape[0])
    return total + s.mean() * y.shape[0] / s.shape[0]


MEANS = {each.__name__: each for each in (scaled, by_sample, unlisted, guarded, masked, by_number)} | {
    "divided": lambda m, s, y: F.cross_entropy(s, y, reduction="sum") / y.shape[0],
    "of features": lambda m, s, y: s.square().sum(1).mean() + F.cross_entropy(s, y),
}


@pytest.mark.parametrize("name", some([*MEANS], 4))
def test_a_mean_is_not(name: str) -> None:
    train_as_plain(case_of(name, MEANS[name]), pipeline(2), 7, 7)


def test_another_output_that_is_no_mean_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is not trained on: the model goes on."""
    inner = Model(lambda m, s, y: {"loss": (loss := F.cross_entropy(s, y)), "perplexity": loss.detach().exp()})
    with caplog.at_level(logging.WARNING):
        model = AutoVaruna(inner, plan=Setup(num_micro_batches=2).plan, num_micro_batches=2, **QUIET)
        model(**labelled(6, 0)[1])["loss"].backward()
        model(**labelled(6, 1)[1])["loss"].backward()
    assert sum("['perplexity'] is no mean over the samples" in each for each in caplog.messages) == 1


def test_integers_that_are_no_counts_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Those of micro-batches are added up, or the greatest or least of them is taken, where the operation says so.

    Once, whether all are so was whether any micro-batch's are, and the greatest integers were added up.
    """

    def outputs(m: Any, s: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = s.argmax(1) == y
        told = {"half": right.sum() // 2, "next": right.sum() + 1, "best": s.amax(1).argmax(), "most": right.sum() > 3}
        untold = {"count": right.sum(), "twice": 2 * right.sum(), "more": right.sum() - (~right).sum()}
        untold |= {"all": (s < 1e6).all(), "some": right.all(), "last": s.argmax(1).max(), "first": s.argmax(1).amin()}
        return {"loss": F.cross_entropy(s, y), **told, **untold}

    plain = Model(outputs)
    with caplog.at_level(logging.WARNING):
        model = AutoVaruna(copy.deepcopy(plain), plan=Setup(num_micro_batches=2).plan, num_micro_batches=2, **QUIET)
        found, expected = model(**labelled(6, 0)[1]), plain(**labelled(6, 0)[1])
    assert all(torch.equal(found[name], expected[name]) for name in list(expected)[5:])
    told = [each.split()[0] for each in caplog.messages if "is no count over the samples" in each]
    assert told == [f"output['{name}']" for name in ("half", "next", "best", "most")]


def of_sequences(m: Any, s: Tensor, y: Tensor) -> Tensor:
    steps, length = torch.stack([s] * 3).log_softmax(2), torch.full((y.shape[0],), 3)
    return F.ctc_loss(steps, y.clamp(min=1)[:, None], length, torch.ones_like(length), reduction="sum") / 10


SUMS: dict[str, Loss] = {
    "by name": lambda m, s, y: F.cross_entropy(s, y, reduction="sum") / 100,
    "of several": lambda m, s, y: (
        torch.stack([F.cross_entropy(s, y, reduction="sum"), s.square().sum(1).sum()]).sum() / 100
    ),
    "of sequences": of_sequences,
    "times samples": lambda m, s, y: F.cross_entropy(s, y) * y.shape[0] / 100,
    "by product": lambda m, s, y: torch.einsum("bc,bc->", s, s) / 100,
}


@pytest.mark.parametrize("name", some([*SUMS], 4))
def test_a_sum_is_added_up_or_refused(name: str) -> None:
    """With the setting that the error names, the numbers are those of the whole batch."""
    case = case_of(name, SUMS[name])
    refuse(case, r"is a sum over the samples.*reduction='sum'", error=InputError)
    train_as_plain(case, pipeline(2, settings=SUM), 6, 6)


@pytest.mark.parametrize("name", some([*NO_MEANS, *SUMS], 3))
def test_with_one_micro_batch_any_loss_is_that_of_plain_pytorch(name: str) -> None:
    train_as_plain(case_of(name, {**NO_MEANS, **SUMS}[name]), pipeline(2, num_micro_batches=1), 6, 6)


ADDED: dict[str, Loss] = {
    "a divided layer": lambda m, x, y: m.added(x / x.shape[0], y),
    "a counted layer": lambda m, x, y: m.added(x * (y > 0).sum(), y),
    "a penalty a sample": lambda m, x, y: m.added(x, y) + x.shape[0] * m.penalty(),
    "divided losses": lambda m, x, y: (m.layers(x).square() / x.shape[0]).sum(),
    "a count": lambda m, x, y: m.added(x, y) / (y > 0).sum(),
    "labels left out": lambda m, x, y: F.cross_entropy(m.layers(x), y, ignore_index=0),
}
NO_SUMS: dict[str, Loss] = {
    "a penalty": lambda m, x, y: m.added(x, y) + m.penalty(),
    "a weight": lambda m, x, y: m.added(x, y) + next(m.parameters()).sum(),
    "a mean": lambda m, x, y: m.layers(x).square().mean(),
    "a mean among sums": lambda m, x, y: m.added(x, y) + m.layers(x).square().mean(),
}


@pytest.mark.parametrize("name", some([*ADDED], 4))
def test_what_is_added_up_is_the_loss_of_the_whole_batch(name: str) -> None:
    """Micro-batches get its size, and what is counted in it, wherever that is what plain PyTorch computes with."""
    train_as_plain(case_of(f"added {name}", ADDED[name], whole=True), pipeline(2, settings=SUM), 7, 6)


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_is_not_added_up(name: str) -> None:
    model = Model(NO_SUMS[name], whole=True)
    refuse(model, r"is no sum over the samples.*the setting reduction='mean'", error=InputError, **SUM)
    AutoVaruna(model, num_micro_batches=1, **SUM, **QUIET)(**labelled(6, 0)[1])


OF_SIZE: dict[str, Loss] = {
    "a divided layer": lambda m, x, y: m.losses(m.layers[0](x) / x.shape[0], y).mean(),
    "a power": lambda m, x, y: m.losses(m.layers[0](x).sigmoid() ** x.size(0), y).mean(),
    "a divided weight": lambda m, x, y: m.losses(F.linear(x, m.layers[0].weight / x.shape[0]), y).mean(),
    "a divided penalty": lambda m, x, y: m.losses(m.layers[0](x), y).mean() + m.penalty() / x.shape[0],
    "divided losses": lambda m, x, y: (m.losses(m.layers[0](x), y) / x.shape[0]).sum(),
    "shares": lambda m, x, y: (
        m.losses(m.layers[0](x), y) * (x[:, 0].exp() / x[:, 0].exp().sum()) / 2 + m.layers[2](x)[:, 0] / y.sum()
    ).sum(),
    "a mean of shares": lambda m, x, y: (m.losses(m.layers[0](x), y) * (x[:, 0].exp() / x[:, 0].exp().sum())).mean(),
    "places": lambda m, x, y: F.log_softmax(m.layers[2](m.layers[0](x)), 1)[torch.arange(x.shape[0]), y].mean(),
}
if torch.__version__ < "2.12":  # its torch.export fixes a batch size that is an exponent, which is refused
    del OF_SIZE["a power"]


@pytest.mark.parametrize("name", some([*OF_SIZE], 5))
def test_the_size_is_that_of_the_whole_batch(name: str) -> None:
    train_as_plain(case_of(f"of size {name}", OF_SIZE[name], whole=True), pipeline(2), 7, 6)


SIZE, MIXES = "size of the batch is a number that", "mixes the samples of a batch:"
NO_NUMBER: dict[str, Loss] = {
    f"{SIZE} clamp computes with": lambda m, x, y: m.losses(m.layers[0](x).clamp(max=x.shape[0] / 2), y).mean(),
    "no mean over its samples: mean": lambda m, x, y: (m.losses(m.layers[0](x), y) / x.shape[0]).mean(),
    "no mean over its samples: square": lambda m, x, y: (m.losses(m.layers[0](x), y).sum() + m.penalty()) / x.shape[0],
    f"{MIXES} unsqueeze": lambda m, x, y: m.losses(m.layers[0](x) * torch.arange(x.shape[0])[:, None], y).mean(),
    f"{MIXES} cumsum": lambda m, x, y: m.losses(m.layers[0](x) + torch.ones(x.shape[0], 1).cumsum(0), y).mean(),
    f"{MIXES} arange.* ": lambda m, x, y: m.losses(
        m.layers[0](x) + m.layers[0].weight.repeat(9, 1)[torch.arange(x.shape[0])], y
    ).mean(),
}


@pytest.mark.parametrize("words", NO_NUMBER)
def test_what_has_no_such_number_is_refused(words: str) -> None:
    refuse(Model(NO_NUMBER[words], whole=True), rf"{words}.* at .*test_losses", error=AutoVarunaError)
