"""Compiled stages: the numbers of stages that are not, the same masks, buffers once, and one compilation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autovaruna import AutoVaruna
from tests.catalogue import CASES, Case
from tests.catalogue.small import Classifier, hidden, labelled
from tests.products import WHOLE
from tests.reference import compare
from tests.session.test_precision import MIXED, WAYS, Trained, same_bits, train_in
from tests.session.training import QUIET, Ranks, Setup

SMALL = Case("little dropout", lambda: Classifier(hidden(nn.Dropout(0.3))), labelled, has_dropout=True)
KEPT = [
    (CASES["tied"], "autocast", "aot_eager"),
    (CASES["dropout"], "float32", "aot_eager"),
    (MIXED, "scaler", "eager"),
    (CASES["no_grad"], "float32", "aot_eager"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(
    case: Case, backend: object, stages: Ranks = ((0,), (1,)), way: str = "float32", sizes: Sequence[int] = (9, 7)
) -> Trained:
    setup = Setup(stages, recompute=True, settings={"compile_stages": backend})
    return train_in(WAYS[way], case, [case.batch(size, step) for step, size in enumerate(sizes)], setup=setup)


@pytest.mark.parametrize(("case", "way", "backend"), KEPT if WHOLE else KEPT[:3], ids=str)
def test_a_backend_that_keeps_the_kernels_keeps_the_bits(case: Case, way: str, backend: str) -> None:
    """Masks, shared parameters, autocast in the model, regions without gradients, and recomputation among them."""
    same_bits(trained(case, backend, way=way), trained(case, False, way=way))


def test_buffers_change_once_a_micro_batch() -> None:
    case = CASES["conv_net_batch_norm"]
    compare(trained(case, "aot_eager").record, trained(case, False).record)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__path__[0], reason="inductor links nothing below a path with a space")
def test_inductor_is_within_rounding() -> None:
    found, expected = (trained(SMALL, backend, ((0,),)) for backend in (True, False))
    compare(found.record, expected.record)
    assert counters["stats"]["unique_graphs"] > 0


def test_no_batch_size_compiles_again() -> None:
    """Micro-batches of 2 to 6 samples, in any order, meet the code that the first one compiled.

    Both stages are on one rank: of two threads that compile at once, torch lets one run without.
    """
    graphs = []
    for sizes in ((10,), (10, 9, 7, 16, 8)):
        torch._dynamo.reset()
        counters.clear()
        trained(CASES["dropout"], "aot_eager", ((0,), (0,)), sizes=sizes)
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
