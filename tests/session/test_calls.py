"""Methods count like calls; calls go into one another; every backward of a call gives its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from autovaruna import AutoVaruna, InputError
from autovaruna.ranks.world import World
from tests.catalogue.small import WIDTH, Written, labelled, two_layers
from tests.products import diagonal
from tests.rank_threads import run_ranks
from tests.reference import gradients_of, sgd
from tests.session.training import QUIET, Setup, as_plain, descend, on_ranks, pipeline, same_gradients

SETTINGS = {"inputs": "per_rank"}
SETUPS = {
    "two": pipeline(2, num_micro_batches=2, settings=SETTINGS),
    "replicas": Setup(((0, 1),), num_micro_batches=2, settings=SETTINGS),
}
XS, Y = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2
SIZES = 4, 2
BATCH = labelled(6, 0)[1]
STAGES = {
    "two": pipeline(2),
    "whole": pipeline(2, num_micro_batches=1),
    "recompute": pipeline(2, recompute=True),
    "replicas": Setup(((0, 1),), num_micro_batches=4, settings={"inputs": "replicated"}),
}
SHARED = Setup(((0, 1),), settings={"shard_optimizer": True})
KEPT_BACK = STAGES["two"], STAGES["replicas"], SHARED


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.num_evaluated = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.actor(torch.tanh(self.body(x)))

    def evaluate(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.actor(hidden), scale * self.critic(hidden)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        logits, values = self.evaluate(x)
        choices = Categorical(logits=logits)
        action = choices.sample() if action is None else action
        return action, choices.log_prob(action), values

    @torch.no_grad()
    def roll(self, x: Tensor, num_steps: int) -> Tensor:
        """Goes from what the model says to the next input, as ``generate`` does."""
        for _ in range(num_steps):
            x = torch.cat((x[:, 2:], self(x)), 1)
        return x

    @torch.no_grad()
    def sample(self, x: Tensor, num_steps: int) -> Tensor:
        """Goes from step to step by its modules, as a diffusion does."""
        for _ in range(num_steps):
            x = x + 0.1 * torch.cat([self.actor(torch.tanh(self.body(x)))] * 2, 1)
            if not float(x.abs().max()) < 100:
                raise ValueError("it diverges")
        return x

    def learn(self, x: Tensor, y: Tensor) -> Tensor:
        """Looks at the number of its loss, so that it cannot be traced."""
        loss = F.cross_entropy(self(x), y)
        if not float(loss.detach()) >= 0:
            raise ValueError("the loss is not finite")
        return loss

    def count(self, x: Tensor) -> int:
        """Counts samples; no weight is used."""
        self.num_evaluated += len(x)
        return self.num_evaluated


def by_method(model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, values = model.evaluate(x, scale=0.5)
    return F.cross_entropy(logits, y) + values.square().mean()


def by_acting(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        assert model.act(x)[0].shape == y.shape
    _, log_probabilities, values = model.act(x, y)
    return values.square().mean() - log_probabilities.mean()


METHODS: dict[str, Callable[..., Tensor]] = {
    "method": by_method,
    "acting": by_acting,
    "private": lambda model, x, y: model._loss(x, y),
    "both": lambda model, x, y: F.cross_entropy(model(x), y) + model.evaluate(x)[1].square().mean(),
    "itself": lambda model, x, y: model.learn(model.roll(x, 3), y),
    "its modules": lambda model, x, y: model.learn(model.sample(x, 3), y),
}
BESIDE: dict[str, Callable[..., Tensor]] = {
    "parts": lambda model, x, y: F.cross_entropy(model(x), y) + model.critic(model.body(x)).square().mean(),
    "inner": lambda model, x, y: F.cross_entropy(model.module(x), y),
}


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("setup", SETUPS)
def test_methods_count_like_calls(kind: str, setup: str) -> None:
    """Once, each rank trained alone, and weights drifted apart without a word."""

    def train(model: Any, optimizer: Any, rank: int = 0, num_ranks: int = 2) -> dict[str, Tensor]:
        y = Y.chunk(num_ranks)[rank]
        for batch in XS:
            x = batch.chunk(num_ranks)[rank]
            descend(METHODS[kind](model, x, y), optimizer)
            with torch.no_grad():
                model.evaluate(x)
        assert model.count(torch.zeros(3)) == 3
        return model.state_dict()

    plain = Agent()
    found = on_ranks(SETUPS[setup], plain, train)
    expected = train(plain, sgd(plain.parameters()), num_ranks=1)
    for state in found:
        torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("kind", BESIDE)
def test_gradients_from_beside_the_wrapper_are_noticed(kind: str) -> None:
    """What does not go backward may be called there."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        x, y = XS[0].chunk(2)[rank], Y.chunk(2)[rank]
        model.critic(model.body(x)).mean().item()
        descend(F.cross_entropy(model(x), y), optimizer)
        BESIDE[kind](model, x, y).backward()
        with pytest.raises(InputError, match=r"has called .* beside the wrapper.*model\.method"):
            optimizer.step()

    on_ranks(SETUPS["replicas"], Agent(), run)


