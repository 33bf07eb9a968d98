"""Measures: `TracedModel` in, costs of its parts out, and from these its `Profile`.

No rank talks to another here; the caller gathers and merges.

Seconds: a block costs what was measured of it alone, times what its layer costs as a whole over the sum of the layer's
blocks; so blocks of a layer add up to the layer. What splitting its backward adds is measured of a layer, too. The
repeated operations are counted with the first block that uses them.

Bytes: memory that a block saves and that another block made is counted with the block that made it, and once, so that
blocks of a stage add up to what the stage keeps. Of memory that repeated operations made, each block that saves it
counts it: a stage may begin anywhere, and must not hold more than was counted.
"""

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
from autovaruna.profiler.records import BlockCost, Profile
from autovaruna.profiler.time import split_seconds, time_splitting, time_weights, time_work
from autovaruna.profiler.work import (
    Numbers,
    Part,
    Samples,
    all_parts,
    block_parts,
    distinct,
    layer_parts,
    make_work,
    repeated_part,
)

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
    parts = [part for part in distinct(all_parts(traced)) if part.is_of_torch]
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
    for place, part in enumerate(distinct(all_parts(traced))):
        first = place % len(sizes)
        found += [(part, size) for size in (*sizes[first:], *sizes[:first])]
    return found


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


def to_profile(
    traced: TracedModel, costs: Mapping[Key, PartCost], device: torch.device, *, has_layers: bool = True
) -> Profile:
    """Returns the profile of a graph from the costs of all its parts.

    Args:
        traced: The traced model.
        costs: Of every part.
        device: Where they were measured.
        has_layers: Whether layers are among them; without, they take what their blocks take.
    """
    sizes, blocks = tuple(sorted({size for _, size in costs})), block_parts(traced)
    layers = layer_parts(traced) if has_layers else []
    return Profile(
        fingerprint=traced.graph.fingerprint,
        device=device_name(device),
        micro_batch_sizes=sizes,
        costs=tuple(
            _block_costs(traced, blocks, layers, {name: cost for (name, at), cost in costs.items() if at == size})
            for size in sizes
        ),
    )


def device_name(device: torch.device) -> str:
    """Returns what a profile is valid for: the kind of device, and the threads of a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {torch.get_num_threads()} threads"


def _block_costs(
    traced: TracedModel, blocks: Sequence[Part], layers: Sequence[Part], costs: Mapping[str, PartCost]
) -> tuple[BlockCost, ...]:
    own = [costs[part.signature] for part in blocks]
    forward, backward, added = _seconds(traced, blocks, layers, costs)
    saved, work = _bytes(traced, blocks, [cost.num_bytes for cost in own])
    weights = [_share(cost) * seconds for cost, seconds in zip(own, backward, strict=True)]
    columns = forward, backward, saved, work, weights, added, [cost.deferred_bytes for cost in own]
    return tuple(BlockCost(*cost) for cost in zip(*columns, strict=True))


def _share(cost: PartCost) -> float:
    """Returns the share of a backward that weight gradients take; measured apart, it may come out as more than all."""
    return min(cost.weight_seconds / cost.backward_seconds, 1.0) if cost.backward_seconds > 0 else 0.0


def _seconds(
    traced: TracedModel, blocks: Sequence[Part], layers: Sequence[Part], costs: Mapping[str, PartCost]
) -> tuple[list[float], list[float], list[float]]:
    """Returns the seconds of each block: forward, backward, and what splitting it adds."""
    forward = [costs[part.signature].forward_seconds for part in blocks]
    backward = [costs[part.signature].backward_seconds for part in blocks]
    added = [costs[part.signature].split_seconds for part in blocks]
    for layer in layers:
        whole = costs[layer.signature]
        _scale(forward, layer, whole.forward_seconds)
        _scale(backward, layer, whole.backward_seconds)
        _scale(added, layer, whole.split_seconds)
    if traced.repeated and blocks:
        first_user = next((k for k, part in enumerate(blocks) if traced.repeated.keys() & part.values), 0)
        forward[first_user] += costs[repeated_part(traced).signature].forward_seconds
    return forward, backward, added


def _scale(seconds: list[float], layer: Part, whole: float) -> None:
    places = [block.index for block in layer.blocks]
    total = sum(seconds[k] for k in places)
    for k in places:
        seconds[k] *= whole / total if total > 0 else 1.0


def _bytes(traced: TracedModel, blocks: Sequence[Part], measured: Sequence[Bytes]) -> tuple[list[int], list[int]]:
    """Returns what each block saves, by the rule above, and what it needs on top."""
    asked = {
        part.storage(part.values[place])
        for part, each in zip(blocks, measured, strict=True)
        for place, _ in each.saved_values
    }
    roots = [node.name for node in traced.module.graph.nodes if node.op in ("placeholder", "get_attr")]
    lasting = {storage for name in roots for storage in traced.facts[name].makes}
    saved, work = [], []
    for part, each in zip(blocks, measured, strict=True):
        kept = [made for made in each.made if made.is_saved or part.storage(part.outputs[made.place]) in asked]
        repeated = {
            part.storage(part.values[place]): num_bytes
            for place, num_bytes in each.saved_values
            if part.values[place] in traced.repeated
        }
        saved.append(
            each.inside
            + sum(made.num_bytes for made in kept)
            + sum(num_bytes for storage, num_bytes in repeated.items() if storage not in lasting)
        )
        passing = sum(made.num_bytes for made in each.made if made not in kept)
        work.append(max(each.forward_work + passing, each.work))
    return saved, work
