"""Compares each policy with the drawing in its own docstring."""

from __future__ import annotations

import inspect

import pytest

from autovaruna.schedule.registry import POLICIES
from autovaruna.schedule.simulation import draw
from autovaruna.schedule.simulator import simulate
from tests.schedule.pipelines import chain, deepened, placed


def drawing(name: str) -> str:
    lines = inspect.getdoc(type(POLICIES[name])).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip().startswith("rank"))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_its_drawing(name: str) -> None:
    """Four micro-batches, one slot an instruction; three stages, and four on two ranks where ranks have several."""
    shared = placed(chain(4, 4), [(0,), (1,), (0,), (1,)], 2)
    drawn = {
        "gpipe": deepened(chain(3, 4)),
        "1f1b": chain(3, 4),
        "varuna": chain(3, 4, recompute=1.0),
        "zero_bubble": chain(3, 4, backward=2.0, weight=1.0),
        "interleaved": shared,
        "deepest_first": shared,
    }
    assert draw(simulate(drawn[name], POLICIES[name]), 1.0) == drawing(name)


def test_registry_names_are_the_policies_own() -> None:
    assert list(POLICIES) == ["gpipe", "1f1b", "varuna", "interleaved", "deepest_first", "zero_bubble"]
    assert all(policy.name == name for name, policy in POLICIES.items())
