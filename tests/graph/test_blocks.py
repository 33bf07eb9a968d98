"""Blocks: what no cut may part, which cuts are left, and pieces that are taken out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.grouping import crossing_sizes, merge_free_blocks
from autovaruna.graph.random import OwnGenerators, RandomStream, draw, untouched_generator
from autovaruna.graph.records import Graph, Size, Value
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.records import Plan
from tests.catalogue import PLAIN, Case
from tests.graph.models import CPU, named, traced, traced_function
from tests.products import some
from tests.session.training import Setup, train_as_plain

WIDTH = 4
X = torch.zeros(3, WIDTH)
Stages = tuple[tuple[int, ...], ...]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def layered(function: Callable[..., Tensor], *more: Tensor, **parts: nn.Module | Tensor) -> TracedModel:
    """Traces a function of ``(self, x, *more)`` with two layers."""
    return traced_function(function, X, *more, first=linear(), second=linear(), **parts)


def blocks_of(model: TracedModel, *starts: str) -> set[int]:
    """Returns the blocks of nodes, each by its name, or by how that starts if no other one does so."""
    return {model.block_of[start if start in model.block_of else named(model, start)] for start in starts}


def taken_apart(self: Any, x: Tensor) -> Tensor:
    values, places = torch.max(self.first(x), dim=1)
    return self.second(x) * values[:, None] + places[:, None]


def changed(self: Any, x: Tensor) -> Tensor:
    out = self.first(x)
    read = out * 2.0
    out.relu_()
    return self.second(out) + torch.tanh(read)


def updated(self: Any, x: Tensor) -> Tensor:
    """Changes lasting memory."""
    out = torch.tanh(self.first(x) + self.mean)
    self.mean.copy_(out.detach().mean(dim=0))
    return self.second(out) - self.mean


def selected(self: Any, x: Tensor) -> Tensor:
    """Has a shape that depends on data, which crosses no cut."""
    out = self.first(x)
    return self.second(x).mean() * torch.masked_select(out, out > 0).sum()


def routed(self: Any, x: Tensor) -> Tensor:
    """Counts sizes, as a router does, from its ranking, which random numbers have, too."""
    scores = torch.tanh(self.first(x))
    first = scores.topk(2, dim=1).indices
    chosen = torch.zeros_like(scores).scatter(1, first, 1.0).long()
    parts = self.second(x)[first.flatten().sort().values // 2].split(chosen.sum(0).tolist())
    return torch.cat([part * 2.0 for part in parts]).sum()


def turned(self: nn.Module, x: Tensor) -> Tensor:
    """Writes to the first user of a value after the third, so that it would run last; the three become one block."""
    root = self.first(x)
    first, second = root * 2.0, root * 3.0
    third = root.sin() + second
    return self.second(first.add_(third))


def around(self: nn.Module, x: Tensor) -> Tensor:
    """Has nodes between two of one group, there and back, which cannot be in another stage."""
    out = self.first(x)
    return self.second(out.add_(torch.tanh(out * 2.0).exp()))


def normed(self: Any, x: Tensor) -> Tensor:
    """Counts what its averages use; once, a cut lay between a BatchNorm's count and them."""
    return self.second(self.norm(self.first(x)))


TOGETHER: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "rule 1: a tuple stays with those who take it apart": (taken_apart, "max getitem getitem_1", ""),
    "rule 2: a change stays with what it changes": (changed, "linear mul relu", "tanh"),
    "rule 3: lasting memory that changes stays in one block": (updated, "add copy sub", ""),
    "rule 4: a shape that depends on data crosses no cut": (selected, "masked_select sum", ""),
    "rule 5: users that change places": (turned, "mul_1 sin add_", ""),
    "rule 6: cycles": (around, "mul tanh exp add_", ""),
    "rule 7: a number stays with what it was counted from": (
        *(routed, "topk zeros_like scatter split_with_sizes item", "linear"),
    ),
    "rule 8: what a module changes of itself stays together": (normed, "add batch_norm", "linear linear_1"),
}


@pytest.mark.parametrize("rule", TOGETHER)
def test_nodes_stay_in_one_block(rule: str) -> None:
    function, together, apart = TOGETHER[rule]
    model = layered(function, mean=torch.zeros(WIDTH), norm=nn.BatchNorm1d(WIDTH))
    (block,) = blocks_of(model, *together.split())
    assert block not in blocks_of(model, *apart.split())


@pytest.mark.parametrize("case", some(PLAIN, 9), ids=str)
def test_rule_5_users_of_a_value_stay_in_order(case: Case) -> None:
    """The users of every value with three or more stand in execution order, so that gradients add up in one order."""
    args, kwargs = case.batch(3, 0)
    model = traced(case.model(), *args, **kwargs)
    assert all(value.producer < min(value.consumers) for value in model.graph.values)
    assert sorted(model.block_of.values()) == [block.index for block in model.graph.blocks for _ in block.nodes]
    for node in model.nodes.values():
        users = [user.name for user in node.users if user.name in model.block_of]
        users = [name for name in users if model.facts[name].needs_gradient]
        if node.name in model.block_of and len(users) >= 3:
            users.sort(key=model.places.__getitem__)
            places = [model.block_of[name] for name in users]
            assert places == sorted(places), (node.name, users)