def go_backward(first: nn.Module, critic: nn.Module, x: Tensor) -> None:
    """Goes backward through two calls of one model and one of another; part of the loss is of the first alone."""
    made = first(first(x) + 0.1)
    judged = critic(2.0 * made)
    loss = judged if judged.dim() == 0 else F.softplus(judged).mean()
    (loss + made.square().mean()).backward()


@pytest.mark.parametrize("has_loss", [True, False])
def test_gradients_go_through_several_calls(has_loss: bool) -> None:
    """Each rank has samples of its own, more on one: each call counts a rank's own loss, but only once."""
    first, layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out)) for out in (WIDTH, 1))
    judge = lambda self, x: F.softplus(self.layers(x)).mean() if has_loss else self.layers(x)  # noqa: E731
    models = first.double(), Written(judge, layers=layers).double()
    x = torch.randn(sum(SIZES), WIDTH, dtype=torch.float64)
    copies = [copy.deepcopy(models) for _ in SIZES]
    go_backward(*models, x)

    def be_rank(world: World) -> list[dict[str, Tensor]]:
        plan = pipeline(2, num_micro_batches=2).plan
        wrapped = [AutoVaruna(model, plan=plan, **QUIET) for model in copies[world.rank]]
        go_backward(*wrapped, x.split(SIZES)[world.rank])
        return [gradients_of(model) for model in wrapped]

    found = run_ranks(len(SIZES), be_rank, timeout_seconds=60.0)
    for place, model in enumerate(models):
        got = {name: gradient for of_rank in found for name, gradient in of_rank[place].items()}
        torch.testing.assert_close(got, gradients_of(model), rtol=1e-9, atol=1e-12)


def model_of(has_loss: bool) -> nn.Module:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        scores = self.last(torch.tanh(self.first(x)))
        return F.cross_entropy(scores, y) if has_loss else scores

    return two_layers(forward)


def of_loss(model: Any) -> None:
    loss = model(**BATCH)
    loss.backward(retain_graph=True)
    (3.0 * loss).backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):  # the last one kept nothing
        loss.backward()


def of_two_losses(model: Any) -> None:
    """The second of which uses half of the scores."""
    scores = model(**BATCH)
    F.cross_entropy(scores, BATCH["y"]).backward(retain_graph=True)
    scores[:, 0].square().mean().backward(retain_graph=True)
    scores[:, 1:].square().mean().backward()
    with pytest.raises(RuntimeError, match="second time"):
        scores.mean().backward()


def of_gradients(model: Any) -> None:
    """Takes the gradients of each loss, and joins them itself."""
    scores, parameters = model(**BATCH), list(model.parameters())
    losses = [F.cross_entropy(scores, BATCH["y"]), scores.square().mean()]
    both = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    for parameter, *found in zip(parameters, *both, strict=True):
        parameter.grad = found[0] + 2 * found[1]


