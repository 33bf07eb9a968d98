"""Holds each numbered rule of grouping, and what is repeated in every stage that uses it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.traced import TracedModel
from tests.catalogue import PLAIN
from tests.graph.models import named, traced, traced_function

WIDTH = 4
X = torch.zeros(3, WIDTH)


def linear() -> nn.Module:
    """Returns a square linear layer."""
    return nn.Linear(WIDTH, WIDTH)


def blocks_of(model: TracedModel, *starts: str) -> set[int]:
    """Returns the blocks of the nodes whose names start with each text."""
    return {model.block_of[named(model, start)] for start in starts}


def test_rule_1_a_tuple_stays_with_those_who_take_it_apart() -> None:
    """A cut may not part max, which gives two tensors, from either."""

    def both(self: nn.Module, x: Tensor) -> Tensor:
        values, places = torch.max(self.first(x), dim=1)
        return self.second(x) * values[:, None] + places[:, None]

    model = traced_function(both, X, first=linear(), second=linear())
    items = [name for name in model.block_of if name.startswith("getitem")]
    assert len({model.block_of[name] for name in [*items, named(model, "max")]}) == 1 and len(items) == 2


def test_rule_2_a_change_stays_with_what_it_changes() -> None:
    """An in-place relu stays with the linear that made its memory, and with who read it before."""

    def changed(self: nn.Module, x: Tensor) -> Tensor:
        out = self.first(x)
        read = out * 2.0
        out.relu_()
        return self.second(out) + torch.tanh(read)

    model = traced_function(changed, X, first=linear(), second=linear())
    assert len(blocks_of(model, "relu", "mul")) == 1
    assert model.block_of["linear"] == model.block_of[named(model, "relu")]
    assert named(model, "tanh") not in model.graph.blocks[model.block_of["linear"]].nodes


def test_rule_3_lasting_memory_that_changes_stays_in_one_block() -> None:
    """Whoever reads a buffer before or after its update is in the block of the update."""

    def updated(self: nn.Module, x: Tensor) -> Tensor:
        out = torch.tanh(self.first(x) + self.mean)
        self.mean.copy_(out.detach().mean(dim=0))
        return self.second(out) - self.mean

    model = traced_function(updated, X, first=linear(), second=linear(), mean=torch.zeros(WIDTH))
    assert len(blocks_of(model, "add", "copy", "sub")) == 1
    assert model.changed_state == {"mean"}


def test_rule_4_a_shape_that_depends_on_data_crosses_no_cut() -> None:
    """What a mask selects is used where it is selected."""

    def selected(self: nn.Module, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.second(x).mean() * torch.masked_select(out, out > 0).sum()

    model = traced_function(selected, X, first=linear(), second=linear())
    assert len(blocks_of(model, "masked_select", "sum")) == 1
    assert not {value.name for value in model.graph.values} & {named(model, "masked_select")}


def test_rule_7_a_number_stays_with_what_it_was_counted_from() -> None:
    """Sizes that a router counts come from its ranking, which random numbers have, too."""

    def routed(self: nn.Module, x: Tensor) -> Tensor:
        scores = torch.tanh(self.first(x))
        first = scores.topk(2, dim=1).indices
        chosen = torch.zeros_like(scores).scatter(1, first, 1.0).long()
        parts = self.second(x)[first.flatten().sort().values // 2].split(chosen.sum(0).tolist())
        return torch.cat([part * 2.0 for part in parts]).sum()

    model = traced_function(routed, X, first=linear(), second=linear())
    assert blocks_of(model, "topk", "zeros_like", "scatter", "split_with_sizes") == {model.block_of["item"]}
    assert model.block_of["linear"] not in blocks_of(model, "topk")


@pytest.mark.parametrize("case", [case for case in PLAIN if not case.refusal], ids=str)
def test_rule_5_users_of_a_value_stay_in_order(case: object) -> None:
    """The users of every value with three or more stand in execution order, so that gradients add up in one order."""
    args, kwargs = case.batch(3, 0)  # type: ignore[attr-defined]
    model = traced(case.model(), *args, **kwargs)  # type: ignore[attr-defined]
    for node in model.nodes.values():
        users = [user.name for user in node.users if user.name in model.block_of]
        users = [name for name in users if model.facts[name].needs_gradient]
        if node.name in model.block_of and len(users) >= 3:
            users.sort(key=model.places.__getitem__)
            places = [model.block_of[name] for name in users]
            assert places == sorted(places), (node.name, users)


def test_rule_5_users_that_must_change_places_join() -> None:
    """The first user is written to after the third, so it would run last; the three of them become one block."""

    def turned(self: nn.Module, x: Tensor) -> Tensor:
        root = self.first(x)
        first, second = root * 2.0, root * 3.0
        third = root.sin() + second
        first.add_(third)
        return self.second(first)

    model = traced_function(turned, X, first=linear(), second=linear())
    assert len(blocks_of(model, "mul_1", "sin", "add_")) == 1


def test_rule_6_a_cycle_of_groups_is_one_group() -> None:
    """What lies between two nodes of one group, there and back, cannot be in another stage."""

    def around(self: nn.Module, x: Tensor) -> Tensor:
        out = self.first(x)
        between = torch.tanh(out * 2.0).exp()
        out.add_(between)
        return self.second(out)

    model = traced_function(around, X, first=linear(), second=linear())
    assert len(blocks_of(model, "mul", "tanh", "exp", "add_")) == 1


def test_masks_and_positions_are_repeated() -> None:
    """Cheap nodes without gradient, parameter or randomness are in no block and cross no cut."""

    def masked(self: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(WIDTH) < lengths[:, None]).to(x.dtype)
        return self.second(torch.tanh(self.first(x) * mask)) * mask

    model = traced_function(masked, X, torch.ones(3, dtype=torch.int64), first=linear(), second=linear())
    mask = {named(model, "arange"), named(model, "lt"), named(model, "to")}
    assert mask <= set(model.repeated) and not mask & model.block_of.keys()
    assert not mask & {value.name for value in model.graph.values}
    assert len(next(each for each in model.graph.inputs if each.name == "args_1").consumers) == 2


def test_random_numbers_and_lookups_are_not_repeated() -> None:
    """Random numbers are drawn in one place, and a table of words is held in one."""

    def drawn(self: nn.Module, x: Tensor, words: Tensor) -> Tensor:
        keep = torch.rand_like(x)
        found = self.table(words)
        return self.second(self.first(x) * keep + found) * keep + found

    table = nn.Embedding(7, WIDTH).requires_grad_(False)
    words = torch.zeros(3, dtype=torch.int64)
    model = traced_function(drawn, X, words, first=linear(), second=linear(), table=table)
    assert {named(model, "rand_like"), named(model, "embedding")} <= model.block_of.keys()


def test_blocks_are_in_an_order_that_runs() -> None:
    """Every value is made before it is used, in some models of the catalogue."""
    for case in PLAIN[:5]:
        args, kwargs = case.batch(3, 0)
        model = traced(case.model(), *args, **kwargs)
        assert all(value.producer < min(value.consumers) for value in model.graph.values)
        assert sorted(model.block_of.values()) == [b.index for b in model.graph.blocks for _ in b.nodes]
