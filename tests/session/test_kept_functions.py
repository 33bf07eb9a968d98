"""Autograd functions that are kept whole are tried out: they go on, are averaged or added up, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, InputError, TraceError
from autovaruna.graph.opaque.functions import applied_by, plain_apply
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, TwoLayers, labelled
from tests.reference import compare, plain_steps
from tests.session.training import QUIET, pipeline, refuse, train, train_as_plain

SIZE = 7


class Half(torch.autograd.Function):
    """Gives half the gradient of a loss, of each sample's if it is a sum."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
        ctx.save_for_backward(scores, labels)
        ctx.parts = scores.shape[0] if reduction == "mean" else 1
        return F.cross_entropy(scores, labels, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        scores, labels = ctx.saved_tensors
        return gradient * 0.5 * (scores.softmax(1) - F.one_hot(labels, CLASSES)) / ctx.parts, None, None


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        root = scores.square().mean().sqrt()
        ctx.save_for_backward(scores, root)
        return root

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        scores, root = ctx.saved_tensors
        return 0.5 * gradient * scores / (root * scores.numel())


class Copied(torch.autograd.Function):
    """Gives numbers on as they are; each kind of it does something else with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


class Centred(Copied):
    """Gives each sample a gradient that depends on those of the others."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


class Clamped(Copied):
    """Limits a gradient, which is right for each sample, and wrong for a weight."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]


class WithFunction(nn.Module):
    """Ends in a loss of the weights of its last layer, features and labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.last, self.features(x), y)


