"""Compiled stages: the numbers of stages that are not, the same masks, buffers once, and one compilation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autovaruna import AutoVaruna
from tests.catalogue import CASES, Case
from tests.products import WHOLE
from tests.reference import bit_equal, compare
from tests.session.test_precision import MIXED, WAYS, Trained, train_in
from tests.session.training import QUIET, Setup, pipeline

SIZES = (9, 7)
KEPT = [("tied", "autocast"), ("dropout", "float32"), ("no_grad", "float32")]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(case: Case, backend: object, num_stages: int = 2, way: str = "float32", recompute: bool = True) -> Trained:
    setup = pipeline(num_stages, recompute=recompute, settings={"compile_stages": backend})
    return train_in(WAYS[way], case, setup, [case.batch(size, step) for step, size in enumerate(SIZES)])


@pytest.mark.parametrize(("name", "way"), KEPT if WHOLE else KEPT[:2])
def test_a_backend_that_keeps_the_kernels_keeps_the_bits(name: str, way: str) -> None:
    """Masks, uses of one parameter in several blocks, regions without gradients, and recomputation among them."""
    bit_equal(trained(CASES[name], "aot_eager", way=way).record, trained(CASES[name], False, way=way).record)


def test_autocast_inside_the_model_is_kept() -> None:
    found, expected = trained(MIXED, "eager", way="scaler"), trained(MIXED, False, way="scaler")
    bit_equal(found.record, expected.record)
    assert found.scales == expected.scales


def test_buffers_change_once_a_micro_batch() -> None:
    case = CASES["conv_net_batch_norm"]
    compare(trained(case, "aot_eager").record, trained(case, False).record)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_is_within_rounding() -> None:
    found, expected = (trained(CASES["dropout"], backend, num_stages=1) for backend in (True, False))
    compare(found.record, expected.record)
    assert counters["stats"]["unique_graphs"] > 0


def test_no_batch_size_compiles_again() -> None:
    """Micro-batches of 2 to 6 samples, in any order, meet the code that the first one compiled.

    Both stages are on one rank: of two threads that compile at once, torch lets one run without.
    """
    case = CASES["dropout"]
    graphs = []
    for sizes in ((10,), (10, 9, 7, 16, 8)):
        torch._dynamo.reset()
        counters.clear()
        setup = Setup(((0,), (0,)), settings={"compile_stages": "aot_eager"})
        train_in(WAYS["float32"], case, setup, [case.batch(size, step) for step, size in enumerate(sizes)])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_torch_compile_around_the_wrapper_changes_nothing() -> None:
    """Once, it compiled the library itself, piece after piece, for minutes."""
    net = nn.Linear(4, 2)
    model = torch.compile(AutoVaruna(net, num_micro_batches=2, **QUIET), backend="eager")
    x = torch.randn(6, 4)
    model(x).square().mean().backward()
    found, net.weight.grad = net.weight.grad, None
    net(x).square().mean().backward()
    torch.testing.assert_close(found, net.weight.grad)
    assert counters["stats"]["unique_graphs"] == 0
