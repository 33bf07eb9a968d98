"""Simulates a step: makes the schedule and predicts its time, in one.

Event-driven: whenever a rank is idle, the policy picks among the instructions that it may run. Everything that happens
at one time happens before any choice at that time, and ranks choose in ascending order, so a simulation is
deterministic. The all-reduce of a stage starts when its last backward has ended on all its replicas, needs no rank's
attention, and those that share a rank go one after another.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from autovaruna.errors import ScheduleError
from autovaruna.schedule.fixed import FixedOrder
from autovaruna.schedule.instruction import Kind, Schedule
from autovaruna.schedule.messages import Route, exact, wiring
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Policy
from autovaruna.schedule.replica import Inbox, Replica
from autovaruna.schedule.simulation import Act, Reduction, Simulation


def simulate(pipeline: Pipeline, policy: Policy) -> Simulation:
    """Simulates one step under a policy.

    Raises:
        ScheduleError: the policy needs more in flight than the plan allows, or left all ranks waiting.
    """
    return _Simulator(pipeline, policy).run()


def replay(pipeline: Pipeline, schedule: Schedule) -> Simulation:
    """Simulates one step with the order of instructions given; the plan's in-flight depth is not enforced.

    Raises:
        ScheduleError: the schedule cannot run to its end.
    """
    return _Simulator(pipeline, FixedOrder(schedule)).run()


class _Simulator:
    def __init__(self, pipeline: Pipeline, policy: Policy) -> None:
        self.pipeline, self.policy = pipeline, policy
        self.stages = [_replicas(pipeline, policy, stage) for stage in range(pipeline.num_stages)]
        self.by_rank: list[list[Replica]] = [[] for _ in range(pipeline.num_ranks)]
        for replica in (replica for stage in reversed(self.stages) for replica in stage):
            self.by_rank[replica.rank].append(replica)
        self.routes: dict[Kind, list[list[Route]]] = {kind: [[] for _ in self.stages] for kind in Kind}
        self._connect()
        self.running: list[Act | None] = [None] * pipeline.num_ranks
        self.acts: tuple[list[Act], ...] = tuple([] for _ in range(pipeline.num_ranks))
        self.queue = [(0.0, rank) for rank, replicas in enumerate(self.by_rank) if replicas]

    def _connect(self) -> None:
        wires = wiring(self.pipeline)
        sources = {Kind.FORWARD: [0] * len(self.stages), Kind.BACKWARD: [0] * len(self.stages)}
        for edge in self.pipeline.edges:
            s, t = edge.source, edge.destination
            sources[Kind.FORWARD][t] += 1
            if edge.needs_gradient:
                sources[Kind.BACKWARD][s] += 1
        for replica in (replica for stage in self.stages for replica in stage):
            n = replica.num_micro_batches
            replica.activations = Inbox(n, sources[Kind.FORWARD][replica.stage])
            replica.gradients = Inbox(n, sources[Kind.BACKWARD][replica.stage])
        for edge in self.pipeline.edges:
            s, t = edge.source, edge.destination
            inboxes = [replica.activations for replica in self.stages[t]]
            self.routes[Kind.FORWARD][s].append(Route(self.stages[t], inboxes, wires(s, t, edge.forward_bytes)))
            if edge.needs_gradient and self.pipeline.needs_gradients:
                inboxes = [replica.gradients for replica in self.stages[s]]
                self.routes[Kind.BACKWARD][t].append(Route(self.stages[s], inboxes, wires(t, s, edge.backward_bytes)))
                for replica in self.stages[s]:
                    replica.consumers.append(self.stages[t])

    def run(self) -> Simulation:
        """Runs all instructions and returns what happened."""
        queue, running = self.queue, self.running
        while queue:
            now = queue[0][0]
            idle: set[int] = set()
            while queue and queue[0][0] == now:
                rank = heappop(queue)[1]
                act = running[rank]
                if act is None:
                    idle.add(rank)
                elif act[1] == now:
                    running[rank] = None
                    idle.add(rank)
                    self._finish(act, now, idle)
            for rank in sorted(idle):
                self._choose(rank, now)
        self._require_done()
        return self._result()

    def _choose(self, rank: int, now: float) -> None:
        replicas = self.by_rank[rank]
        for replica in replicas:
            replica.refresh(now)
        choice = self.policy.pick(replicas)
        if choice is None:
            wake = min(replica.next_arrival(now) for replica in replicas)
            if wake < math.inf:
                heappush(self.queue, (wake, rank))
            return
        replica, kind = choice
        end = now + replica.seconds[kind]
        act = (now, end, replica, kind, replica.start(kind))
        self.running[rank] = act
        self.acts[rank].append(act)
        heappush(self.queue, (end, rank))

    def _finish(self, act: Act, now: float, idle: set[int]) -> None:
        _, _, sender, kind, k = act
        micro_batch = k * sender.stride + sender.index
        for route in self.routes[kind][sender.stage]:
            receiver, arrival = route.send(sender.index, micro_batch, now)
            if self.running[receiver.rank] is None:
                if arrival <= now:
                    idle.add(receiver.rank)
                else:
                    heappush(self.queue, (arrival, receiver.rank))

    def _require_done(self) -> None:
        if not all(replica.is_done for replicas in self.by_rank for replica in replicas):
            raise ScheduleError(self.policy.explain(self.by_rank))

    def _result(self) -> Simulation:
        pipeline = self.pipeline
        ends = [acts[-1][1] if acts else 0.0 for acts in self.acts]
        reductions = self._reductions() if pipeline.needs_gradients else []
        for reduction in reductions:
            for rank in reduction.ranks:
                ends[rank] = max(ends[rank], reduction.end_seconds)
        optimizer = pipeline.optimizer_seconds if pipeline.needs_gradients else ()
        optimizer = tuple(exact(seconds) for seconds in optimizer)
        return Simulation(
            step_seconds=max(end + (optimizer[rank] if optimizer else 0.0) for rank, end in enumerate(ends)),
            peak_in_flight=tuple(tuple(replica.peak for replica in stage) for stage in self.stages),
            reductions=tuple(reductions),
            acts=self.acts,
            overhead_seconds=exact(pipeline.overhead_seconds),
            optimizer_seconds=optimizer,
        )

    def _reductions(self) -> list[Reduction]:
        last = [0.0] * len(self.stages)
        for acts in self.acts:
            for _, end, replica, kind, _ in acts:
                if kind is Kind.BACKWARD:
                    last[replica.stage] = max(last[replica.stage], end)
        free = [0.0] * self.pipeline.num_ranks
        reductions = []
        for stage in sorted(range(len(last)), key=lambda s: (last[s], -s)):
            ranks, seconds = self.pipeline.stages[stage].ranks, exact(self.pipeline.stages[stage].reduce_seconds)
            if seconds > 0:
                start = max(last[stage], max(free[rank] for rank in ranks))
                reductions.append(Reduction(stage, ranks, start, start + seconds))
                for rank in ranks:
                    free[rank] = start + seconds
        return reductions


def _replicas(pipeline: Pipeline, policy: Policy, stage: int) -> list[Replica]:
    times = pipeline.stages[stage]
    needs_recompute = policy.recomputes(pipeline, stage)
    replicas = []
    for i, rank in enumerate(times.ranks):
        replica = Replica(rank, stage, i, times.num_replicas, pipeline.share(stage, i))
        replica.needs_gradients = pipeline.needs_gradients
        replica.needs_recompute = needs_recompute
        replica.depth = policy.depth(pipeline, stage, i) if pipeline.needs_gradients else replica.num_micro_batches
        work = {
            Kind.FORWARD: times.forward_seconds,
            Kind.RECOMPUTE: times.recompute_seconds,
            Kind.BACKWARD: times.backward_seconds,
        }
        overhead = exact(pipeline.overhead_seconds)
        replica.seconds = {kind: exact(seconds / times.speed(i)) + overhead for kind, seconds in work.items()}
        replicas.append(replica)
    return replicas
