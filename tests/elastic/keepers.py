"""Starts keepers on this machine, as a manager does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from autovaruna.elastic.link import Link, ping_all
from autovaruna.ranks.tls import Authority
from tests.hosts.emulation import WAIT_SECONDS, wait_for

AUTHORITY = Authority()
Linked = TypeVar("Linked", bound=Link)


def settings_of(folder: Path, host: str = "localhost") -> dict[str, Any]:
    """Returns the first line to a keeper of a host."""
    own = asdict(AUTHORITY.credentials(host))
    return {"folder": str(folder), "credentials": own, "standby": False, "keep_seconds": 0.0, "copy_share": 1.0}


@contextmanager
def keeper(
    folder: Path, has_standby: bool = False, keep_seconds: float = 0.0, kind: type[Linked] = Link
) -> Iterator[Linked]:
    """Returns a keeper's link, once it answers; it ends with the context."""
    settings = settings_of(folder) | {"standby": has_standby, "keep_seconds": keep_seconds}
    link, is_over = kind("localhost", settings), threading.Event()
    threading.Thread(target=ping_all, args=({"localhost": link}, is_over), daemon=True).start()
    try:
        wait_for(lambda: link.is_up or link.is_gone, "a keeper")
        assert link.is_up, link.words
        yield link
    finally:
        is_over.set()
        link.quit()
        link.wait(WAIT_SECONDS)
