"""float16 with a scaled loss: an overflow on one rank is known to all, which skip the step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autovaruna.errors import InputError
from autovaruna.varuna.step import GROWTH_INTERVAL, StepScale
from tests.varuna.scripts import batch, net, on_ranks, steps, wrap


def plain_half(scale: float) -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch(6, step))
        (loss * scale).backward()
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 1 / scale)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_float16_autocast_and_an_overflow_is_skipped_on_all_ranks_at_once() -> None:
    def script(world: Any) -> Any:
        model = wrap("0,2;1,3", fp16=True)
        model.set_optimizer(model.optimizer, init_loss_scale=2.0**10)
        losses, scale = steps(model, range(3), 0.5), model.get_loss_scale()
        model.set_optimizer(model.optimizer, init_loss_scale=2.0**30)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        inputs = {name: tensor[model.samples] for name, tensor in batch(6).items()}
        found = []
        for _ in range(3):
            found.append((model.step(inputs)[1], model.get_loss_scale()))
            model.optimizer.step()  # changes nothing: there are no gradients
        after = model.state_dict()
        return losses, scale, found, all(torch.equal(before[name], after[name]) for name in before)

    expected = plain_half(2.0**10)
    for losses, scale, found, is_same in on_ranks(4, script):
        assert scale == 2.0**10
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=5e-3, atol=0.0)
        assert found == [(True, 2.0**29), (True, 2.0**28), (True, 2.0**27)] and is_same


def scale_of(*arguments: Any) -> StepScale:
    scale = StepScale(torch.device("cpu"))
    scale.configure(*arguments)
    return scale


def test_the_scale_halves_down_to_the_least_and_doubles_after_many_good_steps() -> None:
    scale = scale_of("dynamic", 8.0, 3.0)
    values = []
    for _ in range(3):
        scale.update(True)
        values.append(scale.value)
    assert values == [4.0, 3.0, 3.0]
    for _ in range(GROWTH_INTERVAL):
        scale.update(False)
    assert scale.value == 6.0


def test_a_fixed_scale_stays() -> None:
    scale = scale_of(128.0, 8.0, 1.0)
    scale.update(True)
    assert scale.value == 128.0


@pytest.mark.parametrize("arguments", [("static", 1.0, 1.0), (-1.0, 1.0, 1.0), ("dynamic", 0.0, 1.0), (True, 1.0, 1.0)])
def test_other_scales_are_refused(arguments: Any) -> None:
    with pytest.raises(InputError, match="scale"):
        scale_of(*arguments)
