"""Looks now and then whether a step that has trained gives in parts what it gives in the whole: see `evidence/`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from autovaruna.config.settings import Settings
from autovaruna.errors import AutoVarunaError
from autovaruna.evidence.clock import SHARE, Clock
from autovaruna.evidence.stage_rows import Observed, Terms, UntriedError
from autovaruna.evidence.witness import StageWitness
from autovaruna.graph.random import RandomStream
from autovaruna.graph.side_effects import restored_attributes
from autovaruna.graph.traced import TracedModel
from autovaruna.heap import other_sizes
from autovaruna.log import warn_once
from autovaruna.ranks.world import World, gather_on_all
from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.program import ModelCall, Program
from autovaruna.schedule.pipeline import Kind
from autovaruna.stage.module import StageModule

logger = logging.getLogger(__name__)
_MOST_SAMPLES, _MOST_COUNTED = 6, 16
"""How many samples are looked at where a part of one micro-batch cannot be tried, and where counts of several meet."""
_WHAT = "running samples of the step in parts"
_UNTRIED = (
    "%s was not run again on parts of a micro-batch: %s. So nobody knows whether micro-batches give what the whole "
    "batch does; compare a loss with plain PyTorch, or pass check_parts=False"
)


@dataclass(eq=False)
class Witness:
    """Looks at steps of one model on this rank.

    Attributes:
        memory_bytes: what this rank may use.
        tries_parts: whether samples are run again; else ranks but tell each other of what else they have looked at.
        is_free: see `Terms`.
        step: returns the number of the step that the script is at; `saved`: says what was saved at a step or before.
        seconds: what this rank has taken for other looks since the last one; `trace_seconds`: for traces.
    """

    model: nn.Module
    world: World
    device: torch.device
    clock: Clock
    memory_bytes: float
    tries_parts: bool
    is_free: bool
    step: Callable[[], int]
    saved: Callable[[int], str]
    seconds: float = 0.0
    trace_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._stages: dict[tuple[str, int], StageWitness] = {}
        self._looked: tuple[int, float] | None = None
        self._right: dict[str, int] = {}  # the last step at which all was right, by graph

    def begin(self, call: ModelCall) -> Observation | None:
        """Counts a step; returns what is to be recorded of it, if anything."""
        kinds, tries = call.program.kinds, self.tries_parts and call.program.is_parted
        if not (tries or call.needs_gradient) or not self.clock.begin(*kinds, trains=call.needs_gradient):
            return None
        return Observation(self, call, self.step(), tries and any(map(self.clock.is_new, kinds)))

    def since(self, key: str) -> str:
        """Says, of an error that is found now, from which step on numbers may be wrong; empty: from this one on."""
        now, right = self.step(), self._right.get(key)
        if right is None or now <= right + 1:
            return ""
        return f" Between step {right} and step {now} numbers may have been wrong; {self.saved(right)}."

    def of(self, stage: StageModule, traced: TracedModel) -> StageWitness:
        key = traced.key, stage.index
        if key not in self._stages:
            self._stages[key] = StageWitness(stage, traced, self.model, self.device)
        return self._stages[key]

    def most_at_once(self, program: Program, stage: int) -> int:
        """Returns how many samples are looked at together: as many as rank and plan have memory for."""
        most = _MOST_COUNTED if program.traced.joins_counts else _MOST_SAMPLES
        return max(2, int(min(most, program.graph.plan.samples_inside(stage, self.memory_bytes))))

    def chosen(self, program: Program) -> dict[int, list[int]]:
        """Returns the micro-batches that count, by stage: the last of the largest, until there are enough samples."""
        found, sizes = dict[int, list[int]](), {m: part.size for m, part in program.batch.micro_batches.items()}
        for each in program.graph.instructions if program.is_parted else ():
            if each.kind is Kind.FORWARD and each.micro_batch in sizes:
                found.setdefault(each.stage, []).append(each.micro_batch)
        chosen: dict[int, list[int]] = {}
        for stage, parts in found.items():
            size = max(map(sizes.__getitem__, parts))
            enough = max(1, self.most_at_once(program, stage) // size)
            chosen[stage] = [m for m in parts if sizes[m] == size][-enough:]
        return chosen

    def forget(self, key: str) -> None:
        self._right.pop(key, None)
        self._stages = {each: found for each, found in self._stages.items() if each[0] != key}

    def look(self, call: ModelCall, step: int, act: Callable[[], str], *, is_over: bool) -> None:
        """Has all ranks look at a step, or at its forward, where an error of one is one of all. Collective."""
        began, steps, key = perf_counter(), self.clock.num_steps, call.program.traced.key
        per_step = 0.0
        if self._looked is not None and steps > self._looked[0]:
            per_step = (began - self._looked[1]) / (steps - self._looked[0])

        def timed() -> tuple[str, float, float, float]:
            try:
                return act(), self.seconds + perf_counter() - began, per_step, self.trace_seconds
            except AutoVarunaError as error:
                raise type(error)(f"{error}{self.since(key)}") from error

        texts, seconds, steps_seconds, traces_seconds = zip(*gather_on_all(self.world, timed, _WHAT), strict=True)
        if is_over:
            took = max(steps_seconds), max(traces_seconds)
            self.clock.record(*call.program.kinds, seconds=seconds, step_seconds=took[0], trace_seconds=took[1])
            self._looked, self._right[key] = (steps, perf_counter()), step
            self.seconds = self.trace_seconds = 0.0
        for untried in dict.fromkeys(filter(None, texts)):
            if self.world.rank == 0:
                warn_once(logger, self.model, untried)


def witness_of(
    settings: Settings,
    model: nn.Module,
    world: World,
    device: torch.device,
    step_seconds: float,
    memory_bytes: float,
    step: Callable[[], int],
    saved: Callable[[int], str],
) -> Witness | None:
    """Returns what looks at some steps, which are predicted to take so long; None: that is turned off."""
    if not (settings.recheck_trace or settings.check_parts):
        return None
    share = SHARE if settings.recheck_trace is True else float(settings.recheck_trace)
    is_free = settings.micro_batch_weight is not None or settings.batch_statistics != "exact"
    clock, tries_parts = Clock(share, step_seconds), settings.check_parts
    return Witness(model, world, device, clock, memory_bytes, tries_parts, is_free, step, saved)


class Observation:
    """What this rank records of one step, and looks at when the step's activations are gone.

    `observed` are the micro-batches that count, by stage and micro-batch, once their forward has begun; `is_first` says
    whether the step is the first of its kind in which samples are run again.
    """

    def __init__(self, witness: Witness, call: ModelCall, step: int, is_first: bool) -> None:
        self._witness, self._call, self._step, self.is_first = witness, call, step, is_first
        self._chosen = witness.chosen(call.program) if witness.tries_parts else {}
        self.observed: dict[tuple[int, int], Observed] = {}

    def arrive(
        self, stage: StageModule, part: MicroBatch, tensors: Mapping[str, Tensor], of_batch: Mapping[str, Tensor]
    ) -> None:
        """Records what a forward works on, if the micro-batch is one that counts."""
        if part.index not in self._chosen.get(stage.index, ()):
            return
        call, traced = self._call, self._call.program.traced
        stream = RandomStream(call.seed, call.number, part.index, self._witness.device)
        before = {name: each.clone() for name, each in stage.changed_state(traced.changed_state).items()}
        self.observed[stage.index, part.index] = Observed(part.size, stream, tensors, of_batch, before)

    def go_back(self, stage: StageModule, part: MicroBatch, name: str, gradient: Tensor) -> None:
        """Records what came back for a result."""
        if (found := self.observed.get((stage.index, part.index))) is not None:
            found.gradients[name] = gradient

    def compare(self, *, is_over: bool = True) -> None:
        """Makes sure that samples give the same together and apart; once the step is over, in its backward, too.

        Collective.

        Raises:
            TraceError, InputError: they do not.
        """
        traced, model = self._call.program.traced, self._witness.model
        with restored_attributes(model) if traced.kept else nullcontext():  # hooks may keep lists
            self._witness.look(self._call, self._step, self._compare, is_over=is_over)

    def _compare(self) -> str:
        """Returns why a stage was not tried."""
        program, untried = self._call.program, ""
        for index, parts in self._chosen.items():
            stage = program.graph.stages[index]
            witness = self._witness.of(stage, program.traced)
            terms = Terms(
                num_samples=program.batch.num_samples,
                most_at_once=self._witness.most_at_once(program, index),
                is_sum=program.graph.is_sum,
                is_free=self._witness.is_free,
                wanted=frozenset(program.wanted[index]),
                lengths=program.lengths,
            )
            try:
                with other_sizes():
                    error = witness.refusal([self.observed[index, m] for m in parts], terms)
            except UntriedError as reason:
                error, untried = None, _UNTRIED % (type(self._witness.model).__qualname__, reason)
            if error is not None:
                raise error
        return untried
