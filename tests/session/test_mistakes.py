"""Mistakes, doubts about the batch and unusual calls get a sentence that says what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, OrderError, TraceError
from autovaruna.errors import PlanError
from autovaruna.runtime.world import World
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.ranks import run_ranks
from tests.reference import Record, compare, gradients_of, sgd
from tests.session.training import QUIET, Setup, on_ranks, refuse

BATCH = labelled(6, 0)[1]
ONE = QUIET | {"num_micro_batches": 2}
TWO = QUIET | {"num_micro_batches": 2, "num_stages": 2, "inputs": "replicated"}


class Net(nn.Module):
    """Two layers; an option object scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor, options: Any = None) -> Tensor:
        scale = 1.0 if options is None else options.scale
        return F.cross_entropy(scale * self.last(torch.tanh(self.first(x))), y)


class Options:
    """Has no text of its own but where it lies in memory."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Function(nn.Module):
    """Holds nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def stepped(wrapped: AutoVaruna) -> AutoVaruna:
    """Makes a step."""
    wrapped(**BATCH).backward()
    return wrapped


def test_a_model_without_parameters_is_one_block() -> None:
    """There is nothing to train, and every operation could be repeated; a stage still has to hold something."""
    model = Function(lambda x, y: (x * y[:, None]).mean())
    assert torch.allclose(AutoVaruna(model, **ONE)(**BATCH), model(**BATCH))


def test_option_objects_are_told_apart_by_what_they_hold() -> None:
    """Equal ones, made anew for each call and on each rank, need no other trace; others do."""

    def be_rank(world: World) -> list[float]:
        torch.manual_seed(0)
        wrapped = AutoVaruna(Net(), **TWO)
        losses = [wrapped(**BATCH, options=Options(scale)).item() for scale in (2.0, 2.0, 3.0)]
        assert wrapped._session.traces is not None and wrapped._session.traces.num_traced == 2
        return losses

    losses = run_ranks(2, be_rank)[0]
    assert losses[0] == losses[1] != losses[2]


def test_a_model_that_is_split_already_is_refused() -> None:
    """Once, a second wrapper failed at its first call: 'Cannot copy out of meta tensor; no data!'."""

    def be_rank(world: World) -> bool:
        model = Net()
        stepped(AutoVaruna(model, **TWO))
        if is_part := any(parameter.is_meta for parameter in model.parameters()):
            for part in (model, nn.Sequential(model.first, model.last)):
                with pytest.raises(InputError, match=r"split over the ranks by an earlier.*state_dict\(\)"):
                    AutoVaruna(part, **TWO)
        return is_part

    assert any(run_ranks(2, be_rank))


def test_a_cast_of_the_inner_module_after_the_split_says_what_to_do() -> None:
    """Once, the stage of each rank failed in its first operation, or took a dtype that no other rank knew of."""

    def be_rank(world: World) -> None:
        wrapped = stepped(AutoVaruna(Net(), **TWO, cuts=["last"]))
        wrapped.module.half()
        with pytest.raises(
            InputError, match=r"weight is torch.float16 on cpu, expected torch.float32.*torch\.autocast"
        ):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


class Bags(nn.Module):
    """Averages embeddings in bags that begin at offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(9, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, offsets: Tensor, words: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.bag(words, offsets)), y)


class Words(nn.Module):
    """Divides the gradients of embeddings by how often their words are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, scale_grad_by_freq=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words).square().mean()  # type: ignore[no-any-return]


NO_BATCH: list[tuple[nn.Module, tuple[Any, ...], str]] = [
    (
        Bags(),
        (torch.tensor([0, 2, 3, 7]), torch.arange(9), torch.zeros(4).long()),
        "offsets says where bags begin .*pad",
    ),
    (Words(), (torch.arange(8).view(4, 2) % 3,), "scale_grad_by_freq has gradients go by how often"),
]


