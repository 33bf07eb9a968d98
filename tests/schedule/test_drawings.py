"""Compares each policy with the drawing in its own docstring."""

from __future__ import annotations

import inspect

import pytest

from autovaruna.schedule import POLICIES, draw, simulate
from tests.schedule.pipelines import chain, deepened


def drawing(name: str) -> str:
    lines = inspect.getdoc(type(POLICIES[name])).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip().startswith("rank"))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_its_drawing(name: str) -> None:
    """Three stages, four micro-batches, one slot an instruction; varuna's drawing recomputes."""
    pipeline = chain(3, 4, recompute=1.0 if name == "varuna" else None)
    pipeline = deepened(pipeline) if name == "gpipe" else pipeline
    assert draw(simulate(pipeline, POLICIES[name]), 1.0) == drawing(name)


def test_registry_names_are_the_policies_own() -> None:
    assert list(POLICIES) == ["gpipe", "1f1b", "varuna"]
    assert all(policy.name == name for name, policy in POLICIES.items())