def mean(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return Half.apply(last(x), y, "mean")  # type: ignore[no-untyped-call, no-any-return]


def parted_sum(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return Half.apply(last(x), y, "sum") / x.shape[0]  # type: ignore[no-untyped-call, no-any-return]


def limited(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(last(Clamped.apply(x)), y)  # type: ignore[no-untyped-call]


def total(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return Half.apply(last(x), y, "sum")  # type: ignore[no-untyped-call, no-any-return]


def root(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return Root.apply(last(x))  # type: ignore[no-untyped-call, no-any-return]


def centred(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(last(Centred.apply(x)), y)  # type: ignore[no-untyped-call]


def limited_weight(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, Clamped.apply(last.weight)), y)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("loss", [mean, parted_sum, limited])
def test_a_function_trains_as_in_plain_pytorch(loss: Loss) -> None:
    """One that reduces the samples is known as a mean or a sum."""
    case = Case(loss.__name__, lambda: WithFunction(loss), labelled)
    train_as_plain(case, pipeline(2, num_micro_batches=3), SIZE, SIZE)


REFUSED: dict[Loss, tuple[type[AutoVarunaError], str]] = {
    total: (InputError, "a sum over the samples"),
    root: (InputError, "no mean over its samples"),
    centred: (TraceError, "what Centred, which is kept whole, returns for a sample, or its gradient, depends"),
    limited_weight: (TraceError, "the gradient of what Clamped, which is kept whole, returns for the whole batch"),
}


@pytest.mark.parametrize("loss", REFUSED)
def test_another_needs_the_whole_batch_in_one(loss: Loss) -> None:
    """It is refused with several micro-batches, and trains with one."""
    case = Case(loss.__name__, lambda: WithFunction(loss), labelled)
    batches = [case.batch(SIZE, step) for step in range(2)]
    error, words = REFUSED[loss]
    with pytest.raises(error, match=words):
        AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(**batches[0][1])
    setup = pipeline(2, num_micro_batches=1)
    compare(train(case, setup, batches), plain_steps(case, batches))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2.0 * gradient


def test_a_function_that_draws_is_refused() -> None:
    def noisy(last: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(last(Noisy.apply(x)), y)  # type: ignore[no-untyped-call]

    refuse(WithFunction(noisy), r"Noisy cannot be traced.*its forward draws random numbers \(aten\.randn_like")


class Turned(Copied):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -2.0 * gradient


turn = Turned.apply
"""As many programs name a function: what torch calls it by is taken out of the class before anything is traced."""


class Named(nn.Module):
    """Calls the function by that name, and by one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), Turned.apply

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = self.turn(torch.tanh(turn(self.first(x))))  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.last(turn(inner)), y)  # type: ignore[no-untyped-call]


def test_functions_have_their_own_backward_by_any_name() -> None:
    case = Case("named_function", Named, labelled)
    train_as_plain(case, pipeline(2), SIZE, SIZE)
    with applied_by(lambda call: call.run()), applied_by(lambda call: call.arguments[0] + 1):
        assert turn(torch.ones(1)) == 2  # type: ignore[no-untyped-call]
        assert plain_apply(Turned, torch.ones(1)) == 1
        assert "forward" in vars(Turned)
    assert "forward" not in vars(Turned)
    assert turn(torch.ones(1)) == 1  # type: ignore[no-untyped-call]


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


class Reaching(nn.Module):
    """Hands a module, or a function that calls it, to such a function."""

    def __init__(self, is_hidden: bool) -> None:
        super().__init__()
        self.inner, self.is_hidden = nn.Linear(WIDTH, WIDTH), is_hidden

    def forward(self, x: Tensor) -> Tensor:
        act = (lambda each: self.inner(each)) if self.is_hidden else self.inner
        return Again.apply(x, act)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_function_that_reaches_weights_is_refused(is_hidden: bool, is_own: bool) -> None:
    """In a submodule, too: kept whole it would go backward into weights that other ranks hold."""
    model = Reaching(is_hidden) if is_own else AfterHook(Reaching(is_hidden))
    batch = labelled(SIZE, 0)[1]
    refuse(
        model,
        r"Again uses the weights of \w+.*pass each weight to apply\(\)",
        batch if not is_own else {"x": batch["x"]},
    )


class Saving(TwoLayers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: 2 * each, lambda each: each):
            return F.cross_entropy(self.last(self.first(x)), y)


def test_hooks_of_saved_tensors_are_refused() -> None:
    refuse(Saving(), r"hooks for saved tensors.*in a submodule")


class HookedNode(nn.Module):
    """Doubles a gradient by a hook on a node of autograd, which `find` finds."""

    def __init__(self, find: Callable[[Tensor], Any], name: str) -> None:
        super().__init__()
        self.first, self.find, self.name = nn.Linear(WIDTH, WIDTH), find, name

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.first(x))
        if out.grad_fn is not None and "Tanh" in str(out.grad_fn) and self.name:
            getattr(self.find(out), self.name)(lambda *gradients: tuple(2 * each for each in gradients[0]))
        return out


class AfterHook(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.inner(x)), y)


NODES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "its own": (lambda out: out.grad_fn, "register_hook"),
    "before it": (lambda out: out.grad_fn, "register_prehook"),
    "the one before": (lambda out: out.grad_fn.next_functions[0][0], "register_prehook"),  # type: ignore[union-attr]
    "an edge": (lambda out: torch.autograd.graph.get_gradient_edge(out).node, "register_hook"),
}


@pytest.mark.parametrize("node", NODES)
def test_hooks_of_nodes_are_refused(node: str) -> None:
    """A trace would drop them; in a submodule they run."""
    model = HookedNode(*NODES[node])
    with pytest.raises(TraceError, match=r"node of a tensor \(grad_fn\) at .*test_kept_functions.*in a submodule"):
        AutoVaruna(model, num_micro_batches=2, **QUIET)(labelled(SIZE, 0)[1]["x"])
    for name in ("", NODES[node][1]):
        case = Case(f"hooked node {node} {name}", lambda: AfterHook(HookedNode(NODES[node][0], name)), labelled)  # noqa: B023
        batches = [case.batch(SIZE, 0)]
        compare(train(case, pipeline(2), batches), plain_steps(case, batches))


class InC(nn.Module):
    """Calls a function of torch that cannot be traced, and is written in C++."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), act

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.act(torch.tanh(self.first(x)))), y)


def test_functions_in_c_that_cannot_be_traced_are_kept_whole() -> None:
    case = Case("quantised", lambda: InC(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -8, 7)), labelled)
    train_as_plain(case, pipeline(2), SIZE, SIZE)


COVARIANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda h: torch.cov(h),
    "method": lambda h: h.cov(),
    "correlation": lambda h: torch.corrcoef(h),
}


@pytest.mark.parametrize("name", COVARIANCES)
def test_functions_in_c_may_join_whole_batches(name: str) -> None:
    case = Case(f"in C {name}", lambda: InC(lambda h: h * (1.0 + COVARIANCES[name](h.t()).square().mean())), labelled)
    batches = [case.batch(SIZE, step) for step in range(2)]
    compare(train(case, pipeline(2, num_micro_batches=1), batches), plain_steps(case, batches))
    refuse(case.model(), "mixes the samples", error=AutoVarunaError)
    assert "cov" not in vars(torch.Tensor)
