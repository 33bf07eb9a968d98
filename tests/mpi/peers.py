"""The stories of `test_peers.py`, as run on 2 ranks: each returns what a peer got wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.runtime.environment import get_world
from tests.catalogue import CASES, Case
from tests.mpi.numbers import NUM_MICRO_BATCHES, wrap
from tests.session.training import gradients_of, share_of, train_rank

TWO_STAGES: dict[str, Any] = {"inputs": "replicated", "num_micro_batches": NUM_MICRO_BATCHES, "stage_ranks": [[0], [1]]}
TWO_REPLICAS: dict[str, Any] = {"num_micro_batches": NUM_MICRO_BATCHES, "stage_ranks": [[0, 1]]}
RANKS_OWN: dict[str, Any] = {"num_micro_batches": NUM_MICRO_BATCHES, "stage_ranks": [[0], [1]]}


class Late(nn.Module):
    """Uses its second input at the end alone, and hands a dict from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        state = {"x": x, "sum": torch.zeros_like(x)}
        for layer in self.layers:
            out = torch.tanh(layer(state["x"]))
            state = {"x": out, "sum": state["sum"] + out}
        return ((state["sum"] * mask) ** 2).mean()


LATE = Case(
    "late",
    Late,
    lambda size, seed: ((), {"x": CASES["returned_scores"].batch(size, seed)[0][0], "mask": torch.ones(size, 12)}),
)


def train(case: Case, size: int, num_steps: int, **settings: Any) -> Any:
    """Trains on whole batches."""
    model, optimizer = wrap(case, **settings)
    return train_rank(case, model, optimizer, [case.batch(size, step) for step in range(num_steps)])


def tied_weights() -> Any:
    """Trains three steps with one weight on both stages."""
    return train(CASES["tied"], 8, 3, **TWO_STAGES)


def two_steps_without_zeroing() -> Any:
    """Returns the gradients after two backwards."""
    case = CASES["chain"]
    model, _ = wrap(case, **TWO_STAGES)
    for seed in (0, 1):
        model(**case.batch(8, seed)[1]).backward()
    return gradients_of(model)


def batch_norm_statistics() -> Any:
    """Returns the statistics after three steps."""
    return train(CASES["batch_norm"], 8, 3, **TWO_STAGES).buffers


def value_of_three_users() -> Any:
    """Trains with a value that two later stages use (two stages a rank)."""
    stages = {**TWO_STAGES, "stage_ranks": [[0], [1], [0], [1]]}
    return train(CASES["three_users"], 8, 3, **stages)


def input_of_a_later_stage() -> Any:
    """Trains with an input that the last stage uses alone, and a dict between stages."""
    return train(LATE, 8, 3, **TWO_STAGES)


def uneven_micro_batches() -> Any:
    """Trains on 18 samples in 4 micro-batches."""
    return train(CASES["chain"], 18, 3, **TWO_STAGES)


def evaluation() -> Any:
    """Returns the losses of evaluation between two steps, of batches of several sizes, and of the steps."""
    case = CASES["dropout"]
    model, optimizer = wrap(case, **TWO_STAGES)
    first = train_rank(case, model, optimizer, [case.batch(8, 0)])
    model.eval()
    with torch.no_grad():
        losses = [model(**case.batch(size, 5)[1]) for size in (8, 8, 3)]
    model.train()
    return first, losses, train_rank(case, model, optimizer, [case.batch(8, 1)])


def evaluation_of_own_samples() -> Any:
    """Returns the scores that each rank gets for its own samples."""
    case = CASES["returned_scores"]
    model, _ = wrap(case, **RANKS_OWN)
    model.eval()
    with torch.no_grad():
        return model(*share_of(case.batch(7, 0), [5, 2], get_world().rank)[0])


def dropout_after_recompute() -> Any:
    """Trains with dropout, with and without recompute."""
    return [train(CASES["dropout"], 8, 3, recompute=how, **TWO_STAGES) for how in ("all", "none")]


def masks_of_two_micro_batches() -> Any:
    """Returns where dropout left zeros, for equal samples in two micro-batches, over two steps with recompute."""
    case = Case("mask", lambda: nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5)), lambda size, seed: ((), {}))
    model, _ = wrap(case, recompute="all", **{**TWO_STAGES, "num_micro_batches": 2})
    seen = []
    for _ in range(2):
        output = model(torch.ones(2, 12))
        output.sum().backward()
        seen += list(output.detach() == 0)
    return torch.stack(seen)


def replicas() -> Any:
    """Returns the weights that each replica holds after three steps on samples of its own."""
    case = CASES["chain"]
    model, optimizer = wrap(case, **TWO_REPLICAS)
    batches = [share_of(case.batch(7, step), [5, 2], get_world().rank) for step in range(3)]
    record = train_rank(case, model, optimizer, batches)
    return record, {name: value.detach().clone() for name, value in model.named_parameters()}


def state_of_batch_norm() -> Any:
    """Returns the whole state before and after a step, and of a model that loaded it after its own."""
    case = CASES["conv_net_batch_norm"]
    model, optimizer = wrap(case, **TWO_STAGES)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_rank(case, model, optimizer, [case.batch(8, 0)])
    after = {name: value.clone() for name, value in model.state_dict().items()}
    other, its = wrap(case, **TWO_STAGES)
    train_rank(case, other, its, [case.batch(8, 3)])
    other.load_state_dict(after)
    return before, after, {name: value.clone() for name, value in other.state_dict().items()}


def input_gradients() -> Any:
    """Returns the gradient of each rank's own input."""
    case = CASES["chain"]
    model, _ = wrap(case, **RANKS_OWN)
    batch = share_of(case.batch(7, 0), [5, 2], get_world().rank)[1]
    x = batch["x"].clone().requires_grad_()
    model(x=x, y=batch["y"]).backward()
    return x.grad


def keyword_arguments() -> Any:
    """Trains a model that is called with keywords which are no tensors."""
    return train(CASES["keywords"], 8, 2, **TWO_STAGES)


def uneven_ranks() -> Any:
    """Trains on 5 and 2 samples; the loss of a rank alone is returned, too."""
    case = CASES["chain"]
    rank = get_world().rank
    model, optimizer = wrap(case, **RANKS_OWN)
    parts = [share_of(case.batch(7, step), [5, 2], rank) for step in range(3)]
    return train_rank(case, model, optimizer, parts), F.mse_loss(parts[0][1]["x"], torch.zeros(()))
