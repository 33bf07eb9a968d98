"""Holds what another attempt to trace does otherwise."""

from __future__ import annotations

import pytest
from torch import nn

from autovaruna.graph.exporting.otherwise import OF_JVP, KeepMoreError, Kept, try_otherwise


def test_what_cannot_be_imported_in_a_trace_is_imported_before_the_next() -> None:
    """The first jvp of a process has torch import, and compile, what goes by what a trace has put elsewhere."""
    try:
        exec("raise TypeError('a function was expected')", {"__name__": OF_JVP})  # as an import runs it
    except TypeError as error:
        with pytest.raises(KeepMoreError) as wanted:
            try_otherwise(error, nn.Linear(2, 2), Kept())
        assert wanted.value.kept == Kept(imported=frozenset({OF_JVP}))
        with pytest.raises(KeepMoreError) as next_wanted:
            try_otherwise(error, nn.Linear(2, 2), wanted.value.kept)
        assert next_wanted.value.kept.is_told
