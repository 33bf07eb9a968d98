"""Measures: `TracedModel` in, costs of its parts out, and from these its `Profile`. No rank talks to another here.

A block costs what was measured of it alone, times what its layer costs as a whole over the sum of the layer's blocks.
Memory that a block saves and another made counts once, with the block that made it; what repeated operations made
counts with each block that saves it, for a stage may begin anywhere. Their seconds are the first user's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, median_low
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from autovaruna.config.files import Amount
from autovaruna.errors import MeasureError
from autovaruna.graph.opaque.run import profiling_mode
from autovaruna.graph.precision import without_autocast
from autovaruna.graph.random import untouched_generator
from autovaruna.graph.source_lines import failed_at, first_line
from autovaruna.graph.traced import TracedModel
from autovaruna.profiler.bytes import Bytes, count_bytes
from autovaruna.profiler.records import BlockCost, Profile
from autovaruna.profiler.work import (
    MeasuredPart,
    Numbers,
    Samples,
    Work,
    all_parts,
    block_parts,
    distinct,
    empty_work,
    layer_parts,
    make_work,
    repeated_part,
)

_LOOKS = 20
_FINE_SECONDS = 20e-6
_LENGTH = {"cpu": 256, "cuda": 4096}
_LEAST_SAMPLES = 15
_LEAST_SECONDS, _MOST_SECONDS = 0.04, 0.2  # some turns of programs that share a core, and many
_SHARED = 1.2  # a core that takes so many times a rank's own time is shared
_SAMPLE_SECONDS = 200e-6
_MOST_REPEATS = 200
_IN_FLIGHT = 3
_MOST_CACHED_BYTES = 64 << 20  # what a run of more bytes leaves behind is in no cache, however few are in flight
_LEAST_SHARE = 0.1  # a measured time is never cut below this share of itself, however much of it a call costs
_RUNS = 15.0
"""How often a block runs, forward and backward, until it and the layer that it is of have been measured once."""
_NOISE = 1.25  # what takes this much longer than at another time was disturbed


def own_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock, in seconds; to read it waits until the device has done all that it was given."""
    if device.type != "cuda":
        return thread_time if torch.get_num_threads() == 1 and _is_fine() else perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return perf_counter()

    return read


@lru_cache(maxsize=1)
def _is_fine() -> bool:
    """Says whether the thread's own time advances in small steps; there are systems on which it counts turns."""
    steps: list[float] = []
    last = thread_time()
    ends = perf_counter() + 1.0
    while len(steps) < _LOOKS and perf_counter() < ends:
        if (now := thread_time()) != last:
            steps.append(now - last)
            last = now
    return min(steps, default=1.0) <= _FINE_SECONDS


@dataclass(frozen=True)
class Pace:
    """The seconds of a fixed kernel, a matrix product and a pass over memory; their inverse ratios are ranks' speeds.

    `typical` is the median of the rank's own time, which knows nothing of programs that take turns on its core; `mean`
    is of what has passed from begin to end, which says what a step gets.
    """

    typical: float
    mean: float


@without_autocast()  # in float16 it takes a CPU seconds
def measure_pace(device: torch.device) -> Pace:
    """Measures the fixed kernel, for long enough that programs that share a core with this one have had their turns."""
    now = own_clock(device)
    generator = torch.Generator().manual_seed(0)
    length = _LENGTH.get(device.type, 256)
    matrix = torch.randn(length, length, generator=generator).to(device)
    _run(matrix)
    own: list[float] = []
    passed: list[float] = []
    begin = perf_counter()

    while True:
        started, own_started = perf_counter(), now()
        _run(matrix)
        own.append(now() - own_started)
        passed.append(perf_counter() - started)
        seconds = perf_counter() - begin
        least = _LEAST_SECONDS if fmean(passed) < _SHARED * median(own) else _MOST_SECONDS
        if len(own) >= _LEAST_SAMPLES and seconds >= least:
            return Pace(median(own), fmean(passed))


@torch.no_grad()
def _run(matrix: torch.Tensor) -> None:
    for _ in range(2):
        torch.tanh(matrix @ matrix)


Seconds = tuple[float, float]  # of one forward and one backward


def time_work(
    work: Work, iterations: int, allowance_seconds: float, device: torch.device, kept_bytes: float = 0.0
) -> Seconds:
    """Times work that has run once: seconds of one forward and of one backward, without those of an empty call.

    No further sample is begun after `allowance_seconds`. `kept_bytes` are what a forward keeps for its backward.
    """
    forward, backward = _samples(work, iterations, allowance_seconds, device, _in_flight(kept_bytes))
    empty_forward, empty_backward = call_seconds(sum(value.requires_grad for value in work.values) or 1, device)
    return _without(forward, empty_forward), _without(backward, empty_backward) if work.needs_gradient else 0.0


