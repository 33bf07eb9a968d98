"""Holds what a call owes other ranks: once it has returned, none of them waits for this rank to call again.

Scripts wait for each other by themselves between calls, in a sum of their losses, say, of which no world knows.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.runtime.deadlock import Failure, encoded
from autovaruna.runtime.transport.base import Part
from autovaruna.runtime.transport.threads import Mailboxes, ThreadTransport, run_ranks
from autovaruna.runtime.world import World

PATIENCE_SECONDS = 20.0


class Held(Part):
    """A message that leaves once its sender has asked for it some times, after those before it."""

    needs_calls = True

    def __init__(self, transport: Lazy, send: Callable[[], object]) -> None:
        self._transport = transport
        self._send = send
        self.has_left = False

    def leave(self) -> None:
        self._send()
        self.has_left = True

    def is_done(self) -> bool:
        if not self.has_left:
            self._transport.advance()
        return self.has_left


class Lazy(ThreadTransport):
    """Moves nothing but while it is called, and then not at once: each message, or notice, is held for some calls."""

    def __init__(self, rank: int, mailboxes: Mailboxes, seed: int) -> None:
        super().__init__(rank, mailboxes)
        self._random = random.Random(seed * 1000 + rank)
        self._held: list[Held] = []
        self._num_calls = 0

    def _hold(self, send: Callable[[], object]) -> Held:
        self._held.append(Held(self, send))
        return self._held[-1]

    def post_send(self, tensor: Tensor, destination: int, channel: int, tag: int) -> Part:
        if self._random.random() < 0.3 and not self._held:
            return super().post_send(tensor, destination, channel, tag)
        return self._hold(lambda: ThreadTransport.post_send(self, tensor, destination, channel, tag))

    def send_notice(self, data: bytes, destination: int) -> None:
        self._hold(lambda: ThreadTransport.send_notice(self, data, destination))

    def take_notices(self) -> Iterator[tuple[int, bytes]]:
        self.advance()
        yield from super().take_notices()

    def fail(self, text: str) -> None:
        for rank in range(len(self.hosts)):
            super().send_notice(encoded(Failure(text, is_final=True)), rank)

    def are_notices_out(self) -> bool:
        self.advance()
        return not self._held

    def advance(self) -> None:
        if self._num_calls > 0:
            self._num_calls -= 1
        elif self._held:
            self._num_calls = self._random.randrange(6)
            self._held.pop(0).leave()


def network(loss_in_model: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)]
    return Loss(nn.Sequential(*layers)) if loss_in_model else nn.Sequential(*layers)


def train(world: World, net: nn.Module, meet: Callable[[], object], loss_in_model: bool) -> list[float]:
    """Does all that a script does in a step, and meets the others after each."""
    net, draws = copy.deepcopy(net), torch.Generator().manual_seed(1 + world.rank)
    optimizer = torch.optim.Adam(net.parameters())
    replicas = [[0, 1], [2]] if loss_in_model else [[0], [1], [2]]
    settings = {"stage_ranks": replicas, "num_micro_batches": 6, "save_deployment": False, "load_deployment": False}
    settings["cuts"] = ["net.4"] if loss_in_model else ["2", "4"]
    model = AutoVaruna(net, optimizer, progress=False, **settings)
    losses = []
    for step in range(3):
        out = model(torch.randn(8, 8, generator=draws))
        meet()
        loss = out if loss_in_model else out.square().mean()
        loss.backward()
        meet()
        model.clip_grad_norm_(1.0)
        meet()
        optimizer.step()
        meet()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            with model.no_sync():
                out = model(torch.randn(8, 8, generator=draws))
                (out if loss_in_model else out.square().mean()).backward()
            meet()
            model.allreduce_grads()
            meet()
    model.state_dict()
    meet()
    model.optimizer_state_dict()
    meet()
    world.barrier("end")
    meet()
    return losses


class Loss(nn.Module):
    """A model whose loss is its own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@pytest.mark.parametrize("loss_in_model", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_may_wait_for_each_other_by_themselves_after_any_call(
    seed: int, loss_in_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lazy_worlds(num_ranks: int) -> list[World]:
        mailboxes = Mailboxes(num_ranks)
        return [World(Lazy(rank, mailboxes, seed)) for rank in range(num_ranks)]

    net = network(loss_in_model)
    expected = run_ranks(3, lambda world: train(world, net, lambda: None, loss_in_model))
    monkeypatch.setattr("autovaruna.runtime.transport.threads.make_worlds", lazy_worlds)
    barrier = threading.Barrier(3, timeout=PATIENCE_SECONDS)
    assert run_ranks(3, lambda world: train(world, net, barrier.wait, loss_in_model)) == expected
