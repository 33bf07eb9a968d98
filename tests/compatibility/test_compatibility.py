"""Runs each script on two ranks and as plain PyTorch, and holds the list in ``docs/compatibility.md``."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from autovaruna import AutoVaruna
from autovaruna.errors import AutoVarunaError
from autovaruna.ranks.world import World
from tests.compatibility import language, others, techniques, vision
from tests.compatibility.script import SCRIPTS, Script, Share, State, Wrap
from tests.rank_threads import run_ranks
from tests.session.training import QUIET, work_shared

RANKS = 2
SETTINGS = {**QUIET, "num_stages": RANKS, "profile_iterations": 1}
HEAD = (
    *("# Scripts that run", ""),
    "Each of these is a short script of `tests/compatibility`, written as people write such scripts. A test trains it",
    "as plain PyTorch on whole batches, and with the line `model = AutoVaruna(model, optimizer)` on two ranks that",
    "have half of each batch, the model in two stages; then it compares all weights. The test writes this page.",
    "",
    "| script | what is done in it | changed beside that line | numbers |",
    "|---|---|---|---|",
)
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
assert language and vision and others and techniques  # their scripts are in the list when they are imported


def run(script: Script, wrap: Wrap, share: Share) -> State:
    """Returns what the models that a script wraps, and what else it names, hold in the end."""
    models: list[Any] = []

    def keep(model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Any:
        models.append(wrap(model, optimizer, **settings))
        return models[-1]

    torch.manual_seed(0)
    more = script.train(keep, share) or {}
    states = [model.state_dict() for model in models]
    return dict(more) | {f"model {k}: {name}": value for k, state in enumerate(states) for name, value in state.items()}


def on_ranks(script: Script) -> list[State]:
    """Runs a script on every rank, a thread each, which trace the model once for all; returns what each has in the end.

    Threads share torch's generator, so that one after the other builds its model: until the first wrap.
    """
    building = Lock()

    def be_rank(world: World) -> State:
        is_built = False

        def wrap(model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Any:
            nonlocal is_built
            if not is_built:
                is_built = True
                building.release()
            inputs = "replicated" if script.is_replicated else "per_rank"
            return AutoVaruna(model, optimizer, **{**SETTINGS, "inputs": inputs, **settings})

        building.acquire()
        return run(script, wrap, lambda tensor: tensor if script.is_replicated else tensor.chunk(RANKS)[world.rank])

    with work_shared(script):
        return run_ranks(RANKS, be_rank, timeout_seconds=200)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.train.__name__)
def test_a_script(script: Script) -> None:
    if script.refusal:
        with pytest.raises(AutoVarunaError, match=script.refusal):
            on_ranks(script)
        return
    expected = run(script, lambda model, optimizer=None, **settings: model, lambda tensor: tensor)
    for state in on_ranks(script):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-6)


def test_the_page_lists_them() -> None:
    """With ``WRITE_PAGE=1`` the page is written anew."""
    if os.environ.get("WRITE_PAGE"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "WRITE_PAGE=1 pytest tests/compatibility writes it anew"


def page() -> str:
    """Returns the page."""
    numbers = {False: "plain PyTorch's", True: "refused, with the line and what to write"}
    rows = [f"| {s.name} | {s.what} | {s.change or '-'} | {numbers[bool(s.refusal)]} |" for s in SCRIPTS]
    return "\n".join([*HEAD, *rows, ""])
