"""Planning without the changes of single plans that follow the search, to tell what these are worth."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autovaruna.planner import search
from autovaruna.planner.memory_fit import Found


def leave_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that fit keep the depths, the recompute and the deferral that the search gave them."""
    monkeypatch.setattr(search, "tuned", _ordered)
    monkeypatch.setattr(search, "tuned_promising", lambda promising, least_seconds: [])


def _ordered(found: Sequence[Found], most_seconds: float) -> list[Found]:
    return sorted(found, key=lambda each: each[2].predicted_seconds)
