"""Holds that nothing damaged is ever loaded: the newest intact checkpoint is, or an error says what is wrong."""

from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autovaruna import AutoVaruna, CheckpointError, load_checkpoint
from autovaruna.checkpoint import manifest as manifest_module
from autovaruna.checkpoint.manifest import INDEX, MANIFEST, STATE, Manifest, read_manifest
from autovaruna.checkpoint.save import write_file

Two = tuple[Path, list[torch.Tensor]]
"""A folder with the checkpoints of two steps, and the weights of the first."""


def trained(seed: int = 0, width: int = 16) -> AutoVaruna:
    """Returns a small model after one step."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(net.parameters())
    model = AutoVaruna(net, optimizer)
    model.optimizer = optimizer
    step(model)
    return model


def step(model: AutoVaruna) -> None:
    model(torch.ones(2, 4)).sum().backward()
    model.optimizer.step()


def snapshot(model: AutoVaruna) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def is_same(model: AutoVaruna, expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, model.state_dict().values(), expected))


def flip(file: Path, bit: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    model = trained()
    model.save_checkpoint(tmp_path, step=1, extra={"a": torch.ones(3)})
    first = snapshot(model)
    step(model)
    model.save_checkpoint(tmp_path, step=2, extra={"a": torch.ones(3)})
    return tmp_path, first


def test_a_flipped_bit_in_any_file_is_found(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    root, first = two
    draw = random.Random(0)
    for file in sorted((root / "step-00000002").iterdir()):
        intact = file.read_bytes()
        for bit in [0, 8 * len(intact) - 1, *(draw.randrange(8 * len(intact)) for _ in range(4))]:
            flip(file, bit)
            model = trained(seed=3)
            before = snapshot(model)
            with pytest.raises(CheckpointError, match=file.name):
                model.load_checkpoint(root, step=2)
            assert is_same(model, before)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert model.load_checkpoint(root).step == 1
            assert is_same(model, first) and file.name in caplog.text
            file.write_bytes(intact)
    assert trained().load_checkpoint(root).step == 2


@pytest.mark.parametrize("how", ["cut off", "longer", "missing", "empty"])
def test_a_file_of_another_size_is_found(how: str, two: Two) -> None:
    root, _ = two
    for file in sorted((root / "step-00000002").iterdir()):
        data = file.read_bytes()
        file.unlink()
        if how != "missing":
            file.write_bytes({"cut off": data[:-1], "longer": data + b"x", "empty": b""}[how])
        assert trained().load_checkpoint(root).step == 1
        file.write_bytes(data)


@pytest.mark.parametrize("name", [MANIFEST, "model-00001.safetensors"])
def test_what_cannot_be_read_now_is_not_passed_over(name: str, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier checkpoint would be taken silently, and the run would go on from there."""
    root, _ = two
    newest = root / "step-00000002"
    locked = newest / name if name == MANIFEST else next(newest.glob("model*.safetensors"))
    for errno_of, words in ((errno.EMFILE, "Too many open files"), (errno.EACCES, "Permission denied")):
        with monkeypatch.context() as patch:
            _forbid(patch, locked, errno_of)
            with pytest.raises(CheckpointError, match=f"{locked.name} cannot be read: {words}"):
                trained(3).load_checkpoint(root)
    assert trained(3).load_checkpoint(root).step == 2


def _forbid(patch: pytest.MonkeyPatch, path: Path, errno_of: int) -> None:
    """Has a file not be opened."""
    for module in (os, io, builtins):

        def instead(opened: Any, *args: Any, real: Any = module.open, **options: Any) -> Any:
            if os.fspath(opened) == os.fspath(path):
                raise OSError(errno_of, os.strerror(errno_of), os.fspath(path))
            return real(opened, *args, **options)

        patch.setattr(module, "open", instead)


def test_without_an_intact_one_every_damage_is_told(two: Two) -> None:
    root, _ = two
    for folder in root.glob("step-*"):
        flip(next(folder.glob("model-*.safetensors")), 4000)
    with pytest.raises(CheckpointError, match=r"step-00000002.*model.*is damaged.*step-00000001.*model.*is damaged"):
        load_checkpoint(root, nn.Linear(2, 2))


def test_what_is_not_there_is_said(two: Two, tmp_path: Path) -> None:
    root, _ = two
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*; complete ones are: 1, 2"):
        load_checkpoint(root, nn.Linear(2, 2), step=7)
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        load_checkpoint(tmp_path / "nowhere", nn.Linear(2, 2))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"got pytorch_model\.bin.*never read"):
        load_checkpoint(tmp_path / "x", nn.Linear(2, 2))


def test_one_checkpoint_can_be_moved_and_loaded_by_its_own_folder(two: Two) -> None:
    root, first = two
    moved = (root / "step-00000001").rename(root / "kept")
    model = trained(seed=4)
    assert model.load_checkpoint(moved).step == 1 and is_same(model, first)


def test_one_without_a_manifest_is_not_taken_for_weights_of_others(two: Two) -> None:
    """Once, its weights were loaded, unchecked, and the optimizer's state was left out."""
    folder = two[0] / "step-00000002"
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        trained(seed=5).load_checkpoint(folder)
    (folder / STATE).unlink()
    assert trained(seed=5).load_checkpoint(folder).step is None


def forge(folder: Path, name: str, data: bytes) -> None:
    """Writes a file of a checkpoint, and a manifest that tells of it."""
    known = read_manifest(folder)
    record = write_file(folder / name, [np.frombuffer(data, np.uint8)] if data else [])
    (folder / MANIFEST).write_text(Manifest(known.step, {**known.files, name: record}).to_json())


def test_one_of_a_version_to_come_is_not_passed_over(two: Two) -> None:
    """An earlier one would be gone on from, and keep= would then remove the intact one."""
    manifest = two[0] / "step-00000002" / MANIFEST
    content = json.loads(manifest.read_text()) | {"format_version": 2}
    del content["checksum"]
    manifest.write_text(json.dumps({"checksum": manifest_module._own_checksum(content), **content}))
    with pytest.raises(CheckpointError, match=r"format_version 2; expected 1.*another step"):
        trained().load_checkpoint(two[0])
    assert trained().load_checkpoint(two[0], step=1).step == 1


def test_an_index_leads_nowhere_else(two: Two, tmp_path: Path) -> None:
    """Once, weights were read from wherever it said, without a checksum."""
    folder, other = two[0] / "step-00000002", next((two[0] / "step-00000001").glob("model-*"))
    for name in (f"../step-00000001/{other.name}", str(other)):
        index = {"weight_map": dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), name)}
        forge(folder, INDEX, json.dumps(index).encode())
        plain = tmp_path / "plain"
        plain.mkdir(exist_ok=True)
        (plain / INDEX).write_text(json.dumps(index))
        for place in (folder, plain):
            with pytest.raises(CheckpointError, match="which is no file of"):
                trained().load_checkpoint(place)