def _in_flight(kept_bytes: float) -> int:
    """Returns how many runs go forward before the first goes backward."""
    return _IN_FLIGHT if kept_bytes * _IN_FLIGHT <= _MOST_CACHED_BYTES else 1


def _goes_on(samples: Collection[Any], iterations: int, ends: float) -> bool:
    """Whether another sample is taken: one is in any case."""
    return not samples or (len(samples) < iterations and perf_counter() < ends)


@lru_cache(maxsize=64)
def call_seconds(num_values: int, device: torch.device) -> Seconds:
    """Returns the seconds that a call with `num_values` received tensors takes before it does anything."""
    return _samples(empty_work(num_values, device), 9, 1.0, device, 1)


def _samples(work: Work, iterations: int, allowance_seconds: float, device: torch.device, in_flight: int) -> Seconds:
    now, ends = own_clock(device), perf_counter() + allowance_seconds
    first = _sample(work, 1, now)
    repeats = min(_MOST_REPEATS, max(math.ceil(_SAMPLE_SECONDS / max(first[0], 1e-7)), in_flight))
    samples = [first] if repeats == in_flight and perf_counter() > ends else []
    while _goes_on(samples, iterations, ends):
        samples.append(_sample(work, repeats, now))
    forwards, backwards = zip(*samples, strict=True)
    return median_low(forwards), median_low(backwards)


def _sample(work: Work, repeats: int, now: Callable[[], float]) -> Seconds:
    """Returns the seconds of one forward and one backward out of `repeats`."""
    started = now()
    runs = deque(work.forward() for _ in range(repeats))
    middle = now()
    if work.needs_gradient:
        while runs:
            work.backward(runs.popleft())
    return (middle - started) / repeats, (now() - middle) / repeats


def _without(seconds: float, call: float) -> float:
    return max(seconds - call, seconds * _LEAST_SHARE)


Key = tuple[str, int]  # signature of a part, and samples in the micro-batch


@dataclass(frozen=True)
class PartCost:
    """What was measured of one part."""

    forward_seconds: Amount
    backward_seconds: Amount
    num_bytes: Bytes

    @property
    def seconds(self) -> Seconds:
        """What takes time."""
        return self.forward_seconds, self.backward_seconds

    def with_seconds(self, forward: float, backward: float) -> PartCost:
        """Returns the cost with other seconds."""
        return PartCost(forward, backward, self.num_bytes)

    def fits(self, part: MeasuredPart) -> bool:
        """Whether a part has all values and outputs that this refers to."""
        values = [place for place, _ in self.num_bytes.saved_values]
        outputs = [each.place for each in self.num_bytes.made]
        return max(values, default=-1) < len(part.values) and max(outputs, default=-1) < len(part.outputs)


