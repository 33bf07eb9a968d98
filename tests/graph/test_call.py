"""Holds how a call is described: names, batches, what asks for another trace."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.graph.call import describe
from autovaruna.graph.guards import Guards, mode_of


class Model(nn.Module):
    """Has a parameter of every kind in its signature."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, pair: Any = None, *more: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        raise NotImplementedError


MODEL = Model()
X, Y = torch.zeros(4, 2), torch.zeros(4, 3)


def names(*args: Any, **kwargs: Any) -> list[str]:
    """Returns the names of the inputs of a call."""
    return [spec.name for spec in describe(MODEL, args, kwargs)[1].inputs]


def key(*args: Any, **kwargs: Any) -> str:
    """Returns the key of a call."""
    return describe(MODEL, args, kwargs)[1].key()


def test_inputs_have_the_names_of_the_signature() -> None:
    """Positional, nested, variable and keyword arguments are each called what a user calls them."""
    assert names(X, (Y, {"deep": [Y]})) == ["x", "pair_0", "pair_1_deep_0"]
    assert names(X, None, Y, Y, mask=X) == ["x", "more_0", "more_1", "mask"]
    assert names(X, labels=Y) == ["x", "labels"]


def test_names_are_identifiers_and_differ() -> None:
    """Keys that are no identifiers, or that read alike, still give a name each."""
    found = names(X, {"a b": Y, "a-b": Y, "a_b": Y})
    assert len(set(found)) == 4 and all(name.isidentifier() for name in found)


def test_the_tensors_come_in_the_order_of_the_names() -> None:
    """What `describe` takes out is the very tensors, and the tree puts them back."""
    tensors, call = describe(MODEL, (X,), {"mask": Y, "flag": True})
    assert tensors[0] is X and tensors[1] is Y
    args, kwargs = call.tree.unflatten(tensors)
    assert args[0] is X and kwargs["mask"] is Y and kwargs["flag"] is True


def test_batches_are_found_by_the_first_size() -> None:
    """What has the first tensor's length is a batch; scalars and other lengths are not."""
    call = describe(MODEL, (X, torch.zeros(7), torch.tensor(1.0)), {"mask": Y})[1]
    assert [spec.is_batch for spec in call.inputs] == [True, False, False, True]
    assert call.batch_size == 4


def test_named_batches_count_alone() -> None:
    """With batch_inputs a tensor of the same length by chance is not a batch, and nested ones go by their root."""
    call = describe(MODEL, (X, (Y, Y)), {"mask": X}, batch_inputs=["pair"])[1]
    assert [spec.is_batch for spec in call.inputs] == [False, True, True, False]


def test_one_trace_serves_any_batch_size() -> None:
    """The key forgets the batch size and nothing else: other lengths, dtypes, constants, structure ask anew."""
    base = key(X, mask=Y, flag=1)
    assert key(torch.zeros(9, 2), mask=torch.zeros(9, 3), flag=1) == base
    others = [
        key(torch.zeros(4, 5), mask=Y, flag=1),
        key(X.double(), mask=Y, flag=1),
        key(X, mask=Y, flag=2),
        key(X, mask=Y, flag=True),
        key(X, Y, flag=1),
        key(X.clone().requires_grad_(), mask=Y, flag=1),
    ]
    assert len({base, *others}) == 7


def test_the_mode_asks_for_another_trace() -> None:
    """eval, no_grad, autocast and frozen parameters each change the graph."""
    model = Model()
    found = {describe(model, (X,), {})[1].key()}
    with torch.no_grad():
        found.add(describe(model, (X,), {})[1].key())
    with torch.autocast("cpu"):
        found.add(describe(model, (X,), {})[1].key())
    found.add(describe(model.eval(), (X,), {})[1].key())
    model.layer.bias.requires_grad_(False)
    found.add(describe(model.train(), (X,), {})[1].key())
    assert len(found) == 5


def test_the_mode_follows_what_was_put_into_the_model() -> None:
    """A reader keeps the modules; another child, another parameter and new flags are seen all the same."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))
    reader = Guards(model)
    words = [reader.words()]
    model[1][0] = nn.Linear(2, 2).eval()
    words.append(reader.words())
    model[0].weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    words.append(reader.words())
    model[1].append(nn.ReLU())
    words.append(reader.words())
    assert words[-1].split(" attributes=")[0] == mode_of(model)
    assert len(set(words)) == 4


def test_the_mode_of_a_compiled_submodule_is_read() -> None:
    """TorchScript keeps its children and parameters in tables of its own."""
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    assert mode_of(model).endswith("parameters=gg")


@pytest.mark.parametrize(
    ("args", "batch_inputs", "message"),
    [
        ((torch.tensor(1.0),), [], r"No argument of the model is a batch.*'x': \(\)"),
        ((1, None), [], "No argument of the model is a batch"),
        ((X,), ["labels"], r"batch_inputs=\['labels'\]"),
        ((X, torch.zeros(5)), ["x", "pair"], r"differ in size.*'x': 4, 'pair': 5"),
    ],
)
def test_a_call_without_a_batch_says_what_it_got(args: tuple[Any, ...], batch_inputs: list[str], message: str) -> None:
    """The error names the tensors, and what to pass."""
    with pytest.raises(InputError, match=message):
        describe(MODEL, args, {}, batch_inputs)
