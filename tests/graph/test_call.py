"""How a call is described and known again: names, batches, structures, and what asks for another trace."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import InputError
from autovaruna.graph.call import CallReader, describe
from autovaruna.graph.guards import Guards
from autovaruna.graph.tree import HidingLeaf, Undelivered, flatten, words
from tests.catalogue.small import Written
from tests.graph.models import call_of, traced

WIDE = torch.zeros(3, 12)


class Model(nn.Linear):
    """Has a parameter of every kind in its signature."""

    def forward(self, x: Tensor, pair: Any = None, *more: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        raise NotImplementedError


MODEL = Model(2, 2)
X, Y = torch.zeros(4, 2), torch.zeros(4, 3)


def names(*args: Any, **kwargs: Any) -> list[str]:
    return [spec.name for spec in call_of(MODEL, *args, **kwargs).inputs]


def test_inputs_have_the_names_of_the_signature() -> None:
    """Positional, nested, variable and keyword arguments are each called what a user calls them."""
    assert names(X, (Y, {"deep": [Y]})) == ["x", "pair_0", "pair_1_deep_0"]
    assert names(X, None, Y, Y, mask=X) == ["x", "more_0", "more_1", "mask"]
    assert names(X, labels=Y) == ["x", "labels"]
    found = names(X, {"a b": Y, "a-b": Y, "a_b": Y})  # no identifiers, or ones that read alike
    assert len(set(found)) == 4 and all(name.isidentifier() for name in found)


def test_batches_are_found_by_the_first_size_or_are_named() -> None:
    """Scalars and other lengths are none; where some are named, none is one by chance, and nested ones go by roots."""
    call = call_of(MODEL, X, torch.zeros(7), torch.tensor(1.0), mask=Y)
    assert [spec.is_batch for spec in call.inputs] == [True, False, False, True]
    assert call.batch_size == 4
    call = describe(MODEL, (X, (Y, Y)), {"mask": X}, batch_inputs=["pair"])[1]
    assert [spec.is_batch for spec in call.inputs] == [False, True, True, False]


def test_one_trace_serves_any_batch_size() -> None:
    """The key forgets the batch size and nothing else: other lengths, dtypes, constants, structure ask anew."""
    base, same = (call_of(MODEL, torch.zeros(size, 2), mask=torch.zeros(size, 3), flag=1).key for size in (4, 9))
    others = [
        call_of(MODEL, torch.zeros(4, 5), mask=Y, flag=1),
        call_of(MODEL, X.double(), mask=Y, flag=1),
        call_of(MODEL, X, mask=Y, flag=2),
        call_of(MODEL, X, mask=Y, flag=True),
        call_of(MODEL, X, Y, flag=1),
        call_of(MODEL, X.clone().requires_grad_(), mask=Y, flag=1),
    ]
    assert base == same and len({base, *(call.key for call in others)}) == 7


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
    with pytest.raises(InputError, match=message):
        describe(MODEL, args, {}, batch_inputs)


@dataclass(frozen=True)
class Answer:
    """A user's own frozen class, unknown to PyTorch."""

    scores: Tensor
    inner: Any = None
    note: str = "none"


ANYTHING = Written(lambda self, *args, **kwargs: None)
ROWS, NUMBERS = torch.randn(4, 3), torch.randn(4)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((ROWS, NUMBERS), {}),
    ((NUMBERS, ROWS), {}),
    ((ROWS,), {"y": NUMBERS}),
    ((ROWS,), {"z": NUMBERS}),
    (([ROWS, NUMBERS],), {}),
    (((ROWS, NUMBERS),), {}),
    (({"a": ROWS, "b": NUMBERS},), {}),
    (({"b": ROWS, "a": NUMBERS},), {}),
    ((ROWS, 1), {}),
    ((ROWS, True), {}),
    ((ROWS, 0.0), {}),
    ((ROWS, -0.0), {}),
    ((ROWS, None, "a"), {}),
    ((ROWS[:2], NUMBERS[:2]), {}),
    ((ROWS.double(), NUMBERS), {}),
    ((ROWS.clone().requires_grad_(), NUMBERS), {}),
    ((nn.Parameter(ROWS),), {}),
    ((Answer(ROWS, NUMBERS),), {}),
    ((ROWS, {1: NUMBERS}), {}),
]


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_known_is_what_a_description_says(grad: bool) -> None:
    reader = CallReader(ANYTHING)
    with torch.set_grad_enabled(grad):
        for args, kwargs in CALLS * 3:
            tensors, call = reader.read(args, kwargs, Guards(ANYTHING).words())
            expected, described = describe(ANYTHING, args, kwargs)
            assert call == described and call.key == described.key
            assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]


