"""Holds back what torch.export prints before it raises: pages of graph, where one sentence of our error is enough."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from autovaruna._torch import EXPORT, FAKE_TENSORS

_LOGGERS = (EXPORT, FAKE_TENSORS)


@contextmanager
def quiet_failure() -> Iterator[None]:
    """Drops what is written to standard error, and logged by the tracer, if what it surrounds raises."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    written = io.StringIO()
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(written):
            yield
        sys.stderr.write(written.getvalue())
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled
