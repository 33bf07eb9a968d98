"""Simulates a step: makes the schedule and predicts its time, in one.

Event-driven: whenever a rank is idle, the policy picks among the instructions that it may run. Everything that happens
at one time happens before any choice at that time, and ranks choose in ascending order, so a simulation is
deterministic.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from autovaruna.errors import ScheduleError
from autovaruna.schedule.bound import Bounds
from autovaruna.schedule.fixed import FixedOrder
from autovaruna.schedule.instruction import Schedule
from autovaruna.schedule.messages import TICKS_PER_SECOND, exact
from autovaruna.schedule.network import Network
from autovaruna.schedule.pipeline import Pipeline
from autovaruna.schedule.policy import Policy
from autovaruna.schedule.reductions import reductions
from autovaruna.schedule.simulation import Act, Simulation


def simulate(pipeline: Pipeline, policy: Policy) -> Simulation:
    """Simulates one step under a policy.

    Raises:
        ScheduleError: the policy needs more in flight than the plan allows, or left all ranks waiting.
    """
    return _Simulator(pipeline, policy).run()


def step_seconds(pipeline: Pipeline, policy: Policy, below: float = math.inf, bounds: Bounds | None = None) -> float:
    """Returns the seconds of one step, infinite as soon as it is certain that they are not below `below`.

    Args:
        pipeline: what to simulate.
        policy: the order of its instructions.
        below: steps that take as long or longer are of no use.
        bounds: of the pipeline, if they are at hand.

    Raises:
        ScheduleError: as `simulate` does, if it comes that far.
    """
    bounds = (bounds or Bounds(pipeline)) if below < math.inf else None
    try:
        return _Simulator(pipeline, policy, below, bounds).run().step_seconds
    except _TooLongError:
        return math.inf


def replay(pipeline: Pipeline, schedule: Schedule) -> Simulation:
    """Simulates one step with the order of instructions given; the plan's in-flight depth is not enforced.

    Raises:
        ScheduleError: the schedule cannot run to its end.
    """
    return _Simulator(pipeline, FixedOrder(schedule)).run()


class _TooLongError(Exception):
    """Ends a simulation whose step takes too long."""


class _Simulator:
    """Runs one simulation.

    The queue holds (seconds, rank): the end of the rank's instruction, or, for an idle rank, the arrival of a message.
    """

    def __init__(
        self, pipeline: Pipeline, policy: Policy, below: float = math.inf, bounds: Bounds | None = None
    ) -> None:
        self.pipeline, self.policy = pipeline, policy
        self.network = Network(pipeline, policy)
        self.latest = self._latest_starts(below, bounds) if bounds else [below] * pipeline.num_ranks
        self.running: list[Act | None] = [None] * pipeline.num_ranks
        self.acts: tuple[list[Act], ...] = tuple([] for _ in range(pipeline.num_ranks))
        self.queue = [(0.0, rank) for rank, replicas in enumerate(self.network.by_rank) if replicas]

    def run(self) -> Simulation:
        """Runs all instructions and returns what happened."""
        while self.queue:
            now = self.queue[0][0]
            idle = self._happen(now)
            for rank in sorted(idle) if len(idle) > 1 else idle:
                self._choose(rank, now)
        if not all(replica.is_done for replica in self.network.replicas()):
            raise ScheduleError(self.policy.explain(self.network.by_rank))
        return self._result()

    def _latest_starts(self, below: float, bounds: Bounds) -> list[float]:
        """Returns when each rank has to start its next instruction, should the step take less than `below`.

        What is left of its work comes after that, and then what no schedule beats.
        """
        work = [sum(replica.work_seconds for replica in replicas) for replicas in self.network.by_rank]
        return [below - each - tail + 1.0 / TICKS_PER_SECOND for each, tail in zip(work, bounds.tails, strict=True)]

    def _happen(self, now: float) -> set[int]:
        """Ends what ends now, and returns the ranks that may have something new to run."""
        queue, running, routes = self.queue, self.running, self.network.routes
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
        replicas, can_start = self.network.by_rank[rank], False
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
        ends = [acts[-1][1] if acts else 0.0 for acts in self.acts]
        reduced = reductions(pipeline, self.acts)
        for reduction in reduced:
            for rank in reduction.ranks:
                ends[rank] = max(ends[rank], reduction.end_seconds)
        optimizer = (pipeline.needs_gradients and pipeline.optimizer_seconds) or (0.0,) * pipeline.num_ranks
        optimizer = tuple(exact(seconds) for seconds in optimizer)
        return Simulation(
            step_seconds=max(end + seconds for end, seconds in zip(ends, optimizer, strict=True)),
            peak_in_flight=tuple(tuple(replica.peak for replica in stage) for stage in self.network.stages),
            reductions=reduced,
            acts=self.acts,
            overhead_seconds=exact(pipeline.overhead_seconds),
            optimizer_seconds=optimizer,
        )
