"""Defines `Work`: a piece with arguments, ready to run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autovaruna.graph.pieces.deferral import SplitPiece, split_backward
from autovaruna.graph.pieces.direct import direct
from autovaruna.graph.pieces.extract import Argument, Piece, Source
from autovaruna.graph.pieces.weight_gradients import Deferred
from autovaruna.graph.precision import precision_of
from autovaruna.profiler.parts import Part
from autovaruna.profiler.samples import Samples

Outputs = Sequence[Tensor]


@dataclass(frozen=True)
class Work:
    """Something to measure.

    Attributes:
        run: The forward.
        arguments: What it is called with.
        values: Which of them come from other blocks; their gradients are sent on, not kept.
        make_gradient: Makes the gradient of an output.
        gradients: One for each output that needs a gradient; made for the outputs of the first run.
        needs_gradient: Whether there is a backward.
        is_cast: Whether autocast casts weights, once for all runs.
        split: The same with a backward that leaves weight gradients for later; None: it has none to leave.
        weights: The arguments whose gradients those are.
    """

    run: Callable[..., Outputs]
    arguments: tuple[Any, ...]
    values: tuple[Tensor, ...]
    make_gradient: Callable[[Tensor], Tensor]
    needs_gradient: bool
    gradients: list[Tensor] = field(default_factory=list)
    is_cast: bool = False
    split: SplitPiece | None = None
    weights: tuple[Tensor, ...] = ()

    def forward(self) -> Outputs:
        """Runs forward."""
        with torch.set_grad_enabled(self.needs_gradient):
            return self.run(*self.arguments)

    def backward(self, outputs: Outputs) -> None:
        """Runs backward from outputs of `forward`; gradients of parameters add up, as over micro-batches."""
        torch.autograd.backward(self._roots(outputs), self.gradients)
        for value in self.values:
            value.grad = None

    def _roots(self, outputs: Outputs) -> list[Tensor]:
        """Returns the outputs that have a gradient; makes their gradients if there are none yet."""
        roots = [output for output in outputs if output.requires_grad]
        if not self.gradients:
            self.gradients.extend(map(self.make_gradient, roots))
        return roots

    def split_forward(self, arguments: Sequence[Any]) -> tuple[Outputs, Deferred]:
        """Runs forward; its `backward` leaves weight gradients for later."""
        assert self.split is not None and self.needs_gradient, "only what can be split is"
        deferred = Deferred()
        with torch.enable_grad():
            return self.split.run(deferred, *arguments), deferred

    def run_split(self, arguments: Sequence[Any]) -> Deferred:
        """Runs forward, and the backward that leaves weight gradients for later; returns what is left."""
        outputs, deferred = self.split_forward(arguments)
        self.backward(outputs)
        return deferred


def make_work(part: Part, samples: Samples, batch_size: int) -> Work:
    """Returns a part as work on `batch_size` samples."""
    traced = part.traced
    code = part.code
    arguments = tuple(samples.argument(argument, batch_size) for argument in code.arguments)
    at = dict(zip(code.arguments, arguments, strict=True))
    values = {argument.name: tensor for argument, tensor in at.items() if argument.source is Source.VALUE}
    split = code.split
    return Work(
        code.run,
        arguments,
        tuple(values[name] for name in part.values),
        _make_gradient,
        code.needs_gradient,
        is_cast=any(precision_of(traced.nodes[name]) for name in part.nodes),
        split=split,
        weights=tuple(at[argument] for argument in split.weights) if split else (),
    )


def empty_work(num_values: int, device: torch.device) -> Work:
    """Returns work that does nothing to `num_values` tensors that need a gradient: what every call costs."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"value_{index}") for index in range(num_values)]
    graph.output(tuple(placeholders))
    values = tuple(torch.zeros(1, device=device, requires_grad=True) for _ in range(num_values))
    return Work(direct(fx.GraphModule({}, graph)), values, values, _make_gradient, True)


def smallest_split(device: torch.device) -> Work:
    """Returns the product of two numbers as work whose backward can be split: what splitting one operation costs."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(name) for name in ("value", "weight")]
    graph.output((graph.call_function(torch.ops.aten.mm.default, tuple(placeholders)),))
    given = (Argument(Source.VALUE, "value"), Argument(Source.PARAMETER, "weight", 0))
    piece = Piece(fx.GraphModule({}, graph), given, ("product",))
    value, weight = (torch.zeros(1, 1, device=device, requires_grad=True) for _ in range(2))
    weight.grad = torch.zeros_like(weight)
    split, run = split_backward(piece), direct(piece.module)
    return Work(run, (value, weight), (value,), _make_gradient, True, split=split, weights=(weight,))


def _make_gradient(output: Tensor) -> Tensor:
    return torch.full_like(output, 0.05)
