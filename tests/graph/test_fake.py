"""Holds that fake parameters are faked once more as torch does it, only quicker."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna.graph.exporting.fake import TracingMode, faked


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


def test_own_parameters_are_faked_as_torch_does() -> None:
    model, quick, slow = Tied(), TracingMode(), FakeTensorMode()
    found = []
    for mode in (quick, slow):
        with faked(model, mode, torch.device("cpu")):
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
            made = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in tensors}
            assert made["one"] is made["same"] is mode.from_tensor(model.one, static_shapes=True)
            assert all(made[name] is not tensor and made[name].fake_mode is mode for name, tensor in tensors)
            found.append({name: _said(tensor) for name, tensor in made.items()})
    assert found[0] == found[1]
