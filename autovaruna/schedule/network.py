"""Builds the replicas of a pipeline and the routes between them, as a simulation starts."""

from __future__ import annotations

from collections import Counter

from autovaruna.schedule.costs import work_seconds
from autovaruna.schedule.instruction import Kind
from autovaruna.schedule.messages import Line, Lines, Route, Wires
from autovaruna.schedule.pipeline import Edge, Pipeline
from autovaruna.schedule.policy import Policy
from autovaruna.schedule.replica import Inbox, Replica


class Network:
    """Holds the replicas and routes of one simulation.

    Attributes:
        stages: ``stages[s][i]`` is replica i of stage s.
        by_rank: the replicas of each rank, deepest stage first.
        routes: ``routes[kind][s]`` is where an instruction of this kind at stage s sends its result.
    """

    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        activations = Counter([edge.destination for edge in pipeline.edges])
        gradients = Counter([edge.source for edge in pipeline.edges if edge.needs_gradient])
        self.stages = [
            [
                _replica(pipeline, policy, stage, index, activations[stage], gradients[stage])
                for index in range(times.num_replicas)
            ]
            for stage, times in enumerate(pipeline.stages)
        ]
        self.by_rank: list[list[Replica]] = [[] for _ in range(pipeline.num_ranks)]
        for stage in reversed(self.stages):
            for replica in stage:
                self.by_rank[replica.rank].append(replica)
        self.routes: dict[Kind, list[list[Route]]] = {kind: [[] for _ in self.stages] for kind in Kind}
        lines = Lines(Line)
        for edge in pipeline.edges:
            self._join(edge, pipeline, lines)
            if edge.needs_gradient and pipeline.needs_gradients:
                self._join_back(edge, pipeline, lines)

    def replicas(self) -> list[Replica]:
        """Returns all replicas, by stage."""
        return [replica for stage in self.stages for replica in stage]

    def _join(self, edge: Edge, pipeline: Pipeline, lines: Lines) -> None:
        inboxes = [replica.activations for replica in self.stages[edge.destination]]
        wires = Wires(lines, pipeline, edge.source, edge.destination, edge.forward_bytes)
        self._route(Kind.FORWARD, edge.source, edge.destination, inboxes, wires)

    def _join_back(self, edge: Edge, pipeline: Pipeline, lines: Lines) -> None:
        inboxes = [replica.gradients for replica in self.stages[edge.source]]
        wires = Wires(lines, pipeline, edge.destination, edge.source, edge.backward_bytes)
        self._route(Kind.BACKWARD, edge.destination, edge.source, inboxes, wires)

    def _route(self, kind: Kind, sender: int, receiver: int, inboxes: list[Inbox], wires: Wires) -> None:
        route = Route(len(self.stages[sender]), self.stages[receiver], inboxes, wires)
        self.routes[kind][sender].append(route)


def _replica(
    pipeline: Pipeline, policy: Policy, stage: int, index: int, num_activations: int, num_gradients: int
) -> Replica:
    """Returns a replica that waits for so many messages before a forward, and so many before a backward."""
    ranks, share = pipeline.stages[stage].ranks, pipeline.share(stage, index)
    inboxes = Inbox(share, num_activations), Inbox(share, num_gradients)
    replica = Replica(ranks[index], stage, index, len(ranks), share, *inboxes)
    replica.needs_gradients = pipeline.needs_gradients
    replica.num_later = pipeline.num_stages - 1 - stage
    if pipeline.needs_gradients:
        replica.depth = policy.depth(pipeline, stage, index)
        replica.needs_recompute = policy.recomputes(pipeline, stage)
        replica.is_split = policy.splits(pipeline, stage)
        replica.most_deferred = pipeline.stages[stage].deferred
    replica.seconds = work_seconds(pipeline, stage, index, is_split=replica.is_split)
    return replica
