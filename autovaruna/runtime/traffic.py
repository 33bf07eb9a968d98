"""Knows which messages each stage gets and sends for a micro-batch; works each kind out once, for all later steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Kind, Mail, Route
from autovaruna.stage.split import Edge, StagePart


class Traffic:
    """The kinds of messages of one job, as one rank sees them.

    Args:
        job: The call.
        rank: This rank.
        mail: Carries the messages; keeps their kinds from step to step.
    """

    def __init__(self, job: Job, rank: int, mail: Mail) -> None:
        self._job = job
        self._rank = rank
        self._known = mail.kinds
        self._batch_inputs = job.split.traced.batch_inputs
        self._travelling = {stage.index: self._batches(stage.inputs) for stage in job.split.stages}
        self._num_replicas = [len(stage.ranks) for stage in job.plan.stages]
        self.origin = ""

    def travelling(self, stage: int) -> tuple[str, ...]:
        """Returns the inputs of a stage that go from rank to rank; others are the same on all of them."""
        return self._travelling[stage]

    def needs_inputs(self, stage: int, part: MicroBatch) -> bool:
        """Whether a stage's inputs of a micro-batch come to this rank by mail."""
        return bool(self._travelling[stage]) and not self._job.batch.has(self._rank, part)

    def activations(self, edge: Edge, part: MicroBatch) -> Kind:
        """Returns the kind of message that takes a cut's values on."""
        return self._of_edge(edge, part, is_back=False)

    def gradients(self, edge: Edge, part: MicroBatch) -> Kind:
        """Returns the kind of message that takes the gradients of a cut's values back."""
        return self._of_edge(edge, part, is_back=True)

    def inputs(self, stage: int, part: MicroBatch) -> Kind:
        """Returns the kind of message that takes inputs to a stage."""
        place = part.index % self._num_replicas[stage]
        key = self._job.graph_key, "inputs", stage, part.origin, place, part.size
        kind = self._known.get(key)
        if kind is None:
            route = Route(part.origin, self._job.rank_of(stage, part.index), 4 * stage + 2)
            kind = self._remember(key, Kind(self._job.graph_key, route, part.size))
        return kind

    def awaited_by_forward(self, stage: StagePart, part: MicroBatch) -> list[Kind]:
        """Returns the messages that a forward waits for."""
        kinds = [self.activations(edge, part) for edge in stage.arriving]
        if self.needs_inputs(stage.index, part):
            kinds.append(self.inputs(stage.index, part))
        return kinds

    def awaited_by_backward(self, stage: StagePart, part: MicroBatch) -> list[Kind]:
        """Returns the messages that a backward waits for."""
        return [self.gradients(edge, part) for edge in stage.leaving if edge.gradients]

    def _of_edge(self, edge: Edge, part: MicroBatch, *, is_back: bool) -> Kind:
        places = part.index % self._num_replicas[edge.source], part.index % self._num_replicas[edge.destination]
        origin = self.origin if is_back else ""
        key = self._job.graph_key, origin, is_back, edge.index, places, part.size
        kind = self._known.get(key)
        if kind is None:
            ends = self._job.rank_of(edge.source, part.index), self._job.rank_of(edge.destination, part.index)
            route = Route(ends[1], ends[0], 4 * edge.index + 1) if is_back else Route(*ends, 4 * edge.index)
            kind = self._remember(key, Kind(self._job.graph_key + origin, route, part.size))
        return kind

    def _remember(self, key: Hashable, kind: Kind) -> Kind:
        self._known[key] = kind
        return kind

    def _batches(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self._batch_inputs)
