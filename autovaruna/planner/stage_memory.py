"""Predicts the memory of a stage on one replica: what it holds, and the peak as its in-flight depth asks for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from autovaruna.planner.arrays import Array, Costs, RangeTables
from autovaruna.planner.records import Peak

Bytes = TypeVar("Bytes", float, Array)
# Times of the simulator are rounded to 2**-40 s; a bound stays below by more than all roundings together.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StageBytes(Generic[Bytes]):
    """The peak of a stage as its in-flight depth asks for it.

    Attributes:
        once: there as long as micro-batches run, at any depth.
        each: on top for each micro-batch in flight.
        least: the peak after the last backward, in the optimizer's step.
        first: in place of `once` in the first backward of a step, which gradients come with.
        running: the part of `once` that is there while the stage runs alone.
        gradients: the part of `once` that comes with the first backward.
    """

    once: Bytes
    each: Bytes
    least: Bytes
    first: Bytes
    running: Bytes
    gradients: Bytes

    @property
    def waiting(self) -> Bytes:
        """The part of `once` that is there before the first backward, while others run."""
        return self.once - self.running - self.gradients

    def at(self, in_flight: float, share: float = math.inf) -> Bytes:
        """Returns the peak over the whole step.

        Args:
            in_flight: forwards not yet backwarded, at most.
            share: micro-batches of the replica. If all of them are in flight before the first backward, one less is
                there when all gradients are.
        """
        first, later = self.first + self.each * in_flight, self.least
        if in_flight < share:
            later = self.once + self.each * in_flight
        elif in_flight > 1:
            later = self.once + self.each * (in_flight - 1)
        return _greatest(first, later, self.least)

    def beside_others(self, in_flight: float, share: float = math.inf) -> Bytes:
        """Returns the peak while other stages of the rank run, in the optimizer's step at the latest."""
        idle = self.once - self.running
        if in_flight >= share:
            later = idle + self.each * (in_flight - 1)
            return _greatest(idle + self.each * in_flight - self.gradients, later, self.least)
        return _greatest(idle + self.each * in_flight, self.least)

    def peak(self: StageBytes[float], in_flight: float, share: float, process_bytes: float) -> Peak:
        """Returns the peak over the whole step, with what other stages of the rank use as well: the process, too."""
        peak = float(self.at(in_flight, share))
        return Peak(peak, peak - float(self.beside_others(in_flight, share)) + process_bytes)


def _greatest(*parts: Bytes) -> Bytes:
    if isinstance(parts[0], float):  # a comparison of two numbers takes numpy ten times as long
        return max(parts)
    return functools.reduce(np.maximum, parts)


@dataclass(frozen=True, slots=True)
class Holdings(Generic[Bytes]):
    """What a stage holds, in bytes; the last nine are for one micro-batch.

    Attributes:
        parameters: of all parameters it uses; `trained` of those that get a gradient, `largest` of the largest of them.
        tied: gradient accumulators, one for each block that uses a parameter of several blocks; `tied_once`, of those
            parameters, what is in `trained`: one accumulator ends as the gradient.
        buffers: of its buffers.
        inputs: the caller's tensors that it uses.
        received, sent: activations from earlier and to later stages.
        gradients_received, gradients_sent: gradients from later and to earlier stages.
        saved: what forward keeps for backward.
        work: what forward and backward need on top of all that is saved. While a block runs backward, what later ones
            saved is gone: so a block at the front needs the less.
        work_of_first: what the first backward of a step needs, with the gradients that it makes, on top of all that is
            saved: while a block runs, later ones have made theirs, and what they saved is gone.
    """

    parameters: Bytes
    trained: Bytes
    largest: Bytes
    tied: Bytes
    tied_once: Bytes
    buffers: Bytes
    inputs: Bytes = 0.0  # type: ignore[assignment]
    received: Bytes = 0.0  # type: ignore[assignment]
    sent: Bytes = 0.0  # type: ignore[assignment]
    gradients_received: Bytes = 0.0  # type: ignore[assignment]
    gradients_sent: Bytes = 0.0  # type: ignore[assignment]
    saved: Bytes = 0.0  # type: ignore[assignment]
    work: Bytes = 0.0  # type: ignore[assignment]
    work_of_first: Bytes = math.inf  # type: ignore[assignment]


class HoldingsOfRanges:
    """What ranges of segments hold with micro-batches of some size: one of them, or all, to the bit the same."""

    def __init__(self, tables: RangeTables, costs: Costs) -> None:
        self.tables, self.size = tables, math.ceil(costs.micro_batch_size)
        self._saved = tables.prefix(costs.saved_bytes)
        self._work = _work_of_blocks(tables, costs, np.zeros_like(costs.work_bytes))
        self._work_of_first = _work_of_blocks(tables, costs, tables.gradient_bytes)

    def all(self) -> Holdings[Array]:
        """Returns what each range holds, as matrices ``[i, j]``; entries with i >= j mean nothing."""
        return self._held(..., np.s_[:, None], np.s_[None, :], self.tables.greatest)

    def of(self, i: int, j: int) -> Holdings[float]:
        """Returns what the range of the segments i .. j-1 holds."""
        blocks = slice(*self.tables.positions[[i, j]])
        held = self._held((i, j), i, j, lambda weights: weights[blocks].max())
        return Holdings(*(float(getattr(held, part.name)) for part in fields(held)))

    def _held(self, where: Any, i: Any, j: Any, greatest: Callable[[Array], Any]) -> Holdings[Any]:
        tables, size = self.tables, self.size
        (at_peak, ends), (at_first_peak, ends_of_first) = self._work, self._work_of_first
        names = ("inputs", "received", "sent", "gradients_received", "gradients_sent")
        return Holdings(
            parameters=tables.parameter_bytes[where],
            trained=tables.trained_bytes[where],
            largest=tables.largest_bytes[where],
            tied=tables.tied_bytes[where],
            tied_once=tables.tied_once_bytes[where],
            buffers=tables.buffer_bytes[where],
            **{name: getattr(tables, name).at(size, where) for name in names},
            saved=np.maximum(self._saved[j] - self._saved[i], 0.0),
            work=np.maximum(greatest(at_peak) - ends[j], 0.0),
            work_of_first=np.maximum(greatest(at_first_peak) - ends_of_first[j], 0.0),
        )


