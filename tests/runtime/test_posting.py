"""Receives that are posted ahead take no more memory than they may, in the first step neither."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autovaruna.runtime import mail
from autovaruna.runtime.mail import AHEAD, Kind, Mail, Parcel, Route
from tests.catalogue import PLAIN
from tests.ranks import make_worlds
from tests.reference import sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 2).without_dropout()


def test_messages_of_unknown_size_are_not_posted_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the first message of a kind had come, a first step had up to 32 receives of it posted, however large."""
    monkeypatch.setattr(mail, "SMALL_BYTES", 1)
    most: Counter[str] = Counter()
    post = Mail._post

    def counted(self: Mail, *args: Any) -> None:
        post(self, *args)
        name = threading.current_thread().name
        most[name] = max(most[name], sum(len(each) for each in self._posted.values()))

    monkeypatch.setattr(Mail, "_post", counted)
    train(CASE, Setup(((0,), (1,)), 16, schedule="gpipe"), [CASE.batch(16, 0)], sgd, [[8, 8]])
    each = 2  # what the stage before sends, and the caller's targets
    assert 0 < max(most.values()) <= each * (AHEAD + 1)


def test_small_receives_are_posted_far_ahead_while_a_rank_waits() -> None:
    """Before the first instruction only those are that it may need soon: posting them all delayed every rank."""
    worlds = make_worlds(2)
    mails = [Mail(world, torch.device("cpu")) for world in worlds]
    kind = Kind("graph", Route(0, 1, 0), 4)
    mails[0].send([torch.ones(2)], kind)
    mails[1].take(kind)
    mails[1].follow([SimpleNamespace(receives=(Parcel(kind, ("x",)),))] * 20)
    mails[1].go_to(0)
    posted = mails[1]._posted[kind.route]
    assert len(posted) == 1 + AHEAD
    threading.Timer(0.05, lambda: mails[0].send([torch.ones(2)], kind)).start()
    mails[1].take(kind)
    assert len(posted) == 20 - 1
