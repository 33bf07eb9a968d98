"""Holds that a structure taken apart is put together again as it was, and that words tell values apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autovaruna.errors import InputError
from autovaruna.graph.tree import Opaque, Undelivered, flatten, words

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Answer:
    """A user's own frozen class, unknown to PyTorch."""

    scores: Tensor
    inner: Any = None
    note: str = "none"


class Cache:
    """Hides tensors, as a key-value cache does."""

    def __init__(self) -> None:
        self.layers = [{"keys": torch.ones(2)}]


A, B, C = (torch.full((2,), float(k)) for k in range(3))
STRUCTURES = {
    "tensor": (A, [A]),
    "tuple": ((A, B), [A, B]),
    "nested": ({"x": [A, (B, None)], "y": {"z": C, "n": 3}}, [A, B, C]),
    "ordered": (OrderedDict(b=A, a=B), [A, B]),
    "named tuple": (Pair(A, [B]), [A, B]),
    "none": (None, []),
    "dataclass": (Answer(A, {"deep": Answer(B)}, "kept"), [A, B]),
    "list of dataclasses": ([Answer(A), Answer(B)], [A, B]),
    "constants": ((1, "two", 3.0, True, None, A), [A]),
}


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal, tensors by identity."""
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, Answer):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_round_trip_changes_nothing(name: str) -> None:
    """Tensors come out in order, and the structure goes around them again."""
    value, expected = STRUCTURES[name]
    tensors, tree = flatten(value)
    assert len(tensors) == len(expected) and all(a is b for a, b in zip(tensors, expected, strict=True))
    assert same(tree.unflatten(tensors), value)
    assert len(tree.tensor_paths()) == len(tensors)


def test_a_model_output_keeps_its_class() -> None:
    """A Hugging Face output is rebuilt, its attributes, keys and missing fields included."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(loss=A, logits=B)
    tensors, tree = flatten(value)
    again = tree.unflatten([C, B])
    assert type(again) is type(value) and again.loss is C and again["logits"] is B and again.hidden_states is None
    assert [path.strip("[].'") for path in tree.tensor_paths()] == ["loss", "logits"] and len(tensors) == 2


class Keyless(OrderedDict[str, Any]):
    """A library's own output, registered without what names its places."""


pytree.register_pytree_node(
    Keyless, lambda it: ([*it.values()], [*it]), lambda values, keys: Keyless(zip(keys, values, strict=True))
)


def test_a_class_that_gives_no_keys_is_taken_apart() -> None:
    """Its places have the names of its entries, or numbers where those hold more."""
    for inner, paths in ((B, ["['sample']", "['scale']"]), ([B, C], ["[0]", "[1]", "[2]"])):
        tensors, tree = flatten(Keyless(sample=A, scale=inner))
        back = tree.unflatten(tensors)
        assert type(back) is Keyless and back["sample"] is A
        assert all(one is other for one, other in zip(flatten(back["scale"])[0], flatten(inner)[0], strict=True))
        assert tree.tensor_paths() == paths and tree.constants() == []


def test_paths_are_what_a_person_would_write() -> None:
    """Names of tensors in messages lead to them."""
    _, tree = flatten({"x": [A, Answer(B)]}, "batch")
    assert tree.tensor_paths() == ["batch['x'][0]", "batch['x'][1].scores"]


def test_keys_tell_constants_and_structures_apart() -> None:
    """Two calls share a key if they differ in tensors alone."""
    keys = [flatten(value)[1].key() for value in ((A, 1), (B, 1), (A, 2), (A, True), [A, 1], (A, None))]
    assert keys[0] == keys[1] and len(set(keys)) == 5


def test_an_opaque_leaf_is_asked_for() -> None:
    """A class that hides tensors is not taken apart; whoever rebuilds says what stands in its place."""
    tensors, tree = flatten((A, Cache()), "output")
    assert len(tensors) == 1 and tree.tensor_paths() == ["output[0]"]
    again = tree.unflatten(tensors, lambda leaf: leaf)
    assert again == (A, Opaque("output[1]", "Cache"))


@pytest.mark.parametrize("use", [lambda it: it.layers, lambda it: it[0], list, len])
def test_an_undelivered_output_says_so_when_used(use: Any) -> None:
    """Nothing silently differs: the stand-in prints, and any use raises with what to do."""
    stand_in = Undelivered(Opaque("output.past", "Cache"))
    assert repr(stand_in) == "Undelivered(Cache at output.past)"
    with pytest.raises(InputError, match=r"output\.past is a Cache.*use_cache=False"):
        use(stand_in)


class Plain:
    """Has no text of its own."""

    def __init__(self, held: Any) -> None:
        self.held = held


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


def test_words_do_not_say_where_an_object_lies_or_how_a_set_is_ordered() -> None:
    program = "from autovaruna.graph.tree import words; print(words({'a', 'b', 'c'}), words(lambda x: x in {'d', 'e'}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert words(Plain(1)) == words(Plain(1))
