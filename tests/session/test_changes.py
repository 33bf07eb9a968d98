"""What a script changes of the model between calls counts from the next call on, as in plain PyTorch, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, RankError
from autovaruna.graph.guards import Guards
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET

BATCH = labelled(6, 0)[1]


class Scaled(nn.Module):
    """Has a number, a flag and a text that forward reads, and a module that it counts nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x) * self.scale, y)


def scale(model: Scaled) -> None:
    model.scale = 2.0


def drop(model: Scaled) -> None:
    model.body[1].p = 1.0  # type: ignore[assignment]


def append(model: Scaled) -> None:
    model.body.append(nn.Tanh())


def exchange(model: Scaled) -> None:
    model.body[1] = nn.ReLU()


def hook(model: Scaled) -> None:
    model.body[0].register_forward_hook(lambda module, given, result: -result)


def train(change: Callable[[Scaled], None], is_plain: bool) -> list[float]:
    """Makes a step before a change and two after it; returns the losses."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = model if is_plain else AutoVaruna(model, optimizer, **QUIET, num_micro_batches=1)
    losses = []
    for step in range(3):
        loss = wrapped(**BATCH)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            change(model)
    return losses


class Config:
    """Is a configuration: one number of it is read, and another one is not."""

    def __init__(self) -> None:
        self.scale, self.unread = 1.0, 0


class Holder(Scaled):
    """Reads numbers in an object, a container, an array, a buffer and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.by_name, self.array, self.tensor = Config(), {"a": [1.0]}, numpy.ones(2), torch.ones(())
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = self.config.scale * self.by_name["a"][0] * float(self.array[0]) * self.tensor * self.buffer
        return super().forward(x, y) * factor


INNER: dict[str, Callable[[Holder], Any]] = {
    "config": lambda model: setattr(model.config, "scale", 2.0),
    "another config": lambda model: vars(model).update(config=SimpleNamespace(scale=2.0)),
    "container": lambda model: model.by_name["a"].__setitem__(0, 2.0),
    "array": lambda model: model.array.fill(2.0),
    "tensor": lambda model: setattr(model, "tensor", torch.full((), 2.0)),
    "buffer": lambda model: setattr(model, "buffer", torch.full((), 2.0)),
}


def test_what_an_attribute_holds_counts() -> None:
    """Once, a trace kept the numbers that a configuration, a list or a replaced buffer had at first."""
    for name, change in INNER.items():
        model = Holder()
        wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
        before = wrapped(**BATCH).item()
        change(model)
        for _ in range(2):
            assert wrapped(**BATCH).item() == 2 * before, name
        model.config.unread = 5
        wrapped(**BATCH)
        assert wrapped._session.traces is not None and wrapped._session.traces.num_traced == 2 - (name == "buffer"), (
            name
        )


def test_a_buffer_of_another_kind_is_refused() -> None:
    model = Holder()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    wrapped(**BATCH)
    model.buffer = torch.ones(1)
    with pytest.raises(InputError, match=r"buffer buffer has been replaced .*got \(\(1,\).*expected \(\(\)"):
        wrapped(**BATCH)


@pytest.mark.parametrize("change", [scale, drop, append, exchange, hook], ids=lambda change: change.__name__)
def test_a_change_counts(change: Callable[[Scaled], None]) -> None:
    assert train(change, is_plain=False) == train(change, is_plain=True) != train(lambda model: None, is_plain=True)


def test_a_value_set_back_needs_no_new_trace() -> None:
    """The words of the start return with the value of the start."""
    model = Scaled()
    guards = Guards(model)
    before = guards.words()
    guards.start()
    model.scale = 2.0
    assert "attributes=scale:2.0" in guards.words() and "scale:2.0" in guards.words()
    model.scale = 1.0
    assert guards.words() == before


def test_what_a_call_sets_itself_is_no_change() -> None:
    """Ranks set it apart, each on its own stages."""
    model = Scaled()
    guards = Guards(model)
    before = guards.words()
    guards.start()
    model.scale, model.body[0].seen = 3.0, 5  # type: ignore[assignment]
    guards.settle()
    assert guards.words() == before and guards.replaced() == []


def test_what_forward_does_not_read_may_change_at_every_step() -> None:
    """A counter or a clock that a script keeps in the model costs no trace, and may differ between ranks."""

    def be_rank(world: World) -> int:
        model = Scaled()
        model.num_steps = 0  # type: ignore[assignment]
        wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
        model.began = float(world.rank)  # type: ignore[assignment]
        for _ in range(4):
            model.num_steps += 1  # type: ignore[assignment, operator]
            model.clock = 0.1 * world.rank  # type: ignore[assignment]
            wrapped(**BATCH)
        assert wrapped._session.traces is not None
        return wrapped._session.traces.num_traced

    assert run_ranks(2, be_rank) == [1, 1]


def test_what_forward_looked_for_in_vain_counts_once_it_is_there() -> None:
    class Curious(Scaled):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * getattr(self, "weight_of_loss", 1.0)

    model = Curious()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    model.weight_of_loss = 4.0  # type: ignore[assignment]
    assert wrapped(**BATCH).item() == 4 * before
    del model.weight_of_loss
    assert wrapped(**BATCH).item() == before


def test_another_parameter_is_refused_once_the_model_is_split() -> None:
    """It would not be trained; before the first call, it is taken."""
    model = Scaled()
    wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
    model.body[2] = nn.Linear(WIDTH, CLASSES)
    wrapped(**BATCH).backward()
    assert model.body[2].weight.grad is not None
    model.body[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(InputError, match=r"\['body\.0\.weight'\]\. Expected the same ones"):
        wrapped(**BATCH)


def test_a_change_on_one_rank_is_told() -> None:
    """Ranks whose models differ would compute different things."""

    def be_rank(world: World) -> None:
        model = Scaled()
        wrapped = AutoVaruna(model, num_micro_batches=2, **QUIET)
        wrapped(**BATCH)
        if world.rank == 1:
            model.scale = 2.0
        with pytest.raises(RankError, match=r"attributes is missing on rank 0, scale:2\.0 on rank 1"):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


class OfClass(Scaled):
    """Reads a number that its class has, until a script gives the model one of its own."""

    factor = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * self.factor


def test_a_counter_is_left_out_and_what_is_read_beside_it_counts() -> None:
    """A trace with something unusable in the place of an attribute says whether it is read, by way of its class too."""
    model = OfClass()
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    for step in range(3):
        model.num_steps, model.factor = step, 2.0**step  # type: ignore[assignment]
        assert wrapped(**BATCH).item() == before * 2.0**step
    model.num_steps = 7  # type: ignore[assignment]
    wrapped(**BATCH)
    traces = wrapped._session.traces
    assert traces is not None and traces.num_traced == 4  # one for each value of the factor


def test_what_a_model_only_compares_counts() -> None:
    class Choosing(Scaled):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * (1.0 if self.shift is None else 2.0)

    model = Choosing()
    model.shift = 1  # type: ignore[assignment]
    wrapped = AutoVaruna(model, num_micro_batches=1, **QUIET)
    before = wrapped(**BATCH).item()
    for value, factor in ((2, 1.0), (None, 0.5), (3, 1.0), (4, 1.0), (None, 0.5)):
        model.shift = value  # type: ignore[assignment]
        assert wrapped(**BATCH).item() == before * factor
