"""Predicts the memory of a stage on one replica.

One formula serves a single stage (numbers) and all ranges of a chain at once (matrices): see `Holdings`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autovaruna.planner.memory.holdings import Holdings
from autovaruna.planner.memory.stage_bytes import Bytes, StageBytes


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
        has_own_inputs: whether each rank passes samples of its own; else all pass the same ones.
    """

    optimizer_bytes_factor: float
    needs_gradient: bool = True
    process_bytes: float = 0.0
    fragmentation: float = 1.0
    work_of_all: float = 0.0
    work_of_largest: float = 0.0
    has_own_inputs: bool = True

    def fixed(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes that are there whether or not micro-batches run: what lasts, and gradients."""
        return self.lasting(held) + self.gradients(held)

    def lasting(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes that stay from step to step: parameters, buffers, optimizer state, the process."""
        state = held.parameters + held.buffers + self.process_bytes
        return state + held.trained * self.optimizer_bytes_factor if self.needs_gradient else state

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

    def updating(self, held: Holdings[Bytes]) -> Bytes:
        """Returns the bytes on top when no micro-batch is there: tied gradients meet, then the optimizer steps."""
        if not self.needs_gradient:
            return held.trained * 0.0
        step = held.trained * self.work_of_all + held.largest * self.work_of_largest - (held.tied - held.tied_once)
        most: Bytes = np.maximum(step, held.tied_once)
        return most

    def before_gradients(self, held: Holdings[Bytes]) -> Bytes:
        """Returns what the first backward of a step needs more than others; it is less: gradients come with it."""
        if not self.needs_gradient:
            return held.trained * 0.0
        more: Bytes = np.minimum(held.work_of_first - held.work - self.gradients(held), 0.0)
        return more

    def of_stage(self, held: Holdings[Bytes], needs_recompute: bool) -> StageBytes[Bytes]:
        """Returns the peak on one replica, for any number of forwards not yet backwarded.

        Args:
            held: what the stage holds.
            needs_recompute: whether it recomputes.
        """
        each, messages, running, updating, deferred = (
            part * self.fragmentation
            for part in (
                self.per_micro_batch(held, needs_recompute),
                self.messages(held),
                self.running(held, needs_recompute),
                self.updating(held),
                held.deferred,
            )
        )
        gradients = self.gradients(held)
        once = gradients + messages + running
        first, least = once + self.before_gradients(held), gradients + updating
        return StageBytes(once, each, least, first, running, gradients, deferred).on_top_of(self.lasting(held))
