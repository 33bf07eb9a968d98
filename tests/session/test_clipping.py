"""PyTorch's own clipping gives the gradients of plain PyTorch, whichever list of parameters a script passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import InputError, RankError
from tests.catalogue import CASES
from tests.reference import adamw
from tests.session.training import Setup, gradients_of, on_ranks, pipeline

CASE = CASES["chain"].without_dropout()
TOKEN = (CASE.name, CASE.has_dropout)
SETUPS = {
    "two": pipeline(2, num_micro_batches=1),
    "idle_rank": Setup(((0,), (1,)), num_ranks=3, num_micro_batches=1),
    "shared_state": Setup(((0, 1), (1, 2)), num_micro_batches=1, settings={"shard_optimizer": True}),
}
LISTS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "parameters": lambda model, optimizer: model.parameters(),
    "groups": lambda model, optimizer: [each for group in optimizer.param_groups for each in group["params"]],
    "some": lambda model, optimizer: list(model.parameters())[1:-1],
}


def clip_by_norm(parameters: list[Any]) -> Any:
    """Clips once by the second norm and once by the largest number, in the two ways that torch has."""
    return [nn.utils.clip_grad_norm_(parameters, *way) for way in ((0.1, 2.0, False, True), (0.01, torch.inf))]


def clip_by_value(parameters: list[Any]) -> Any:
    """Clips each number, as parameters are on any device: torch chooses the way."""
    nn.utils.clip_grad_value_(parameters, 2e-3)
    nn.utils.clip_grad_value_(parameters, 1e-3)


def total_norm(parameters: list[Any]) -> Any:
    """Clips nothing."""
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def backward(model: Any) -> None:
    """Gives the parameters gradients."""
    batch = CASE.batch(6, 0)
    CASE.loss_of(model(*batch[0], **batch[1]), batch).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_value, total_norm])
@pytest.mark.parametrize("what", LISTS)
def test_clipping_is_as_in_plain_pytorch(what: str, clip: Callable[[list[Any]], Any], setup: str) -> None:
    """Once, it was refused, for it would have clipped by the norm of one rank."""

    def run(model: Any, optimizer: Any, rank: int) -> tuple[Any, dict[str, Tensor]]:
        backward(model)
        found = clip(list(LISTS[what](model, optimizer)))
        return found, gradients_of(model)

    plain = CASE.model()
    norms, expected = run(plain, adamw(plain.parameters()), 0)
    for found, gradients in on_ranks(SETUPS[setup], CASE.model(), run, adamw, TOKEN):
        torch.testing.assert_close(found, norms)
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients})


def test_a_parameter_without_gradient_counts_nothing() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> Any:
        backward(model)
        first = next(iter(model.parameters()))
        if not first.is_meta:
            first.grad = None
        return clip_by_norm(list(model.parameters()))

    plain = CASE.model()
    expected = run(plain, None, 0)
    for found in on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN):
        torch.testing.assert_close(found, expected)


def test_norms_that_are_not_finite_raise_on_every_rank() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        first = next(iter(model.parameters()))
        first.grad.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN)


def test_ranks_that_leave_out_what_is_elsewhere_hear_of_it() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        with pytest.raises(RankError, match=r"got a list on rank 0 without that of .*which another rank has"):
            nn.utils.clip_grad_norm_([each for each in model.parameters() if not each.is_meta], 1.0)

    on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN)


def test_what_is_computed_from_gradients_is_not_joined() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        with pytest.raises(InputError, match=rf"Rank {rank} does not hold"):
            float(nn.utils.get_total_norm([each.grad * 2 for each in model.parameters()]))

    on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN)


def test_ranks_that_clip_to_other_norms_hear_of_it() -> None:
    """At their next norm, for clipping itself asks nobody."""

    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 + rank)
        with pytest.raises(RankError, match=r"max_norm of the last clipping is 1 on rank 0, 2 on rank 1"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    on_ranks(SETUPS["two"], CASE.model(), run, adamw, TOKEN)
