"""Remembers the peaks of stages: a search asks for the same ones again and again."""

from __future__ import annotations

from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.memory.stage_bytes import StageBytes
from autovaruna.planner.memory.stage_memory import MemoryModel
from autovaruna.planner.records import Peak


class Peaks:
    """The peaks of stages on one of their replicas, with M micro-batches.

    Args:
        model: the rules of memory.
        num_micro_batches: M.
    """

    def __init__(self, model: MemoryModel, num_micro_batches: int) -> None:
        self.model, self.num_micro_batches = model, num_micro_batches
        self._of_stages: dict[tuple[int, bool], tuple[Holdings[float], StageBytes[float]]] = {}
        self._known: dict[tuple[int, bool, int, int, int, bool], Peak] = {}

    def of(
        self,
        held: Holdings[float],
        needs_recompute: bool,
        deferred: int,
        in_flight: int,
        num_replicas: int,
        *,
        is_short: bool = False,
    ) -> Peak:
        """Returns the peak of a stage.

        Args:
            held: what it holds; it is known by its identity, and kept.
            needs_recompute, deferred, in_flight: as in `StagePlan`.
            num_replicas: how many share its micro-batches.
            is_short: whether the replica has one micro-batch less than others.
        """
        key = id(held), needs_recompute, deferred, in_flight, num_replicas, is_short
        peak = self._known.get(key)
        if peak is None:
            share = max(-(-self.num_micro_batches // num_replicas) - is_short, 1)
            stage, most = self._of_stage(held, needs_recompute), share if is_short else in_flight
            peak = stage.peak(min(in_flight, most), share, self.model.process_bytes, deferred)
            self._known[key] = peak
        return peak

    def _of_stage(self, held: Holdings[float], needs_recompute: bool) -> StageBytes[float]:
        """Returns the peak of a stage for any number of forwards not yet backwarded."""
        key = id(held), needs_recompute
        if key not in self._of_stages:
            self._of_stages[key] = held, self.model.of_stage(held, needs_recompute)
        return self._of_stages[key][1]
