"""Defines `StageBytes`: the memory of a stage on one replica, as its in-flight depth asks for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import numpy as np

from autovaruna.planner.costs import Array
from autovaruna.planner.records import Peak

Bytes = TypeVar("Bytes", float, Array)


@dataclass(frozen=True, slots=True)
class StageBytes(Generic[Bytes]):
    """The peak of a stage as its in-flight depth asks for it, and what it defers.

    Attributes:
        once: there as long as micro-batches run, at any depth.
        each: on top for each micro-batch in flight.
        least: the peak after the last backward, in the optimizer's step.
        first: in place of `once` in the first backward of a step, which gradients come with.
        running: the part of `once` that is there while the stage runs alone.
        gradients: the part of `once` that comes with the first backward.
        each_deferred: on top for each micro-batch whose weight gradients are deferred.
    """

    once: Bytes
    each: Bytes
    least: Bytes
    first: Bytes
    running: Bytes
    gradients: Bytes
    each_deferred: Bytes

    @property
    def waiting(self) -> Bytes:
        """The part of `once` that is there before the first backward, while others run."""
        return self.once - self.running - self.gradients

    def at(self, in_flight: float, share: float = math.inf, deferred: float = 0) -> Bytes:
        """Returns the peak over the whole step.

        Args:
            in_flight: forwards not yet backwarded, at most.
            share: micro-batches of the replica. If all of them are in flight before the first backward, one less is
                there when all gradients are.
            deferred: backwards whose weight gradients are not yet computed, at most; none before the first backward.
        """
        first, later = self._peaks(in_flight, share, deferred)
        return _greatest(first, later, self.least)

    def depth_within(self: StageBytes[Array], limit: float, share: float) -> Array:
        """Returns the greatest depth at which the peak over the whole step is within a limit, 0 or less if none is.

        Args:
            limit: in bytes.
            share: micro-batches of the replica. At a depth of all of them, one less is there when all gradients are.
        """
        depth = np.zeros_like(self.least)
        left = np.flatnonzero(self.least <= limit)
        each = self.each.take(left)
        first, later = (_depth_in(limit - part.take(left), each) for part in (self.first, self.once))
        is_whole = (first >= share) & (later >= share - 1) if share > 1 else first >= 1
        depth.put(left, np.where(is_whole, share, np.floor(np.minimum(first, later))))
        return depth

    def _peaks(self, in_flight: float, share: float, deferred: float) -> tuple[Bytes, Bytes]:
        """Returns the peak of the first backward, and that of all others."""
        first = self.first + self.each * in_flight
        if in_flight < share:
            return first, self.once + self._held(in_flight, share, deferred)
        if in_flight > 1 or deferred:
            return first, self.once + self._held(in_flight - 1, share, deferred)
        return first, self.least

    def _held(self, in_flight: float, share: float, deferred: float) -> Bytes:
        """Returns the most that micro-batches hold: those that are deferred are in flight no longer."""
        if not deferred:
            return self.each * in_flight
        most_deferred, rest = min(deferred, share), max(share - in_flight, 0.0)
        return _greatest(
            self.each * in_flight + self.each_deferred * min(deferred, rest),
            self.each * min(in_flight, share - most_deferred) + self.each_deferred * most_deferred,
        )

    def beside_others(self, in_flight: float, share: float = math.inf, deferred: float = 0) -> Bytes:
        """Returns the peak while other stages of the rank run, in the optimizer's step at the latest."""
        idle = self.once - self.running
        if in_flight >= share:
            later = idle + self._held(in_flight - 1, share, deferred)
            return _greatest(idle + self.each * in_flight - self.gradients, later, self.least)
        return _greatest(idle + self._held(in_flight, share, deferred), self.least)

    def peak(
        self: StageBytes[float], in_flight: float, share: float, process_bytes: float, deferred: float = 0
    ) -> Peak:
        """Returns the peak over the whole step, with what other stages of the rank use as well: the process, too."""
        peak = float(self.at(in_flight, share, deferred))
        return Peak(peak, peak - float(self.beside_others(in_flight, share, deferred)) + process_bytes)

    def on_top_of(self, lasting: Bytes) -> StageBytes[Bytes]:
        """Returns the same with something that is always there."""
        return replace(self, once=self.once + lasting, least=self.least + lasting, first=self.first + lasting)

    def map(self, change: Callable[[Bytes], Bytes]) -> StageBytes[Bytes]:
        """Returns the same with every part changed."""
        return StageBytes(*(change(getattr(self, part.name)) for part in fields(self)))


def _greatest(*parts: Bytes) -> Bytes:
    """Returns the greatest of some numbers, or of each entry of some arrays."""
    if isinstance(parts[0], float):  # a comparison of two numbers takes numpy ten times as long
        return max(parts)
    return functools.reduce(np.maximum, parts)


def _depth_in(room: Array, each: Array) -> Array:
    """Returns how many micro-batches there is room for, with a fraction."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(each > 0, room / each, np.where(room >= 0, np.inf, 0.0))


def deepest(held: StageBytes[Array], limit: float, least_share: float) -> Array:
    """Returns the greatest depth at which a peak may be within a limit; a replica has `least_share` or more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        some, whole = (
            np.floor(np.where(held.each > 0, (limit - part) / held.each, np.where(part <= limit, np.inf, 0.0)))
            for part in (held.once, held.first)
        )
    some = np.maximum(some, 0.0)
    whole = np.minimum(whole, some + 1.0)
    depth = np.maximum(some, np.where(whole >= least_share, whole, 0.0))
    return np.where(held.least <= limit, depth, 0.0)
