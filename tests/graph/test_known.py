"""A branch on numbers that follow from constants and shapes alone is taken as plain PyTorch takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.call import describe
from autovaruna.graph.verify.eager_vs_graph import compare
from tests.catalogue import CASES
from tests.graph.models import CPU, Function, named, traced

X = torch.zeros(3, 12)


def by_positions(self: nn.Module, x: Tensor) -> Tensor:
    """Branches as libraries do that look for packed sequences."""
    positions = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    is_packed = isinstance(positions, torch._subclasses.FakeTensor) or not bool((positions.diff(dim=1) == 1).all())
    return torch.sin(x) if is_packed else torch.cos(x)


def test_a_branch_on_positions_is_that_of_plain_pytorch() -> None:
    assert named(traced(Function(by_positions), X), "cos")


def after_writing(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    positions[1:].add_(1)
    return positions.sum() == 66


UNKNOWN = {
    "input": lambda x: x.sum() == 0,
    "written into a view": after_writing,
    "drawn": lambda x: torch.rand(12).sum() > 0,
    "differs by batch size": lambda x: torch.ones(x.shape[0]).sum() == 7,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_numbers_still_stop_a_trace(kind: str) -> None:
    def branch(self: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(x) if UNKNOWN[kind](x) else torch.cos(x)

    with pytest.raises(TraceError, match=r"cannot be traced|fixes its batch size"):
        traced(Function(branch), X)


def test_a_library_makes_no_other_mask_for_a_trace() -> None:
    """Once, PaliGemma without ``token_type_ids`` was traced with a mask that plain PyTorch does not make."""
    pytest.importorskip("transformers")
    case = CASES["paligemma"]
    model, (_, batch) = case.model(), case.batch(4, 0)
    trace = traced(model, **batch)
    compare(trace, model, describe(model, (), batch)[0], CPU)
    assert not [name for name in trace.nodes if name.startswith("cumsum") and trace.nodes[name].users]


def test_tensors_that_follow_from_inputs_are_seen_as_fake() -> None:
    def seen(self: nn.Module, x: Tensor) -> Tensor:
        is_fake = isinstance(x * 2, torch._subclasses.FakeTensor)
        return torch.sin(x) if is_fake else torch.cos(x)

    assert named(traced(Function(seen), X), "sin")
    assert type(torch._subclasses) is type(torch)