@pytest.mark.parametrize(("model", "arguments", "words"), NO_BATCH)
def test_inputs_without_a_batch_in_front_are_told_from_others(
    model: nn.Module, arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        AutoVaruna(model, **ONE)(*arguments)


TOKENS = 11
WHOLE = {"inputs": "replicated", "num_micro_batches": 1, "dynamic_batch": False}
TOGETHER = r"inputs='replicated', num_micro_batches=1, dynamic_batch=False together"


class Positions(nn.Module):
    """Has room for so many."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5000, 1, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[0]]  # the positions


class TimeFirst(nn.Module):
    """Takes (time, batch) through an encoder, with a mask made from the length of what it is given."""

    def __init__(self, has_positions: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), Positions() if has_positions else nn.Identity()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0)
        self.layers, self.last = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(WIDTH, TOKENS),
        )

    def forward(self, src: Tensor, y: Tensor) -> Tensor:
        length = src.shape[0] if isinstance(self.places, Positions) else len(src)  # the length
        h = self.places(self.words(src))
        h = self.layers(h, mask=torch.log(torch.tril(torch.ones(length, length))))
        return F.cross_entropy(self.last(h).flatten(0, 1), y.flatten())


class Recurrent(nn.Module):
    """Takes a hidden state, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.last(self.cell(x, state)[0]).square().mean()  # type: ignore[no-any-return]


class Nodes(nn.Module):
    """Joins nodes by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, joined: Tensor) -> Tensor:
        return self.last(joined @ self.first(x).relu()).log_softmax(1)[:, 0].mean().neg()


class Actor(nn.Module):
    """Takes one observation, and returns a loss of what it would do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.action, self.value = (
            nn.Linear(4, WIDTH),
            nn.Linear(WIDTH, 2),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, state: Tensor) -> Tensor:
        h = self.first(state).relu()
        return self.action(h).softmax(-1)[0].log().neg() + self.value(h)[0].square()


class Pictures(nn.Module):
    """Takes a list of images of their own sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, images: list[Tensor], y: Tensor) -> Tensor:
        h = torch.stack([self.first(each).mean((1, 2)) for each in images])
        return F.cross_entropy(self.last(h), y)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


WORDS = (torch.arange(30).reshape(5, 6) % TOKENS, torch.arange(1, 31).reshape(5, 6) % TOKENS)
CAUSES: dict[str, tuple[nn.Module, tuple[Any, ...], str]] = {
    "time first": (TimeFirst(False), WORDS, r"# the length\).*batch_first=False\) takes the first one for time.*"),
    "positions": (TimeFirst(True), WORDS, r"# the positions\): it holds for batch <= 5000 alone.*batch_first=True.*"),
    "state": (
        Recurrent(),
        (random(5, 6, WIDTH), (random(1, 6, WIDTH),) * 2),
        r"which state_0 \(1, 6, 12\), .*",
    ),
    "graph": (Nodes(), (random(7, 4), random(7, 7)), r"joined \(7, 7\) joins rows of x \(7, 4\).*"),
    "observation": (Actor(), (random(4),), r"state \(4,\) looks like one sample.*unsqueeze\(0\).*"),
    "images": (Pictures(), ([random(3, 8, 8), random(3, 9, 9)], torch.tensor([0, 1])), r"in a list \(images_0, .*"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_doubt_about_the_batch_names_its_cause_line_and_settings(cause: str) -> None:
    model, arguments, words = CAUSES[cause]
    with pytest.raises(TraceError, match=rf"test_mistakes\.py:\d+ \(.*{words}{TOGETHER}"):
        AutoVaruna(model, num_micro_batches=2, **QUIET)(*arguments)


@pytest.mark.parametrize("cause", CAUSES)
def test_those_settings_have_the_numbers_of_plain_pytorch(cause: str) -> None:
    model, arguments, _ = CAUSES[cause]
    model.zero_grad()
    loss = model(*arguments)
    loss.backward()

    def step(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        found = wrapped(*arguments)
        found.backward()
        return Record(losses=[found.detach()], gradients=[gradients_of(wrapped.module)])

    expected = Record(losses=[loss.detach()], gradients=[gradients_of(model)])
    model.zero_grad()
    for record in on_ranks(Setup(((0, 1),), 1, settings=WHOLE), model, step, sgd):
        compare(record, expected)


class TwoSteps(torch.optim.SGD):
    """Wants a closure, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it requires a closure"
        return super().step(closure)


def test_an_optimizer_that_wants_a_closure_is_told_the_settings() -> None:
    model = Nodes()
    with pytest.raises(PlanError, match=r"(?s)requires a closure.*optimizer_bytes_factor.*num_stages=1 and num"):
        wrapped = AutoVaruna(model, TwoSteps(model.parameters(), lr=0.1), **WHOLE, **QUIET)
        wrapped(random(7, 4), random(7, 7))


@pytest.mark.parametrize("has_positions", (True, False))
def test_an_encoder_with_a_mask_made_from_the_length_runs_once_the_batch_is_named(has_positions: bool) -> None:
    model = TimeFirst(has_positions)
    loss = model(*WORDS)
    loss.backward()
    expected = Record(losses=[loss.detach()], gradients=[gradients_of(model)])
    model.zero_grad()
    wrapped = AutoVaruna(model, num_micro_batches=2, batch_dims={"src": 1, "y": 1}, **QUIET)
    found = wrapped(*WORDS)
    found.backward()
    compare(Record(losses=[found.detach()], gradients=[gradients_of(wrapped.module)]), expected)


SIZE = 6


class Masking(nn.Module):
    """Scales its samples in place, and renames a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x[:, 0] = 0.5
        x.mul_(2)
        y[y == 1] = 0
        return F.cross_entropy(self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) + x), y)


def test_changed_arguments_are_refused() -> None:
    """The caller's tensors stayed as they were."""
    batch = labelled(SIZE, 0)[1]
    refuse(Masking(), r"changes its arguments x, y in place.*x\.clone\(\)", batch)


class Statistics(nn.Module):
    """Averages its features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return hidden.square().mean()


def test_statistics_of_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autovaruna"):
        AutoVaruna(Statistics(), num_micro_batches=2, **QUIET)(labelled(SIZE, 0)[1]["x"])
    assert "forward changes mean by the numbers of its samples" in caplog.text


class Policy(nn.Module):
    """Returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> torch.distributions.Distribution:
        return torch.distributions.Categorical(logits=self.first(x))


def test_a_model_that_returns_no_tensors_is_told_so() -> None:
    with pytest.raises(TraceError, match="returns nothing but Categorical, which hides its tensors"):
        AutoVaruna(Policy(), num_micro_batches=2, **QUIET)(labelled(SIZE, 0)[1]["x"])


class Leaving(nn.Module):
    """Keeps the mean square of its features in an attribute, and cached positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES)),
        )
        self.extra: Any = 0.0
        self.places: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.places = torch.arange(WIDTH)
        self.extra = [hidden.square().mean()]
        return self.last(hidden * self.places)  # type: ignore[no-any-return]


def test_attributes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    x = labelled(6, 0)[1]["x"]
    model = AutoVaruna(Leaving(), num_micro_batches=2, **QUIET)
    with caplog.at_level(logging.WARNING, "autovaruna"):
        model(x)
        model.eval()
        model(x)
    (said,) = (each.getMessage() for each in caplog.records if "leaves tensors" in each.getMessage())
    assert "leaves tensors in extra. They stay" in said


def test_a_loss_of_what_a_hook_has_kept_is_refused() -> None:
    batch = labelled(6, 0)[1]
    inner, kept = Leaving(), dict[str, Tensor]()
    inner.first.register_forward_hook(lambda module, given, made: kept.update(made=made))
    model = AutoVaruna(inner, num_micro_batches=2, **QUIET)
    loss = F.cross_entropy(model(batch["x"]), batch["y"]) + kept["made"].square().mean()
    with pytest.raises(OrderError, match="left beside what the model returns"):
        loss.backward()  # type: ignore[no-untyped-call]
