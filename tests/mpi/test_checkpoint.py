"""Holds checkpoints of ranks that are processes: any number of them goes on, and none holds more than its part."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna
from tests.catalogue.hugging_face import GPT, make
from tests.catalogue.small import WIDTH, Classifier, hidden, labelled
from tests.mpi.launch import run_on_forks, run_on_ranks, warm
from tests.session.training import descend

MODULE = "tests.mpi.test_checkpoint"
QUIET = {"load_deployment": False, "save_deployment": False, "profile_iterations": 1, "seed": 1}


def gpt2(num_layers: int, width: int) -> nn.Module:
    sizes = {"n_layer": num_layers, "n_embd": width, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    return make("GPT2LMHeadModel", "GPT2Config", {**GPT, **sizes})


def two_stages(net: nn.Module) -> AutoVaruna:
    """Wraps a GPT-2 that is to be evaluated in two stages, cut in the middle whatever its layers take."""
    middle = f"transformer.h.{net.config.n_layer // 2}"
    return AutoVaruna(net, num_micro_batches=2, cuts=(middle,), inputs="replicated", device="cpu", **QUIET).eval()


def call(model: nn.Module) -> float:
    tokens = torch.arange(64).reshape(4, 16)
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss.item())


def resident_bytes() -> int:
    """Returns the memory of this process that is not shared with files."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


def load_on_meta(folder: str, num_layers: int, width: int) -> tuple[float, int, int]:
    """Loads a model on ``meta`` in two stages; returns its loss, the peak of memory on top, and the bytes of it all."""
    call(two_stages(gpt2(2, 32)))  # what the first call of any model brings into memory is not counted
    with torch.device("meta"):
        net = gpt2(num_layers, width)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    model = two_stages(net)
    before, peak, is_over = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    model.load_checkpoint(folder)
    loss = call(model)
    is_over.set()
    thread.join()
    return loss, peak[0] - before, whole


def train(root: str, num_stages: int, loads: bool, num_steps: int) -> list[float]:
    """Trains, from a checkpoint or from the start, saves in the background after three steps; returns the losses.

    There are enough layers for three stages, dropout, and a buffer that changes.
    """
    torch.manual_seed(3)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.ReLU()) for _ in range(3))
    net = Classifier(hidden(*layers, nn.BatchNorm1d(WIDTH)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = AutoVaruna(net, optimizer, num_stages=num_stages, num_micro_batches=2, inputs="replicated", **QUIET)
    first = 0
    if loads:
        info = model.load_checkpoint(root)
        assert info.step is not None and info.extra == {"note": "from rank 0"}
        first = info.step
    losses = []
    for step in range(first, first + num_steps):
        loss = model(**labelled(8, step)[1])
        descend(loss, optimizer)
        losses.append(loss.item())
        if step == 2:
            note = "from rank 0" if model.world.rank == 0 else "from another"
            model.save_checkpoint(root, step=3, extra={"note": note}, background=True)
    model.wait_checkpoint()
    return losses


def test_other_numbers_of_ranks_go_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run_on_ranks(2, f"{MODULE}:train", str(tmp_path), 2, False, 5)
    assert (tmp_path / "step-00000003").is_dir()
    for losses in run_on_ranks(3, f"{MODULE}:train", str(tmp_path), 3, True, 2):
        assert losses == whole[0][3:]


def test_a_model_on_meta_loads_in_parts_from_a_folder_of_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = gpt2(8, 768).eval()
    net.save_pretrained(tmp_path, max_shard_size="50MB")  # type: ignore[operator]
    expected = call(net)
    warm().prepare(f"{MODULE}:gpt2", 1, 4)  # which imports the library
    for loss, peak, whole in run_on_forks(2, f"{MODULE}:load_on_meta", str(tmp_path), 8, 768):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert peak < 0.6 * whole, f"{peak / whole:.2f} of the whole model"
