"""Methods of the model count like calls of it; modules that are called beside the wrapper are noticed at the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from autovaruna import AutoVaruna, InputError
from tests.reference import sgd
from tests.session.training import Setup, on_ranks, pipeline

SETTINGS = {"inputs": "per_rank"}
SETUPS = {
    "two": pipeline(2, num_micro_batches=2, settings=SETTINGS),
    "replicas": Setup(((0, 1),), num_micro_batches=2, settings=SETTINGS),
}


class Agent(nn.Module):
    """Has an actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.num_evaluated = 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        return self.actor(torch.tanh(self.body(x)))  # type: ignore[no-any-return]

    def evaluate(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Returns logits and values."""
        hidden = torch.tanh(self.body(x))
        return self.actor(hidden), scale * self.critic(hidden)

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns actions, their log probabilities and values."""
        logits, values = self.evaluate(x)
        choices = Categorical(logits=logits)
        action = choices.sample() if action is None else action  # type: ignore[no-untyped-call]
        return action, choices.log_prob(action), values  # type: ignore[no-untyped-call]

    def count(self, x: Tensor) -> int:
        """Counts samples; no weight is used."""
        self.num_evaluated += len(x)
        return self.num_evaluated


def agent() -> Agent:
    """Makes an agent."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Agent()


def by_method(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Trains by a method alone."""
    logits, values = model.evaluate(x, scale=0.5)
    return F.cross_entropy(logits, y) + values.square().mean()


def by_acting(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Trains by actions that were chosen before."""
    with torch.no_grad():
        assert model.act(x)[0].shape == y.shape
    _, log_probabilities, values = model.act(x, y)
    return values.square().mean() - log_probabilities.mean()  # type: ignore[no-any-return]


def by_both(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Trains by forward and a method."""
    return F.cross_entropy(model(x), y) + model.evaluate(x)[1].square().mean()


def beside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Trains by forward, and a submodule beside it."""
    logits: Tensor = model(x)
    return F.cross_entropy(logits, y) + model.critic(model.body(x)).square().mean()


def inner(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Calls the model in the wrapper."""
    return F.cross_entropy(model.module(x), y)


def batches(num: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Draws batches."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.arange(8) % 2) for _ in range(num)]


@pytest.mark.parametrize("loss_of", [by_method, by_acting, by_both])
@pytest.mark.parametrize("setup", SETUPS)
def test_methods_count_like_calls(loss_of: Callable[..., Tensor], setup: str) -> None:
    """Once, each rank trained alone, and weights drifted apart without a word."""
    plain = agent()

    def train(model: Any, optimizer: Any, part: slice) -> dict[str, Tensor]:
        for x, y in batches():
            loss_of(model, x[part], y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.evaluate(x[part])
        assert model.count(torch.zeros(3)) == 3
        return model.state_dict()  # type: ignore[no-any-return]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> dict[str, Tensor]:
        return train(model, optimizer, slice(4 * rank, 4 * rank + 4))

    found = on_ranks(SETUPS[setup], plain, run)
    reference = agent()
    expected = train(reference, sgd(reference.parameters()), slice(None))
    for state in found:
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("loss_of", [beside, inner])
def test_gradients_from_beside_the_wrapper_are_noticed(loss_of: Callable[..., Tensor]) -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        x, y = batches(1)[0]
        loss_of(model, x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]).backward()
        with pytest.raises(InputError, match=r"has called .* beside the wrapper.*model\.method"):
            optimizer.step()

    on_ranks(SETUPS["replicas"], agent(), run)


def test_what_goes_not_backward_may_be_called_beside_the_wrapper() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        x, y = batches(1)[0]
        model.critic(model.body(x)).mean().item()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    on_ranks(SETUPS["replicas"], agent(), run)
