"""Compares what a trace gives with what its model gives, on a few samples: no difference may go unsaid."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autovaruna._torch import pytree
from autovaruna.errors import TraceError
from autovaruna.graph.export.errors import first_line
from autovaruna.graph.source_lines import origin
from autovaruna.graph.traced import TracedModel
from autovaruna.graph.verify.eager_vs_graph import EagerVsGraph, Returned, Rounded

logger = logging.getLogger(__name__)
SEEDS = (1, 2)
_MOST_NAMES = 5
BY_ROUNDING = 16.0
"""A difference that is so many times what rounding does to the model itself is still one of rounding."""
CLEAR = 10.0
"""One that is so many times what is allowed is an error."""


def compare(traced: TracedModel, model: nn.Module, tensors: Sequence[Tensor], device: torch.device) -> None:
    """Makes sure that a trace computes what its model does.

    Both run on the samples, drawing the same random numbers; neither leaves anything behind. The model must give the
    same in a second call, or it keeps something in Python that a trace would fix. If they differ, the model runs again
    with sums that are off by their rounding, to see whether that explains it.

    Args:
        traced: The trace.
        model: The model, all of whose numbers are on `device`.
        tensors: The samples, in the order of the call's inputs.
        device: Where both run.

    Raises:
        TraceError: they differ; says where that begins.
    """
    both = EagerVsGraph(traced, model, tensors, device)
    try:
        plain, ours = both.plain(), both.trace()
    except Exception as error:  # the step will say so, if it is one of the model
        logger.info("the trace was not compared with the model: %s: %s", type(error).__name__, first_line(error))
        return
    _compare(both, plain, ours, model)
    try:
        again, left = both.plain_again()
    except Exception as error:  # plain PyTorch will say so
        logger.info("the trace was not compared with a second call: %s: %s", type(error).__name__, first_line(error))
        return
    if any(distance(one, other) > tolerance(traced) for one, other in zip(again, plain, strict=True)):
        raise TraceError(
            f"forward changes Python state, and its next call computes something else: got changes of "
            f"{', '.join(left[:_MOST_NAMES]) or 'what is no attribute of a module'}, which a trace would fix for good. "
            "Expected a forward that changes buffers alone; make it a tensor with register_buffer(), or pass it to the "
            "model as an argument."
        )


def _compare(both: EagerVsGraph, plain: list[Tensor], ours: list[Tensor], model: nn.Module) -> None:
    """Makes sure that what the trace gives, `ours`, is what a call of the model gives."""
    allowed = tolerance(both.traced)
    found = [distance(one, other) for one, other in zip(ours, plain, strict=True)]
    if all(each <= allowed for each in found):
        return
    bounds = [max(allowed, BY_ROUNDING * each) for each in _noise(both)]
    worst = max(range(len(found)), key=lambda place: found[place] / bounds[place])
    if found[worst] <= bounds[worst]:
        return
    names = [*(spec.path for spec in both.traced.outputs), *both.state]
    difference = Difference(names[worst], ours[worst], plain[worst], found[worst], bounds[worst])
    _report(f": {difference}{_where(both, allowed)}", difference, model)


@dataclass(frozen=True)
class Difference:
    """A tensor that the trace gives and the model does not."""

    name: str
    ours: Tensor
    plain: Tensor
    size: float
    allowed: float

    def __str__(self) -> str:
        if self.ours.shape != self.plain.shape or self.ours.dtype != self.plain.dtype:
            return f"{self.name} is {_kind(self.ours)} by the trace and {_kind(self.plain)} by the model itself"
        place = int((_wide(self.ours) - _wide(self.plain)).abs().nan_to_num(torch.inf, torch.inf).argmax())
        ours, plain = (each.reshape(-1)[place].item() for each in (self.ours, self.plain))
        return (
            f"{self.name}{f', element {place},' if self.ours.dim() else ''} is {ours:.9g} by the trace and "
            f"{plain:.9g} by the model itself (they differ by {self.size:.1e} of the largest, {self.allowed:.1e} is "
            "what rounding may do)"
        )


def _report(what: str, difference: Difference, model: nn.Module) -> None:
    text = f"The trace of {type(model).__qualname__} computes something else than the model itself{what}."
    if difference.size <= CLEAR * difference.allowed:
        logger.warning("%s Training goes on with the numbers of the trace.", text)
        return
    raise TraceError(
        f"{text} Expected the same numbers. Forward depends on something that a trace does not see, or a library takes "
        "another way while it is traced. Pass what it depends on to the model as an argument, make it a buffer, or "
        "write the line as operations on tensors; with check_trace=False the numbers are those of the trace."
    )


def tolerance(traced: TracedModel) -> float:
    """Returns the relative difference that needs no explanation, by the coarsest dtype in a graph: 1e-5 for float32."""
    values = [leaf for fact in traced.facts.values() for leaf in pytree.tree_leaves(fact.value)]
    kinds = {each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point()}
    step: float = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return 2.0 * math.pow(step, 0.75)


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the greatest difference of two tensors over the greatest number in the second."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.inf
    if one.layout is not torch.strided or not one.numel() or torch.equal(one, other):
        return 0.0
    first, second = _wide(one), _wide(other)
    is_finite = second.isfinite()
    if not torch.equal(first[~is_finite].nan_to_num(), second[~is_finite].nan_to_num()):
        return torch.inf
    off = (first - second)[is_finite].abs()
    largest = second[is_finite].abs().max().item() if off.numel() else 0.0
    return float(off.max().nan_to_num(torch.inf, torch.inf)) / max(largest, 1e-300) if off.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return flat.detach().reshape(-1).double()


def _noise(both: EagerVsGraph) -> list[float]:
    """Returns what rounding does to each number of the model."""
    plain = both.plain()
    runs = [both.plain(Rounded(both.device, seed)) for seed in SEEDS]
    return [max(distance(run[place], each) for run in runs) for place, each in enumerate(plain)]


def _where(both: EagerVsGraph, allowed: float) -> str:
    """Returns in which module the first difference is."""
    returned: Returned = {}
    nodes: dict[str, tuple[fx.Node, Any]] = {}
    both.plain(returned=returned)
    both.trace(nodes)
    for path, tensors in returned.items():
        if not path or path not in nodes:
            continue
        node, value = nodes[path]
        alike = [each for each in tensors if isinstance(value, Tensor) and each.shape == value.shape]
        if alike and min(distance(value, each) for each in alike) > allowed:
            line, kind = origin(node), type(both.model.get_submodule(path)).__qualname__
            return f". The first module that returns something else is {path}, a {kind}{line and f', at {line}'}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
