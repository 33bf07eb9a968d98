"""Plans in which the search itself gives ranks several stages train with the bits of one stage."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autovaruna.graph.records import Graph
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.planner.records import Plan
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import BlockCost, Profile
from tests.catalogue import PLAIN, Case
from tests.planner.cases import make_cluster
from tests.products import some
from tests.reference import OPTIMIZERS, bit_equal
from tests.session.training import Setup, train

SIZE, STEPS = 6, 3
LONG = [case for case in PLAIN if case.max_stages >= 4]


@dataclass(frozen=True)
class Searched(Setup):
    """A run whose plan is searched, for blocks that take long and messages that do not."""

    def plan(self, graph: Graph) -> Plan:
        """Returns the plan that the search chooses, in which ranks hold several stages."""
        costs = tuple(BlockCost(0.01, 0.02, 1e3, 0.0) for _ in graph.blocks)
        profile = Profile(graph.fingerprint, "test", (1,), (costs,))
        constraints = Constraints(num_micro_batches=self.num_micro_batches, num_replicas=1)
        plan = make_plan(Problem(graph, profile, make_cluster(self.world_size), SIZE, constraints=constraints))
        ranks = [rank for stage in plan.stages for rank in stage.ranks]
        assert len(ranks) > len(set(ranks)) > 1, "the search was to choose several stages a rank"
        return plan


@pytest.mark.parametrize(("case", "num_ranks"), some([(case, 2 + k % 2) for k, case in enumerate(LONG)], 7), ids=str)
def test_searched_interleaving_changes_no_bit(case: Case, num_ranks: int) -> None:
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    setups = Searched(num_ranks=num_ranks), Setup()
    bit_equal(*(train(case, setup, batches, OPTIMIZERS["adamw"]) for setup in setups))
