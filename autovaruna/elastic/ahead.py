"""Plans for fewer ranks than there are, before any is lost: a job that starts again then need not search.

A rank of a job with a manager writes down what its plan was made from. ``python -m autovaruna.elastic.ahead FILE``
reads that, needs no torch, has the lowest priority, and saves the plans where the next run of the job looks for them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Literal

import msgspec

from autovaruna.config.files import parse, read_record, write_whole
from autovaruna.elastic.job_folder import deployment_name
from autovaruna.errors import AutoVarunaError, DeploymentError
from autovaruna.planner.deployment import Fingerprint, deployment_of, differences, host_counts, load, save
from autovaruna.planner.problem import Problem
from autovaruna.planner.search import make_plan, plan_with_sharing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What a plan was made from, and what it is valid for."""

    problem: Problem
    fingerprint: Fingerprint
    sharing: bool | Literal["auto"]  # whether replicas share the optimizer's state
    folder: str  # where deployments are saved
    shares_memory: bool  # whether ranks share that of their host

    def write(self, path: Path) -> None:
        """Writes it to a file; raises OSError if that cannot be."""
        write_whole(path, json.dumps(msgspec.to_builtins(self)), is_synced=False)

    def fewer(self) -> Iterator[Request]:
        """Yields requests for one host less, once for each numbers of ranks that are left, and for one rank less."""
        hosts = self.problem.cluster.hosts
        found: dict[tuple[int, ...], Request] = {}
        for lost in dict.fromkeys(hosts):
            rest = self._without({rank for rank, host in enumerate(hosts) if host == lost})
            found.setdefault(rest.fingerprint.hosts, rest)
        rest = self._without({len(hosts) - 1})
        found.setdefault(rest.fingerprint.hosts, rest)
        yield from (each for each in found.values() if each.problem.cluster.num_ranks > 1)

    def _without(self, lost: Collection[int]) -> Request:
        cluster, problem = self.problem.cluster, self.problem
        kept = [rank not in lost for rank in range(cluster.num_ranks)]
        hosts = tuple(compress(cluster.hosts, kept))
        before, after = Counter(cluster.hosts), Counter(hosts)
        growth = [before[host] / after[host] if self.shares_memory else 1.0 for host in hosts]

        def limits_of(limits: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(limit * times for limit, times in zip(compress(limits, kept), growth, strict=True))

        left = replace(
            cluster,
            hosts=hosts,
            memory_bytes=limits_of(cluster.memory_bytes),
            speeds=tuple(compress(cluster.speeds, kept)),
            own_process_bytes=tuple(compress(cluster.own_process_bytes, kept)),
        )
        fingerprint = replace(
            self.fingerprint,
            num_ranks=len(hosts),
            hosts=host_counts(hosts),
            memory_bytes=limits_of(self.fingerprint.memory_bytes),
        )
        own_inputs = problem.min_micro_batches_for_inputs == cluster.num_ranks
        least = len(hosts) if own_inputs else problem.min_micro_batches_for_inputs
        ranks = range(len(hosts))
        groups: tuple[tuple[int, ...], ...] = tuple((rank,) for rank in ranks) if own_inputs else (tuple(ranks),)
        groups = problem.input_groups and groups
        smaller = replace(problem, cluster=left, min_micro_batches_for_inputs=least, input_groups=groups)
        return replace(self, problem=smaller, fingerprint=fingerprint)

    def plan(self) -> None:
        """Saves the plan, unless there is a valid one; raises AutoVarunaError if none fits, or it cannot be saved."""
        path = Path(self.folder, deployment_name(self.fingerprint.hosts))
        with suppress(DeploymentError):
            if not differences(load(path).fingerprint, self.fingerprint):
                return
        plan = plan_with_sharing(self.problem, self.sharing, make_plan)
        save(path, deployment_of(plan, self.problem.graph, self.fingerprint))


def plan_ahead(path: Path) -> None:
    """Makes the plans that a file asks for; where there is none for some ranks, the others are made all the same."""
    for request in read_record(parse(path.read_bytes()), Request).fewer():
        try:
            request.plan()
        except AutoVarunaError as error:
            logger.warning("no plan for %s: %s", request.fingerprint.hosts, error)


if __name__ == "__main__":
    os.nice(19)
    plan_ahead(Path(sys.argv[1]))
