"""Measures: `TracedModel` in, costs out. No rank talks to another here; the caller gathers and merges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

import torch
from torch import Tensor, nn

from autovaruna.config.files import Amount, Whole
from autovaruna.errors import MeasureError
from autovaruna.graph.module_state import profiling_mode
from autovaruna.graph.precision import without_autocast
from autovaruna.graph.random import untouched_generator
from autovaruna.graph.source_lines import failed_at
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.bytes import Bytes, count_bytes, count_deferred_bytes
from autovaruna.profiler.parts import Part, block_parts, layer_parts, repeated_part
from autovaruna.profiler.time import split_seconds, time_splitting, time_weights, time_work
from autovaruna.profiler.work import Numbers, Samples, make_work

logger = logging.getLogger(__name__)

_NOISE = 1.25
"""What takes this much longer than at another time was disturbed."""
Key = tuple[str, int]
"""Signature of a part, and samples in the micro-batch."""


@dataclass(frozen=True)
class PartCost:
    """What was measured of one part: seconds of a forward and of a backward (0: there is none), and bytes.

    The last three are those of `BlockCost`, 0 if the backward has nothing to leave for later. Of a layer, only the
    seconds that splitting adds are measured.
    """

    forward_seconds: Amount
    backward_seconds: Amount
    num_bytes: Bytes
    weight_seconds: Amount = 0.0
    split_seconds: Amount = 0.0
    deferred_bytes: Whole = 0

    @property
    def seconds(self) -> tuple[float, float, float, float]:
        """What takes time: forward, backward, weight gradients, splitting."""
        return self.forward_seconds, self.backward_seconds, self.weight_seconds, self.split_seconds

    def with_seconds(self, seconds: Iterable[float]) -> PartCost:
        """Returns the cost with other seconds."""
        forward, backward, weights, split = seconds
        return PartCost(forward, backward, self.num_bytes, weights, split, self.deferred_bytes)


def measure(
    traced: TracedModel,
    model: nn.Module,
    micro_batch_sizes: Sequence[int],
    device: torch.device,
    *,
    iterations: int = 5,
    budget_seconds: float = 10.0,
    splits: bool = True,
    share: tuple[int, int] = (0, 1),
    known: Collection[Key] = (),
    inputs: Sequence[Tensor] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[Key, PartCost]:
    """Measures every distinct block and layer of a traced model, or one rank's share of them.

    Args:
        traced: The traced model.
        model: The model; its parameters may be on ``meta``, and nothing of it is changed.
        micro_batch_sizes: Samples in a micro-batch; one measurement of each.
        device: Where to measure.
        iterations: Samples of each measurement.
        budget_seconds: Time after which each part is sampled once only.
        splits: Whether weight gradients are measured apart, too.
        share: ``(rank, num_ranks)``; this rank measures every num_ranks-th part.
        known: Parts that are not measured; the same on all ranks.
        inputs: Tensors of a call in the order of ``traced.call.inputs``, so that integers are what they will be;
            without them integers are zeros.
        on_progress: Called with the parts measured so far and their number.

    Returns:
        A cost for each part of this rank's share. A model that was traced without gradients has no backward.

    Raises:
        MeasureError: a part cannot be run; says which.
    """
    rank, num_ranks = share
    jobs = [job for job in _jobs(traced, micro_batch_sizes) if (job[0].signature, job[1]) not in known]
    jobs = jobs[rank::num_ranks]
    kinds = [Samples(traced, model, device, inputs, numbers) for numbers in Numbers]
    ends = perf_counter() + budget_seconds
    costs: dict[Key, PartCost] = {}
    with untouched_generator(device), without_autocast(), profiling_mode():
        for done, (part, size) in enumerate(jobs):
            allowance = max(0.0, ends - perf_counter()) / (len(jobs) - done)
            costs[part.signature, size] = _measure_one(part, kinds, size, iterations, allowance, splits)
            if on_progress is not None:
                on_progress(done + 1, len(jobs))
    logger.info("measured %d parts of a model of %d blocks", len(costs), len(traced.graph.blocks))
    return costs


def lasting_keys(traced: TracedModel, micro_batch_sizes: Sequence[int]) -> list[Key]:
    """Returns what is measured and costs the same in another program: operators of other libraries may change."""
    parts = [part for part in _distinct(traced) if part.is_of_torch]
    return [(part.signature, size) for size in micro_batch_sizes for part in parts]


def merge(shares: Iterable[Mapping[Key, PartCost]]) -> dict[Key, PartCost]:
    """Joins the shares of all ranks."""
    return {key: cost for share in shares for key, cost in share.items()}


def settle(costs: Sequence[PartCost]) -> PartCost:
    """Returns what a part takes by several measurements: the mean of each kind of seconds over the undisturbed ones."""
    return costs[0].with_seconds(map(_undisturbed, zip(*(cost.seconds for cost in costs), strict=True)))


def _undisturbed(seconds: Sequence[float]) -> float:
    """Returns the mean of those that another program cannot have slowed much."""
    return fmean(each for each in seconds if each <= _NOISE * min(seconds))


def _jobs(traced: TracedModel, sizes: Sequence[int]) -> list[tuple[Part, int]]:
    """Returns what to measure: a part with all sizes at once, since machines drift; each rank comes by every size."""
    found: list[tuple[Part, int]] = []
    for place, part in enumerate(_distinct(traced)):
        first = place % len(sizes)
        found += [(part, size) for size in (*sizes[first:], *sizes[:first])]
    return found


def _distinct(traced: TracedModel) -> list[Part]:
    parts = [*block_parts(traced), *layer_parts(traced), repeated_part(traced)]
    return list({part.signature: part for part in reversed(parts) if part.nodes}.values())[::-1]


def _measure_one(
    part: Part, kinds: Sequence[Samples], size: int, iterations: int, allowance: float, splits: bool
) -> PartCost:
    """Measures a part on the first of several kinds of numbers that it takes."""
    first: Exception | None = None
    for samples in kinds:
        try:
            return _measure_on(part, samples, size, iterations, allowance, splits)
        except Exception as error:
            first = error if first is None else first
    assert first is not None
    raise MeasureError(_explain(part, size, first, failed_at(first, part.traced.nodes))) from first


def _measure_on(part: Part, samples: Samples, size: int, iterations: int, allowance: float, splits: bool) -> PartCost:
    started = perf_counter()
    work = make_work(part, samples, size)
    num_bytes = count_bytes(work, samples.device)
    left = allowance - (perf_counter() - started)
    kept_bytes = num_bytes.inside + sum(made.num_bytes for made in num_bytes.made)
    seconds = time_work(work, iterations, left, samples.device, kept_bytes)
    if work.split is None or not splits:
        return PartCost(*seconds, num_bytes)
    left = allowance - (perf_counter() - started)
    if len(part.blocks) > 1:
        added = time_splitting(work, iterations, left, samples.device, kept_bytes)
        return PartCost(*seconds, num_bytes, split_seconds=added)
    weights = time_weights(work, iterations, left, samples.device)
    added = work.split.num_operations * split_seconds(samples.device)
    return PartCost(*seconds, num_bytes, weights, added, count_deferred_bytes(work)[0])


def _explain(part: Part, size: int, error: Exception, where: str) -> str:
    module = next((block.module for block in part.blocks), "") or "the model itself"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"The block {part.name} (module {module}) failed while it was measured with {size} samples{where}: got "
        f"{type(error).__name__}: {reason}. Expected it to run on random numbers of the traced shapes (integers are "
        "those of the first batch, or zeros). If memory ran out, lower the micro-batch size; if its operations refuse "
        "such numbers, please report the module."
    )
