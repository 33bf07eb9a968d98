"""Holds that a trace which recalls repeated operations is the trace that runs each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autovaruna.errors import TraceError
from autovaruna.graph.exporting import program
from autovaruna.graph.layout import NotPlainError, layout_of, storage_of
from autovaruna.graph.recalling import recall, repeats
from autovaruna.graph.recalling.recall import Memory
from autovaruna.graph.recalling.recalled_modules import RecalledModules
from autovaruna.graph.traced import TracedModel
from tests.graph.models import Function, traced, traced_function

X = torch.zeros(3, 8, 12)


class Layer(nn.Module):
    """Attends and thinks, with views, dropout and an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(x.shape[0], 8, 3, 2, 6)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return x + F.relu_(self.out(mixed.transpose(1, 2).reshape(x.shape[0], 8, 12)))


class InPlace(nn.Module):
    """Writes into part of what an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out[:, 0] = out[:, 1] * 2
        return out


class Asking(nn.Module):
    """Does different work with tensors that need a gradient, that are leaves, or of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.layer(x)
        learned = self.layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.layer(x)
        parts = [-each if each.requires_grad else each for each in (fixed, learned)]
        parts += [each.exp() if each.is_leaf else each for each in (fixed, learned)]
        return sum(parts) + (low.float() if low.dtype is torch.bfloat16 else 2 * low)


def sizes(self: Any, x: Tensor) -> Tensor:
    x = x * self.weight
    for _ in range(3):
        doubled = torch.cat([x, x], dim=1)
        x = doubled.mean(dim=1, keepdim=True) * doubled.shape[0] + x / doubled.numel()
    return x


def constants(self: Any, x: Tensor) -> Tensor:
    x = x * self.weight
    for rate in (1, 1.0, True, 2):
        x = torch.add(x, x, alpha=rate) + torch.full_like(x, rate).to(x.dtype)
    return x


def several(self: Any, x: Tensor) -> Tensor:
    x = x * self.weight
    for _ in range(3):
        values, places = x.topk(12, dim=-1)
        x = values + places + torch.stack(torch.unbind(x, dim=1), dim=1)
    return x


def differentiating(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        y = (self.layer(x) * self.layer(x)).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True, allow_unused=True)
        x = x if slope is None else x + slope
    return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*(Layer() for _ in range(4))),
    "in place": lambda: nn.Sequential(*(InPlace() for _ in range(3))),
    "asking": lambda: nn.Sequential(*(Asking() for _ in range(3))),
    "sizes": lambda: Function(sizes, weight=nn.Parameter(torch.ones(12))),
    "constants": lambda: Function(constants, weight=nn.Parameter(torch.ones(12))),
    "several": lambda: Function(several, weight=nn.Parameter(torch.ones(12))),
    "norms": lambda: nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(3))),
    "recurrent": lambda: nn.LSTM(12, 12, num_layers=3, batch_first=True),
    "differentiating": lambda: Function(differentiating, layer=nn.Linear(12, 12)),
}


def described(model: TracedModel) -> object:
    """Returns what a trace says, with each storage under the name of the node that made it."""
    makers: dict[int, str] = {}
    nodes, known = [], []
    for node in model.module.graph.nodes:
        value = node.meta.get("val")
        layout = (str(tuple(value.shape)), str(value.stride()), value.dtype) if isinstance(value, Tensor) else value
        nodes.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(layout)))
    for name, fact in model.facts.items():
        kinds = [
            sorted(makers.setdefault(each, name) for each in kind) for kind in (fact.reads, fact.makes, fact.writes)
        ]
        known.append((name, kinds, fact.needs_gradient, fact.is_random, fact.num_flops))
    return nodes, known, model.graph, model.outputs, dict(model.repeated)


def outcome(model: nn.Module, x: Tensor) -> object:
    """Returns what a trace says, or the error that it raises."""
    try:
        return described(traced(model, x))
    except TraceError as error:
        return str(error)


@contextmanager
def no_modules_recalled() -> Iterator[None]:
    """Lets traces call every submodule while it lasts."""

    @contextmanager
    def off(model: nn.Module) -> Iterator[RecalledModules]:
        yield RecalledModules(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "recalled_modules", off)
        yield


@contextmanager
def everything_runs() -> Iterator[None]:
    """Recalls nothing while it lasts."""
    with no_modules_recalled(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "recalled_repeats", lambda: nullcontext(None))
        patch.setattr(Memory, "take_apart", lambda *args: None)
        yield


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_trace_that_recalls_is_the_one_that_runs(name: str, needs_gradient: bool) -> None:
    model, x = MODELS[name](), X.clone().requires_grad_(needs_gradient)
    with everything_runs():
        expected = outcome(model, x)
    assert outcome(model, x) == expected


def test_further_layers_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    recalled = Memory.recall

    def counting(self: Memory, call: recall.Call) -> Any:
        found = recalled(self, call)
        counts[-1] += found is not None
        return found

    monkeypatch.setattr(Memory, "recall", counting)
    for num_layers in (2, 5):
        counts.append(0)
        with no_modules_recalled():
            traced(nn.Sequential(*(Layer() for _ in range(num_layers))), X)
    assert counts[1] - counts[0] == 2 * 3 * 5  # norm, two products, attention, sum: in the trace, and for the facts


def test_without_torchs_private_parts_everything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["layers"]()
    expected = outcome(model, X)
    monkeypatch.setattr(repeats, "_OF_TORCH", ("not_there",))
    monkeypatch.setattr(recall, "_IS_SUPPORTED", False)
    monkeypatch.setattr(Memory, "recall", lambda self, call: pytest.fail("something was recalled"))
    assert outcome(model, X) == expected


def test_what_torch_runs_is_put_back() -> None:
    before = (torch._ops.OpOverload.__call__, repeats.proxy_tensor.proxy_call)
    with pytest.raises(TraceError):
        traced_function(lambda self, x: x if (x + x).sum() > 0 else -x, X)
    assert (torch._ops.OpOverload.__call__, repeats.proxy_tensor.proxy_call) == before


@pytest.mark.parametrize(
    "make",
    [lambda x: x[1:], lambda x: x.requires_grad_(), lambda x: torch.empty(0), lambda x: x.to_sparse()],
    ids=["offset", "leaf", "no fake", "sparse"],
)
def test_layouts_that_cannot_be_made_anew_are_refused(make: Callable[[Tensor], Tensor]) -> None:
    mode = FakeTensorMode()
    with mode:
        tensor = make(torch.empty(3, 4)) if make(torch.empty(3, 4)).numel() else None
    with pytest.raises(NotPlainError):
        layout_of(torch.empty(0) if tensor is None else tensor, mode, ())


def test_layouts_are_made_anew_in_memory_of_their_own() -> None:
    mode = FakeTensorMode()
    with mode:
        tensor = torch.empty(3, 4).t()
    made = layout_of(tensor, mode, ()).make(mode, ())
    assert (made.shape, made.stride(), made.dtype, made.device) == ((4, 3), (1, 4), torch.float32, tensor.device)
    assert storage_of(made) != storage_of(tensor)
