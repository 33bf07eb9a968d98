"""Weights and buffers whose memory is not in the order of their dimensions: each rank has the same numbers of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from tests.reference import sgd
from tests.session.training import on_ranks, pipeline

CASES = ("channels_last", "expanded", "sliced")


class Model(nn.Module):
    """Has a kernel with its channels last, an expanded buffer, or a weight that is a part of another tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kernel, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
        self.other = nn.Parameter(torch.randn(4, 9)[:, 2:7] if kind == "sliced" else torch.randn(4, 5))
        self.register_buffer("scale", torch.full((1,), 0.5).expand(5) if kind == "expanded" else torch.ones(5))
        if kind == "channels_last":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.kernel(x)).mean((2, 3))
        out: Tensor = (self.last(hidden) + hidden @ self.other) * self.scale
        return out.square().mean()


@pytest.mark.parametrize("kind", CASES)
def test_every_rank_has_the_same_whole_state(kind: str) -> None:
    """The state after two steps is that of plain PyTorch on every rank, and loads back."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Model(kind)
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0) -> dict[str, Tensor]:
        for _ in range(2):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if kind != "expanded":  # which plain PyTorch cannot load
            model.load_state_dict(state)
        again = model.state_dict()
        assert all(torch.equal(again[name], value) for name, value in state.items())
        moments = [values["momentum_buffer"] for values in optimizer.state_dict()["state"].values()]
        return state | {f"moment {place}": value for place, value in enumerate(moments)}

    def wrapped(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
        return run(model, optimizer, rank)

    states = on_ranks(pipeline(2, num_micro_batches=1), plain, wrapped)
    expected = run(plain, sgd(plain.parameters()))
    for state in states:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
