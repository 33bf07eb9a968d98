"""Holds that fake parameters are faked once more as torch does it, only quicker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna.graph.call import describe
from autovaruna.graph.exporting.export import export
from autovaruna.graph.exporting.fake import faked, quickly_faked


class Tied(nn.Module):
    """Holds parameters of several kinds, one of them twice, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.empty(3, 4, device="meta"))
        self.turned = nn.Parameter(torch.empty(4, 3, dtype=torch.bfloat16).t())
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)
        self.same = self.one
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def _said(tensor: Tensor) -> tuple[object, ...]:
    kind = type(tensor), isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.is_leaf, tensor._version
    return *kind, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def test_fake_parameters_are_faked_as_torch_does() -> None:
    model, found = Tied(), []
    for context in (quickly_faked(), nullcontext()):
        own, mode = FakeTensorMode(), FakeTensorMode()
        with faked(model, own, torch.device("cpu")), context:
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
            made = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in tensors}
            assert made["one"] is made["same"] is mode.from_tensor(model.one, static_shapes=True)
            assert all(made[name] is not tensor and made[name].fake_mode is mode for name, tensor in tensors)
            found.append({name: _said(tensor) for name, tensor in made.items()})
    assert found[0] == found[1]


class _Counted(FakeTensorMode):
    """Counts the fakes that torch makes the long way."""

    num_made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        convert = self.fake_tensor_converter.from_real_tensor

        def counted(*args: Any, **kwargs: Any) -> Any:
            _Counted.num_made += 1
            return convert(*args, **kwargs)

        self.fake_tensor_converter.from_real_tensor = counted


def test_an_export_fakes_parameters_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_strict_utils, "FakeTensorMode", _Counted)
    model, inputs = nn.Sequential(*[nn.Linear(3, 3) for _ in range(9)]), torch.zeros(4, 3)
    export(model, describe(model, (inputs,), {})[1], 4, True, torch.device("cpu"))
    assert 0 < _Counted.num_made < 9