def measure(
    traced: TracedModel,
    model: nn.Module,
    micro_batch_sizes: Sequence[int],
    device: torch.device,
    *,
    iterations: int = 5,
    budget_seconds: float = 10.0,
    share: tuple[int, int] = (0, 1),
    known: Collection[Key] = (),
    inputs: Sequence[Tensor] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[Key, PartCost]:
    """Measures every distinct block and layer of a traced model, or one rank's share of them; changes nothing of it.

    A part that cannot be run is a MeasureError.

    Args:
        budget_seconds: Time after which each part is sampled once only.
        share: ``(rank, num_ranks)``; this rank measures every num_ranks-th part.
        known: Parts that are not measured; the same on all ranks.
        inputs: Tensors of a call in the order of ``traced.call.inputs``; without them integers are zeros.
        on_progress: Called with the parts measured so far and their number.
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
            costs[part.signature, size] = measure_one(part, kinds, size, iterations, allowance)
            if on_progress is not None:
                on_progress(done + 1, len(jobs))
    return costs


def parts_by_key(traced: TracedModel, micro_batch_sizes: Sequence[int]) -> dict[Key, MeasuredPart]:
    """Returns everything that is measured."""
    return {(part.signature, size): part for size in micro_batch_sizes for part in distinct(all_parts(traced))}


def lasting_parts(traced: TracedModel, micro_batch_sizes: Sequence[int]) -> dict[Key, MeasuredPart]:
    """Returns what is measured and costs the same in another program: operators of other libraries may change."""
    return {key: part for key, part in parts_by_key(traced, micro_batch_sizes).items() if part.is_of_torch}


def measuring_seconds(traced: TracedModel, sizes: Sequence[int], known: Collection[Key]) -> float:
    """Estimates how long it takes to measure what is not `known` on this CPU, from the arithmetic of blocks alone."""
    fresh = [part for part in distinct(block_parts(traced)) if (part.signature, max(sizes)) not in known]
    flops = sum(block.num_flops_per_sample for part in fresh for block in part.blocks)
    flops_per_second = 4.0 * _LENGTH["cpu"] ** 3 / measure_pace(torch.device("cpu")).typical
    return _RUNS * 3.0 * flops * sum(sizes) / flops_per_second  # a backward has twice the products of a forward


def merge(shares: Iterable[Mapping[Key, PartCost]]) -> dict[Key, PartCost]:
    """Joins the shares of all ranks."""
    return {key: cost for share in shares for key, cost in share.items()}


def settle(costs: Sequence[PartCost]) -> PartCost:
    """Returns what a part takes by several measurements: the mean of each kind of seconds over the undisturbed ones."""

    def undisturbed(seconds: Sequence[float]) -> float:
        return fmean(each for each in seconds if each <= _NOISE * min(seconds))

    return costs[0].with_seconds(*map(undisturbed, zip(*(cost.seconds for cost in costs), strict=True)))


def _jobs(traced: TracedModel, sizes: Sequence[int]) -> list[tuple[MeasuredPart, int]]:
    """Returns what to measure: a part with all sizes at once, since machines drift; each rank comes by every size."""
    return [
        (part, sizes[(place + turn) % len(sizes)])
        for place, part in enumerate(distinct(all_parts(traced)))
        for turn in range(len(sizes))
    ]


def measure_one(part: MeasuredPart, kinds: Sequence[Samples], size: int, iterations: int, allowance: float) -> PartCost:
    """Measures a part on the first of several kinds of numbers that it takes."""
    first: Exception | None = None
    for samples in sorted(kinds, key=lambda each: part.code.takes_shares and each.numbers is not Numbers.SHARE):
        try:
            return _measure_on(part, samples, size, iterations, allowance)
        except Exception as error:
            first = first or error
    assert first is not None
    module = next((block.module for block in part.blocks), "") or "the model itself"
    where = failed_at(first, part.traced.nodes)
    raise MeasureError(
        f"The block {part.name} (module {module}) failed while it was measured with {size} samples{where}: got "
        f"{type(first).__name__}: {first_line(first)}. Expected it to run on random numbers of the traced shapes "
        "(integers are those of the first batch, or zeros). If memory ran out, lower the micro-batch size; "
        "if its operations refuse such numbers, please report the module."
    ) from first


def _measure_on(part: MeasuredPart, samples: Samples, size: int, iterations: int, allowance: float) -> PartCost:
    started = perf_counter()
    device = samples.device
    work = make_work(part, samples, size)
    num_bytes = count_bytes(work, device)
    left = allowance - (perf_counter() - started)
    kept_bytes = num_bytes.inside + sum(made.num_bytes for made in num_bytes.made)
    return PartCost(*time_work(work, iterations, left, device, kept_bytes), num_bytes)


def to_profile(
    traced: TracedModel, costs: Mapping[Key, PartCost], device: torch.device, *, has_layers: bool = True
) -> Profile:
    """Returns the profile of a graph from the costs of all its parts; without layers, these take what blocks take."""
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
    traced: TracedModel, blocks: Sequence[MeasuredPart], layers: Sequence[MeasuredPart], costs: Mapping[str, PartCost]
) -> tuple[BlockCost, ...]:
    forward, backward = (_seconds(kind, blocks, layers, costs) for kind in (0, 1))
    if traced.repeated and blocks:
        first_user = next((k for k, part in enumerate(blocks) if traced.repeated.keys() & part.values), 0)
        forward[first_user] += costs[repeated_part(traced).signature].forward_seconds
    saved, work = _bytes(traced, blocks, [costs[part.signature].num_bytes for part in blocks])
    return tuple(BlockCost(*cost) for cost in zip(forward, backward, saved, work, strict=True))


def _seconds(
    kind: int, blocks: Sequence[MeasuredPart], layers: Sequence[MeasuredPart], costs: Mapping[str, PartCost]
) -> list[float]:
    """Returns one of the seconds of each block, scaled to what layers take as a whole."""
    seconds = [costs[part.signature].seconds[kind] for part in blocks]
    for layer in layers:
        places = [block.index for block in layer.blocks]
        total, whole = sum(seconds[k] for k in places), costs[layer.signature].seconds[kind]
        for k in places:
            seconds[k] *= whole / total if total > 0 else 1.0
    return seconds


def _bytes(
    traced: TracedModel, blocks: Sequence[MeasuredPart], measured: Sequence[Bytes]
) -> tuple[list[int], list[int]]:
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
