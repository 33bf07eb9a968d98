"""A model with cut points, its batches, and training it with `Varuna` on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.ranks.world import World
from autovaruna.varuna import CutPoint, Varuna
from tests.rank_threads import run_ranks
from tests.session.training import work_shared

WORDS, WIDTH, LAYERS = 40, 12, 4
QUIET: dict[str, Any] = {"from_cache": False, "save_deployment": False, "progress": False}
QUIET |= {"device": "cpu", "profile_iterations": 1, "seed": 5}
GRIDS: dict[str, tuple[int, Any]] = {
    "grid": (4, "0,2;1,3;"),
    "one": (1, None),
    "backwards": (4, {1: [0, 1], 0: [3, 2]}),
    "two stages": (2, "0;1"),
    "three stages": (3, [[0], [1], [2]]),
    "two replicas": (2, {0: [0, 1]}),
    "two unequal replicas": (6, "4,5;0,1,2,3"),
    "unequal": (3, "0;1,2"),
}
"""Ranks, and which of them have which stage, as scripts spell it."""


class Net(nn.Module):
    """Layers with a cut point after each; the head may be tied to the embedding by name."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.cutpoints = nn.ModuleList(CutPoint() for _ in range(LAYERS))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer, cutpoint in zip(self.layers, self.cutpoints, strict=True):
            hidden = cutpoint(hidden + self.dropout(torch.tanh(layer(hidden))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def batch(size: int, step: int = 0, device: Any = None) -> dict[str, Tensor]:
    """Returns a batch that depends on size and step alone."""
    x = torch.randint(WORDS, (size, 5), generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": (3 * x + 1) % WORDS}


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    _WEIGHTS = Net().state_dict()


def net(dropout: float = 0.0) -> Net:
    """Returns the model, with the same weights each time; ranks that are threads share torch's generator."""
    made = Net(dropout)
    made.load_state_dict(_WEIGHTS)
    return made


def wrap(stage_map: Any, batch_size: int = 6, chunk_size: int | None = 2, **options: Any) -> Varuna:
    """Wraps the model on this rank and gives it an optimizer."""
    model = options.pop("model", None) or net(options.pop("dropout", 0.0))
    wrapped = Varuna(model, stage_map, options.pop("make", batch), batch_size, chunk_size, **{**QUIET, **options})
    wrapped.set_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    return wrapped


def steps(model: Varuna, numbers: range, max_norm: float | None = None) -> list[float]:
    losses = []
    for step in numbers:
        whole = batch(model.global_batch_size, step)
        loss, overflow = model.step({name: t[model.samples] for name, t in whole.items()}, max_norm)
        if not overflow:
            model.optimizer.step()
        losses.append(loss)
    return losses


def plain_steps(model: Any, size: int, steps: range, max_norm: Any = None, scale: float = 0.0) -> list[float]:
    """Trains as plain PyTorch; in float16, with a loss that is scaled, if there is a scale."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scale > 0):
            loss = model(**batch(size, step))
        (loss * (scale or 1.0)).backward()
        torch._foreach_div_([each.grad for each in model.parameters()], scale or 1.0)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_ranks(num_ranks: int, run: Callable[[World], Any], token: object = "varuna") -> list[Any]:
    """Runs a function on ranks that are threads, which trace equal models (`token`) once; returns results by rank."""
    with work_shared(token):
        return run_ranks(num_ranks, run)


def close(got: list[float], expected: list[float], rtol: float = 1e-5) -> bool:
    return len(got) == len(expected) and all(abs(a - b) <= rtol * abs(b) for a, b in zip(got, expected, strict=True))
