"""Which lines of a forward are checks: they raise by the numbers in tensors, and do nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from autovaruna.graph.export.assertions import passing

KINDS = {
    "if t: raise E": False,
    "if not t: raise E": True,
    "if a is None and (t > b.max() or\n   t < 0): raise E": False,
    "assert t": True,
    "assert not t.any()": False,
    "assert torch.all(t).item()": True,
    "assert t.any().item() == a": None,
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
