"""Makes random calls of random graphs, in any order, and holds them to plain PyTorch.

Calls take other paths through the model, of other sizes, with and without gradients; between them parameters are
frozen and set free, gradients are added up, kept back and clipped, and the state leaves the model and comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import PlanError
from tests.catalogue.case import Batch, Case
from tests.catalogue.drawn import NUM_PATHS, draw_case
from tests.products import drawn_seeds
from tests.reference import OPTIMIZERS, Record, buffers_of, compare, weights_of
from tests.session.test_drawn_graphs import draw_setup, micro_batches
from tests.session.training import Setup, TooFewBlocksError, merge, on_ranks, with_state

Forward = Callable[[Batch], Tensor]
ONCE_WRONG = (560,)  # a layer that one stage uses before and after another
KINDS = ("train", "train", "train", "accumulate", "keep", "evaluate", "freeze", "reload", "clip")


class Script:
    """A loop of training, the same for a plain model and for a wrapped one.

    Args:
        seed: What it does depends on this alone.
        case: Its model.
    """

    def __init__(self, seed: int, case: Case) -> None:
        chance = random.Random(seed)
        self._case = case
        self._names = [name for name, _ in case.model().named_parameters() if not name.startswith("embedding")]
        self._acts = ["train", *(chance.choice(KINDS) for _ in range(7)), "train"]
        self._chance = chance.random()

    def run(self, model: nn.Module, whole: nn.Module, optimizer: Any, forward: Forward, clip: Any) -> list[Tensor]:
        """Runs it and returns the losses; `whole` is the model that was given, `model` what is called and saved."""
        chance, losses = random.Random(self._chance), []
        for act in self._acts:
            args, kwargs = self._case.batch(chance.randint(1, 9), chance.randrange(1000))
            batch = args, {**kwargs, "path": chance.randrange(NUM_PATHS)}
            name, is_free = chance.choice(self._names), chance.random() < 0.5
            if act in ("train", "accumulate", "keep", "clip"):
                with model.no_sync() if act == "keep" and isinstance(model, AutoVaruna) else nullcontext():
                    losses.append(forward(batch))
                if act == "clip":
                    clip(0.3)
                if act in ("train", "clip"):
                    optimizer.step()
                    optimizer.zero_grad()
            elif act == "evaluate":
                with torch.no_grad():
                    model.eval()
                    losses.append(forward(batch))
                    model.train()
            elif act == "freeze":
                dict(whole.named_parameters())[name].requires_grad_(is_free)
            else:
                model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        return losses


def plain(script: Script, case: Case, setup: Setup, make_optimizer: Any) -> Record:
    """Runs a script on the model itself, micro-batch by micro-batch."""
    model = case.model()
    optimizer = make_optimizer(model.parameters())

    def forward(batch: Batch) -> Tensor:
        parts, size = micro_batches(batch, setup.num_micro_batches), batch[0][0].shape[0]
        total = torch.zeros(())
        for args, kwargs in parts:
            loss = model(*args, **kwargs) * (args[0].shape[0] / size)
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
        return total

    def clip(most: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)

    losses = script.run(model, model, optimizer, forward, clip)
    return Record(losses, weights=weights_of(model), buffers=buffers_of(model))


def wrapped(script: Script, case: Case, setup: Setup, make_optimizer: Any) -> Record:
    """Runs a script on ranks."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Record:
        def forward(batch: Batch) -> Tensor:
            loss = model(*batch[0], **batch[1])
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        return with_state(Record(script.run(model, model.module, optimizer, forward, model.clip_grad_norm_)), model)

    return merge(on_ranks(setup, case.model(), run, make_optimizer, token=(case.name, case.has_dropout)))


@pytest.mark.parametrize("seed", sorted({*drawn_seeds(12), *ONCE_WRONG}))
def test_any_calls_train_as_plain_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    case = draw_case(seed, chance.randint(5, 18)).without_dropout()
    script, make_optimizer = Script(seed, case), OPTIMIZERS[chance.choice(list(OPTIMIZERS))]
    for num_stages in range(chance.randint(1, 4), 0, -1):
        setup = draw_setup(chance, case, num_stages)
        try:
            got = wrapped(script, case, setup, make_optimizer)
        except TooFewBlocksError:
            continue
        except PlanError as refusal:  # a shared layer is at a stage too late for a path that needs it early
            assert "another order" in str(refusal)
            return
        compare(got, plain(script, case, setup, make_optimizer))
        return
