"""Computes what a graph uses of the whole batch, and weights of losses, before the micro-batches run.

The totals of each rank's mini-batch travel in its `Report`; from those of all ranks each one computes the same values.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.graph.call import CallSpec, method_of
from autovaruna.graph.lengths import free_value
from autovaruna.graph.operators import Merge
from autovaruna.graph.pieces import Argument, ArgumentSource, Piece, direct, extract
from autovaruna.graph.precision import is_autocast, without_autocast
from autovaruna.graph.traced import TracedModel
from autovaruna.ranks.world import World, gather_on_all
from autovaruna.runtime.batch import GlobalBatch
from autovaruna.session.shared_call import SharedCall, Totals


def micro_batch_weights(
    weigh: Callable[..., float] | None, model: nn.Module, shared: SharedCall, batch: GlobalBatch, world: World
) -> tuple[float, ...]:
    """Returns a weight for each micro-batch, in order; empty without a function of the user's. Collective."""
    if weigh is None:
        return ()

    signature = inspect.signature(method_of(model, shared.call.method))

    def weights_of_own() -> dict[int, float]:
        found = {}
        for part in batch.owned_by(world.rank):
            args, kwargs = shared.call.arguments(shared.samples(part.start, part.size))
            weight: Any = weigh(dict(signature.bind(*args, **kwargs).arguments))
            if not float(weight) >= 0:
                raise InputError(f"micro_batch_weight returned {weight!r}; expected a number of at least zero.")
            found[part.index] = float(weight)
        return found

    known = dict(ChainMap(*gather_on_all(world, weights_of_own, "weighing micro-batches")))
    return tuple(known[index] for index in batch.micro_batches)


ValuesOfBatch = Mapping[float, dict[str, Tensor]]
"""What a micro-batch is given for each call of `of_batch`: by the weight of its loss, then by the node's name."""


