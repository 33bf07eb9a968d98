"""Knows which versions of torch the library runs on."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch

from autovaruna import _TORCH

logger = logging.getLogger("autovaruna.graph")


@cache
def warn_of_untried() -> None:
    """Logs one warning if this version of torch is not one that the library was tried on."""
    oldest, first_untried = (tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d+)", _TORCH))
    if not oldest <= tuple(map(int, str(torch.__version__).split(".")[:2])) < first_untried:
        logger.warning("torch %s has not been tried with this library, which expects %s", torch.__version__, _TORCH)