@pytest.mark.parametrize(("act", "setup"), diagonal([of_loss, of_two_losses, of_gradients], [*STAGES, *STAGES]))
def test_backwards_give_their_gradients_up_to_one_that_keeps_nothing(act: Callable[[Any], None], setup: str) -> None:
    same_gradients(STAGES[setup], model_of(act is of_loss), act)


@pytest.mark.parametrize("setup", [pipeline(1), pipeline(1, recompute=True), SHARED])
@pytest.mark.parametrize("has_loss", [False, True])
def test_no_backward_goes_through_weights_that_have_changed(has_loss: bool, setup: Setup) -> None:
    """Plain PyTorch refuses it as well."""

    def step_between(model: Any, optimizer: Any) -> None:
        first, second = (model(**BATCH).square().mean() for _ in range(2))
        second.backward(retain_graph=True)
        optimizer.step()
        for loss in (first, second):
            with pytest.raises(RuntimeError, match=r"modified by an inplace|after weights have changed"):
                loss.backward()

    as_plain(setup, model_of(has_loss), step_between)


def test_weights_that_no_gradient_needs_may_change() -> None:
    """The first layer's, for its input needs no gradient, and biases."""

    def act(model: Any) -> None:
        loss = model(**BATCH)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "first" in name or "bias" in name:
                    parameter.mul_(2.0)
        loss.backward()

    same_gradients(pipeline(2), model_of(has_loss=True), act)


def keep_back(model: Any) -> None:
    """Goes backward, without a sum over ranks."""
    with model.no_sync() if isinstance(model, AutoVaruna) else nullcontext():
        model(**BATCH).backward()


BETWEEN: dict[str, Callable[[Any, Any], object]] = {
    "a call without a backward": lambda model, optimizer: model(**BATCH),
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_gradients_that_are_kept_back_are_kept_or_dropped_as_in_plain_pytorch(what: str) -> None:
    """Once, a call whose loss the script did not go backward from took them, and zero_grad() left them."""

    def go(model: Any, optimizer: Any) -> Any:
        for _ in range(2):
            keep_back(model)
            BETWEEN[what](model, optimizer)
            descend(model(**BATCH), optimizer)
        return model.state_dict()

    for setup in KEPT_BACK:
        as_plain(setup, model_of(True), go, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setup", KEPT_BACK)
def test_hooks_of_parameters_see_gradients_that_were_kept_back_and_other_backwards_do_not(setup: Setup) -> None:
    """Once, a hook got None in no_sync() and missed allreduce_grads(), and autograd.grad() took what was kept back.

    It got None, too, on ranks whose optimizer does not step over the parameter.
    """

    def go(model: Any, optimizer: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient / 2)
        for place in range(4):
            if place:
                keep_back(model)
            if place == 1 and isinstance(model, AutoVaruna):
                model.allreduce_grads()
            if place == 2 and setup is not SHARED:  # of which a rank has only its own gradients
                torch.autograd.grad(model(**BATCH), list(model.parameters()))
            if place != 1:
                model(**BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    as_plain(setup, model_of(True), go, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setup", SETUPS)
def test_numbers_of_samples_that_a_model_returns_are_those_of_the_call(setup: str) -> None:
    """Once, they were symbols, which became the number that the model was traced with."""

    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        return {"loss": self.layers(x).square().mean(), "n": x.shape[0], "half": x.shape[0] / 2, "many": x.shape[0] > 3}

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[list[Any]]:
        return [[*model(XS[0][:size]).values()][1:] for size in (4, 3)]

    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for found in on_ranks(SETUPS[setup], Written(forward, layers=layers), run):
        assert found == [[4, 2.0, True], [3, 1.5, False]]
        assert [type(each) for each in found[0]] == [int, float, bool]


def test_a_checkpoint_of_the_old_kind_gives_no_gradients_without_one_of_its_inputs() -> None:
    """Plain PyTorch warns of it; once, a trace gave them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=True) + self.second(x))

    names = ("first", "second", "last")
    model = Written(forward, **{name: nn.Linear(4, 4) for name in names})
    same_gradients(pipeline(2), model, lambda wrapped: wrapped(XS[0]).square().mean().backward())
