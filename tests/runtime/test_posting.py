"""Receives that are posted ahead take no more memory than they may, in the first step neither."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from autovaruna.runtime import posting
from autovaruna.runtime.mail import Mail
from tests.catalogue import PLAIN
from tests.parallel.training import Setup, train
from tests.reference import sgd

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 2).without_dropout()


def test_messages_of_unknown_size_are_not_posted_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first message of a kind had come, a first step had up to 32 receives of it posted, however large."""
    monkeypatch.setattr(posting, "SMALL_BYTES", 1)
    most: Counter[str] = Counter()
    post = Mail._post

    def counted(self: Mail, *args: Any) -> None:
        post(self, *args)
        name = threading.current_thread().name
        most[name] = max(most[name], sum(len(each) for each in self._posted.values()))

    monkeypatch.setattr(Mail, "_post", counted)
    train(CASE, Setup(((0,), (1,)), 16, schedule="gpipe"), [CASE.batch(16, 0)], sgd, [[8, 8]])
    each = 2  # what the stage before sends, and the caller's targets
    assert 0 < max(most.values()) <= each * (posting.AHEAD + 1)
