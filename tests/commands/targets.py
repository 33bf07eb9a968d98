"""Holds functions that a user may name on the command line, good ones and bad ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.profiler.models import WIDTH, Mlp

Target = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


def mlp() -> Target:
    return Mlp(6), (torch.zeros(4, WIDTH),), {}


def mlp_on_meta() -> Target:
    with torch.device("meta"):
        return Mlp(12, 512), (torch.zeros(4, 512),), {}


def huge_on_meta() -> Target:
    with torch.device("meta"):
        return Mlp(1, 1 << 16), (torch.zeros(1 << 16, 1 << 16),), {}


def fails() -> None:
    raise RuntimeError("no data here")


def returns_a_model_alone() -> nn.Module:
    return Mlp(2)


def returns_other_things() -> tuple[int, int, int]:
    return 1, 2, 3


def returns_no_samples() -> Target:
    return Mlp(2), (torch.zeros(0, WIDTH),), {}


not_a_function = 5
