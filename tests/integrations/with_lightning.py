"""Trains a small LightningModule, plain on one process or over the ranks."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations import SETTINGS

BATCH, EPOCHS = 6, 2


class Classifier(pl.LightningModule):
    """Calls one child that has all parameters, or itself where two children have them."""

    def __init__(self, has_one_child: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []
        self.criterion = nn.CrossEntropyLoss()
        self.has_one_child = has_one_child
        if has_one_child:
            self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        else:
            self.body, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.net(x) if self.has_one_child else self.head(self.body(x))

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        loss = self.criterion(self.net(x) if self.has_one_child else self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("loss_of_all", self.criterion(self(x), y), sync_dist=True)

    test_step = validation_step

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def loader(rank: int, num_ranks: int) -> Any:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 5, generator=chance), torch.randint(3, (24,), generator=chance)
    return DataLoader(TensorDataset(x[rank::num_ranks], y[rank::num_ranks]), batch_size=BATCH // num_ranks)


def train(folder: Path, has_one_child: bool, num_ranks: int, resume: bool = False) -> dict[str, Any]:
    """Returns the losses of each step, and what the test says; 0 ranks are those of plain Lightning."""
    strategy: Any = "auto"
    callbacks: list[pl.Callback] = []
    if num_ranks:
        from autovaruna.integrations.lightning import AutoVarunaStrategy, MetricsMonitor

        strategy, callbacks = AutoVarunaStrategy(**SETTINGS), [MetricsMonitor()]
    saved = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=EPOCHS, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=CSVLogger(folder, "csv", "") if num_ranks else False, log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[saved, *callbacks], default_root_dir=folder,
    )  # fmt: skip
    model, samples = Classifier(has_one_child), loader(trainer.global_rank, num_ranks or 1)
    trainer.fit(model, samples, samples, ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
    assert not deepcopy(model).__dict__.get("_autovaruna_wrappers")  # which would copy the module that they wrap
    found = trainer.test(model, samples, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return {"losses": model.losses, "test": found[0]["loss_of_all"]}


def train_on_ranks(folder: str, num_ranks: int, resume: bool = False) -> list[dict[str, Any]]:
    return [train(Path(folder, str(one)), one, num_ranks, resume) for one in (True, False)]
