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
from torch.utils.checkpoint import checkpoint

from autovaruna import AutoVaruna, InputError, TraceError
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, labelled
from tests.reference import bit_equal, compare, part, plain_micro_batched, plain_steps, ranges
from tests.session.training import QUIET, Setup, pipeline, train

SIZE, STEPS = 6, 3


def only(gradients: Any) -> Tensor:
    """Returns the one gradient that a hook gets."""
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
    """Goes backward in its forward."""

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
    with pytest.raises(TraceError, match=r"body\S* is a TorchScript module.*take the one that it was made of"):
        AutoVaruna(Classifier(Between(script)), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])


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
    with pytest.raises(TraceError, match=r"Python's or numpy's generator.*draw from torch"):
        AutoVaruna(outside, num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])


def test_micro_batches_of_a_kept_module_are_those_of_plain_pytorch() -> None:
    """A branch is taken, and a buffer changed, for each micro-batch on its own."""
    case = case_of(Branch)
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    plain = plain_micro_batched(case, [[part(batch, *bounds) for bounds in ranges(SIZE, 3)] for batch in batches])
    compare(train(case, Setup(), batches), plain)


class Grows(nn.Module):
    """Returns as many rows as numbers are positive."""

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
    """Branches itself."""

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
        with pytest.raises(InputError, match=f"{words} its samples|{words} the samples"):
            AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1])
    changes = (
        {"num_micro_batches": 1} if words == "no mean over" else {"settings": {"reduction": "sum"} if words else {}}
    )
    compare(train(case, pipeline(2, **changes), batches), plain_steps(case, batches))


def test_samples_that_meet_in_a_kept_module_are_refused() -> None:
    with pytest.raises(
        TraceError, match="criterion, which is kept whole, returns for a sample, or its gradient, depends"
    ):
        AutoVaruna(WithLoss(of_pairs), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])


def test_the_model_itself_is_not_kept_whole() -> None:
    """A model that branches outside of its submodules is refused, with its line, whatever else was kept."""
    with pytest.raises(TraceError, match=r"OwnBranch cannot be traced at .*test_kept\.py.*x\.sum\(\) > 0.*submodule"):
        AutoVaruna(OwnBranch(Between(Branch())), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])


class OwnNumbers(Classifier):
    """Hands numbers to numpy itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * float(numpy.abs(x.numpy()).mean())


class OwnSizes(Classifier):
    """Takes lengths from its labels."""

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
    with pytest.raises(TraceError, match=rf"cannot be traced at .*{words}"):
        AutoVaruna(kind(Branch()), num_micro_batches=2, **QUIET)(**batch)


def test_measuring_leaves_no_trace_in_a_kept_module() -> None:
    """What is measured runs on a copy; hooks of backward see the gradients of the steps alone."""
    layer = nn.Linear(WIDTH, WIDTH)
    seen: list[Tensor] = []
    layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(only(outputs)))
    model = AutoVaruna(Classifier(Between(layer)), num_micro_batches=2, **QUIET)
    model(**labelled(SIZE, 0)[1]).backward()
    assert [len(each) for each in seen] == [3, 3]
