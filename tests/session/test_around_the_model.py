"""What scripts do with weights around the model gives the numbers of plain PyTorch, or says what is missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autovaruna import InputError
from tests.catalogue import CASES
from tests.reference import Record, adamw, compare
from tests.session.training import Setup, on_ranks, pipeline

CASE = CASES["conv_net_batch_norm"].without_dropout()
SETUPS = {"two": pipeline(2, num_micro_batches=1), "replicas": Setup(((0, 1),), num_micro_batches=1)}
TOKEN = (CASE.name, CASE.has_dropout)
Story = Callable[[Any, Any], Any]


def step(model: Any, optimizer: Any, seed: int) -> Tensor:
    """Makes a step; returns its loss."""
    loss: Tensor = CASE.loss_of(model(*CASE.batch(7, seed)[0], **CASE.batch(7, seed)[1]), CASE.batch(7, seed))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def evaluated(model: Any) -> tuple[Any, Tensor]:
    """Returns a model with its loss in eval mode."""
    model.eval()
    with torch.no_grad():
        return model, model(*CASE.batch(7, 9)[0], **CASE.batch(7, 9)[1])


def average(model: Any, optimizer: Any) -> Any:
    """Keeps an average in a copy that was made before the first call; buffers are those of the model."""
    mean = copy.deepcopy(model)
    for seed in range(2):
        step(model, optimizer, seed)
        with torch.no_grad():
            for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.3)
            for kept, new in zip(mean.buffers(), model.buffers(), strict=True):
                kept.copy_(new)
    return evaluated(mean)


def average_of_a_copy_after(model: Any, optimizer: Any) -> Any:
    """Makes the copy of a model that is split, and uses ``data``."""
    step(model, optimizer, 0)
    mean = copy.deepcopy(model)
    step(model, optimizer, 1)
    for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
        kept.data.mul_(0.9).add_(new.data, alpha=0.1)
    return evaluated(mean)


def average_of_states(model: Any, optimizer: Any) -> Any:
    """Goes over two states in parallel, as timm does; and averages a copy of the inner module."""
    mean, inner = copy.deepcopy(model), copy.deepcopy(getattr(model, "module", model))
    for seed in range(2):
        step(model, optimizer, seed)
        with torch.no_grad():
            for each in (mean, inner):
                for kept, new in zip(each.state_dict().values(), model.state_dict().values(), strict=True):
                    kept.copy_(0.7 * kept + 0.3 * new)
    torch.testing.assert_close(list(inner.state_dict().values()), list(mean.state_dict().values()))
    return evaluated(mean)


def averaged_model(model: Any, optimizer: Any) -> Any:
    """Uses PyTorch's own averages, made before and after the first call, whose state has all names."""
    first = AveragedModel(model, use_buffers=True)
    step(model, optimizer, 0)
    second = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step(model, optimizer, 1)
    for each in (first, second):
        each.update_parameters(model)
    step(model, optimizer, 2)
    for each in (first, second):
        each.update_parameters(model)
    first.load_state_dict(second.state_dict())
    return evaluated(first)


def edits(model: Any, optimizer: Any) -> Any:
    """Changes weights by hand: clamps, decays, copies, steps, and writes into a state."""
    for seed in range(2):
        before = [each.detach().clone() for each in model.parameters()]
        step(model, optimizer, seed)
        with torch.no_grad():
            for each, old in zip(model.parameters(), before, strict=True):
                each.clamp_(-0.1, 0.1).add_(each - old, alpha=0.5)
        for each in model.parameters():
            each.data = each.data * 0.99
    state = model.state_dict()
    state[next(iter(state))].mul_(2)
    del state
    CASE.loss_of(model(*CASE.batch(7, 3)[0], **CASE.batch(7, 3)[1]), CASE.batch(7, 3)).backward()
    for each in model.parameters():
        each.data.sub_(each.grad, alpha=0.1)
    return evaluated(model)


