"""Says what concerns a model once, however often it is traced."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from torch import nn

_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def warn_once(logger: logging.Logger, model: nn.Module, text: str) -> None:
    """Logs a warning about a model that has not been given for it yet."""
    known = _said.setdefault(model, set())
    if text not in known:
        known.add(text)
        logger.warning("%s", text)
