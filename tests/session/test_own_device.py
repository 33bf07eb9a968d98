"""Each rank of a host with several GPUs computes on one of its own, wherever the script has put the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna import AutoVaruna
from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError
from autovaruna.graph.export.fakes import fake_like
from autovaruna.runtime.environment import LOCAL_RANK_VARIABLES
from autovaruna.session.device import bring_to_own_device, find_device, on_own_gpu

CPU, META = torch.device("cpu"), torch.device("meta")


def gpu(number: int) -> torch.device:
    return torch.device("cuda", number)


def said_to_be_on(*devices: torch.device) -> nn.Module:
    """Returns a model with one parameter on each device, without any such device."""
    model = nn.Module()
    mode = FakeTensorMode()
    for number, device in enumerate(devices):
        tensor = torch.zeros(2, device="meta") if device == META else fake_like(torch.zeros(2), mode, device)
        model.register_parameter(f"p{number}", nn.Parameter(tensor))
    return model


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets torch say that there are four GPUs, and notes which one is current."""
    if torch.__version__ < "2.12" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("fake tensors of this torch ask the driver for the GPU")
    state = SimpleNamespace(current=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(state, "current", device.index))
    for name in LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return state


@pytest.mark.parametrize(
    "devices, setting, local_rank, current, expected",
    [
        ((CPU,), "auto", 3, 0, CPU),
        ((), "auto", 3, 0, CPU),
        ((META,), "auto", 3, 0, gpu(3)),
        ((META,), "auto", 5, 0, gpu(1)),  # more ranks than GPUs
        ((META,), "auto", None, 0, gpu(0)),  # no launcher
        ((META,), "auto", 3, 2, gpu(2)),  # the script has chosen
        ((gpu(0),), "auto", 3, 0, gpu(3)),
        ((gpu(0), META), "auto", 1, 0, gpu(1)),
        ((gpu(0),), "auto", 3, 2, gpu(2)),
        ((gpu(2),), "auto", 3, 0, gpu(2)),
        ((gpu(0), gpu(1)), "auto", 3, 0, gpu(0)),  # a model over several devices stays as it is
        ((CPU,), "cuda", 3, 0, gpu(3)),
        ((gpu(0),), "cpu", 3, 0, CPU),
    ],
)
def test_a_rank_computes_on_a_device_of_its_own(
    devices: tuple[torch.device, ...],
    setting: str,
    local_rank: int | None,
    current: int,
    expected: torch.device,
    four_gpus: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four_gpus.current = current
    if local_rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(local_rank))
    assert find_device(said_to_be_on(*devices), Settings(device=setting)) == expected


class Moved(nn.Module):
    """Notes where it is moved: tensors cannot go to GPUs that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = said_to_be_on(gpu(0)).p0
        self.places: list[Any] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.places.append(fn(SimpleNamespace(is_meta=False, to=lambda device: device)))
        return self


def test_a_model_on_the_first_gpu_goes_to_the_own_one_which_becomes_current(
    four_gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_LOCALID", "2")
    model = Moved()
    assert bring_to_own_device(model, None, Settings()) == gpu(2)
    assert model.places == [gpu(2)] and four_gpus.current == 2


def test_what_is_where_it_belongs_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    before = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters())
    assert bring_to_own_device(model, optimizer, Settings()) == CPU
    assert all(each is before[name] for name, each in model.named_parameters())


def test_inputs_go_to_the_own_gpu_from_others_alone() -> None:
    here, there = torch.zeros(1), SimpleNamespace(is_cuda=True, device=gpu(0), to=lambda device: device)
    tensors: list[Any] = [here, there]
    assert on_own_gpu(tensors, CPU) is tensors
    assert on_own_gpu(tensors, gpu(1)) == [here, gpu(1)]


@pytest.mark.parametrize("name", ["nowhere", "cuda" if not torch.cuda.is_available() else "cuda:999"])
def test_a_device_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{name}', which cannot be used here: .* Expected auto, cpu"):
        AutoVaruna(nn.Linear(2, 2), device=name)