def _work_of_blocks(tables: RangeTables, costs: Costs, gradients: Array) -> tuple[Array, Array]:
    """Returns what is there while each block works, and where a range ends, both with all that came before it."""
    saved, made = costs.saved_bytes.cumsum(), gradients.cumsum()
    return saved + costs.work_bytes - made, (np.append(0.0, saved) - np.append(0.0, made))[tables.positions]


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The rules by which holdings add up.

    Attributes:
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
        needs_gradient: False if only forwards run.
        process_bytes: what a rank holds beside tensors.
        fragmentation: bytes that the allocator takes for each byte that micro-batches make and free; parameters, the
            optimizer's state and gradients are made once, or once a step, and lie without holes.
        work_of_all, work_of_largest: bytes that the optimizer's step needs on top, for each byte of all trained
            parameters and of the largest of them.
        most_owners: the most replicas that share the optimizer's state. What is not said to be of so many counts with
            that many, the least that it may take.
    """

    optimizer_bytes_factor: float
    needs_gradient: bool = True
    process_bytes: float = 0.0
    fragmentation: float = 1.0
    work_of_all: float = 0.0
    work_of_largest: float = 0.0
    most_owners: int = 1

    def fixed(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes that are there whether or not micro-batches run: what lasts, and gradients."""
        return self.lasting(held) + self.gradients(held)

    def lasting(self, held: Holdings[Bytes], num_replicas: int = 0) -> Bytes:
        """Returns the bytes that stay from step to step: parameters, buffers, optimizer state, the process."""
        state = held.parameters + held.buffers + self.process_bytes
        return state + self.owned(held, num_replicas) * self.optimizer_bytes_factor if self.needs_gradient else state

    def owned(self, held: Holdings[Bytes], num_replicas: int = 0) -> Bytes:
        """Returns the bytes that the replica with most of them steps over: its share, or the largest parameter."""
        owners = min(num_replicas or self.most_owners, self.most_owners)
        return held.trained if owners == 1 else _greatest(held.trained / owners, held.largest)

    def gradients(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes of all gradients, with an accumulator for each use of a parameter."""
        return held.trained + held.tied - held.tied_once if self.needs_gradient else held.trained * 0.0

    def per_micro_batch(self, held: Holdings[Bytes], needs_recompute: bool) -> Bytes:
        """Returns the bytes of each micro-batch in flight.

        What is received is a leaf that lives until its backward, and what is sent stays until its gradient is back.
        """
        if not self.needs_gradient:
            return held.inputs * 0.0
        kept = held.received + held.inputs
        return kept if needs_recompute else kept + held.saved + held.sent

    def running(self, held: Holdings[Bytes], needs_recompute: bool) -> Bytes:
        """Returns the bytes of the micro-batch at work."""
        if not self.needs_gradient:
            return held.work + held.inputs + held.sent
        return held.work + held.saved + held.sent if needs_recompute else held.work

    def messages(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes of messages on their way."""
        return held.received + held.gradients_received + held.gradients_sent if self.needs_gradient else held.received

    def updating(self, held: Holdings[Bytes], num_replicas: int = 0) -> Bytes:
        """Returns the bytes on top when no micro-batch is there: tied gradients meet, then the optimizer steps."""
        if not self.needs_gradient:
            return held.trained * 0.0
        owned = self.owned(held, num_replicas)
        step = owned * self.work_of_all + held.largest * self.work_of_largest - (held.tied - held.tied_once)
        most: Bytes = np.maximum(step, held.tied_once)
        return most

    def before_gradients(self, held: Holdings[Bytes]) -> Bytes:
        """Returns what the first backward of a step needs more than others; it is less: gradients come with it."""
        if not self.needs_gradient:
            return held.trained * 0.0
        more: Bytes = np.minimum(held.work_of_first - held.work - self.gradients(held), 0.0)
        return more

    def of_stage(self, held: Holdings[Bytes], needs_recompute: bool, num_replicas: int = 0) -> StageBytes[Bytes]:
        """Returns the peak on one of some replicas (0: not known), for any number of forwards not yet backwarded."""
        each, messages, running, updating = (
            part * self.fragmentation
            for part in (
                self.per_micro_batch(held, needs_recompute),
                self.messages(held),
                self.running(held, needs_recompute),
                self.updating(held, num_replicas),
            )
        )
        gradients = self.gradients(held)
        lasting = self.lasting(held, num_replicas)
        once = lasting + (gradients + messages + running)
        first, least = once + self.before_gradients(held), lasting + (gradients + updating)
        return StageBytes(once, each, least, first, running, gradients)
