"""Submodules that cannot be traced are kept whole, and train with the numbers of plain PyTorch on any plan."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from autovaruna import AutoVaruna, InputError
from tests.catalogue.case import Batch, Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, labelled
from tests.reference import bit_equal, compare, part, plain_micro_batched, plain_steps, ranges
from tests.session.training import (
    QUIET,
    Setup,
    pipeline,
    refuse,
    same_gradients,
    train,
    train_as_plain,
)

SIZE, STEPS = 6, 3


def only(gradients: Any) -> Tensor:
    (gradient,) = gradients
    assert isinstance(gradient, Tensor)
    return gradient


class Between(nn.Module):
    """Puts a module between two layers that can be traced."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.middle(torch.tanh(self.first(x)))))
        return out


class Branch(nn.Module):
    """Branches on a number in a tensor, and assigns a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.left(x) if self.mean.sum().item() > 0 else self.right(self.left(x))
        return out - self.mean


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(at).tanh().square().sum(), at, create_graph=True)
        return x - force


class TensorHook(nn.Module):
    """Sets a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[no-untyped-call]
        return out


class Checkpointed(nn.Module):
    """Recomputes a part of itself, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return out if x.max().item() > 0 else -out


def tied() -> nn.Module:
    """Two kept modules that share a weight."""
    first, second = Branch(), Branch()
    second.left.weight = first.left.weight
    return nn.Sequential(first, nn.LayerNorm(WIDTH), second)


def hooked() -> nn.Module:
    """A layer with a hook on its results and one on its gradients."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, given, result: 2.0 * result)
    layer.register_full_backward_hook(lambda module, inputs, outputs: (3.0 * only(inputs),))
    return layer


KINDS: tuple[Callable[[], nn.Module], ...] = (
    Branch,
    OwnGradient,
    TensorHook,
    Checkpointed,
    tied,
    hooked,
)


def case_of(kind: Callable[[], nn.Module]) -> Case:
    """Returns a classifier with a module in its middle."""
    return Case(f"kept_{kind.__name__}", lambda: Classifier(Between(kind())), labelled)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_kept_modules_train_like_plain_pytorch(kind: Callable[[], nn.Module]) -> None:
    """With one micro-batch the bits are those of plain PyTorch; with three, those of one stage, recompute or not."""
    case = case_of(kind)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    bit_equal(train(case, pipeline(2, num_micro_batches=1), batches), plain_steps(case, batches))
    one = train(case, Setup(), batches)
    bit_equal(train(case, pipeline(3), batches), one)
    bit_equal(train(case, pipeline(2, recompute=True), batches), one)


def test_torchscript_modules_are_refused() -> None:
    """The error names the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script: nn.Module = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    refuse(Classifier(Between(script)), r"body\S* is a TorchScript module.*take the one that it was made of")


class Drawing(nn.Module):
    """Draws from Python's generator and from torch's, and branches on what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3, self.training)
        return self.layer(x) * random.random() if torch.rand(()).item() > 0.5 else x


def test_random_numbers_of_kept_modules_follow_from_the_seed() -> None:
    """Neither stages nor recomputing change what a kept module draws, from whichever generator."""
    case = case_of(Drawing)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    state = random.getstate()
    one = train(case, Setup(), batches)
    assert random.getstate() == state
    bit_equal(train(case, pipeline(3, recompute=True), batches), one)
    assert len({loss.item() for loss in one.losses}) == STEPS


