"""Runs examples and the Python of pages on one process, as their readers would, with what a page takes for granted."""

from __future__ import annotations

import copy
import json
import os
import re
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autovaruna
import autovaruna.varuna
from autovaruna import AutoVaruna, ElasticSampler
from autovaruna.ranks.environment import get_world
from tests.catalogue.small import Classifier

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
BARE = {"README.md", "docs/index.md", "docs/migration.md", "docs/morphing.md"}
BARE |= {f"docs/how-to/{name}.md" for name in ("slurm", "morphing", "start-and-end", "notebooks", "coming-from")}
"""Pages whose `model` is not wrapped yet when they begin."""
LIBRARIES = "docs/integrations.md"
ALONE = {LIBRARIES, "docs/migration.md", "docs/how-to/coming-from.md"}
"""Pages each of whose blocks stands for itself; of the first, each has a model and data as a library takes them."""


def blocks(page: str) -> list[tuple[str, str, int]]:
    """Returns what stands after each fence of a page, the text with its snippets, and its line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for each in FENCE.finditer(text):
        body = SNIPPET.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), each["text"])
        found.append((each["info"].strip(), body, text.count("\n", 0, each.start()) + 1))
    return found


def names(page: str) -> dict[str, Any]:
    """Returns what the blocks of a page find when they begin."""
    torch.manual_seed(0)
    net = Classifier(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)))
    dataset = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    loader = DataLoader(dataset, batch_size=8)
    x, y = next(iter(loader))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {
        **{"torch": torch, "nn": nn, "copy": copy, "autovaruna": autovaruna, "AutoVaruna": AutoVaruna},
        **{"DataLoader": DataLoader, "dataset": dataset, "loader": loader, "x": x, "y": y},
        **{"net": net, "optimizer": optimizer, "inputs": {"x": x, "y": y}, "step": 1, "num_steps": 1},
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "scaler": torch.amp.GradScaler("cpu"),
        "sampler": ElasticSampler(dataset, global_batch_size=8),
        "pyrannc": SimpleNamespace(RaNNCModule=lambda model, optimizer: model),  # what readers come from
        "model": net if page in BARE else AutoVaruna(net, optimizer),
    }
    return given | (in_libraries() if page == LIBRARIES else {})


def in_libraries() -> dict[str, Any]:
    """Returns a model, data and a module as Trainer, accelerate and Lightning take them."""
    import lightning
    from transformers import GPT2Config, GPT2LMHeadModel

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(batch["input_ids"][:, :4].float()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    dataset = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(dataset, batch_size=4)  # type: ignore[arg-type]
    given = {"model": model, "dataset": dataset, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    return given | {"module": Module()}


def run(page: str) -> str:
    """Runs an example or the Python of a page in a folder of its own; returns what went wrong, or an empty text."""
    before, sys.argv = dict(os.environ), [page]
    try:
        get_world().num_models = 0  # a page is a script
        if page.endswith(".py"):
            runpy.run_path(str(ROOT / page), run_name="__main__")
            return ""
        given = names(page)
        for info, text, line in blocks(page):
            if info == "python" or info.startswith("python title="):
                given |= names(page) if page in ALONE else {}
                exec(compile("\n" * line + text, page, "exec"), given)
    except BaseException:
        return traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


def main(pages: list[str]) -> None:
    """Prints a line of JSON: what went wrong in each page."""
    sys.modules["varuna"] = autovaruna.varuna
    sys.path.append(str(ROOT / "examples"))
    wrong = {}
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            wrong[page] = run(page)
            os.chdir(ROOT)
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
