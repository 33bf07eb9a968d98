"""Trains a small model with accelerate's loop, plain on one process or over the ranks, which import libraries once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import autovaruna
from tests.catalogue import CASES
from tests.integrations import SETTINGS

BATCH, STEPS, SAVED = 6, 6, 3
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def accelerator_of(num_ranks: int, **options: Any) -> Any:
    """Returns ours, or, for 0 ranks, that of plain accelerate."""
    if num_ranks:
        from autovaruna.integrations.accelerate import Accelerator

        return Accelerator(cpu=True, autovaruna=SETTINGS, **options)
    return accelerate.Accelerator(cpu=True, **options)


def train(folder: Path, num_ranks: int, resume: bool = False) -> dict[str, Any]:
    """Returns losses and norms by step, and predictions of all samples; 0 ranks are those of plain accelerate."""
    accelerator = accelerator_of(num_ranks, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    chance = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(40, 5, generator=chance), torch.randint(3, (40,), generator=chance))
    loader: Any = DataLoader(samples, batch_size=BATCH // (num_ranks or 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder / "state"))
    first, found = SAVED - 1 if resume else 0, []
    for step, (x, y) in enumerate(accelerator.skip_first_batches(loader, first), first):
        if step == STEPS:
            break
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else 0.0
            optimizer.step()
            optimizer.zero_grad()
        found.append((accelerator.gather(loss.detach()).mean().item(), float(norm)))
        if step == SAVED - 2:
            accelerator.save_state(str(folder / "state"))
    model.eval()
    with torch.no_grad():
        predictions = torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in loader])
    accelerator.save_model(model, str(folder / "model"))
    is_whole = accelerator.get_state_dict(model).keys() == accelerator.unwrap_model(model).state_dict().keys()
    return {"steps": found, "predictions": predictions.tolist(), "is_whole": is_whole}


def train_gpt2(folder: str, num_ranks: int) -> list[float]:
    """Returns bf16 losses of a GPT-2, which ties weights and returns a key-value cache, and one after loading."""
    accelerator = accelerator_of(num_ranks, mixed_precision="bf16")
    case = CASES["gpt2"].without_dropout()
    model: Any = case.model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    tokens = case.batch(16, 1)[1]["input_ids"]
    loader: Any = DataLoader(TensorDataset(tokens), batch_size=4 // (num_ranks or 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (x,) in loader:
        output = model(input_ids=x, labels=x)
        assert output.logits.dtype == torch.float32
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(output.loss.detach()).mean().item())
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    with torch.no_grad():
        return [*losses, accelerator.gather(model(input_ids=x, labels=x).loss).mean().item()]


def group_on_ranks() -> dict[str, Any]:
    """Returns what torch.distributed, accelerate and torchmetrics see of the ranks."""
    autovaruna.init_process_group()
    autovaruna.init_process_group()
    metric = torchmetrics.MeanMetric()
    metric.update(float(autovaruna.get_rank()))
    return {
        "group": (dist.get_rank(), dist.get_world_size()),
        "sampled": list(DistributedSampler(range(7), shuffle=False)),  # type: ignore[arg-type]
        "mean": metric.compute().item(),
        "processes": accelerate.Accelerator().num_processes,
        "variables": {name: os.environ[name] for name in VARIABLES},
    }


def evaluate_on_first() -> str:
    """Returns the error of an evaluation on the main process alone, of a model that is split."""
    accelerator = accelerator_of(2)
    model: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    samples = TensorDataset(torch.randn(8, 5), torch.randint(3, (8,)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(nn.functional.cross_entropy(model(samples.tensors[0]), samples.tensors[1]))
    optimizer.step()
    try:
        if accelerator.is_main_process:
            with torch.no_grad():
                model(samples.tensors[0])
        accelerator.wait_for_everyone()
    except autovaruna.RankError as error:
        return str(error)
    return ""


def refusals() -> list[str]:
    """Returns the errors of an optimizer without its model, and of a group of other ranks."""
    from autovaruna.integrations.accelerate import Accelerator

    alone = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    texts = []
    for act in (
        autovaruna.init_process_group,
        lambda: autovaruna.init_process_group("mpi"),
        lambda: (dist.destroy_process_group(), Accelerator(cpu=True).prepare(alone)),
    ):
        try:
            act()
        except autovaruna.AutoVarunaError as error:
            texts.append(str(error))
    return texts
