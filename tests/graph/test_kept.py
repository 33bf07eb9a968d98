"""Submodules that cannot be traced are kept whole, and train with the numbers of plain PyTorch on any plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autovaruna import AutoVaruna, InputError
from tests.catalogue.case import Batch, Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, Written, hidden, labelled, two_layers
from tests.products import some
from tests.reference import bit_equal, compare, micro_batches, plain_micro_batched
from tests.session.training import QUIET, Setup, measure, pipeline, refuse, same_gradients, train, train_as_plain

SIZE, STEPS = 6, 3
BATCH = labelled(SIZE, 0)[1]


def branching(self: Any, x: Tensor) -> Tensor:
    """Branches on a number in a tensor, and assigns a buffer."""
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    out: Tensor = self.left(x) if self.mean.sum().item() > 0 else self.right(self.left(x))
    return out - self.mean


def branch() -> Any:
    left, right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Written(branching, left=left, right=right, mean=torch.zeros(WIDTH))


def layer_of(function: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Returns a module that does something with a layer and its input that cannot be traced."""
    return Written(lambda self, x: function(self.layer, x), layer=nn.Linear(WIDTH, WIDTH))


def own_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    """Goes backward in its forward."""
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(layer(at).tanh().square().sum(), at, create_graph=True)
    return x - force


