"""Says what a stage holds: of any blocks (numbers), of one range of a chain, and of all its ranges (matrices)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from autovaruna.graph.records import Graph
from autovaruna.planner.costs import Array, Costs
from autovaruna.planner.memory.stage_bytes import Bytes
from autovaruna.planner.ranges import RangeTables, gradient_bytes


@dataclass(frozen=True, slots=True)
class Holdings(Generic[Bytes]):
    """What a stage holds, in bytes; the last ten are for one micro-batch.

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
        work_of_first: what the first backward of a step needs, with the gradients that it makes, on top of all that is
            saved: while a block runs, later ones have made theirs, and what they saved is gone.
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
    work_of_first: Bytes = math.inf  # type: ignore[assignment]


def holdings_of_stage(
    graph: Graph, costs: Costs, blocks: Collection[int], made: Array | None = None
) -> Holdings[float]:
    """Returns what a stage of any blocks holds (not only of a range); `made` are the graph's `gradient_bytes`."""
    inside, size = set(blocks), math.ceil(costs.micro_batch_size)
    used = [p for p in graph.parameters if not inside.isdisjoint(p.blocks)]
    trained = [p for p in used if p.needs_gradient]
    last = max(inside)
    held = [v for v in graph.values if v.producer in inside or not inside.isdisjoint(v.consumers)]
    received = [v for v in held if v.producer not in inside]
    sent = [v for v in held if max(v.consumers) > last]
    index = sorted(inside)
    saved = costs.saved_bytes[index]
    gradients = (gradient_bytes(graph) if made is None else made)[index]
    at_peak, after = saved.cumsum() + costs.work_bytes[index] - saved.sum(), gradients.sum() - gradients.cumsum()
    return Holdings(
        parameters=float(sum(p.num_bytes for p in used)),
        trained=float(sum(p.num_bytes for p in trained)),
        largest=float(max((p.num_bytes for p in trained), default=0)),
        tied=float(sum(p.num_bytes * len(inside & set(p.blocks)) for p in trained if len(p.blocks) > 1)),
        tied_once=float(sum(p.num_bytes for p in trained if len(p.blocks) > 1)),
        buffers=float(sum(graph.blocks[k].buffer_bytes for k in inside)),
        inputs=sum(i.size.at(size) for i in graph.inputs if not inside.isdisjoint(i.consumers)),
        received=sum(v.size.at(size) for v in received),
        sent=sum(v.size.at(size) for v in sent),
        gradients_received=sum(v.size.at(size) for v in sent if v.needs_gradient),
        gradients_sent=sum(v.size.at(size) for v in received if v.needs_gradient),
        saved=float(saved.sum()),
        work=float(at_peak.max()),
        deferred=float(costs.deferred_bytes[index].sum()),
        work_of_first=float((at_peak + after).max()),
    )


def holdings_of_ranges(tables: RangeTables, costs: Costs) -> Holdings[Array]:
    """Returns what every range of segments holds, as matrices ``[i, j]``; entries with i >= j mean nothing."""
    size = math.ceil(costs.micro_batch_size)
    return replace(
        state_of_ranges(tables),
        inputs=tables.inputs.at(size),
        received=tables.received.at(size),
        sent=tables.sent.at(size),
        gradients_received=tables.gradients_received.at(size),
        gradients_sent=tables.gradients_sent.at(size),
        saved=tables.add_up(costs.saved_bytes),
        work=_work_of_ranges(tables, costs, np.zeros_like(costs.work_bytes)),
        deferred=tables.add_up(costs.deferred_bytes),
        work_of_first=_work_of_ranges(tables, costs, tables.gradient_bytes),
    )


def state_of_ranges(tables: RangeTables) -> Holdings[Array]:
    """Returns what every range of segments holds without any micro-batch, as matrices."""
    none = np.zeros(())
    return Holdings(
        parameters=tables.parameter_bytes,
        trained=tables.trained_bytes,
        largest=tables.largest_bytes,
        tied=tables.tied_bytes,
        tied_once=tables.tied_once_bytes,
        buffers=tables.buffer_bytes,
        inputs=none,
        received=none,
        sent=none,
        gradients_received=none,
        gradients_sent=none,
        saved=none,
        work=none,
    )


def _work_of_ranges(tables: RangeTables, costs: Costs, gradients: Array) -> Array:
    """Returns what is saved up to a block, what it needs, and later gradients, less all that is saved; at most."""
    at_peak, at_ends = _work_of_blocks(tables, costs, gradients)
    return np.asarray(np.maximum(tables.greatest(at_peak) - at_ends[None, :], 0.0), dtype=np.float64)


def _work_of_blocks(tables: RangeTables, costs: Costs, gradients: Array) -> tuple[Array, Array]:
    """Returns what is there while each block works, and where a range ends, both with all that came before it."""
    saved, made = costs.saved_bytes.cumsum(), gradients.cumsum()
    return saved + costs.work_bytes - made, (np.append(0.0, saved) - np.append(0.0, made))[tables.positions]


class HoldingsByRange:
    """Says what single ranges of segments hold, to the bit what `holdings_of_ranges` does, without its matrices.

    Args:
        tables: of the graph.
        costs: at some micro-batch size.
    """

    def __init__(self, tables: RangeTables, costs: Costs) -> None:
        self.tables, self.size = tables, math.ceil(costs.micro_batch_size)
        self._saved, self._deferred = tables.prefix(costs.saved_bytes), tables.prefix(costs.deferred_bytes)
        self._work = _work_of_blocks(tables, costs, np.zeros_like(costs.work_bytes))
        self._work_of_first = _work_of_blocks(tables, costs, tables.gradient_bytes)

    def of(self, i: int, j: int) -> Holdings[float]:
        """Returns what the range of the segments i .. j-1 holds."""
        tables, size = self.tables, self.size
        return Holdings(
            parameters=float(tables.parameter_bytes[i, j]),
            trained=float(tables.trained_bytes[i, j]),
            largest=float(tables.largest_bytes[i, j]),
            tied=float(tables.tied_bytes[i, j]),
            tied_once=float(tables.tied_once_bytes[i, j]),
            buffers=float(tables.buffer_bytes[i, j]),
            inputs=tables.inputs.of(i, j, size),
            received=tables.received.of(i, j, size),
            sent=tables.sent.of(i, j, size),
            gradients_received=tables.gradients_received.of(i, j, size),
            gradients_sent=tables.gradients_sent.of(i, j, size),
            saved=max(float(self._saved[j] - self._saved[i]), 0.0),
            work=self._most(i, j, *self._work),
            deferred=max(float(self._deferred[j] - self._deferred[i]), 0.0),
            work_of_first=self._most(i, j, *self._work_of_first),
        )

    def _most(self, i: int, j: int, at_peak: Array, at_ends: Array) -> float:
        positions = self.tables.positions
        return max(float(at_peak[positions[i] : positions[j]].max() - at_ends[j]), 0.0)
