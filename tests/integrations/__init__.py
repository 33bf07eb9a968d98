"""Tests of what joins AutoVaruna to libraries that own the loop; each is skipped where its library is missing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

SETTINGS = {"progress": False, "save_deployment": False, "num_stages": 2, "profile_iterations": 1}


def same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-5) -> bool:
    """Whether two models have the same weights by name, but for rounding."""
    close = {name: pytest.approx(each.numpy(), abs=tolerance) for name, each in expected.items()}
    return close == {name: each.numpy() for name, each in found.items()}
