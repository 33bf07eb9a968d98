"""Cut points: found wherever they are in a model, never seen by the numbers, and heeded as the user asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import CutPoint
from autovaruna.errors import InputError, PlanError, TraceError
from autovaruna.graph.call import describe
from autovaruna.graph.records import CutMark, Graph
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.cut_points import PREFER_MARGIN, resolve_cut
from autovaruna.planner.problem import Constraints, Problem
from autovaruna.planner.search import make_plan
from autovaruna.profiler.records import BlockCost, Profile
from tests.catalogue.small import Written
from tests.planner.cases import make_cluster, make_graph
from tests.varuna.scripts import net


def traced(model: nn.Module, *args: Tensor) -> TracedModel:
    return trace(model, describe(model, args or (torch.randn(6, 8),), {})[1], torch.device("cpu"))


def marks(model: nn.Module, *args: Tensor) -> dict[str, CutMark]:
    return {mark.name: mark for mark in traced(model, *args).graph.cut_marks}


def layers(act: Any, **modules: Any) -> nn.Module:
    """Returns a model that acts with two layers, cut points and its input."""
    parts = {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), **modules}
    return Written(lambda self, x: act(self, x).square().mean(), **parts)


def between(m: Any, x: Tensor) -> Tensor:
    return m.second(m.cut(m.first(x)))


def test_one_process_gets_its_tensor_back_as_it_is_and_the_graph_has_no_trace_of_it() -> None:
    x = torch.randn(3)
    assert CutPoint()(x) is x
    with pytest.raises(InputError, match="takes one tensor"):
        CutPoint()((x, x))
    with_cut, without = (traced(layers(between, cut=each)) for each in (CutPoint(), nn.Identity()))
    assert str(with_cut.module.graph) == str(without.module.graph)
    assert with_cut.graph.fingerprint != without.graph.fingerprint


def test_a_cut_starts_with_what_uses_the_tensor() -> None:
    model = traced(layers(between, cut=CutPoint()))
    mark = model.graph.cut_marks[0]
    assert (mark.name, mark.reason) == ("cut", "")
    assert model.graph.blocks[mark.block].module == "second"
    assert resolve_cut(model.graph, "cut") == mark.block


def test_it_is_found_wherever_it_is() -> None:
    nested = nn.Sequential(nn.Sequential(nn.Tanh(), CutPoint()))
    for cuts in (nn.ModuleList([CutPoint()]), [CutPoint()], {0: CutPoint()}, nested):
        found = marks(layers(lambda m, x: m.second(m.cuts[0](m.first(x))), cuts=cuts))
        assert found["cuts.0.1" if cuts is nested else "cuts.0"].block > 0


def test_a_loop_has_one_for_each_turn_and_one_used_twice_is_named() -> None:
    tokens = torch.zeros(6, 5, dtype=torch.long)
    found = marks(net(), tokens, tokens)
    assert list(found) == [f"cutpoints.{place}" for place in range(4)]
    blocks = [mark.block for mark in found.values()]
    assert blocks == sorted(set(blocks)) and all(blocks)
    with pytest.raises(TraceError, match=r"CutPoint cut is used 2 times"):
        traced(layers(lambda m, x: m.cut(m.second(m.cut(m.first(x)))), cut=CutPoint()))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda m, x: m.second(m.first(m.cut(x))), "nothing of the model lies before it"),
        (lambda m, x: m.cut(m.second(m.first(x)).square().mean()), None),
        (lambda m, x: m.second(x) + m.second(torch.no_grad()(lambda: m.cut(m.first(x)))()), None),
        (lambda m, x: m.second(torch.relu_(m.cut(m.first(x)))), "changed in place"),
    ],
    ids=["first", "in between", "without gradients", "in place"],
)
def test_one_that_cannot_be_a_cut_says_why(act: Any, reason: str | None) -> None:
    mark = marks(layers(act, cut=CutPoint()))["cut"]
    assert (mark.block > 0) == (reason is None) and (reason or "") in mark.reason


def problem_of(num_blocks: int, num_ranks: int) -> Problem:
    """Returns equal blocks of 10 ms forward and 20 ms backward, one sample a micro-batch."""
    graph = make_graph(num_blocks)
    costs = (BlockCost(0.01, 0.02, 1000.0, 500.0),) * num_blocks
    constraints = Constraints(num_micro_batches=16)
    return Problem(graph, Profile(graph.fingerprint, "test", (1,), (costs,)), make_cluster(num_ranks), 16,
                   constraints=constraints)  # fmt: skip


def marked(problem: Any, blocks: dict[str, int], **constraints: Any) -> Any:
    cut_marks = tuple(CutMark(name, block, "" if block > 0 else "it is broken") for name, block in blocks.items())
    graph: Graph = replace(problem.graph, cut_marks=cut_marks)
    return replace(problem, graph=graph, constraints=replace(problem.constraints, **constraints))


def starts(plan: Any) -> list[int]:
    return [stage.blocks[0] for stage in plan.stages]


def test_only_cuts_at_cut_points_alone_and_names_those_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    problem = marked(problem_of(8, 2), {"a": 2, "b": 6}, cutpoints="only", num_stages=2)
    assert starts(make_plan(problem))[1] in (2, 6)
    ignored = replace(problem, constraints=replace(problem.constraints, cutpoints="ignore"))
    assert starts(make_plan(ignored)) == [0, 4]
    problem = marked(problem_of(8, 3), {"a": 2, "b": -1}, cutpoints="only", num_stages=3)
    with pytest.raises(PlanError, match=r"allows 2.*b is none: it is broken"):
        make_plan(problem)
    assert "the CutPoint b cannot be a cut: it is broken" in caplog.text


def test_prefer_cuts_there_unless_elsewhere_is_better_by_the_margin_or_cut_points_are_too_few() -> None:
    far = marked(problem_of(8, 2), {"a": 2}, cutpoints="prefer", num_stages=2)
    assert starts(make_plan(far)) == [0, 4]
    near = marked(problem_of(100, 2), {"a": 51}, cutpoints="prefer", num_stages=2)
    assert starts(make_plan(near)) == [0, 51] and PREFER_MARGIN > 0.02
    problem = marked(problem_of(9, 3), {"a": 3}, cutpoints="prefer", num_stages=3)
    assert starts(make_plan(problem)) == [0, 3, 6]
