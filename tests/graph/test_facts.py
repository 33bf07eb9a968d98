"""Holds what is learned of each node: gradients, aliases, changes, randomness, arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.graph.facts import Fact
from tests.graph.models import named, traced, traced_function

X = torch.zeros(3, 4)


def facts_of(function: object, *starts: str, **parts: nn.Module | Tensor) -> list[Fact]:
    """Returns the facts of the nodes whose names start with each text."""
    model = traced_function(function, X, **parts)  # type: ignore[arg-type]
    return [model.facts[named(model, start)] for start in starts]


def test_gradients_follow_parameters_and_stop_at_detach() -> None:
    """What a parameter feeds needs a gradient; what is detached, frozen or made of inputs alone does not."""

    def mixed(self: nn.Module, x: Tensor) -> Tensor:
        return self.learned(x).tanh() + self.learned(x).detach().cos() + self.frozen(x).sin() + x.exp()

    parts = {"learned": nn.Linear(4, 4), "frozen": nn.Linear(4, 4).requires_grad_(False)}
    found = facts_of(mixed, "tanh", "cos", "sin", "exp", **parts)
    assert [fact.needs_gradient for fact in found] == [True, False, False, False]


def test_what_is_written_into_needs_a_gradient() -> None:
    """Memory that was made without a gradient gets one by what is written into it, or into a view of it."""

    def filled(self: nn.Module, x: Tensor) -> Tensor:
        out, other = torch.zeros_like(x), torch.ones_like(x)
        out[:, :2] = self.layer(x)[:, :2]
        other[:, :2] = x[:, :2]
        return out.exp() + other.exp()

    found = facts_of(filled, "zeros", "ones", layer=nn.Linear(4, 4))
    assert [fact.needs_gradient for fact in found] == [True, False]


def test_views_share_memory_and_copies_do_not() -> None:
    """A view is made of its argument's storage; arithmetic and contiguous copies are not."""

    def viewed(self: nn.Module, x: Tensor) -> Tensor:
        out = self.layer(x).t()
        return out.contiguous().exp().view(-1)

    found = facts_of(viewed, "t", "contiguous", "exp", "view", layer=nn.Linear(4, 4))
    assert [fact.is_view for fact in found] == [True, False, False, True]
    assert found[3].makes == found[2].makes


def test_changes_are_seen() -> None:
    """In-place operations write; so does batch normalisation, whose schema does not say so, while it trains."""
    (add,) = facts_of(lambda self, x: self.layer(x).add_(1.0), "add_", layer=nn.Linear(4, 4))
    assert add.writes and add.writes <= add.reads and not add.is_view
    norm = nn.BatchNorm1d(4)
    (trained,) = facts_of(lambda self, x: self.norm(x), "batch_norm", norm=norm)
    assert len(trained.writes) == 2
    model = traced(nn.Sequential(nn.BatchNorm1d(4).eval()), X)
    assert not model.facts["batch_norm"].writes and not model.changed_state


def test_changes_are_seen_by_what_the_schema_says() -> None:
    """Operations on lists, and those of libraries, change what they say, also in a region and through a view."""

    def changed(self: nn.Module, x: Tensor) -> Tensor:
        torch._foreach_mul_([self.plain], 0.9)
        with torch.no_grad():
            torch._foreach_lerp_([self.inside.view(2, 2)], [self.kept.view(2, 2)], 0.5)
        return x + self.plain + self.inside

    buffers = {name: torch.ones(4) for name in ("plain", "inside", "kept")}
    model = traced_function(changed, X, **buffers)
    assert model.changed_state == {"plain", "inside"}


def test_dropout_is_random_only_while_it_drops() -> None:
    """A dropout of probability zero, or under eval, draws nothing; attention's likewise."""

    def dropped(self: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + torch.bernoulli(x)

    model = traced_function(dropped, X)
    found = {name: fact.is_random for name, fact in model.facts.items() if "dropout" in name or "bernoulli" in name}
    assert [name for name, is_random in found.items() if is_random] == ["dropout", "bernoulli"]

    def attended(self: nn.Module, x: Tensor) -> Tensor:
        y = x[:, None, None]
        on = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        return on + F.scaled_dot_product_attention(y, y, y)

    model = traced_function(attended, X)
    assert [f.is_random for n, f in model.facts.items() if n.startswith("scaled")] == [True, False]


def test_a_random_region_is_random() -> None:
    """Noise drawn under no_grad, in a region of its own, is seeded as one node."""

    def noisy(self: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.rand_like(x) * 2.0
        return self.layer(x) * noise

    model = traced_function(noisy, X, layer=nn.Linear(4, 4))
    assert sum(fact.is_random for fact in model.facts.values()) == 1


def test_arithmetic_is_counted() -> None:
    """A linear of 4 by 5 takes 40 operations a sample."""
    model = traced(nn.Linear(4, 5), X)
    assert model.facts["linear"].num_flops == 2 * 4 * 5 * model.sizes.batch_size
    assert model.graph.blocks[0].num_flops_per_sample == 40


def test_values_are_fakes_of_the_hint() -> None:
    """The pass holds shapes alone, for a batch size that no other dimension has."""
    model = traced(nn.Linear(4, 7), X)
    value = model.facts["linear"].value
    assert value.shape == (model.sizes.batch_size, 7) and model.sizes.batch_size not in (4, 7)
    assert isinstance(value, torch._subclasses.FakeTensor)


def test_each_operation_has_its_own_arithmetic() -> None:
    """What comes after a product, or before it, has none of its arithmetic, recalled or not."""

    def several(self: nn.Module, x: Tensor) -> Tensor:
        first = self.layer(x).view(-1, 2, 2).transpose(1, 2)
        return self.layer(first.reshape(-1, 4).split(2, dim=1)[0].repeat(1, 2))

    model = traced_function(several, X, layer=nn.Linear(4, 4))
    product = 2 * 4 * 4 * model.sizes.batch_size
    found = {name: fact.num_flops for name, fact in model.facts.items() if fact.num_flops}
    assert found == {"linear": product, "linear_1": product}