def tensor_hook(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    if out.requires_grad:
        out.register_hook(lambda gradient: 0.5 * gradient)
    return out


def drawing(layer: nn.Module, x: Tensor) -> Tensor:
    """Draws from Python's generator and from torch's, and branches on what it drew."""
    x = F.dropout(x, 0.3)
    return layer(x) * random.random() if torch.rand(()).item() > 0.5 else x


def masked(layer: nn.Module, x: Tensor) -> Tensor:
    """Masks samples by numpy's random numbers, as many as there are samples: no more speaks against a trace."""
    return layer(x) * (torch.from_numpy(numpy.random.rand(x.shape[0])) > 0.3).to(x.device)[:, None]


def grown(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns as many rows as numbers are positive."""
    return layer(x)[: int((x.sum(1) < 0).sum())] if x.abs().max().item() > 100 else layer(x)


def tied() -> nn.Module:
    """Two kept modules that share a weight."""
    first, second = branch(), branch()
    second.left.weight = first.left.weight
    return nn.Sequential(first, nn.LayerNorm(WIDTH), second)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "branch": branch,
    "own_gradient": partial(layer_of, own_gradient),
    "tied": tied,
    "tensor_hook": partial(layer_of, tensor_hook),
}


def around(middle: nn.Module) -> nn.Module:
    """Returns a classifier with a module between layers that can be traced."""
    return Classifier(hidden(nn.Tanh(), middle, nn.ReLU()))


def case_of(name: str, kind: Callable[[], nn.Module]) -> Case:
    return Case(f"kept_{name}", lambda: around(kind()), labelled)


@pytest.mark.parametrize("name", some([*KINDS], 2))
def test_kept_modules_train_like_plain_pytorch(name: str) -> None:
    """With one micro-batch the bits are plain PyTorch's; with three those of one stage, recompute or not.

    A branch is taken, and a buffer changed, for each micro-batch on its own.
    """
    case = case_of(name, KINDS[name])
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    train_as_plain(case, pipeline(2, num_micro_batches=1), *[SIZE] * STEPS, exact=True)
    one = train(case, Setup(), batches)
    bit_equal(train(case, pipeline(3, recompute=True), batches), one)
    if name == "branch":
        compare(one, plain_micro_batched(case, [micro_batches(batch, 3) for batch in batches]))


@pytest.mark.parametrize("function", [drawing, masked])
def test_random_numbers_of_kept_modules_follow_from_the_seed(function: Any) -> None:
    """Neither stages nor recomputing change what a kept module draws, from whichever generator; a trace fixes none."""
    case = case_of(function.__name__, partial(layer_of, function))
    state, still = random.getstate(), partial(torch.optim.SGD, lr=0.0)
    one = train(case, Setup(), [case.batch(SIZE, 0)] * STEPS, make_optimizer=still)
    assert random.getstate() == state
    bit_equal(train(case, pipeline(3, recompute=True), [case.batch(SIZE, 0)] * STEPS, make_optimizer=still), one)
    assert len({loss.item() for loss in one.losses}) == STEPS


def test_another_shape_than_in_the_trial_is_refused() -> None:
    """What a kept module returns for a batch has the shape that the trial showed, or an error says so."""
    model = AutoVaruna(Classifier(layer_of(grown)), num_micro_batches=2, **QUIET)
    model(**BATCH).backward()
    with pytest.raises(InputError, match=r"body, which is kept whole.*got \(0, 12\).*expected \(3, 12\)"):
        model(x=200.0 * torch.ones(SIZE, WIDTH), y=BATCH["y"])


def with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Returns a model whose loss branches on a number, which makes no difference, but that it is kept whole."""
    branching = lambda self, s, y: loss(s, y) if bool(s.sum() > 0) else loss(s, y).clone()  # noqa: E731
    forward = lambda self, x, y: self.criterion(self.body(x), y)  # noqa: E731
    return Written(forward, body=hidden(nn.Tanh()), criterion=Written(branching))


LOSSES: dict[str, tuple[Callable[..., Tensor], str, dict[str, Any]]] = {
    "root": (lambda s, y: F.cross_entropy(s, y).sqrt(), "no mean over its samples", {"num_micro_batches": 1}),
    "total": (
        lambda s, y: 0.1 * F.cross_entropy(s, y, reduction="none").sum(),
        *("no mean over its samples.* reduction='sum' for a sum", {"settings": {"reduction": "sum"}}),
    ),
    "mean": (F.cross_entropy, "", {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_kept_module_is_tried_in_the_first_step(name: str) -> None:
    """One that is a mean goes on; with one micro-batch, or as a sum, the others do, too."""
    loss, words, changes = LOSSES[name]
    case = Case(f"kept loss {name}", partial(with_loss, loss), labelled)
    if words:
        refuse(case, words, case.batch(SIZE + 1, 0)[1], error=InputError)
    train_as_plain(case, pipeline(2, **changes), SIZE + 1, SIZE + 1)


class Own(Classifier):
    """Does itself what cannot be traced, with a module in it that is kept whole."""

    def __init__(self, function: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__(hidden(nn.Tanh(), branch(), nn.ReLU()))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(super().forward, x, y)


def own_sizes(loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """Takes lengths from its labels."""
    return loss(x, y) * F.interpolate(x[:, None, None], size=(y.max() + 1, y.min() + 1)).mean()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "TorchScript": (
        lambda: around(torch.jit.script(nn.Linear(WIDTH, WIDTH))),
        r"body\S* is a TorchScript module.*take the one that it was made of",
    ),
    "numbers of Python's": (
        lambda: Own(lambda loss, x, y: random.random() * loss(x, y)),
        r"test_kept\.py:\d+ \(.*self.*Python's or numpy's generator.*draw from torch",
    ),
    "samples that meet": (
        lambda: with_loss(lambda scores, y: (scores @ scores.T).logsumexp(1)),
        r"mixes the samples of a batch: .* at .*test_kept\.py:\d+ \(.*self\.criterion",
    ),
    "a branch": (
        lambda: Own(lambda loss, x, y: loss(-x if x.sum() > 0 else x, y)),
        r"Own cannot be traced at .*test_kept\.py.*x\.sum\(\) > 0.*submodule",
    ),
    "numbers for numpy": (  # they are there without a trace, so the inputs are not to blame
        lambda: Own(lambda loss, x, y: loss(x, y) * float(numpy.abs(x.numpy()).mean())),
        r"cannot be traced at .*x\.numpy.*goes through NumPy, which needs the numbers in a tensor",
    ),
    "sizes": (lambda: Own(own_sizes), "cannot be traced at .*needs the number in a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_whole_is_refused_by_its_line(name: str) -> None:
    """The model itself, whatever else was kept, and what a trial shows to be wrong."""
    make, words = REFUSED[name]
    refuse(make(), words)


def test_what_another_call_keeps_is_refused() -> None:
    """Stages would find what a trace, or another micro-batch, has left there."""
    model = AutoVaruna(Classifier(hidden(nn.Tanh())), num_micro_batches=2, **QUIET)
    with parametrize.cached(), pytest.raises(InputError, match=r"parametrize\.cached\(\).*enter it in forward"):
        model(**BATCH)


def run_packed(self: Any, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Runs a recurrent module over sequences of several lengths."""
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    packed, (hidden, _) = self.lstm(packed)
    return pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0], hidden.transpose(0, 1)


def reader(packs_itself: bool) -> nn.Module:
    """Reads sequences, packed in a submodule or in the model's own forward."""

    def read(self: Any, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        of_packed = partial(run_packed, self.inner) if packs_itself else self.inner
        found, hidden = of_packed(torch.tanh(self.first(x)), lengths)
        return F.cross_entropy(self.last(found.mean(1) + hidden.sum(1).repeat(1, 2)), y)

    lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
    return two_layers(read, inner=Written(run_packed, lstm=lstm))


def sentences(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 8, (size,), generator=generator)
    x = torch.randn(size, 7, WIDTH, generator=generator)
    return (), {"x": x, "lengths": lengths, "y": torch.arange(size) % CLASSES}


def test_packed_sequences_train_in_a_submodule() -> None:
    """Lengths of zero are refused by torch where the module is tried out, and where its time is measured."""
    case = Case("packed", lambda: reader(False), sentences)
    train_as_plain(case, pipeline(2), 7, 7)
    measure(case, 7)
    refuse(reader(True), r"packs sequences at .*test_kept.*total_length=x\.shape\[1\]\)", sentences(4, 0)[1])


def strict(self: Any, x: Tensor) -> Tensor:
    """Takes no such widths."""
    if self.layer(x).shape[1] == WIDTH:
        raise ValueError(f"it takes no {WIDTH} numbers")
    return x


def tried(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Goes on another way."""
    try:
        h = self.strict(x)
    except ValueError:
        h = torch.tanh(self.first(x))
    return F.cross_entropy(self.last(h), y)


def test_forward_may_catch_what_a_module_raises() -> None:
    """Once torch.export took the module for one that still ran."""
    model = two_layers(tried, strict=Written(strict, layer=nn.Linear(WIDTH, WIDTH)))
    same_gradients(pipeline(2), model, lambda wrapped: wrapped(**BATCH).backward())


def evaluating(self: Any, x: Tensor) -> Tensor:
    """Goes by a number of its argument, and counts its calls."""
    self.calls += 1
    return self.layer(x) if x.max().item() < 100 else x


def growing(layer: nn.Module, x: Tensor) -> Tensor:
    """Changes its weight past autograd: neither a later micro-batch nor a recompute would know."""
    layer.weight.data.mul_(1.01 if x.max().item() < 100 else 1.0)
    return layer(x)


def test_what_keeps_a_module_from_being_kept_whole_is_named() -> None:
    """Once the line alone was, with the advice to move it into a submodule, where it was."""
    counter = Written(evaluating, layer=nn.Linear(WIDTH, WIDTH), calls=0)
    refuse(around(counter), r"In body\.2, which cannot be traced .*the Python number calls \(0 -> 1\).*register_buffer")
    words = r"number in a tensor.*module body\.2 .* can neither be traced nor kept whole: its forward changes its param"
    refuse(around(layer_of(growing)), words)


def columns(self: Any, x: Tensor) -> Tensor:
    """Embeds columns, and goes by a number; on drawn numbers the embeddings raise."""
    parts = [layer(x[:, k].long()) for k, layer in enumerate(self.layers)]
    return torch.cat(parts, 1) if x.max().item() < 100 else x


def test_children_of_a_kept_module_run_where_two_others_share_a_child() -> None:
    """Once torch.export followed the copy that is tried out, by names of its own: 'Unexpected key layers.0@3'."""
    layers, layer = nn.ModuleList([nn.Embedding(3, 3), nn.Embedding(3, 3)]), nn.Linear(6, 6)
    ways = {name: nn.Sequential(layer, nn.Tanh()) for name in ("first", "second")}
    model = Written(
        lambda self, x, y: F.cross_entropy(self.last(self.second(self.first(self.columns(x)))), y),
        **{"columns": Written(columns, layers=layers), **ways, "last": nn.Linear(6, CLASSES)},
    )
    x = (torch.arange(SIZE * 5).view(SIZE, 5) % 3).float()
    same_gradients(pipeline(2), model, lambda wrapped: wrapped(x, BATCH["y"]).backward())
