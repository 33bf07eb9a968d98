"""Pieces under autocast, and pieces whose backward leaves weight gradients for later."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autovaruna.graph.pieces import Argument, ArgumentSource, Deferred, Piece, direct, extract, split_backward
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.measure import measure
from tests.catalogue.small import Written
from tests.graph.models import CPU, traced


@dataclass
class Example:
    """A model of one piece, with the parameters that are left for later."""

    function: Callable[..., Any]
    parts: dict[str, Callable[[], nn.Module | Tensor]]
    deferred: set[str]
    shape: tuple[int, ...] = (4, 6)

    def model(self) -> Written:
        torch.manual_seed(0)
        return Written(self.function, **{name: make() for name, make in self.parts.items()})


def weight(*shape: int) -> Callable[[], Tensor]:
    return lambda: nn.Parameter(torch.randn(*shape))


def linear() -> nn.Module:
    return nn.Linear(6, 6)


BOTH = {"a.weight", "a.bias"}
EXAMPLES = {
    "linear": Example(lambda s, x: s.a(torch.tanh(s.b(x))), {"a": linear, "b": linear}, BOTH | {"b.weight", "b.bias"}),
    "norm_stays": Example(lambda s, x: s.n(s.a(x)), {"a": linear, "n": lambda: nn.LayerNorm(6)}, BOTH),
    "in_a_block_each": Example(lambda s, x: F.linear(x, s.w) + s.w.square().sum(), {"w": weight(6, 6)}, {"w"}),
    "used_twice": Example(lambda s, x: s.a(torch.relu(s.a(s.a(x)))), {"a": linear}, BOTH),
    "transposed_and_sliced": Example(lambda s, x: (x @ s.w.t()[:, :3]) @ s.w[:3], {"w": weight(6, 6)}, {"w"}),
    "addmm": Example(lambda s, x: torch.addmm(s.b, x, s.w), {"w": weight(6, 5), "b": weight(5)}, {"w", "b"}),
    "experts": Example(lambda s, x: torch.bmm(torch.stack([x, x, x]), s.w), {"w": weight(3, 6, 5)}, {"w"}),
    "both_are_weights": Example(lambda s, x: x @ (s.v @ s.w), {"v": weight(6, 2), "w": weight(2, 6)}, {"v", "w"}),
    "convolutions": Example(
        lambda s, x: s.up(F.relu(s.down(x), inplace=True)),
        {"down": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), "up": lambda: nn.ConvTranspose2d(4, 2, 3, stride=2)},
        {"down.weight", "down.bias", "up.weight", "up.bias"},
        (3, 2, 8, 8),
    ),
    "words": Example(
        lambda s, x: s.a(s.e(x.argsort(1))), {"e": lambda: nn.Embedding(9, 6), "a": linear}, BOTH | {"e.weight"}
    ),
    "frozen": Example(
        lambda s, x: s.a(x) @ s.w, {"a": lambda: linear().requires_grad_(False), "w": weight(6, 6)}, {"w"}
    ),
    "nothing": Example(lambda s, x: s.n(x), {"n": lambda: nn.LayerNorm(6)}, set()),
}


def whole(model: TracedModel) -> Piece:
    return extract(model, model.block_of, [spec.node for spec in model.outputs])


def arguments(piece: Piece, model: nn.Module, x: Tensor) -> list[Any]:
    """Returns arguments with leaves of their own."""
    return [
        model.get_parameter(each.name).detach().requires_grad_(each.block >= 0)
        if each.source is ArgumentSource.PARAMETER
        else x
        for each in piece.arguments
    ]


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_what_is_left_for_later_and_its_bits(example: Example) -> None:
    """Over three batches in flight, whose weight gradients come after all backwards; x gets its gradient before."""
    model = example.model()
    batches = [torch.randn(example.shape, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    piece = whole(traced(model, batches[0]))
    split = split_backward(piece)
    assert {argument.name for argument in split.weights} == example.deferred if split else not example.deferred
    if split is None:
        return
    plain, apart, xs = arguments(piece, model, batches[0]), arguments(piece, model, batches[0]), []
    weights = [given for argument, given in zip(piece.arguments, apart, strict=True) if argument in split.weights]
    left = []
    for batch in batches:
        both = [batch.clone().requires_grad_() for _ in range(2)]
        for given, x in zip((plain, apart), both, strict=True):
            given[:] = [
                x if a.source is ArgumentSource.INPUT else g for a, g in zip(piece.arguments, given, strict=True)
            ]
        (expected,), deferred = piece.module(*plain), Deferred()
        (found,) = split.run(deferred, *apart)
        assert torch.equal(found, expected)
        for output in (expected, found):
            torch.sin(output).sum().backward()
        xs += [both]
        left.append(deferred)
    assert all(each.grad is None for each in weights)
    for deferred in left:
        deferred.compute(weights)
    for one, other in [*zip(apart, plain, strict=True), *xs]:
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_several_uses_in_a_block_are_added_as_one_backward_adds_them() -> None:
    """Each sum over the uses comes before the sum over micro-batches; in another order last bits differ."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    for _ in range(3):
        x = graph.call_function(torch.ops.aten.mm.default, (graph.call_function(torch.tanh, (x,)), w))
    graph.output((x,))
    given = Argument(ArgumentSource.INPUT, "x"), Argument(ArgumentSource.PARAMETER, "w", 0)
    piece = Piece(fx.GraphModule({}, graph), given, ("y",))
    split = split_backward(piece)
    assert split is not None and split.num_operations == 3
    weights = [torch.randn(9, 9, generator=torch.Generator().manual_seed(5)).requires_grad_() for _ in range(2)]
    batches = [torch.randn(7, 9, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    left = [Deferred() for _ in batches]
    for batch, deferred in zip(batches, left, strict=True):
        piece.module(batch, weights[0])[0].sum().backward()
        split.run(deferred, batch, weights[1])[0].sum().backward()
    for deferred in left:
        deferred.compute([weights[1]])
    assert torch.equal(weights[0].grad, weights[1].grad)


def test_only_operands_and_gradients_last_until_weight_gradients_are_computed() -> None:
    example = EXAMPLES["linear"]
    model, x = example.model(), torch.randn(example.shape)
    piece = whole(traced(model, x))
    split = split_backward(piece)
    assert split is not None
    given, deferred = arguments(piece, model, x), Deferred()

    def reference(tensor: Tensor) -> StorageWeakRef:
        return StorageWeakRef(tensor.untyped_storage())

    seen: list[StorageWeakRef] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(reference(t)) or t.detach(), lambda t: t):
        (output,) = split.run(deferred, *given)
    result = reference(output)
    output.sum().backward()
    del output
    assert result.expired()
    weights = [g for a, g in zip(piece.arguments, given, strict=True) if a in split.weights]
    known = {reference(each).cdata for each in given}
    kept = {each.cdata for each in seen if not each.expired()} - known
    assert len(kept) == 1, "the tanh, which is the operand of the second product; the first has the batch"
    deferred.compute(weights)
    assert all(each.expired() for each in seen if each.cdata in kept)


def test_what_fails_is_shown_with_the_line_of_its_node() -> None:
    model = Written(lambda self, x, y: torch.tanh(x @ y))
    graph = torch.export.export(model, (torch.randn(3, 4), torch.randn(4, 2))).graph_module
    with pytest.raises(RuntimeError) as caught:
        direct(graph)(torch.randn(3, 4), torch.randn(5, 2))
    frame = traceback.extract_tb(caught.tb)[-1]
    assert frame.filename.startswith("<eval_with_key>") and (frame.line or "").startswith("matmul = ")


def no_gradient_inside(self: nn.Module, x: Tensor) -> Tensor:
    x = self.first(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        weights = x @ self.first.weight.sum(0).unsqueeze(1)
    return self.last(x * weights.float()).mean()


def test_what_is_under_no_grad_keeps_its_precision_and_its_grad_mode() -> None:
    """Story: torch.export loses ``torch.no_grad()`` inside ``torch.autocast`` when it makes regions of them."""
    model = Written(no_gradient_inside, first=nn.Linear(4, 4), last=nn.Linear(4, 1))
    x = torch.randn(6, 4)
    piece = whole(traced(model, x))
    given = arguments(piece, model, x)
    (found,) = piece.module(*given)
    found.backward()
    expected = model(x)
    expected.backward()
    assert torch.equal(found, expected)
    leaves = [(argument.name, leaf.grad) for argument, leaf in zip(piece.arguments, given, strict=True)]
    for name, parameter in model.named_parameters():
        (gradient,) = (each for of, each in leaves if of == name and each is not None)
        assert torch.equal(gradient, parameter.grad)


BFLOAT16 = torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("around", [nullcontext(), BFLOAT16], ids=["float32", "bfloat16"])
def test_weights_that_are_cast_count_once_not_once_a_micro_batch(around: Any) -> None:
    """The copy of the weight is memory of the rank; what a micro-batch keeps does not hold it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1024, bias=False))
    with around:
        graph = traced(model, torch.ones(6, 4))
    copies = sum(block.buffer_bytes for block in graph.graph.blocks)
    assert copies == (2 * (4 * 4 + 4 + 4 * 1024) if around is BFLOAT16 else 0)
    costs = measure(graph, model, [2], CPU, iterations=1)
    assert all(cost.num_bytes.inside < 1024 for cost in costs.values())
