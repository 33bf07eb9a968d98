"""Checks that a model makes of numbers in tensors: kept, and no reason to refuse it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, TraceError
from autovaruna.graph.export.assertions import passing
from tests.catalogue.case import Batch, Case
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.reference import bit_equal, plain_steps
from tests.session.training import QUIET, pipeline, train

SIZE = 6


class Checked(nn.Module):
    """Checks its labels, and what it computes, in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y is not None and y.max() >= CLASSES:
            raise ValueError(f"Label {y.max()} is too large")
        out = torch.tanh(self.first(x))
        if not (out.abs() <= 1).all():
            reason = "tanh is broken"
            raise ValueError(reason)
        with torch.no_grad():
            assert out.isfinite().all(), "not finite"
        return F.cross_entropy(self.last(out), y)


CASE = Case("checked", Checked, labelled)


def test_checks_change_no_number() -> None:
    """A model that checks numbers trains on stages, measured or not, compiled or not."""
    batches = [CASE.batch(SIZE, step) for step in range(2)]
    bit_equal(train(CASE, pipeline(2, num_micro_batches=1), batches), plain_steps(CASE, batches))
    AutoVaruna(CASE.model(), num_micro_batches=2, **QUIET)(**batches[0][1]).backward()


def wrong(batch: Batch, x: float, y: int) -> Batch:
    """Returns a batch whose last sample has other numbers."""
    (), given = batch
    given["x"][-1], given["y"][-1] = x, y
    return (), given


@pytest.mark.parametrize(("x", "y", "line"), [(0.0, CLASSES, "y.max.. >= CLASSES"), (float("nan"), 0, "<= 1")])
def test_what_a_check_refuses_is_refused(x: float, y: int, line: str) -> None:
    """It looks at the numbers of every micro-batch, and names the line."""
    batch = wrong(CASE.batch(SIZE, 0), x, y)
    with pytest.raises(ValueError, match=r"too large|broken"):
        CASE.model()(**batch[1])
    model = AutoVaruna(CASE.model(), num_micro_batches=2, **QUIET)
    with pytest.raises(InputError, match=rf"raises at test_checks\.py:\d+ \(.*{line}"):
        model(**batch[1])


class Scattered(nn.Module):
    """Puts rows that belong to samples, but to no one sample each, where the samples want them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        wanted = (y == 1)[:, None]
        torch._assert_async(y.min() >= 0, "labels")
        torch._check_tensor_all_with(ValueError, wanted.sum() * WIDTH == rows.numel(), lambda: "rows do not match")
        return F.cross_entropy(self.last(self.first(x).masked_scatter(wanted, rows)), y)


def test_checks_of_torch_are_kept() -> None:
    """Rows that are no batch go to every micro-batch; the check of the model's own says that they are too many."""
    given = {**labelled(SIZE, 0)[1], "y": torch.tensor([1, 0] * (SIZE // 2)), "rows": torch.ones(SIZE // 2, WIDTH)}
    Scattered()(**given).backward()
    model = AutoVaruna(Scattered(), num_micro_batches=2, **QUIET)
    with pytest.raises(
        InputError, match=r"raises at test_checks\.py:\d+ \(torch\._check_tensor_all_with.*every micro-"
    ):
        model(**given)
    with pytest.raises(InputError, match=r"raises at test_checks\.py:\d+ \(torch\._assert_async"):
        model(**{**given, "y": given["y"] - 2})


class Branches(Checked):
    """Does another thing where a number is large."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= CLASSES:
            return super().forward(x, y.clamp(max=CLASSES - 1))
        return super().forward(x, y)


def test_a_branch_is_no_check() -> None:
    with pytest.raises(TraceError, match=r"y\.max\(\) >= CLASSES"):
        AutoVaruna(Branches(), num_micro_batches=2, **QUIET)(**labelled(SIZE, 0)[1])


KINDS = {
    "if t: raise E": False,
    "if not t: raise E": True,
    "if a is None and (t > b.max() or\n   t < 0): raise E": False,
    "assert t": True,
    "assert not t.any()": False,
    "if a: pass\nelif t: raise E": False,
    "if t: a = 1": None,
    "if t:\n  if a: return\n  raise E": None,
    "assert t and u": True,
    "if t and u: raise E": None,
    "if 0 < t < 1: raise E": None,
    "assert t or u": None,
    "if a or not t: raise E": None,
    "if bool(t) is False: raise E": None,
    "if any(t): raise E": None,
    "if t in a: raise E": None,
    "while t: raise E": None,
}


@pytest.mark.parametrize(("code", "wanted"), KINDS.items())
def test_only_what_raises_or_does_nothing_is_a_check(code: str, wanted: bool | None, tmp_path: Path) -> None:
    """What a tensor must be follows from the code; where that cannot be told, the line is no check."""
    path = tmp_path / "code.py"
    path.write_text("def f():\n" + textwrap.indent(code, " "))
    line = 3 if "elif" in code or "\n   " in code else 2
    assert passing(str(path), line) is wanted
