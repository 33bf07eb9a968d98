"""Holds what a version of torch that the library does not know meets: a warning, or an import that says why."""

import importlib
from importlib.metadata import version

import pytest
import torch

import autovaruna
from autovaruna import _torch
from autovaruna.errors import SUPPORTED_TORCH


@pytest.mark.parametrize(
    ("number", "is_tried"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0", True), ("2.14.1", True), ("2.15.0a0", False)],
)
def test_an_untried_version_is_told_once(number, is_tried, monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", number)
    _torch.warn_of_untried.cache_clear()
    for _ in range(2):
        _torch.warn_of_untried()
    assert [record.args[0] for record in caplog.records] == ([] if is_tried else [number])


@pytest.mark.parametrize(
    ("holder", "name", "words"),
    [
        (torch._C, "_get_dispatch_mode", "torch._C._get_dispatch_mode"),
        (torch.nn.Module, "_apply", "torch.nn.modules.module.Module._apply"),
        (torch._subclasses.fake_tensor, "FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensorMode"),
    ],
)
def test_a_private_name_that_is_gone_is_named(holder, name, words, monkeypatch):
    monkeypatch.delattr(holder, name)
    with pytest.raises(ImportError) as raised:
        importlib.reload(_torch)
    assert str(raised.value).startswith(f"torch {torch.__version__} has no {words}, which this library needs")
    assert SUPPORTED_TORCH in str(raised.value)
    assert isinstance(raised.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.autograd.gone", "AttributeError: module 'torch.autograd' has no attribute 'gone'"),
        ("from torch._C import gone", "ImportError: cannot import name 'gone' from 'torch._C'"),
    ],
)
def test_an_import_that_fails_says_with_which_torch(line, words, monkeypatch, tmp_path):
    (tmp_path / "needs_a_gone_name.py").write_text(f"import torch\n{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(autovaruna._HOMES, "CutPoint", "needs_a_gone_name")
    with pytest.raises(ImportError) as raised:
        from autovaruna import CutPoint  # noqa: F401
    message = str(raised.value)
    assert message.startswith(f"autovaruna.CutPoint cannot be imported: got {words}")
    assert message.endswith(f", with torch {version('torch')}. Expected {SUPPORTED_TORCH}.")
    assert raised.value.__cause__ is not None
