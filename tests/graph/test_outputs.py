"""Holds what each output of a model is taken for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.graph.call import describe
from autovaruna.graph.outputs import OutputKind
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from tests.graph.models import CPU, Function

X = torch.zeros(3, 4)
LOSS, SAMPLES, MEAN, TOTAL, SAME = OutputKind


def returning(make: Any, loss_mode: str = "auto") -> TracedModel:
    """Traces a model that returns what `make` makes of a linear layer's output of shape (3, 4)."""
    model = Function(lambda self, x: make(self.layer(x)), layer=nn.Linear(4, 4))
    return trace(model, describe(model, (X,), {})[1], CPU, loss_mode=loss_mode)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda out: out.mean(), [LOSS]),
        (lambda out: out, [SAMPLES]),
        (lambda out: (out.mean(), out.detach()), [LOSS, SAMPLES]),
        (lambda out: (out.mean(), out), [MEAN, SAMPLES]),
        (lambda out: {"loss": out.mean(), "logits": out}, [LOSS, SAMPLES]),
        (lambda out: (out.mean(), out.sum()), [MEAN, MEAN]),
        (lambda out: {"loss": out.mean(), "other": out.sum()}, [LOSS, MEAN]),
        (lambda out: (out, out.detach().mean(dim=0)), [SAMPLES, MEAN]),
        (lambda out: (out, (out > 0).sum()), [SAMPLES, TOTAL]),
        (lambda out: (out, torch.arange(4)), [SAMPLES, SAME]),
        (lambda out: out.mean().reshape(1), [MEAN]),
        (lambda out: (out.mean(), None, 3), [LOSS]),
    ],
)
def test_kinds(make: Any, kinds: list[OutputKind]) -> None:
    """A lone differentiable scalar, or the one named loss, is the loss; the rest by batch, dtype and inputs."""
    assert [spec.kind for spec in returning(make).outputs] == kinds


def test_the_batch_dimension_of_samples_is_said() -> None:
    """A transposed output is put together along its second dimension."""
    (spec,) = returning(lambda out: out.t()).outputs
    assert (spec.kind, spec.dimension, spec.needs_gradient) == (SAMPLES, 1, True)


@pytest.mark.parametrize(
    ("make", "outer"),
    [
        (lambda out: out, 1),
        (lambda out: out.reshape(-1), 1),
        (lambda out: out.t().reshape(-1), 4),
        (lambda out: out.t().reshape(-1).exp().view(2, -1), 2),
        (lambda out: out.t().reshape(4, -1), 1),
        (lambda out: out.t().reshape(-1).view(2, 2, -1).flatten(1).softmax(0), 2),
        (lambda out: out.t().reshape(-1, 1).repeat(1, 2).max(1)[0], 4),
    ],
)
def test_rows_say_how_often_the_samples_come(make: Any, outer: int) -> None:
    """A dimension that was made of features and samples has all samples for each of the features before them."""
    traced = returning(make, loss_mode="outputs")
    (spec,) = traced.outputs
    assert traced.outer(spec, ()) == outer


def test_rows_of_unknown_order_are_refused() -> None:
    """Behind each other stand the rows of two values, each with all samples for each feature."""
    with pytest.raises(TraceError, match="which samples the rows of output"):
        returning(lambda out: torch.cat([out.t().reshape(-1)] * 2), loss_mode="outputs")


def test_paths_lead_to_the_outputs() -> None:
    """An output is called what a person would write."""
    outputs = returning(lambda out: {"loss": out.mean(), "more": [out, (out * 2,)]}).outputs
    assert [spec.path for spec in outputs] == ["output['loss']", "output['more'][0]", "output['more'][1][0]"]


def test_the_mode_decides_against_the_shape() -> None:
    """outputs: a lone scalar is no loss; loss: a scalar beside other outputs still needs its name."""
    assert returning(lambda out: out.mean(), "outputs").loss is None
    found = returning(lambda out: {"loss": out.mean(), "x": out}, "loss").loss
    assert found is not None and found.path == "output['loss']"


@pytest.mark.parametrize(
    "make", [lambda out: out, lambda out: (out.mean(), out.sum()), lambda out: out.detach().mean()]
)
def test_a_loss_that_is_not_there_is_an_error(make: Any) -> None:
    """Asked for a loss among outputs that have none, or several, it says what was found."""
    with pytest.raises(TraceError, match=r"loss_mode='loss'.*got \{'output"):
        returning(make, "loss")


def test_an_output_that_is_an_input_or_repeated() -> None:
    """A model may return its input, or a mask: they are samples too, and no block makes them."""

    def passed(self: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), x, x > 0

    model = Function(passed, layer=nn.Linear(4, 4))
    found = trace(model, describe(model, (X,), {})[1], CPU)
    assert [spec.kind for spec in found.outputs] == [SAMPLES, SAMPLES, SAMPLES]
    assert [spec.node in found.block_of for spec in found.outputs] == [True, False, False]
