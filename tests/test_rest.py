"""Holds that what is left to `make test-rest` is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rest import KEPT

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", KEPT)
def test_what_is_named_is_a_file_or_a_test_of_one(name: str) -> None:
    file, _, test = name.partition("::")
    text = (HERE / file).read_text()
    assert not test or f"\ndef {test}" in text