def test_a_forward_that_is_a_function_is_read_anew() -> None:
    model = Written(lambda self, *args, **kwargs: None)
    reader = CallReader(model)
    assert [spec.name for spec in reader.read((ROWS,), {}, "")[1].inputs] == ["args_0"]
    model.forward = lambda images: None
    assert [spec.name for spec in reader.read((ROWS,), {}, "")[1].inputs] == ["images"]


class Plain:
    """Has no text of its own, and hides what it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_class_of_the_users_own_is_taken_apart_and_put_together() -> None:
    value = [Answer(ROWS, {"deep": Answer(NUMBERS)}, "kept")]
    tensors, tree = flatten(value)
    assert [id(each) for each in tensors] == [id(ROWS), id(NUMBERS)] and tree.unflatten(tensors) == value


@pytest.mark.parametrize("use", [lambda it: it.layers, lambda it: it[0], list, len])
def test_an_undelivered_output_says_so_when_used(use: Any) -> None:
    """Nothing silently differs: the stand-in prints, and any use raises with what to do, but `hasattr`."""
    stand_in = Undelivered(HidingLeaf("output.past", "Cache"))
    assert not hasattr(stand_in, "dtype")  # accelerate looks at all outputs so
    assert repr(stand_in) == "Undelivered(Cache at output.past)"
    with pytest.raises(InputError, match=r"output\.past is a Cache.*use_cache=False"):
        use(stand_in)


def long(number: float) -> Any:
    """Returns an array whose text leaves out what differs."""
    array = numpy.zeros(5000)
    array[2500] = number
    return array


def scaling(factor: float) -> Callable[[float], float]:
    return lambda x: factor * x


DIFFERENT: tuple[tuple[Any, Any], ...] = (
    (long(1.0), long(2.0)),
    (Plain(long(1.0)), Plain(long(2.0))),
    (numpy.array([None, "a"]), numpy.array([None, "b"])),
    (scaling(1.0), scaling(2.0)),
    (lambda x: x + 1, lambda x: x - 1),
    ({"a", "b"}, {"a", "c"}),
)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_objects_that_differ_have_other_words(one: Any, other: Any) -> None:
    """Once, a long array was told by its text, which leaves numbers out: a call got the losses of an earlier one."""
    assert words(one) != words(other)


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        ({"src": 1, "state": 1, "state_1": 0, "rest": 1}, [1, None, 1, 0, 1]),
        ({"src": 1, "state_0": 1}, [1, None, 1, 0, None]),
    ],
)
def test_names_cover_arguments_and_what_is_in_them(dims: dict[str, int], found: list[int | None]) -> None:
    """A name is one of an argument, not the beginning of another's: ``src`` is not ``src_mask``."""
    model = Written(lambda self, src, src_mask, state=None, *rest: src)
    args = (torch.zeros(7, 3), torch.zeros(7, 7), (torch.zeros(2, 3, 4), [torch.zeros(3)]), torch.zeros(5, 3))
    inputs = describe(model, args, {}, batch_dims=list(dims.items()))[1].inputs
    assert [spec.dimension if spec.is_batch else None for spec in inputs] == found


def test_a_trace_under_a_debugger_is_the_same() -> None:
    def picked(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.data.mean(1, keepdim=True)
        return torch.where(x > scale, self.layer(x), x.new_zeros(x.shape[0], 12))

    model = nn.Sequential(nn.Linear(12, 12), Written(picked, layer=nn.Linear(12, 12)))
    plain, lines = traced(model, WIDE), list[str]()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        lines.extend([event] * (frame.f_code is picked.__code__))
        return watch if frame.f_code is picked.__code__ else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        watched = traced(model, WIDE)
    finally:
        sys.settrace(before)
    assert "line" in lines
    assert list(watched.nodes) == list(plain.nodes) and watched.graph == plain.graph


def test_a_graph_serves_its_own_method_or_module_alone() -> None:
    """Once, where lengths were free, a call of a method took the graph of another one with like arguments."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(12, 12), last=nn.Linear(12, 12)))
    reader = CallReader(model)
    calls = [reader.read((WIDE,), {}, "", method)[1] for method in ("forward", "first", "last", "last.forward")]
    assert len({call.kind for call in calls}) == len({call.key for call in calls}) == 4
    assert [call.of(model) for call in calls[:3]] == [model, model.first, model.last]
