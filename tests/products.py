"""How much of a product of cases runs: a part in which every value of every factor occurs, or all of it."""

from __future__ import annotations

import os

WHOLE = bool(os.environ.get("WHOLE_PRODUCTS"))
"""Whether all of it runs; ``make test-whole`` asks for that."""
