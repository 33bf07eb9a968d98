"""What ranks tell each other are values: bytes that would call a function are refused."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autovaruna.errors import CheckpointError, RankError
from autovaruna.log import error_text
from autovaruna.ranks.deadlock import Failure, Need, RankWatch
from autovaruna.ranks.transport.values import pack, unpack

VALUES = [
    (None, True, 10**30, 1.5, "é", b"x", 1j),
    ([{1: {2}}, frozenset({3})], range(3), slice(1, 2), bytearray(b"y")),
    (torch.float32, torch.Size([2]), torch.device("cpu")),
    (Need(1, ("sent", 0, 1, 2), 3), Failure("text"), CheckpointError),
    (Path("a"), Counter("ab"), OrderedDict(a=1), defaultdict(list, a=[1]), np.float64(0.5)),
]


class Calls:
    """Its bytes call a function where they are read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("value", VALUES)
def test_values_come_as_they_went(value: object) -> None:
    assert unpack(pack(value)) == value


def test_tensors_without_numbers_and_arrays_come_as_they_went() -> None:
    meta, array = unpack(pack((torch.empty(2, 3, dtype=torch.int8, device="meta").T, np.arange(6).reshape(2, 3))))
    assert (meta.device.type, meta.shape, meta.stride(), meta.dtype) == ("meta", (3, 2), (1, 3), torch.int8)
    assert np.array_equal(array, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    "call",
    [
        Calls(os.mkdir, "made"),
        Calls(eval, "__import__('os').mkdir('made')"),
        Calls(getattr, pack, "__globals__"),
        Calls(torch.load, "made"),
        Calls(error_text, ValueError()),
        Calls(RankWatch, None, None),
        Calls(Calls, print),
    ],
)
def test_functions_are_not_called(call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError, match="ranks send each other"):
        unpack(pickle.dumps([1, (call,)]))
    assert not Path("made").exists()


def test_a_name_does_not_lead_out_of_a_module_of_ours() -> None:
    for name in ("pickle.loads", "io.open_code", "RankError.__init__", "_Reader"):
        words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (pack.__module__, name))
        with pytest.raises(RankError, match="ranks send each other"):
            unpack(b"\x80\x04" + words + b"\x93.")


def test_damaged_bytes_are_refused() -> None:
    draw = random.Random(0)
    for value in VALUES * 200:
        data = bytearray(pack(value))
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            unpack(data)
        except RankError as error:
            assert str(error)
