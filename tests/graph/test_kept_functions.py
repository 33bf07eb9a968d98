"""Functions that are kept whole go on, are averaged or added up, or are refused.

They are autograd functions, those of ``torch.jit.script``, and those that a script marks with `keep_whole`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, InputError, TraceError, keep_whole
from autovaruna.graph.trace import trace
from tests.catalogue import DEVICE
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, Written, function_of, labelled, two_layers
from tests.graph.models import call_of
from tests.products import some
from tests.reference import bit_equal
from tests.session.training import QUIET, Setup, pipeline, refuse, train, train_as_plain

SIZE = 7
X = {"x": labelled(SIZE, 0)[1]["x"]}
TWO: dict[str, Any] = {"plan": Setup(num_micro_batches=2).plan, "num_micro_batches": 2, **QUIET}


class Half(torch.autograd.Function):
    """Gives half the gradient of a loss, of each sample's if it is a sum."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
        ctx.save_for_backward(scores, labels)
        ctx.parts = scores.shape[0] if reduction == "mean" else 1
        return F.cross_entropy(scores, labels, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        scores, labels = ctx.saved_tensors
        return gradient * 0.5 * (scores.softmax(1) - F.one_hot(labels, CLASSES)) / ctx.parts, None, None


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        root = scores.square().mean().sqrt()
        ctx.save_for_backward(scores, root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scores, root = ctx.saved_tensors
        return 0.5 * gradient * scores / (root * scores.numel())


CENTRED = function_of(lambda gradient: gradient - gradient.mean(0))  # each sample's depends on those of the others
CLAMPED = function_of(lambda gradient: gradient.clamp(-0.01, 0.01))  # is right for each sample, wrong for a weight
RAISED = function_of(lambda gradient: torch.where(gradient.abs() < 1e-4, 2.0 * gradient, gradient))  # drawn are larger
NOISY = function_of(lambda gradient: -2.0 * gradient, lambda x: x + torch.randn_like(x))


class Turned(function_of(lambda gradient: -2.0 * gradient)):  # type: ignore[misc]
    """Turns gradients round."""


CENTRE = keep_whole(lambda x: x - x.mean().item())
turn = Turned.apply
"""As many programs name a function: what torch calls it by is taken out of the class before anything is traced."""
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def model_of(loss: Loss) -> nn.Module:
    """Returns a model that ends in a loss of itself, features and labels."""
    return two_layers(lambda self, x, y: loss(self, torch.tanh(self.first(x)), y), turn=Turned.apply)


def case_of(name: str, loss: Loss) -> Case:
    return Case(f"function, {name}", lambda: model_of(loss), labelled)


def classify(change: Callable[[Any, Tensor], Tensor]) -> Loss:
    """Returns the loss of the scores that a function of the model makes of features."""
    return lambda m, h, y: F.cross_entropy(change(m, h), y)


@torch.jit.script
def damped(h: Tensor, scale: float = 0.5) -> Tensor:
    """Goes by the numbers of each sample."""
    rows = []
    for row in h:
        if float(row.sum()) > 0.0:
            row = row * scale
        rows.append(row)
    return torch.stack(rows)


@torch.jit.script
def normed(h: Tensor) -> Tensor:
    """Goes by the numbers of all samples."""
    if float(h.abs().max()) > 0.0:
        h = h / h.abs().max()
    return h


@torch.jit.script
def squared(h: Tensor) -> Tensor:
    return h * h


@keep_whole
def sorted_rows(h: Tensor, *, is_down: bool) -> tuple[Tensor, Tensor]:
    """Sorts rows by their greatest number, as Python does, and back."""
    order = sorted(range(len(h)), key=h.amax(1).tolist().__getitem__, reverse=is_down)
    places = torch.tensor(order)
    return h[places][places.argsort()], h.argmax(1)


def by_numpy(h: Tensor, bias: Tensor) -> Tensor:
    """Takes weights as an argument, and goes through numpy."""
    signs = torch.from_numpy(numpy.sign(h.detach().cpu().numpy()))
    return h * signs.to(h.device) + bias.sum()


AS_PLAIN: dict[str, Loss] = {
    "scripted": classify(lambda m, h: m.last(damped(h) + damped(h, scale=2.0))),
    "marked": classify(lambda m, h: m.last(sorted_rows(h, is_down=True)[0])),
    "of a library": classify(lambda m, h: m.last(keep_whole(by_numpy)(h, m.last.bias))),
    "mean": lambda m, h, y: Half.apply(m.last(h), y, "mean"),
    "divided sum": lambda m, h, y: Half.apply(m.last(h), y, "sum") / h.shape[0],
    "limited": classify(lambda m, h: m.last(CLAMPED.apply(h))),
    "small gradients": lambda m, h, y: 1e-3 * F.cross_entropy(m.last(RAISED.apply(h)), y),
    "by any name": classify(lambda m, h: m.last(turn(m.turn(torch.tanh(turn(h)))))),
    "in C++": classify(lambda m, h: m.last(torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -8, 7))),
}


@pytest.mark.parametrize("name", some([*AS_PLAIN], 4))
def test_a_function_trains_as_in_plain_pytorch(name: str) -> None:
    """One that reduces the samples to a sum says so by its name; each has its own backward by any name."""
    train_as_plain(case_of(name, AS_PLAIN[name]), pipeline(2), SIZE, SIZE)
    assert "forward" not in vars(Turned), "the names of functions are those of the script again"


MIXES, GRADIENT = "mixes the samples", "the gradient that goes back through module is another.*the gradient of "
TOGETHER = MIXES + ".* is another for . samples together than for parts of them, at .*test_kept_functions.*"
REFUSED: dict[str, tuple[Loss, type[AutoVarunaError], str]] = {
    "sum": (lambda m, h, y: Half.apply(m.last(h), y, "sum"), InputError, "a sum over the samples"),
    "root": (lambda m, h, y: Root.apply(m.last(h)), InputError, "no mean over its samples"),
    "scripted, mixing": (classify(lambda m, h: m.last(normed(h))), TraceError, TOGETHER + "normed"),
    "marked, mixing": (classify(lambda m, h: m.last(CENTRE(h))), TraceError, TOGETHER + "CENTRE"),
    "centred": (classify(lambda m, h: m.last(CENTRED.apply(h))), TraceError, GRADIENT + r"first\.weight"),
    "limited weight": (
        classify(lambda m, h: F.linear(h, CLAMPED.apply(m.last.weight))),
        *(TraceError, GRADIENT + r"last\.weight"),
    ),
    "covariance": (classify(lambda m, h: m.last(h * (1.0 + h.t().cov().square().mean()))), AutoVarunaError, MIXES),
    "correlation": (
        classify(lambda m, h: m.last(h * (1.0 + torch.corrcoef(h.t()).square().mean()))),
        *(AutoVarunaError, MIXES),
    ),
}


@pytest.mark.parametrize("name", some([*REFUSED], 4))
def test_another_needs_the_whole_batch_in_one(name: str) -> None:
    """It is refused with several micro-batches, and trains with one."""
    loss, error, words = REFUSED[name]
    refuse(case_of(name, loss), words, error=error)
    train_as_plain(case_of(name, loss), pipeline(2, num_micro_batches=1), SIZE, SIZE)
    assert "cov" not in vars(torch.Tensor)


def test_a_number_that_a_function_makes_and_nothing_trains_is_told(caplog: pytest.LogCaptureFixture) -> None:
    largest = keep_whole(lambda h: h.max().item() * torch.ones(()))
    model = AutoVaruna(model_of(lambda m, h, y: {"loss": m.last(h).mean(), "most": largest(h.detach())}), **TWO)
    model(**labelled(SIZE, 0)[1])
    assert "output['most'] may be no mean over the samples (" in caplog.text


def test_a_scripted_function_without_branches_is_traced() -> None:
    case = case_of("squared", lambda m, h, y: F.cross_entropy(m.last(squared(h)), y))
    model = case.model()
    assert not trace(model, call_of(model, **case.batch(SIZE, 0)[1]), DEVICE).has_kept_modules
    train_as_plain(case, pipeline(2), SIZE)


NET = nn.Linear(WIDTH, WIDTH)


def hiding(h: Tensor) -> Tensor:
    """Uses weights that it is not given."""
    return NET(h)


def hiding_in(inner: nn.Module, h: Tensor) -> Tensor:
    return inner(h)


class Again(torch.autograd.Function):
    """Runs a module forward, and forward again in its backward, where the weights take their gradients themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.act = act
        return act(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.act(x), gradients[0])
        return x.grad, None


def reaching(is_hidden: bool) -> nn.Module:
    """Hands a module, or a function that calls it, to such a function."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return Again.apply(x, (lambda each: self.inner(each)) if is_hidden else self.inner)

    return Written(forward, inner=nn.Linear(WIDTH, WIDTH))


def inside(inner: nn.Module) -> nn.Module:
    """Returns a classifier with such a module."""
    return Classifier(nn.Sequential(inner, nn.Linear(WIDTH, CLASSES)))


def saved_by_hooks(m: Any, h: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda each: 2 * each, lambda each: each):
        return F.cross_entropy(m.last(h), y)


def test_a_function_that_draws_has_the_same_bits_on_any_number_of_stages() -> None:
    case = case_of("noise", lambda m, h, y: F.cross_entropy(m.last(NOISY.apply(h)), y))
    batches = [case.batch(SIZE, step) for step in range(2)]
    one, two = (train(case, pipeline(num_stages, num_micro_batches=3), batches) for num_stages in (1, 2))
    bit_equal(one, two)
    assert one.losses[0] != train(case, pipeline(1, num_micro_batches=2), batches).losses[0]


WEIGHTS = r"Again uses the weights of \w+.*pass each weight to apply\(\)"
NEITHER = "can neither be traced nor kept whole: "
MARKED = "The function {} .* " + NEITHER + "it uses tensors of {} that are not among its arguments"
LINES: dict[str, tuple[nn.Module, str, Any]] = {
    "weights of a marked function": (
        Written(lambda self, x: keep_whole(hiding)(x), inner=NET),
        *(MARKED.format("hiding", "the model"), X),
    ),
    "weights in its closure": (
        Written(lambda self, x: keep_whole(partial(hiding_in, self.inner))(x), inner=NET),
        *(MARKED.format("partial", "Linear"), X),
    ),
    "no tensor": (
        Written(lambda self, x: keep_whole(float)(x.sum()) * self.inner(x), inner=NET),
        *(f"float .* {NEITHER}it returns no tensor", X),
    ),
    "hooks of saved tensors": (model_of(saved_by_hooks), r"hooks for saved tensors.*in a submodule", None),
    "weights": (reaching(False), WEIGHTS, X),
    "hidden weights": (reaching(True), WEIGHTS, X),
    "weights of a submodule": (inside(reaching(False)), WEIGHTS, None),  # other ranks may hold them
    "hidden weights of a submodule": (inside(reaching(True)), WEIGHTS, None),
}


@pytest.mark.parametrize("name", LINES)
def test_others_are_refused_by_their_line(name: str) -> None:
    refuse(*LINES[name])


def hooked_node(self: Any, x: Tensor) -> Tensor:
    """Doubles a gradient by a hook on a node of autograd, which `find` finds."""
    out = torch.tanh(self.first(x))
    if out.grad_fn is not None and "Tanh" in str(out.grad_fn):
        getattr(self.find(out), self.name)(lambda *gradients: tuple(2 * each for each in gradients[0]))
    return out


NODES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "its own": (lambda out: out.grad_fn, "register_hook"),
    "before it": (lambda out: out.grad_fn, "register_prehook"),
    "the one before": (lambda out: out.grad_fn.next_functions[0][0], "register_prehook"),
    "an edge": (lambda out: torch.autograd.graph.get_gradient_edge(out).node, "register_hook"),
}


@pytest.mark.parametrize("node", NODES)
def test_hooks_of_nodes_are_refused(node: str) -> None:
    """A trace would drop them; in a submodule they run."""
    find, name = NODES[node]
    make = lambda: two_layers(hooked_node, last=None, find=find, name=name)  # noqa: E731
    refuse(make(), r"node of a tensor \(grad_fn\) at .*test_kept_functions.*in a submodule", X)
    train_as_plain(Case(f"node {node}", lambda: inside(make()), labelled), pipeline(2), SIZE)
