"""Trains small LightningModules, plain on one process or over the ranks."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.integrations import SETTINGS

BATCH = 6


class Steps(pl.LightningModule):
    """Calls both children in a step, as Lightning's own first example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.decoder = nn.Sequential(nn.Tanh(), nn.Linear(6, 8), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        loss = self.criterion(self.decoder(self.encoder(x)), y)
        self.log("loss", loss, batch_size=x.size(0))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Checked(Steps):
    """Calls itself, with the same loss on all ranks, and is validated and tested."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.criterion(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss_of_all", self.criterion(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


class OneChild(Checked):
    """Trains by calls of one child that has all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.encoder, self.decoder)
        del self.encoder, self.decoder

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.criterion(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss


class OwnParameter(Steps):
    """Has a parameter of its own, a helper that uses weights, a dictionary for a loss, and a scheduler's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def _loss(self, x: Any, y: Any) -> Any:
        return self.criterion(self(x) * self.scale, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self._loss(*batch), "mean": batch[0].mean()}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log_dict({"loss": outputs["loss"], "mean": outputs["mean"]}, sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("checked", self._loss(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}}


class Metrics(Steps):
    """Logs metrics of torchmetrics, and goes by the epoch of the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.means = MulticlassAccuracy(3, average="micro"), nn.ModuleList([MeanMetric()])
        self.checked = MetricCollection({"checked": MulticlassAccuracy(3, average="micro")})
        self.trained = self.checked.clone(prefix="trained_")

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.trained.update(logits, y)
        self.log_dict(self.trained, on_step=False, on_epoch=True)  # once, this ended the job: it iterates
        loss = self.criterion(logits, y) * (1 + self.current_epoch)
        self.log_dict({"loss": loss, "of_batch": (logits.argmax(-1) == y).float().mean(), "one": 1.0})
        self.means[0].update(loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> Any:
        self.checked.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.checked.compute())
        self.checked.reset()


class Numbers(Steps):
    """Has steps that go by numbers, and so are not traced."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.item() if batch_idx % 2 else loss, sync_dist=True)
        return loss

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
        if kwargs.get("sync_dist"):
            super().log(name, value, **kwargs)

    def on_train_epoch_end(self) -> None:
        self.log("of_ones", self(torch.ones(2, 5)).mean(), sync_dist=True)


class TwoOptimizers(Steps):
    """Goes backward itself, one child after the other, and looks at outputs at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        x, y = batch
        for optimizer, loss_of in zip(self.optimizers(), (self._size, self._loss), strict=True):
            self.toggle_optimizer(optimizer)
            loss = loss_of(x, y)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, sync_dist=True)

    def _size(self, x: Any, _: Any) -> Any:
        return self(x).square().mean()

    def _loss(self, x: Any, y: Any) -> Any:
        return self.criterion(self.decoder(self.encoder(x).detach()), y)

    def on_train_epoch_end(self) -> None:
        self.log("of_ones", self(torch.ones(2, 5)).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.encoder, self.decoder)]


KINDS: dict[str, tuple[type[Steps], Any]] = {
    "usual": (Steps, None),
    "own parameter, average": (OwnParameter, lambda: EMAWeightAveraging(decay=0.5)),
    "metrics, average": (Metrics, lambda: StochasticWeightAveraging(1e-2, 1)),
    "numbers": (Numbers, None),
    "two optimizers": (TwoOptimizers, None),
}


def loader(rank: int, num_ranks: int) -> Any:
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 5, generator=chance), torch.randint(3, (24,), generator=chance)
    return DataLoader(TensorDataset(x[rank::num_ranks], y[rank::num_ranks]), batch_size=BATCH // num_ranks)


def trainer_of(folder: str | Path, settings: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """Returns a Trainer over the ranks with these settings; without, plain Lightning's."""
    strategy: Any = "auto"
    if settings is not None:
        from autovaruna.integrations.lightning import AutoVarunaStrategy

        strategy = AutoVarunaStrategy(**SETTINGS | settings)
    return pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=2, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip


def train(kind: str, folder: Path, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what is logged in the end, the weights, those of the checkpoint, and how often the module was traced."""
    make, average = KINDS[kind]
    trainer = trainer_of(folder, settings, logger=False, callbacks=average and average())
    model, samples = make(), loader(trainer.global_rank, trainer.world_size)
    trainer.fit(model, samples, samples)
    saved: Any = trainer.checkpoint_callback
    return {
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": model.state_dict(),
        "saved": torch.load(saved.best_model_path, weights_only=False)["state_dict"],
        "traces": {name: each.num_traces for name, each in vars(model).get("_autovaruna_wrappers", {}).items()},
    }


def train_all(folder: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    return {kind: train(kind, Path(folder, kind), settings) for kind in KINDS}


def train_and_test(kind: type[Checked], folder: Path, num_ranks: int, resume: bool) -> dict[str, Any]:
    """Returns the losses of each step, and what the test says; 0 ranks are those of plain Lightning."""
    callbacks: list[pl.Callback] = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    if num_ranks:
        from autovaruna.integrations.lightning import MetricsMonitor

        callbacks.append(MetricsMonitor())
    trainer = trainer_of(
        folder, {} if num_ranks else None, callbacks=callbacks, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=CSVLogger(folder, "csv", "") if num_ranks else False, log_every_n_steps=1,
    )  # fmt: skip
    model, samples = kind(), loader(trainer.global_rank, num_ranks or 1)
    trainer.fit(model, samples, samples, ckpt_path=str(folder / "epoch=0.ckpt") if resume else None)
    assert not deepcopy(model).__dict__.get("_autovaruna_wrappers")  # which would copy the module that they wrap
    found = trainer.test(model, samples, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return {"losses": model.losses, "test": found[0]["loss_of_all"]}


def train_and_test_all(folder: str, num_ranks: int, resume: bool = False) -> dict[str, dict[str, Any]]:
    return {
        kind.__name__: train_and_test(kind, Path(folder, kind.__name__), num_ranks, resume)
        for kind in (OneChild, Checked)
    }


def refusals() -> list[str]:
    """Returns the errors of a weight in a step that is not traced, a state on one rank, and a fit after evaluation."""

    class Both(OwnParameter):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx % 2)

    texts = []
    for model in (Both(), OwnParameter(), Steps()):
        trainer = trainer_of("", {}, max_steps=1, logger=False, enable_checkpointing=False)
        samples = loader(trainer.global_rank, 2)
        try:
            if type(model) is OwnParameter:
                trainer.validate(model, samples, verbose=False)
            trainer.fit(model, samples)
            if trainer.is_global_zero:
                model.state_dict()
            trainer.strategy.barrier()
        except Exception as error:
            texts.append(str(error))
    return texts
