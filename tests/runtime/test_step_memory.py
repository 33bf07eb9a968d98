"""What a step keeps in memory: receives that are posted, what waits for a recompute, outputs; no more than it may."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autovaruna.runtime import mail
from autovaruna.runtime.executor import _alone
from autovaruna.runtime.in_flight import Stash
from autovaruna.runtime.mail import AHEAD, Mail, MessageKind, Parcel, Stream
from tests.catalogue import PLAIN
from tests.ranks import make_worlds
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

pytestmark = pytest.mark.timeout(60)
CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


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
    mails = [Mail(world, torch.device("cpu")) for world in make_worlds(2)]
    kind = MessageKind("graph", Stream(0, 1, 0), 4)
    mails[0].send([torch.ones(2)], kind)
    mails[1].receive(kind)
    mails[1].follow([SimpleNamespace(receives=(Parcel(kind, ("x",)),))] * 20)
    mails[1].go_to(0)
    posted = mails[1]._posted[kind.route]
    assert len(posted) == 1 + AHEAD
    threading.Timer(0.05, lambda: mails[0].send([torch.ones(2)], kind)).start()
    mails[1].receive(kind)
    assert len(posted) == 20 - 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_stash_gives_back_what_it_took_and_lets_go_of_it(device: str) -> None:
    tensors = {"a": torch.randn(3, 4, device=device).t(), "b": torch.arange(5, device=device), "c": torch.ones(1)}
    stash = Stash(tensors, is_offloaded=True)
    taken = stash.pop()
    assert taken.keys() == tensors.keys() and stash.pop() == {}
    for name, tensor in tensors.items():
        assert torch.equal(taken[name], tensor)
        assert (taken[name].device, taken[name].stride()) == (tensor.device, tensor.stride())


def test_training_with_offload_is_training() -> None:
    setup = Setup(((0,), (1,)), 3, recompute=True, schedule="varuna", settings={"offload": True})
    batches = [CASE.batch(6, step) for step in range(2)]
    compare(train(CASE, setup, batches, sgd, [[3, 3]] * 2), plain_steps(CASE, batches, sgd))


def test_an_output_is_kept_on_memory_of_its_own() -> None:
    """``mse_loss`` leaves its mean in the memory of all terms: one micro-batch after the other, they added up."""
    x = torch.randn(100, requires_grad=True)
    for output in (F.mse_loss(x, torch.zeros(100)), x[:10], x * 2):
        kept = _alone(output)
        assert torch.equal(kept, output) and not kept.requires_grad
        assert kept.untyped_storage().nbytes() == kept.nbytes
    assert kept.data_ptr() == output.data_ptr(), "what fills its memory is not copied"
