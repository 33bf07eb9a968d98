"""Simulates a step of a pipeline, instruction by instruction, over links that are busy one message at a time."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from heapq import heappop, heappush
from itertools import chain

from autovaruna.errors import ScheduleError
from autovaruna.schedule.bound import Bounds
from autovaruna.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    TICKS_PER_SECOND,
    Kind,
    Pipeline,
    exact,
)
from autovaruna.schedule.registry import Policy
from autovaruna.schedule.replica import Lines, RankLine, Replica, Route, Wires
from autovaruna.schedule.simulation import Act, AllReduce, Simulation, ends_of, on_shared_cores


def reductions(pipeline: Pipeline, acts: tuple[list[Act], ...]) -> tuple[AllReduce, ...]:
    """Returns the all-reduces that take time, in the order in which their stages end."""
    last = _ends_of_gradients(pipeline, acts)
    free = [0.0] * pipeline.num_ranks
    placed = []
    for stage in sorted(range(pipeline.num_stages), key=lambda s: (last[s], -s)):
        times = pipeline.stages[stage]
        ranks, seconds, lead = times.ranks, exact(times.reduce_seconds), exact(times.reduce_lead_seconds)
        if seconds > 0 and pipeline.needs_gradients:
            start = max(last[stage] - lead, max(free[rank] for rank in ranks))
            placed.append(AllReduce(stage, ranks, start, start + seconds))
            for rank in ranks:
                free[rank] = start + seconds
    return tuple(placed)


def _ends_of_gradients(pipeline: Pipeline, acts: tuple[list[Act], ...]) -> list[float]:
    last = [0.0] * pipeline.num_stages
    for row in acts:
        for _, end, replica, kind, _ in row:
            if end > last[replica.stage] and kind is BACKWARD:
                last[replica.stage] = end
    return last


def simulate(pipeline: Pipeline, policy: Policy) -> Simulation:
    """Simulates one step under a policy.

    Raises:
        ScheduleError: the policy needs more in flight than the plan allows, or left all ranks waiting.
    """
    return _Simulator(pipeline, policy).run()


def simulate_below(
    pipeline: Pipeline, policy: Policy, below: float, bounds: Bounds | None = None
) -> tuple[Simulation | None, int]:
    """Simulates one step, until it is certain that it does not take less than `below`: then there is no simulation.

    How many instructions were simulated is returned as well. `bounds` are of the pipeline, if they are at hand.

    Raises:
        ScheduleError: as `simulate` does, if it comes that far.
    """
    bounds = (bounds or Bounds(pipeline)) if below < math.inf else None
    simulator, found = _Simulator(pipeline, policy, below, bounds), None
    with suppress(_TooLongError):
        found = simulator.run()
    return found, sum(map(len, simulator.acts))


class _TooLongError(Exception):
    """Ends a simulation whose step takes too long."""


class _Simulator:
    """Runs one simulation.

    The queue holds (seconds, rank): the end of the rank's instruction, or, for an idle rank, the arrival of a message.

    Attributes:
        stages: ``stages[s][i]`` is replica i of stage s.
        by_rank: the replicas of each rank, deepest stage first.
        routes: ``routes[kind][s]`` is where an instruction of this kind at stage s sends its result.
    """

    def __init__(
        self, pipeline: Pipeline, policy: Policy, below: float = math.inf, bounds: Bounds | None = None
    ) -> None:
        self.pipeline, self.policy = pipeline, policy
        activations = Counter([edge.destination for edge in pipeline.edges])
        gradients = Counter([edge.source for edge in pipeline.edges if edge.needs_gradient])
        self.stages = [
            [self._replica(s, i, (activations[s], gradients[s])) for i in range(times.num_replicas)]
            for s, times in enumerate(pipeline.stages)
        ]
        self.by_rank: list[list[Replica]] = [[] for _ in range(pipeline.num_ranks)]
        for replica in chain(*reversed(self.stages)):
            self.by_rank[replica.rank].append(replica)
        self.routes = self._routes()
        self.latest = [below] * pipeline.num_ranks  # starts of a rank's next instruction: its work and its tail follow
        if bounds:
            work = [sum(replica.work_seconds for replica in replicas) for replicas in self.by_rank]
            pairs = zip(work, bounds.rank_tails, strict=True)
            self.latest = [below - each - tail + 1.0 / TICKS_PER_SECOND for each, tail in pairs]
        self.running: list[Act | None] = [None] * pipeline.num_ranks
        self.acts: tuple[list[Act], ...] = tuple([] for _ in range(pipeline.num_ranks))
        self.queue = [(0.0, rank) for rank, replicas in enumerate(self.by_rank) if replicas]

    def _replica(self, stage: int, index: int, num_messages: tuple[int, int]) -> Replica:
        pipeline, policy = self.pipeline, self.policy
        depth = policy.depth(pipeline, stage, index) if pipeline.needs_gradients else pipeline.num_micro_batches
        return Replica(pipeline, stage, index, num_messages, depth, policy.recomputes(pipeline, stage))

    def _routes(self) -> dict[Kind, list[list[Route]]]:
        pipeline, stages = self.pipeline, self.stages
        routes: dict[Kind, list[list[Route]]] = {kind: [[] for _ in stages] for kind in Kind}
        lines = Lines(RankLine)
        for edge in pipeline.edges:
            s, t = edge.source, edge.destination
            inboxes = [replica.activations for replica in stages[t]]
            wires = Wires(lines, pipeline, s, t, edge.forward_bytes)
            routes[FORWARD][s].append(Route(len(stages[s]), stages[t], inboxes, wires))
            if edge.needs_gradient and pipeline.needs_gradients:
                inboxes = [replica.gradients for replica in stages[s]]
                wires = Wires(lines, pipeline, t, s, edge.backward_bytes)
                routes[BACKWARD][t].append(Route(len(stages[t]), stages[s], inboxes, wires))
        return routes

    def run(self) -> Simulation:
        while self.queue:
            now = self.queue[0][0]
            idle = self._happen(now)
            for rank in sorted(idle) if len(idle) > 1 else idle:
                self._choose(rank, now)
        if not all(replica.is_done for stage in self.stages for replica in stage):
            name = self.policy.name
            raise ScheduleError(f"policy {name} waits on every rank; a policy must pick something that may run")
        return self._result()

    def _happen(self, now: float) -> set[int]:
        """Ends what ends now, and returns the ranks that may have something new to run."""
        queue, running, routes = self.queue, self.running, self.routes
        idle: set[int] = set()
        while queue and queue[0][0] == now:
            rank = heappop(queue)[1]
            act = running[rank]
            if act is None:
                idle.add(rank)
            elif act[1] == now:
                running[rank] = None
                idle.add(rank)
                _, _, sender, kind, k = act
                for route in routes[kind][sender.stage]:
                    receiver, arrival = route.send(sender.index, k, now)
                    if running[receiver] is None:
                        if arrival <= now:
                            idle.add(receiver)
                        else:
                            heappush(queue, (arrival, receiver))
        return idle

    def _choose(self, rank: int, now: float) -> None:
        """Starts what the policy picks, or has the rank wake when the next known message arrives."""
        replicas, can_start = self.by_rank[rank], False
        for replica in replicas:
            if replica.known_until <= now:
                replica.refresh(now)
            if replica.can_start:
                can_start = True
        choice = self.policy.pick(replicas) if can_start else None
        if choice is None:
            wake = min([replica.known_until for replica in replicas])
            if wake < math.inf:
                heappush(self.queue, (wake, rank))
            return
        if now > self.latest[rank]:
            raise _TooLongError
        replica, kind = choice
        seconds = replica.seconds[kind]
        self.latest[rank] += seconds
        end = now + seconds
        act = now, end, replica, kind, replica.start(kind)
        self.running[rank] = act
        self.acts[rank].append(act)
        heappush(self.queue, (end, rank))

    def _result(self) -> Simulation:
        pipeline = self.pipeline
        reduced = reductions(pipeline, self.acts)
        ends = ends_of(self.acts, reduced)
        optimizer = (pipeline.needs_gradients and pipeline.optimizer_seconds) or (0.0,) * pipeline.num_ranks
        optimizer = tuple(exact(seconds) for seconds in optimizer)
        found = Simulation(
            step_seconds=max(end + seconds for end, seconds in zip(ends, optimizer, strict=True)),
            reductions=reduced,
            acts=self.acts,
            overhead_seconds=exact(pipeline.overhead_seconds),
            optimizer_seconds=optimizer,
        )
        return found if pipeline.cores == math.inf else on_shared_cores(found, pipeline.cores)
