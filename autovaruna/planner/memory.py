"""Predicts the memory of a stage on one replica.

One formula serves a single stage (numbers) and all ranges of a chain at once (matrices): see `Holdings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Array, Costs
from autovaruna.planner.ranges import RangeTables

Bytes = TypeVar("Bytes", float, Array)


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
        deferred: what is kept for weight gradients that are computed apart from backward.
    """

    parameters: Bytes
    trained: Bytes
    largest: Bytes
    tied: Bytes
    tied_once: Bytes
    buffers: Bytes
    inputs: Bytes
    received: Bytes
    sent: Bytes
    gradients_received: Bytes
    gradients_sent: Bytes
    saved: Bytes
    work: Bytes
    deferred: Bytes = 0.0  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class StageBytes(Generic[Bytes]):
    """The peak of a stage as its in-flight depth asks for it.

    Attributes:
        once: there as long as micro-batches run, at any depth.
        each: on top for each micro-batch in flight.
        least: the peak after the last backward, in the optimizer's step.
    """

    once: Bytes
    each: Bytes
    least: Bytes

    def at(self, in_flight: float) -> Bytes:
        """Returns the peak over the whole step."""
        peak: Bytes = np.maximum(self.once + self.each * in_flight, self.least)
        return peak

    def map(self, change: Callable[[Bytes], Bytes]) -> StageBytes[Bytes]:
        """Returns the same with every part changed."""
        return StageBytes(change(self.once), change(self.each), change(self.least))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The rules by which holdings add up.

    Attributes:
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
        needs_gradient: False if only forwards run.
        process_bytes: what a rank holds beside tensors.
        heap_share: what the allocator needs on top of each byte that one micro-batch needs: it fills other holes than
            the one before it has left.
        work_of_all, work_of_largest: bytes that the optimizer's step needs on top, for each byte of all trained
            parameters and of the largest of them.
    """

    optimizer_bytes_factor: float
    needs_gradient: bool = True
    process_bytes: float = 0.0
    heap_share: float = 0.0
    work_of_all: float = 0.0
    work_of_largest: float = 0.0

    def fixed(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes that are there whether or not a step runs: state, gradients, optimizer."""
        state = held.parameters + held.buffers + self.process_bytes
        return (
            state + held.trained * (1.0 + self.optimizer_bytes_factor) + (held.tied - held.tied_once)
            if self.needs_gradient
            else state
        )

    def per_micro_batch(self, held: Holdings[Bytes], needs_recompute: bool) -> Bytes:
        """Returns the bytes of each micro-batch in flight.

        What is received is a leaf that lives until its backward, and what is sent stays until its gradient is back.
        """
        if not self.needs_gradient:
            return held.inputs * 0.0
        kept = held.received + held.inputs
        return kept if needs_recompute else kept + held.saved + held.sent

    def passing(self, held: Holdings[Bytes], needs_recompute: bool) -> Bytes:
        """Returns the bytes of the micro-batch at work, and of messages on their way."""
        passing = held.received + held.work
        if not self.needs_gradient:
            return passing + held.inputs + held.sent
        passing = passing + held.gradients_received + held.gradients_sent
        return passing + held.saved + held.sent if needs_recompute else passing

    def updating(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes on top when no micro-batch is there: tied gradients meet, then the optimizer steps."""
        if not self.needs_gradient:
            return held.trained * 0.0
        step = held.trained * self.work_of_all + held.largest * self.work_of_largest - (held.tied - held.tied_once)
        most: Bytes = np.maximum(step, held.tied_once)
        return most

    def of_stage(self, held: Holdings[Bytes], needs_recompute: bool, deferred: int = 0) -> StageBytes[Bytes]:
        """Returns the peak on one replica, for any number of forwards not yet backwarded.

        Args:
            held: what the stage holds.
            needs_recompute: whether it recomputes.
            deferred: backwards whose weight gradients are not yet computed.
        """
        fixed, each = self.fixed(held), self.per_micro_batch(held, needs_recompute)
        passing = self.passing(held, needs_recompute)
        holes = (passing + each) * self.heap_share
        once = fixed + passing + holes
        if deferred:
            once = once + held.deferred * (deferred + self.heap_share)
        return StageBytes(once, each, fixed + self.updating(held))

    def total(self, held: Holdings[Bytes], in_flight: int, needs_recompute: bool, deferred: int = 0) -> Bytes:
        """Returns the peak on one replica with `in_flight` forwards not yet backwarded, and `deferred` backwards."""
        return self.of_stage(held, needs_recompute, deferred).at(in_flight)


def holdings_of_stage(graph: Graph, costs: Costs, blocks: Collection[int]) -> Holdings[float]:
    """Returns what a stage of any blocks holds (not only of a range)."""
    inside, size = set(blocks), math.ceil(costs.micro_batch_size)
    used = [p for p in graph.parameters if inside & set(p.blocks)]
    trained = [p for p in used if p.needs_gradient]
    last = max(inside)
    held = [v for v in graph.values if v.producer in inside or inside & set(v.consumers)]
    received = [v for v in held if v.producer not in inside]
    sent = [v for v in held if max(v.consumers) > last]
    index = sorted(inside)
    return Holdings(
        parameters=float(sum(p.num_bytes for p in used)),
        trained=float(sum(p.num_bytes for p in trained)),
        largest=float(max((p.num_bytes for p in trained), default=0)),
        tied=float(sum(p.num_bytes * len(inside & set(p.blocks)) for p in trained if len(p.blocks) > 1)),
        tied_once=float(sum(p.num_bytes for p in trained if len(p.blocks) > 1)),
        buffers=float(sum(graph.blocks[k].buffer_bytes for k in inside)),
        inputs=sum(i.size.at(size) for i in graph.inputs if inside & set(i.consumers)),
        received=sum(v.size.at(size) for v in received),
        sent=sum(v.size.at(size) for v in sent),
        gradients_received=sum(v.size.at(size) for v in sent if v.needs_gradient),
        gradients_sent=sum(v.size.at(size) for v in received if v.needs_gradient),
        saved=float(costs.saved_bytes[index].sum()),
        work=float(
            (costs.saved_bytes[index].cumsum() + costs.work_bytes[index]).max() - costs.saved_bytes[index].sum()
        ),
        deferred=float(costs.deferred_bytes[index].sum()),
    )


def holdings_of_ranges(tables: RangeTables, costs: Costs) -> Holdings[Array]:
    """Returns what every range of segments holds, as matrices ``[i, j]``; entries with i >= j mean nothing."""
    size = math.ceil(costs.micro_batch_size)
    return Holdings(
        parameters=tables.parameter_bytes,
        trained=tables.trained_bytes,
        largest=tables.largest_bytes,
        tied=tables.tied_bytes,
        tied_once=tables.tied_once_bytes,
        buffers=tables.buffer_bytes,
        inputs=tables.inputs.at(size),
        received=tables.received.at(size),
        sent=tables.sent.at(size),
        gradients_received=tables.gradients_received.at(size),
        gradients_sent=tables.gradients_sent.at(size),
        saved=tables.add_up(costs.saved_bytes),
        work=_work_of_ranges(tables, costs),
        deferred=tables.add_up(costs.deferred_bytes),
    )


def _work_of_ranges(tables: RangeTables, costs: Costs) -> Array:
    """Returns the greatest of what is saved up to a block and what the block needs, less all that is saved."""
    saved = costs.saved_bytes.cumsum()
    at_ends = np.append(0.0, saved)[tables.positions]
    return np.asarray(np.maximum(tables.greatest(saved + costs.work_bytes) - at_ends[None, :], 0.0), dtype=np.float64)


def forbid_empty(table: Array) -> Array:
    """Returns the table with infinity where the range is empty."""
    n = table.shape[0]
    return np.where(np.arange(n)[:, None] < np.arange(n)[None, :], table, np.inf)