def second_optimizer(model: Any, optimizer: Any) -> Any:
    """Makes an optimizer of all parameters in the middle, with groups by name."""
    step(model, optimizer, 0)
    biases = [each for name, each in model.named_parameters() if "bias" in name]
    others = [each for name, each in model.named_parameters() if "bias" not in name]
    second = adamw(iter([{"params": others, "weight_decay": 0.1}, {"params": biases}]))  # type: ignore[arg-type]
    for seed in (1, 2):
        step(model, second, seed)
    return evaluated(model)


def saved_in_the_middle(model: Any, optimizer: Any) -> Any:
    """Saves model and optimizer by their own methods, goes on, and goes back."""
    step(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert len(saved[1]["state"]) == len(list(model.parameters()))
    step(model, optimizer, 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(model, optimizer, 2)
    return evaluated(model)


def teacher(model: Any, optimizer: Any) -> Any:
    """Calls a frozen copy first, which then follows the model."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for seed in range(2):
        evaluated(frozen)
        step(model, optimizer, seed)
        frozen.load_state_dict(model.state_dict())
    return evaluated(frozen)


STORIES: tuple[Story, ...] = (
    average,
    average_of_a_copy_after,
    average_of_states,
    averaged_model,
    edits,
    second_optimizer,
    saved_in_the_middle,
    teacher,
)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_it_is_as_in_plain_pytorch(story: Story, setup: str) -> None:
    def run(model: Any, optimizer: Any, rank: int) -> Record:
        told, loss = story(model, optimizer)
        return Record([loss.clone()], weights={name: each.clone() for name, each in told.state_dict().items()})

    plain = CASE.model()
    expected = run(plain, adamw(plain.parameters()), 0)
    for found in on_ranks(SETUPS[setup], CASE.model(), run, adamw, TOKEN):
        compare(found, expected, rtol=1e-4)


def test_all_ranks_list_all_parameters() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> list[Any]:
        step(model, optimizer, 0)
        first = next(iter(model.parameters()))
        return [[(name, each.shape) for name, each in model.named_parameters()], first.device, first.dtype]

    plain = CASE.model()
    expected = [[(name, each.shape) for name, each in plain.named_parameters()], torch.device("cpu"), torch.float32]
    assert on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN) == [expected, expected]


def both(*models: Any) -> list[Any]:
    """Returns the parameters of each."""
    return [each.parameters() for each in models]


JOINS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "lerp_": lambda model, whole: [a.data.lerp_(b, 0.5) for a, b in zip(*both(whole, model), strict=True)],
    "add": lambda model, whole: torch.zeros(()) + sum(each.pow(2).sum() for each in model.parameters()),
    "stack": lambda model, whole: torch.stack([each.grad.norm() for each in model.parameters()]),
    "item": lambda model, whole: [each.grad.norm().item() for each in model.parameters() if each.grad is not None],
    "cat": lambda model, whole: nn.utils.parameters_to_vector(model.parameters()),
    "conv2d|linear": lambda model, whole: model.module(*CASE.batch(7, 0)[0], **CASE.batch(7, 0)[1]),
    "__reduce_ex__": lambda model, whole: copy.copy([copy.copy(each) for each in model.parameters()]),
    "backward": lambda model, whole: [each.sum().backward() for each in model.parameters()],
}


@pytest.mark.parametrize("what", JOINS)
def test_joining_what_is_apart_is_refused(what: str) -> None:
    """Once, an average skipped what was elsewhere without a word, and penalties and norms were those of one rank."""

    def run(model: Any, optimizer: Any, rank: int) -> None:
        model(*CASE.batch(7, 0)[0], **CASE.batch(7, 0)[1]).backward()
        with pytest.raises(
            InputError, match=rf"Rank {rank} does not hold .* got ({what})\(\).*copy\.deepcopy\(model\)"
        ):
            JOINS[what](model, CASE.model())

    on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN)
