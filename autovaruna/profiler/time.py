"""Times work: the clock that counts this rank's own time, the speed of its device, samples long enough for both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, median_low
from time import perf_counter, thread_time

import torch

from autovaruna.profiler.work import Work, empty_work, smallest_split

_LOOKS = 20
_FINE_SECONDS = 20e-6


def own_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock, in seconds; to read it waits until the device has done all that it was given."""
    if device.type != "cuda":
        return thread_time if torch.get_num_threads() == 1 and _is_fine() else perf_counter
    wait = wait_for(device)

    def read() -> float:
        wait()
        return perf_counter()

    return read


def wait_for(device: torch.device) -> Callable[[], None]:
    """Returns what waits until a device has done all that it was given; a host has, when a call returns."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


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


_LENGTH = {"cpu": 256, "cuda": 4096}
_LEAST_SAMPLES = 15
_LEAST_SECONDS, _MOST_SECONDS = 0.04, 0.2
"""Some turns of programs that share a core, and many."""
_SHARED = 1.2
"""A core that takes so many times a rank's own time is shared."""


@dataclass(frozen=True)
class Pace:
    """The seconds of a fixed kernel: a matrix product and a pass over memory.

    The ranks' relative speeds are the inverse ratios of these numbers. Where other programs take turns on a core, a
    rank's own time knows nothing of it, as that of a profile; what has passed from begin to end says what a step gets.

    Attributes:
        typical: the median of the rank's own time.
        mean: what has passed, over all samples.
    """

    typical: float
    mean: float


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
    while not _are_enough(own, passed, perf_counter() - begin):
        started, own_started = perf_counter(), now()
        _run(matrix)
        own.append(now() - own_started)
        passed.append(perf_counter() - started)
    return Pace(median(own), fmean(passed))


def _are_enough(own: Sequence[float], passed: Sequence[float], seconds: float) -> bool:
    """Says whether samples that took so many seconds tell what other programs take; more are needed if they do."""
    if len(own) < _LEAST_SAMPLES or seconds < _LEAST_SECONDS:
        return False
    return seconds >= _MOST_SECONDS or fmean(passed) < _SHARED * median(own)


def _run(matrix: torch.Tensor) -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.tanh(matrix @ matrix)


_SAMPLE_SECONDS = 200e-6
_MOST_REPEATS = 200
_IN_FLIGHT = 3
_MOST_CACHED_BYTES = 64 << 20
"""What a run of more bytes leaves behind is in no cache, however few are in flight."""
_LEAST_SHARE = 0.1
"""A measured time is never cut below this share of itself, however much of it a call costs."""

Seconds = tuple[float, float]
"""Of one forward and one backward."""


def time_work(
    work: Work, iterations: int, allowance_seconds: float, device: torch.device, kept_bytes: float = 0.0
) -> Seconds:
    """Times forward and backward.

    Args:
        work: What to time; it has run once already.
        iterations: Samples to take.
        allowance_seconds: No further sample is begun after this time; one is taken in any case.
        device: Where it runs.
        kept_bytes: What a forward keeps for its backward.

    Returns:
        Seconds of one forward and of one backward (0 if there is none), without what a call of an empty piece costs.
    """
    in_flight = _IN_FLIGHT if kept_bytes * _IN_FLIGHT <= _MOST_CACHED_BYTES else 1
    forward, backward = _samples(work, iterations, allowance_seconds, device, in_flight)
    empty_forward, empty_backward = call_seconds(sum(value.requires_grad for value in work.values) or 1, device)
    return _without(forward, empty_forward), _without(backward, empty_backward) if work.needs_gradient else 0.0


@lru_cache(maxsize=64)
def call_seconds(num_values: int, device: torch.device) -> Seconds:
    """Returns the seconds that a call with `num_values` received tensors takes before it does anything."""
    return _samples(empty_work(num_values, device), 9, 1.0, device, 1)


def time_weights(work: Work, iterations: int, allowance_seconds: float, device: torch.device) -> float:
    """Times the weight gradients that a split backward leaves for later; arguments are those of `time_work`."""
    now, started = own_clock(device), perf_counter()
    deferred = [work.run_split(work.arguments) for _ in range(_IN_FLIGHT)]
    samples: list[float] = []
    repeats = 1
    while not samples or (len(samples) < iterations and perf_counter() - started < allowance_seconds):
        begin = now()
        for _ in range(repeats):
            for each in deferred:
                each.compute(work.weights, is_last=False)
        seconds = (now() - begin) / repeats / len(deferred)
        enough = math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-7) / len(deferred))
        if repeats < min(enough, _MOST_REPEATS):
            repeats = min(enough, _MOST_REPEATS)
            continue
        samples.append(seconds)
    return _without(median_low(samples), call_seconds(1, device)[1])


def time_splitting(
    work: Work, iterations: int, allowance_seconds: float, device: torch.device, kept_bytes: float = 0.0
) -> float:
    """Returns the seconds that forward, backward and weight gradients take more if the last two are apart.

    Memory that is used late is in no cache, so this is more than the splitting itself takes. Arguments are those of
    `time_work`; both ways are sampled in turn.
    """
    in_flight = _IN_FLIGHT if kept_bytes * _IN_FLIGHT <= _MOST_CACHED_BYTES else 1
    now, started = own_clock(device), perf_counter()
    added: list[float] = []
    while not added or (len(added) < iterations and perf_counter() - started < allowance_seconds):
        together = sum(_sample(work, in_flight, now))
        begin = now()
        runs = deque(work.split_forward(work.arguments) for _ in range(in_flight))
        left = []
        while runs:
            outputs, deferred = runs.popleft()
            work.backward(outputs)
            left.append(deferred)
            del outputs
        for deferred in left:
            deferred.compute(work.weights)
        added.append((now() - begin) / in_flight - together)
    return max(0.0, median_low(added))


@lru_cache(maxsize=4)
def split_seconds(device: torch.device) -> float:
    """Returns what splitting the backward of one operation adds to its forward and backward, weight gradients apart."""
    work = smallest_split(device)
    return max(0.0, min(time_splitting(work, 100, 0.05, device) for _ in range(3)) - call_seconds(1, device)[1])


def _samples(work: Work, iterations: int, allowance_seconds: float, device: torch.device, in_flight: int) -> Seconds:
    now, started = own_clock(device), perf_counter()
    first = _sample(work, 1, now)
    repeats = min(_MOST_REPEATS, max(math.ceil(_SAMPLE_SECONDS / max(first[0], 1e-7)), in_flight))
    samples = [first] if repeats == in_flight and perf_counter() - started > allowance_seconds else []
    while not samples or (len(samples) < iterations and perf_counter() - started < allowance_seconds):
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
