"""A model may be called in `parametrize.cached()`: what one run has cached is nothing for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import gradients_of, on_ranks, pipeline


class Twice(nn.Module):
    """Uses a weight twice that power iterations change each time it is computed; may have to be kept whole."""

    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.layer, self.is_kept = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), is_kept

    def forward(self, x: Tensor) -> Tensor:
        if self.is_kept and x.detach().sum().item() > 1e9:
            return x
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Model(nn.Module):
    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(WIDTH, WIDTH), Twice(is_kept), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.twice(self.first(x))), y)


@pytest.mark.parametrize("is_kept", [False, True])
def test_each_run_has_a_cache_of_its_own(is_kept: bool) -> None:
    """Once, a trace took the value that the run before it had left for one that follows from nothing."""

    def run(model: Any, optimizer: Any, rank: int) -> dict[str, Tensor]:
        for step in range(2):
            with parametrize.cached():
                model(**labelled(6, step)[1]).backward()
        return gradients_of(model)

    plain = Model(is_kept)
    found = on_ranks(pipeline(2), plain, run)
    expected = run(plain, None, 0)
    for gradients in found:
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients}, rtol=1e-4, atol=1e-6)