class Masked(nn.Module):
    """Masks samples by numpy's random numbers, as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(numpy.random.rand(x.shape[0])) > 0.3
        out: Tensor = self.layer(x) * mask[:, None]
        return out


def test_what_numpy_draws_is_not_fixed_by_the_trace() -> None:
    """A module that draws is kept whole, even where that is all that speaks against a trace."""
    case = case_of(Masked)
    batches = [case.batch(SIZE, 0)] * STEPS
    one = train(case, Setup(), batches, make_optimizer=partial(torch.optim.SGD, lr=0.0))
    assert len({loss.item() for loss in one.losses}) == STEPS
    bit_equal(train(case, pipeline(3), batches, make_optimizer=partial(torch.optim.SGD, lr=0.0)), one)
    outside = Classifier(nn.Sequential(nn.Linear(WIDTH, CLASSES)))
    outside.forward = lambda x, y: random.random() * F.cross_entropy(outside.body(x), y)  # type: ignore[method-assign]
    refuse(outside, r"Python's or numpy's generator.*draw from torch")


def test_micro_batches_of_a_kept_module_are_those_of_plain_pytorch() -> None:
    """A branch is taken, and a buffer changed, for each micro-batch on its own."""
    case = case_of(Branch)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    plain = plain_micro_batched(case, [[part(batch, *bounds) for bounds in ranges(SIZE, 3)] for batch in batches])
    compare(train(case, Setup(), batches), plain)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out[: int((x.sum(1) < 0).sum())] if x.abs().max().item() > 100 else out


def test_another_shape_than_in_the_trial_is_refused() -> None:
    """What a kept module returns for a batch has the shape that the trial showed, or an error says so."""
    model = AutoVaruna(Classifier(Grows()), num_micro_batches=2, **QUIET)
    batch = labelled(SIZE, 0)[1]
    model(**batch).backward()
    with pytest.raises(InputError, match=r"body, which is kept whole.*got \(0, 12\).*expected \(3, 12\)"):
        model(x=200.0 * torch.ones(SIZE, WIDTH), y=batch["y"])


class OwnBranch(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(-x if x.sum() > 0 else x, y)


class Criterion(nn.Module):
    """Returns a loss; whether it branches on a number makes no difference, but that it is kept whole."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        return self.loss(scores, y) if bool(scores.sum() > 0) else self.loss(scores, y).clone()


class WithLoss(nn.Module):
    """Has a module for its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        self.criterion = Criterion(loss)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.layers(x), y)
        return loss


def root(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y).sqrt()


def total(scores: Tensor, y: Tensor) -> Tensor:
    return 0.1 * F.cross_entropy(scores, y, reduction="none").sum()


def of_pairs(scores: Tensor, y: Tensor) -> Tensor:
    """Compares each sample with all others."""
    return (scores @ scores.T).logsumexp(1)


@pytest.mark.parametrize(("loss", "words"), [(root, "no mean over"), (total, "a sum over"), (F.cross_entropy, "")])
def test_a_loss_of_a_kept_module_is_tried_out(loss: Callable[..., Tensor], words: str) -> None:
    """One that is a mean goes on; with one micro-batch, or as a sum, the others do, too."""
    case = Case(f"kept_{loss.__name__}", partial(WithLoss, loss), labelled)
    batches = [case.batch(SIZE + 1, step) for step in range(2)]
    if words:
        refuse(case.model(), f"{words} its samples|{words} the samples", batches[0][1], error=InputError)
    changes = (
        {"num_micro_batches": 1} if words == "no mean over" else {"settings": {"reduction": "sum"} if words else {}}
    )
    compare(train(case, pipeline(2, **changes), batches), plain_steps(case, batches))


def test_samples_that_meet_in_a_kept_module_are_refused() -> None:
    refuse(WithLoss(of_pairs), "criterion, which is kept whole, returns for a sample, or its gradient, depends")


def test_the_model_itself_is_not_kept_whole() -> None:
    """A model that branches outside of its submodules is refused, with its line, whatever else was kept."""
    refuse(OwnBranch(Between(Branch())), r"OwnBranch cannot be traced at .*test_kept\.py.*x\.sum\(\) > 0.*submodule")


class OwnNumbers(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * float(numpy.abs(x.numpy()).mean())


class OwnSizes(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        lengths: Any = (y.max() + 1, y.min() + 1)
        return super().forward(x, y) * F.interpolate(x[:, None, None], size=lengths).mean()


OWN = [
    (OwnNumbers, r"x\.numpy.*goes through NumPy, which needs the numbers in a tensor"),
    (OwnSizes, "interpolate.*needs the number in a tensor"),
]


@pytest.mark.parametrize(("kind", "words"), OWN)
def test_what_only_a_trace_lacks_is_not_called_an_error_of_the_model(kind: type[Classifier], words: str) -> None:
    """Numbers that others than torch's tracers want are there without a trace, so the inputs are not to blame."""
    batch = labelled(SIZE, 0)[1]
    kind(Branch())(**batch).backward()
    refuse(kind(Branch()), rf"cannot be traced at .*{words}", batch)


