"""Runs plain PyTorch on one process: the numbers that every plan must give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from tests.catalogue.case import Batch, Case, batch_size

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
Tensors: TypeAlias = dict[str, Tensor]


@dataclass
class Record:
    """What some steps of training gave: the loss and the gradients of each, and what the last one has left, by name."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)  # a parameter without a gradient is not in it
    weights: Tensors = field(default_factory=dict)  # a tied one under each of its names
    buffers: Tensors = field(default_factory=dict)

    def groups(self) -> list[Tensors]:
        """Returns the tensors of each group that is of one scale, under names that say what they are."""
        losses = {f"loss of step {step}": loss for step, loss in enumerate(self.losses)}
        steps = [
            {f"gradient of {name} in step {step}": value for name, value in gradients.items()}
            for step, gradients in enumerate(self.gradients)
        ]
        weights = {f"weight {name}": value for name, value in self.weights.items()}
        return [losses, *steps, weights, {f"buffer {name}": value for name, value in self.buffers.items()}]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes AdamW with a large epsilon, so that the sign of a gradient that is zero but for rounding does not count."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "adamw": adamw}


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Returns the samples from `start` to `stop`; tensors whose first dimension is not the batch stay whole."""
    size = batch_size(batch)
    cut: Batch = pytree.tree_map(lambda leaf: leaf[start:stop] if _has_samples(leaf, size) else leaf, batch)
    return cut


def _has_samples(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def micro_batches(batch: Batch, num_micro_batches: int) -> list[Batch]:
    """Returns the parts that a run cuts a batch into, the first ones longer by one sample, without empty ones."""
    short, num_longer = divmod(batch_size(batch), num_micro_batches)
    bounds = [index * short + min(index, num_longer) for index in range(num_micro_batches + 1)]
    return [part(batch, start, end) for start, end in pairwise(bounds) if end > start]


def plain_steps(case: Case, batches: Sequence[Batch], *args: Any, **more: Any) -> Record:
    """Trains on whole global batches, one a call; the rest is as in `plain_micro_batched`."""
    return plain_micro_batched(case, [[batch] for batch in batches], *args, **more)


def plain_micro_batched(
    case: Case,
    steps: Sequence[Sequence[Batch]],
    make_optimizer: MakeOptimizer = sgd,
    max_norm: float | None = None,
    num_accumulated: int = 1,
    model: nn.Module | None = None,
) -> Record:
    """Trains micro-batch by micro-batch: the loss of a call is the mean over samples of its micro-batches' losses.

    This is what a model that mixes samples or updates buffers (BatchNorm) is to be compared with; what it counts are
    calls. `steps` holds the micro-batches of each call. Trained is a case, built with seed 0, or `model`, in place.
    Gradients of `num_accumulated` calls are added for one step of the optimizer, before which `max_norm` clips them.
    """
    model = case.model() if model is None else model
    optimizer = make_optimizer(model.parameters())
    record = Record()
    for call, micro_batches in enumerate(steps, 1):
        record.losses.append(_backward(case, model, micro_batches))
        if call % num_accumulated == 0:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            record.gradients.append(gradients_of(model))
            optimizer.step()
            optimizer.zero_grad()
    record.weights, record.buffers = weights_of(model), buffers_of(model)
    return record


def _backward(case: Case, model: nn.Module, micro_batches: Sequence[Batch]) -> Tensor:
    size = sum(map(batch_size, micro_batches))
    losses = []
    counters = {name: each.clone() for name, each in model.named_buffers() if not each.is_floating_point()}
    for batch in micro_batches:
        model.load_state_dict(counters, strict=False)
        loss = case.loss_of(model(*batch[0], **batch[1]), batch) * (batch_size(batch) / size)
        loss.backward()
        losses.append(copied(loss))
    return torch.stack(losses).sum()


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def gradients_of(model: nn.Module) -> Tensors:
    """Returns copies of the gradients that are on this rank, by parameter name."""
    held = [(name, p.grad) for name, p in model.named_parameters() if not p.is_meta]
    return {name: copied(each) for name, each in held if each is not None and not each.is_meta}


def weights_of(model: nn.Module) -> Tensors:
    """Returns copies of the parameters, a tied one under each of its names."""
    return {name: copied(p) for name, p in model.named_parameters(remove_duplicate=False)}


def buffers_of(model: nn.Module) -> Tensors:
    return {name: copied(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}


def compare(got: Record, expected: Record, rtol: float = 1e-5) -> None:
    """Asserts that two records agree, each tensor within `rtol` of its scale; the error names the worst first.

    The scale of a tensor is its largest number, or a hundredth of the largest in the same group (the gradients of one
    step, the weights, ...) if that is more: the gradient of a key's bias, say, is zero but for rounding.
    """
    pairs = _pairs(got, expected)
    errors = {name: relative_error(first, second, scale) for name, (first, second, scale) in pairs.items()}
    wrong = sorted((name for name in errors if not errors[name] <= rtol), key=lambda name: -errors[name])
    lines = [f"{name}: relative error {errors[name]:.2e}, allowed {rtol:.0e}" for name in wrong]
    assert not wrong, "\n".join(lines)


def bit_equal(got: Record, expected: Record) -> None:
    """Asserts that two records hold the same bits; the error names every tensor that differs."""
    pairs = _pairs(got, expected)
    wrong = [name for name, (first, second, _) in pairs.items() if not torch.equal(first, second)]
    lines = [f"{name}: differs by {relative_error(*pairs[name]):.2e}, allowed nothing" for name in wrong]
    assert not wrong, "\n".join(lines)


def relative_error(got: Tensor, expected: Tensor, scale: float) -> float:
    """Returns the largest difference over `scale`; infinity for another shape or dtype, NaN, or other integers."""
    if got.shape != expected.shape or got.dtype != expected.dtype or not got.isfinite().all():
        return float("inf")
    if torch.equal(got, expected):
        return 0.0
    if not got.is_floating_point():
        return float("inf")
    return (got.double() - expected.double()).abs().max().item() / max(scale, 1e-12)


def _pairs(got: Record, expected: Record) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Returns what was got, what was expected, and the scale to compare on, of each tensor by name."""
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    for first, second in zip(got.groups(), expected.groups(), strict=True):
        missing, extra = second.keys() - first.keys(), first.keys() - second.keys()
        assert not missing and not extra, f"missing: {sorted(missing)}; not expected: {sorted(extra)}"
        largest = {name: _largest(value) for name, value in second.items()}
        floor = 1e-2 * max(largest.values(), default=0.0)
        found |= {name: (first[name].cpu(), second[name].cpu(), max(largest[name], floor)) for name in second}
    return found


def _largest(value: Tensor) -> float:
    return value.double().abs().max().item() if value.is_floating_point() and value.numel() else 0.0
