"""Tensors that forward leaves beside what it returns are not there after a call, and that is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import OrderError
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET


class Leaving(nn.Module):
    """Keeps the mean square of its features in an attribute, and cached positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES)),
        )
        self.extra: Any = 0.0
        self.places: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.places = torch.arange(WIDTH)
        self.extra = [hidden.square().mean()]
        return self.last(hidden * self.places)  # type: ignore[no-any-return]


def test_attributes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    x = labelled(6, 0)[1]["x"]
    model = AutoVaruna(Leaving(), num_micro_batches=2, **QUIET)
    with caplog.at_level(logging.WARNING, "autovaruna"):
        model(x)
        model.eval()
        model(x)
    (said,) = (each.getMessage() for each in caplog.records if "leaves tensors" in each.getMessage())
    assert "leaves tensors in extra. They stay" in said


def test_a_loss_of_what_a_hook_has_kept_is_refused() -> None:
    batch = labelled(6, 0)[1]
    inner, kept = Leaving(), dict[str, Tensor]()
    inner.first.register_forward_hook(lambda module, given, made: kept.update(made=made))
    model = AutoVaruna(inner, num_micro_batches=2, **QUIET)
    loss = F.cross_entropy(model(batch["x"]), batch["y"]) + kept["made"].square().mean()
    with pytest.raises(OrderError, match="left beside what the model returns"):
        loss.backward()  # type: ignore[no-untyped-call]
