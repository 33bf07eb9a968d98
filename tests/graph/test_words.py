"""Words tell what one trace cannot serve together, and are the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from autovaruna.graph.tree import words


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