class BatchValues:
    """The values of the whole batch of one graph; `buffers` returns the model's, by first name, as they are now."""

    def __init__(self, traced: TracedModel, buffers: Callable[[], Mapping[str, Tensor]], device: torch.device) -> None:
        self._traced = traced
        self._totals = traced.totals
        self._buffers, self._device = buffers, device
        made_of = [name for name, _ in self._totals.values.values()]
        before = extract(traced, self._totals.before, list(self._totals.merges), is_bare=True)
        after = extract(traced, self._totals.after, list(dict.fromkeys(made_of)), is_bare=True)
        self._before, self._after = ((piece, direct(piece.module)) for piece in (before, after))

    def of_samples(self, tensors: Sequence[Tensor], num_samples: int, lengths: tuple[int, ...]) -> Totals:
        """Returns the totals of a mini-batch; `lengths` are those that vary, in this call."""
        if not num_samples:
            return []
        found = self._run(self._before, tensors, (num_samples, lengths), {})
        return [total.tolist() if isinstance(total, Tensor) else total for total in found.values()]

    def of_batch(
        self,
        reported: Sequence[Totals],
        sizes: Sequence[int],
        tensors: Sequence[Tensor],
        batch: GlobalBatch,
        lengths: tuple[int, ...],
    ) -> ValuesOfBatch:
        """Returns what micro-batches are given, by totals and sizes of the mini-batches that ranks have reported."""
        parts = [(totals, size) for totals, size in zip(reported, sizes, strict=True) if size]
        counts = [size for _, size in parts]
        made: dict[str, Any] = {
            name: self._merged(name, [each[place] for each, _ in parts], counts)
            for place, name in enumerate(self._totals.merges)
        }
        if self._totals.after:
            totals = {name: self._as_traced(name, total) for name, total in made.items()}
            found = self._run(self._after, tensors, (batch.num_samples, lengths), totals)
            made = found | {name: total for name, total in made.items() if name in found}  # it may be changed in place
        return {
            share: {
                name: torch.as_tensor(use.of_share(made[source], share)).to(self._device, self._dtype(name))
                for name, (source, use) in self._totals.values.items()
            }
            for share in {part.weight for part in batch.micro_batches.values()}
        }

    def _merged(self, name: str, totals: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Returns a total of all mini-batches, of `sizes` samples each: a number, or a tensor of them."""
        is_number = not isinstance(totals[0], list)
        parts = totals if is_number else torch.tensor(totals, dtype=_widest(self._dtype(name)))
        match self._totals.merges[name]:
            case Merge.SUM:
                return sum(parts)
            case Merge.MEAN:
                return sum(part * size for part, size in zip(parts, sizes, strict=True)) / sum(sizes)
            case Merge.LARGEST:
                return max(parts) if is_number else torch.as_tensor(parts).amax(0)
            case Merge.SMALLEST:
                return min(parts) if is_number else torch.as_tensor(parts).amin(0)

    def _as_traced(self, name: str, total: Any) -> Any:
        """Returns a merged total as the operation would that computes it."""
        is_tensor = isinstance(self._traced.nodes[name].meta["val"], Tensor)
        return torch.as_tensor(total).to(self._device, self._dtype(name), copy=True) if is_tensor else total

    def _dtype(self, name: str) -> torch.dtype:
        return self._traced.nodes[name].meta["val"].dtype  # type: ignore[no-any-return]

    def _run(
        self,
        code: tuple[Piece, Callable[..., Sequence[Any]]],
        tensors: Sequence[Tensor],
        size: tuple[int, tuple[int, ...]],
        totals: Mapping[str, Any],
    ) -> dict[str, Any]:
        piece, run = code
        inputs = dict(zip(self._traced.inputs, tensors, strict=True))

        def value_of(argument: Argument) -> Any:
            match argument.source:
                case ArgumentSource.INPUT:
                    return inputs[argument.name].detach().to(self._device).contiguous()  # as micro-batches are
                case ArgumentSource.SIZE:
                    return self._traced.sizes.in_call(free_value(self._traced.nodes[argument.name]), *size)
                case ArgumentSource.BUFFER:
                    return self._buffers()[argument.name]
                case ArgumentSource.CONSTANT:
                    return self._traced.constants[argument.name].to(self._device)
                case _:
                    return totals[argument.name]

        given = map(value_of, piece.arguments)
        with torch.no_grad(), without_autocast() if is_autocast() else nullcontext():  # it enters it as its nodes say
            return dict(zip(piece.outputs, run(*given), strict=True))


class WholeBatch:
    """The values of the whole batch, of every graph of a model."""

    def __init__(self, buffers: Callable[[], Mapping[str, Tensor]], world: World, device: torch.device) -> None:
        self._buffers, self._world, self._device = buffers, world, device
        self._known: dict[str, BatchValues] = {}

    def _of(self, traced: TracedModel) -> BatchValues:
        if traced.key not in self._known:
            self._known[traced.key] = BatchValues(traced, self._buffers, self._device)
        return self._known[traced.key]

    def of_own(self, traced: TracedModel, call: CallSpec, tensors: Sequence[Tensor]) -> Totals:
        """Returns the totals of this rank's mini-batch."""
        lengths = traced.lengths_of(call) or ()
        return self._of(traced).of_samples(tensors, call.batch_size, lengths) if traced.totals else []

    def of_batch(
        self, traced: TracedModel, shared: SharedCall, batch: GlobalBatch, lengths: tuple[int, ...], what: str
    ) -> ValuesOfBatch:
        """Returns what micro-batches are given of the whole batch. Collective, with the label `what`, if it is new."""
        if not traced.totals:
            return {}
        values = self._of(traced)
        reported: Sequence[Totals | None] = [each.totals for each in shared.numbers]
        if None in reported:  # on every rank
            own = partial(self.of_own, traced, shared.call, shared.tensors)
            reported = gather_on_all(self._world, own, what)
        first = [ranks[0] for ranks in shared.groups]
        totals = [reported[rank] or [] for rank in first]
        return values.of_batch(totals, [shared.sizes[rank] for rank in first], shared.tensors, batch, lengths)

    def forget(self, key: str) -> None:
        self._known.pop(key, None)


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
