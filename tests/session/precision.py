"""Trains in any precision, with plain PyTorch and with AutoVaruna, by the same ordinary loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autovaruna import AutoVaruna
from tests.catalogue import Batch, Case
from tests.reference import MakeOptimizer, Record, buffers_of, sgd, weights_of
from tests.session.training import Setup, gradients_of, merge, on_ranks, with_state


@dataclass(frozen=True)
class Way:
    """A precision to train in.

    Attributes:
        weights: dtype of the parameters and of the inputs.
        autocast: dtype of the autocast around the call; None: there is none.
        scale: what the scaler starts with; 0: there is none.
        max_norm: clips the gradients; 0: not.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 0.0
    max_norm: float = 0.0

    def around(self) -> AbstractContextManager[Any]:
        """Returns what surrounds a call."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)

    def scaler(self) -> torch.amp.GradScaler:
        """Returns a scaler, that grows every second step."""
        return torch.amp.GradScaler("cpu", init_scale=self.scale or 1.0, growth_interval=2, enabled=self.scale > 0)

    def cast(self, given: Any) -> Any:
        """Returns a model, or a batch, in the dtype of the weights."""
        if isinstance(given, nn.Module):
            return given.to(self.weights)

        def convert(leaf: Any) -> Any:
            return leaf.to(self.weights) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return pytree.tree_map(convert, given)


WAYS = {
    "float64": Way(torch.float64),
    "float32": Way(),
    "autocast": Way(autocast=torch.bfloat16),
    "bfloat16": Way(torch.bfloat16),
    "scaler": Way(autocast=torch.float16, scale=2.0**12, max_norm=1.0),
}


@dataclass
class Trained:
    """What training gave: the record, and the scaler's scale after each step."""

    record: Record
    scales: list[float]


def train_in(
    way: Way, case: Case, setup: Setup, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd
) -> Trained:
    """Trains with AutoVaruna on ranks that are threads."""

    def wrap(*given: Any, **settings: Any) -> AutoVaruna:
        return AutoVaruna(*given, scaler=way.scaler(), **settings)

    def run(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Trained:
        record, scales = loop(way, case, wrapped, optimizer, wrapped._session._scaler, batches)
        return Trained(with_state(record, wrapped), scales)

    results = on_ranks(
        setup, way.cast(case.model()), run, make_optimizer, wrap=wrap, token=(case.name, case.has_dropout, str(way))
    )
    assert all(each.scales == results[0].scales for each in results), "scales differ between ranks"
    return Trained(merge([each.record for each in results]), results[0].scales)


def plain_in(way: Way, case: Case, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd) -> Trained:
    """Trains with plain PyTorch."""
    model = way.cast(case.model())
    record, scales = loop(way, case, model, make_optimizer(model.parameters()), way.scaler(), batches)
    record.weights, record.buffers = weights_of(model), buffers_of(model)
    return Trained(record, scales)


def loop(
    way: Way, case: Case, model: Any, optimizer: torch.optim.Optimizer, scaler: Any, batches: Sequence[Batch]
) -> tuple[Record, list[float]]:
    """Is the loop of an ordinary script."""
    record, scales = Record(), []
    plain_clip = lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
    clip = getattr(model, "clip_grad_norm_", plain_clip)
    for args, kwargs in map(way.cast, batches):
        with way.around():
            loss = case.loss_of(model(*args, **kwargs), (args, kwargs))
        scaler.scale(loss).backward()
        record.losses.append(loss.detach())
        if way.max_norm:
            scaler.unscale_(optimizer)
            clip(way.max_norm)
        record.gradients.append({name: each.nan_to_num() for name, each in gradients_of(model).items()})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return record, scales


class Mixed(nn.Module):
    """Leaves autocast and enters it in the middle, with and without gradients; has dropout, BatchNorm and a tie."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 12)
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.batch_norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(self.first(self.words(x)))
        with torch.autocast("cpu", enabled=False):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                turn = h @ h.transpose(1, 2)
            h = h + torch.softmax(turn.to(self.second.weight.dtype), -1) @ self.second(h.to(self.second.weight.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = h + self.third(self.norm(h.to(self.second.weight.dtype))).to(h.dtype)
        h = self.drop(self.batch_norm(h.transpose(1, 2))).transpose(1, 2).to(self.words.weight.dtype)
        return F.cross_entropy(F.linear(h, self.words.weight)[:, 0].float(), y)