def test_measuring_leaves_no_trace_in_a_kept_module() -> None:
    """What is measured runs on a copy; hooks of backward see the gradients of the steps alone."""
    layer = nn.Linear(WIDTH, WIDTH)
    seen: list[Tensor] = []
    layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(only(outputs)))
    model = AutoVaruna(Classifier(Between(layer)), num_micro_batches=2, **QUIET)
    model(**labelled(SIZE, 0)[1]).backward()
    assert [len(each) for each in seen] == [3, 3]


class Twice(nn.Module):
    """Uses a weight twice that power iterations change each time it is computed; may have to be kept whole."""

    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.layer, self.is_kept = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), is_kept

    def forward(self, x: Tensor) -> Tensor:
        if self.is_kept and x.detach().sum().item() > 1e9:
            return x
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Model(nn.Module):
    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(WIDTH, WIDTH), Twice(is_kept), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.twice(self.first(x))), y)


@pytest.mark.parametrize("is_kept", [False, True])
def test_each_run_has_a_cache_of_its_own(is_kept: bool) -> None:
    """Once, a trace took the value that the run before it had left for one that follows from nothing."""

    def act(model: Any) -> None:
        for step in range(2):
            with parametrize.cached():
                model(**labelled(6, step)[1]).backward()

    same_gradients(pipeline(2), Model(is_kept), act, rtol=1e-4)


LENGTH = 7


class Reader(nn.Module):
    """Reads sequences of several lengths; `read` says how."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.full((1, 1, WIDTH), 0.1))
        self.read = read

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.read(self, torch.tanh(self.first(x)), lengths)), y)


def unsorted(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    """Means go over as many places as the longest sequence of the whole batch has."""
    packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    packed, (hidden, _) = model.lstm(packed)
    found, _ = pad_packed_sequence(packed, batch_first=True)
    return found.mean(1) + hidden.sum((0, 2))[:, None]


def sorted_by_hand(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    lengths, order = lengths.sort(descending=True)
    _, (hidden, _) = model.lstm(pack_padded_sequence(x[order], lengths.cpu(), batch_first=True))
    return torch.cat([hidden[-2], hidden[-1]], 1)[order.argsort()]


def in_a_row(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed, _ = model.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    packed, hidden = model.gru(packed, model.start.expand(-1, x.shape[0], -1).contiguous())
    found, lengths = pad_packed_sequence(packed, padding_value=-1.0, total_length=x.shape[1])
    return found.sum(0) / lengths[:, None] + hidden[-1]


def data(model: Reader, x: Tensor, lengths: Tensor) -> Tensor:
    packed, _ = model.gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    found: Tensor = packed.data
    return found.mean(0).expand(x.shape[0], -1)


def sentences(size: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, LENGTH + 1, (size,), generator=generator)
    x = torch.randn(size, LENGTH, WIDTH, generator=generator)
    return (), {"x": x, "lengths": lengths, "y": torch.arange(size) % CLASSES}


@pytest.mark.parametrize("read", [unsorted, sorted_by_hand, in_a_row])
def test_packed_sequences_train_as_in_plain_pytorch(read: Callable[..., Tensor]) -> None:
    """Lengths of zero are refused by torch where the module is tried out, and where its time is measured."""
    case = Case(read.__name__, lambda: Reader(read), sentences)
    train_as_plain(case, pipeline(2), 7, 7)
    AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**sentences(7, 0)[1]).backward()


def test_what_is_done_with_packed_numbers_is_refused() -> None:
    refuse(Reader(data), r"takes mean of a packed sequence at .*test_kept", sentences(4, 0)[1])


def test_lengths_in_a_list_are_refused() -> None:
    class Listed(Reader):
        def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
            packed, _ = self.gru(pack_padded_sequence(x, [LENGTH] * 4, batch_first=True))  # type: ignore[arg-type]
            return pad_packed_sequence(packed)[0].mean()

    refuse(Listed(data), "by lengths that are no tensor", sentences(4, 0)[1])