def test_masks_and_positions_are_repeated() -> None:
    """Cheap nodes without gradient, parameter or randomness are in no block and cross no cut."""

    def masked(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(WIDTH) < lengths[:, None]).to(x.dtype)
        return self.second(torch.tanh(self.first(x) * mask)) * mask

    model = layered(masked, torch.ones(3, dtype=torch.int64))
    mask = {named(model, "arange"), named(model, "lt"), named(model, "to")}
    assert mask <= set(model.repeated) and not mask & model.block_of.keys()
    assert not mask & {value.name for value in model.graph.values}
    assert len(next(each for each in model.graph.inputs if each.name == "lengths").consumers) == 2


def work_of(cuts: Sequence[int], is_free: Sequence[bool]) -> Stages:
    """Returns the blocks that cost something, by stage; a stage of views alone is none."""
    edges = [0, *(cut + 1 for cut in cuts), len(is_free)]
    stages = [tuple(k for k in range(a, b) if not is_free[k]) for a, b in pairwise(edges)]
    return tuple(stage for stage in stages if stage)


def bytes_of(cuts: Sequence[int], is_free: Sequence[bool], crossing: Sequence[Size]) -> list[list[Size]]:
    """Returns, for each place between two stages that work, the sizes of the plan's cuts there."""
    places: dict[int, list[Size]] = {}
    for cut in cuts:
        before = sum(not free for free in is_free[: cut + 1])
        if 0 < before < sum(not free for free in is_free):
            places.setdefault(before, []).append(crossing[cut])
    return [places[key] for key in sorted(places)]


def is_as_good(one: Sequence[list[Size]], other: Sequence[list[Size]]) -> bool:
    """Whether at each place the first plan sends no more than the second, for any micro-batch size."""
    return all(
        any(mine.fixed_bytes <= its.fixed_bytes and mine.sample_bytes <= its.sample_bytes for its in theirs)
        for ours, theirs in zip(one, other, strict=True)
        for mine in ours
    )


def subsets(cuts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Returns every plan that may use some cuts."""
    return chain.from_iterable(combinations(cuts, size) for size in range(len(cuts) + 1))


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_has_one_as_good_without_dropped_cuts(seed: int) -> None:
    """Chains of up to seven blocks, some of views alone, with any bytes: all plans against all that are left."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 7)
    is_free = [rng.random() < 0.5 for _ in range(num_blocks)]
    crossing = [Size(rng.randint(0, 2), rng.randint(0, 2)) for _ in range(num_blocks)]
    merged = merge_free_blocks([(str(k),) for k in range(num_blocks)], crossing, is_free.__getitem__)
    assert [name for block in merged for name in block] == [str(k) for k in range(num_blocks)]
    kept = [int(block[-1]) for block in merged[:-1]]
    left = [(work_of(plan, is_free), bytes_of(plan, is_free, crossing)) for plan in subsets(kept)]
    for plan in subsets(range(num_blocks - 1)):
        work, sent = work_of(plan, is_free), bytes_of(plan, is_free, crossing)
        assert any(mine == work and is_as_good(ours, sent) for mine, ours in left), plan


def test_crossing_sizes_count_a_value_once_a_cut() -> None:
    values = [Value("a", 0, (1, 3), Size(1.0, 2.0), True), Value("b", 2, (3,), Size(0.0, 5.0), True)]
    assert crossing_sizes(values, 4) == [Size(1.0, 2.0), Size(1.0, 2.0), Size(1.0, 7.0), Size(0.0, 0.0)]


@dataclass(frozen=True)
class StageABlock(Setup):
    def plan(self, graph: Graph) -> Plan | None:
        return Setup(((0,),) * len(graph.blocks), self.num_micro_batches).plan(graph)


@pytest.mark.parametrize("case", some(PLAIN, 14), ids=str)
def test_a_stage_a_block_gives_the_bits_of_the_plain_model(case: Case) -> None:
    """With one micro-batch and dropout off; that fewer cuts change no bit, dropout on, is for tests/session."""
    train_as_plain(case.without_dropout(), StageABlock(num_micro_batches=1), 5, 4, exact=True)


def test_random_numbers_depend_on_step_micro_batch_and_node_alone() -> None:
    """Equal coordinates draw equal numbers, any other differ, and the user's generator does not notice."""

    def drawn(seed: int, step: int, micro_batch: int, node: int) -> Tensor:
        return draw(RandomStream(seed, step, micro_batch, CPU), node, torch.rand, 8)

    before = torch.get_rng_state()
    with untouched_generator(CPU):
        first = drawn(1, 2, 3, 4)
        assert torch.equal(first, drawn(1, 2, 3, 4))
        with OwnGenerators(0):  # a look at the step, beside which the script may draw
            alike = torch.rand(8)
            assert torch.equal(first, drawn(1, 2, 3, 4))
        assert torch.equal(torch.get_rng_state(), before) and not torch.equal(alike, first)
        others = [drawn(0, 2, 3, 4), drawn(1, 0, 3, 4), drawn(1, 2, 0, 4), drawn(1, 2, 3, 0), drawn(1, 3, 2, 4)]
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(torch.get_rng_state(), before)
