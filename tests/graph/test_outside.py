"""What forward reads from outside of the model, and a script sets between steps, counts in the next one."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import functools
import os
import sys
import threading
from collections import ChainMap, deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autovaruna import AutoVaruna, TraceError
from autovaruna.graph.guards import Guards
from autovaruna.graph.outside import read_outside
from autovaruna.runtime import witness
from tests.reference import sgd
from tests.session.training import QUIET, descend, pipeline

Act = Callable[[Any, Tensor], Tensor]
X, Y = torch.randn(6, 4), torch.randn(6, 4)
WEIGHT, UNREAD, TENSOR, WRITTEN = 1.0, 1.0, torch.ones(4), torch.ones(4)
TABLE: dict[str, Any] = {"deep": {"t": 1.0}, "act": torch.relu}
DEEPER: dict[str, Any] = {"a": [{"b": [{"c": 1.0}]}]}
LIST, MANY, QUEUE = [1.0], [1.0] * 2000, deque([1.0])
CONTEXT, THREAD, CHAIN = ContextVar("CONTEXT", default=1.0), threading.local(), ChainMap({}, TABLE)
ARGS = SimpleNamespace(temp=1.0, inner=SimpleNamespace(temp=1.0))
SLOPE = functools.partial(F.leaky_relu, negative_slope=0.1)
CONFIG = ModuleType("own_config")
CONFIG.TEMP = 1.0  # type: ignore[attr-defined]
sys.modules["own_config"] = CONFIG
COUNTED, REMEMBERED = SimpleNamespace(calls=0), dict[int, Tensor]()
STEPS = ("a number", "a class", "another tensor", "a namespace", "a function in a dict", "a tensor in place")
STEPS += ("the mode of one", "a module in a list")


class Kind(enum.Enum):
    ONE, TWO = 1, 2


@dataclasses.dataclass(slots=True)
class Slotted:
    temp: float = 1.0


class Schedule:
    step = 0

    def value(self) -> float:
        return WEIGHT + self.step


class Meta(type):
    of_meta = 1.0


class OfMeta(metaclass=Meta):
    pass


BRANCH, SLOTTED, SCHEDULE = Kind.ONE, Slotted(), Schedule()
HELD, LISTED, DEEP = Slotted(), Schedule(), SimpleNamespace(temp=1.0)


class Teacher(nn.Module):
    """Is no module of a model, but in a list; does something else in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.ModuleList([nn.Dropout(0.0), nn.BatchNorm1d(4)])

    def forward(self, h: Tensor) -> Tensor:
        return self.rates[0](h) * 2 if self.training else h.tanh() * (self.rates[1].bias is None)


TEACHERS: list[Any] = [Teacher()]


class Base(nn.Module):
    """Does something between two layers."""

    of_base = 1.0

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 4), nn.Linear(4, 4), MethodType(act, self)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.act(torch.tanh(self.first(x)))), y)


class Net(Base):
    """Has an attribute of its class, and objects of its own."""

    of_class = 1.0

    def __init__(self, act: Act) -> None:
        super().__init__(act)
        self.held, self.listed, self.deep = HELD, [LISTED], SimpleNamespace(a=SimpleNamespace(b=DEEP))

    def power(self, exponent: float, h: Tensor) -> Tensor:
        return h.abs() ** exponent * WEIGHT

    half = functools.partialmethod(power, 0.5)


def helper(h: Tensor) -> Tensor:
    return (lambda each: each * WEIGHT)(h)


def imported(self: Any, h: Tensor) -> Tensor:
    import own_config

    return h * own_config.TEMP


def branching(self: Any, h: Tensor) -> Tensor:
    match BRANCH:
        case Kind.ONE:
            return h
        case _:
            return h * 2


def closed(value: float) -> tuple[Act, Callable[[], None]]:
    def act(self: Any, h: Tensor) -> Tensor:
        return h * value

    def change() -> None:
        nonlocal value
        value = 2.0

    return act, change


CLOSED, CHANGE = closed(1.0)
HERE = sys.modules[__name__]
CASES: dict[str, tuple[Act, Callable[[], object]]] = {
    "a number": (lambda self, h: h * WEIGHT, lambda: setattr(HERE, "WEIGHT", 2.0)),
    "a function that reads it": (lambda self, h: helper(h), lambda: setattr(HERE, "WEIGHT", 2.0)),
    "another function": (lambda self, h: helper(h), lambda: setattr(HERE, "helper", torch.sin)),
    "a namespace": (lambda self, h: h * ARGS.inner.temp, lambda: setattr(ARGS.inner, "temp", 2.0)),
    "a module": (imported, lambda: setattr(CONFIG, "TEMP", 2.0)),
    "a class": (lambda self, h: h * self.of_class, lambda: setattr(Net, "of_class", 2.0)),
    "a base": (lambda self, h: h * self.of_base, lambda: setattr(Base, "of_base", 2.0)),
    "a class before its base": (lambda self, h: h * self.of_base, lambda: setattr(Net, "of_base", 2.0)),
    "a closure": (CLOSED, CHANGE),
    "a default": (lambda self, h, table=TABLE: h * table["deep"]["t"], lambda: TABLE["deep"].update(t=2.0)),
    "a dict": (lambda self, h: h * TABLE["deep"]["t"], lambda: TABLE["deep"].update(t=2.0)),
    "a function in a dict": (lambda self, h: TABLE["act"](h), lambda: TABLE.update(act=torch.sin)),
    "a list": (lambda self, h: h * LIST[0], lambda: LIST.__setitem__(0, 2.0)),
    "one of many": (lambda self, h: h * MANY[7], lambda: MANY.__setitem__(7, 2.0)),
    "deep inside": (lambda self, h: h * DEEPER["a"][0]["b"][0]["c"], lambda: DEEPER["a"][0]["b"][0].update(c=2.0)),
    "a queue": (lambda self, h: h * QUEUE[-1], lambda: QUEUE.append(2.0)),
    "another tensor": (lambda self, h: h * TENSOR, lambda: setattr(HERE, "TENSOR", torch.zeros(4))),
    "a tensor in place": (lambda self, h: h * WRITTEN.sum().item(), lambda: WRITTEN.zero_()),
    "a tensor's data": (lambda self, h: h * WRITTEN.sum().item(), lambda: setattr(WRITTEN, "data", torch.zeros(4))),
    "a variable of a context": (lambda self, h: h * CONTEXT.get(), lambda: CONTEXT.set(2.0)),
    "a variable of a thread": (lambda self, h: h * THREAD.temp, lambda: setattr(THREAD, "temp", 2.0)),
    "a chain of dicts": (lambda self, h: h * CHAIN["deep"]["t"], lambda: TABLE["deep"].update(t=2.0)),
    "an attribute of a function": (lambda self, h: h * helper.rate, lambda: setattr(helper, "rate", 2.0)),
    "a part of a method": (lambda self, h: self.half(h), lambda: setattr(HERE, "WEIGHT", 2.0)),
    "a class of a class": (lambda self, h: h * OfMeta.of_meta, lambda: setattr(Meta, "of_meta", 2.0)),
    "a branch": (branching, lambda: setattr(HERE, "BRANCH", Kind.TWO)),
    "slots": (lambda self, h: h * SLOTTED.temp, lambda: setattr(SLOTTED, "temp", 2.0)),
    "a method of an object": (lambda self, h: h * SCHEDULE.value(), lambda: setattr(SCHEDULE, "step", 1)),
    "a class of an object": (lambda self, h: h * SCHEDULE.value(), lambda: setattr(Schedule, "step", 1)),
    "words of a partial": (lambda self, h: SLOPE(h), lambda: SLOPE.keywords.update(negative_slope=0.5)),
    "slots of a module": (lambda self, h: h * self.held.temp, lambda: setattr(HELD, "temp", 2.0)),
    "an object in a list of a module": (lambda self, h: h * self.listed[0].value(), lambda: setattr(LISTED, "step", 1)),
    "an object far inside": (lambda self, h: h * self.deep.a.b.temp, lambda: setattr(DEEP, "temp", 2.0)),
    "a module in a list": (lambda self, h: TEACHERS[0](h), lambda: TEACHERS.__setitem__(0, nn.Sigmoid())),
    "the mode of one": (lambda self, h: TEACHERS[0](h), lambda: TEACHERS[0].eval()),
    "a number of one": (lambda self, h: TEACHERS[0](h), lambda: setattr(TEACHERS[0].rates[0], "p", 0.1)),
    "a weight of one": (lambda self, h: TEACHERS[0](h), lambda: setattr(TEACHERS[0].rates[1], "bias", None)),
    "the environment": (lambda self, h: h * float(os.getenv("OWN", "1")), lambda: os.environ.update(OWN="2")),
    "torch's dtype": (lambda self, h: h * torch.ones(()), lambda: torch.set_default_dtype(torch.float64)),
    "torch's precision": (lambda self, h: h @ TENSOR, lambda: torch.set_float32_matmul_precision("high")),
    "by its name": (lambda self, h: h * globals()["WEIGHT"], lambda: setattr(HERE, "WEIGHT", 2.0)),
}
AT_FIRST = {"WEIGHT": 1.0, "UNREAD": 1.0, "TENSOR": TENSOR, "BRANCH": BRANCH, "helper": helper}


def begin() -> None:
    """Puts everything back as it was when this file was read."""
    vars(HERE).update(AT_FIRST)
    ARGS.inner.temp = CONFIG.TEMP = SLOTTED.temp = HELD.temp = DEEP.temp = 1.0  # type: ignore[attr-defined]
    Net.of_class = Base.of_base = THREAD.temp = Meta.of_meta = 1.0
    if "of_base" in vars(Net):
        del Net.of_base
    Schedule.step = 0
    vars(SCHEDULE).clear()
    vars(LISTED).clear()
    CONTEXT.set(1.0)
    vars(helper).update(rate=1.0)
    TABLE.update(deep={"t": 1.0}, act=torch.relu)
    LIST[0] = MANY[7] = DEEPER["a"][0]["b"][0]["c"] = 1.0
    WRITTEN.fill_(1.0)
    TEACHERS[0] = Teacher()
    SLOPE.keywords.update(negative_slope=0.1)
    os.environ.pop("OWN", None)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")


def notices(act: Act, change: Callable[[], object]) -> None:
    """Asserts that a change asks for another trace."""
    guards = started(Net(act))
    before = guards.words()
    assert guards.words() == before
    change()
    assert guards.words() != before


def started(model: Net) -> Guards:
    guards = Guards(model)
    guards.start()
    return guards


@pytest.mark.parametrize("name", CASES)
def test_another_value_asks_for_another_trace(name: str) -> None:
    """Once, the first value held for ever, without a word."""
    begin()
    notices(*CASES[name])
    begin()


def test_a_hook_of_all_modules_asks_for_another_trace() -> None:
    """And its removal for the first one."""
    begin()
    guards = started(Net(torch.abs))
    first = guards.words()
    with register_module_forward_hook(lambda module, given, out: out * 2):
        assert guards.words() != first
    assert guards.words() == first


def many(self: Any, h: Tensor) -> Tensor:
    for name in STEPS:
        h = CASES[name][0](self, h)
    return h


def losses(act: Act, changes: Sequence[Callable[[], object]], wrap: Callable[..., Any] | None = None) -> list[float]:
    """Returns the loss of a step before, and after each change, of plain PyTorch or of a wrapped model."""
    begin()
    torch.manual_seed(0)
    model = Net(act)
    optimizer, found = sgd(model.parameters()), []
    wrapped = wrap(model, optimizer) if wrap else model
    for change in (lambda: None, *changes):
        change()
        found.append(wrapped(X, Y))
        descend(found[-1], optimizer)
    return [loss.item() for loss in found]


def ours(model: Net, optimizer: Any = None) -> Any:
    return AutoVaruna(model, optimizer, plan=pipeline(1, num_micro_batches=1).plan, num_micro_batches=1, **QUIET)


def test_steps_are_those_of_plain_pytorch() -> None:
    changes = [CASES[name][1] for name in STEPS]
    assert losses(many, changes, ours) == pytest.approx(losses(many, changes), rel=1e-5)


def test_what_no_step_reads_is_ignored() -> None:
    """One that is only printed, say."""
    wrapped = ours(Net(lambda self, h: h if self.training else h * UNREAD))
    for value in range(4):
        HERE.UNREAD = float(value)  # type: ignore[attr-defined]
        wrapped(X, Y)
    assert wrapped.num_traces == 1


def test_what_no_guard_sees_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library keeps is not looked into: the second step is refused, with the line and both numbers."""
    monkeypatch.setattr(witness, "SHARE", 0.99)  # however long a step takes here
    words = r"mul\.Tensor\(\w+, 2\.0\), traced as .*, 1\.0\), at .*test_outside\.py"
    with decimal.localcontext(decimal.Context(1)) as context, pytest.raises(TraceError, match=words):
        losses(lambda self, h: h * float(context.prec), [lambda: setattr(context, "prec", 2)] * 10, ours)


def remembering(self: Any, h: Tensor) -> Tensor:
    if h.shape[1] not in REMEMBERED:
        REMEMBERED[h.shape[1]] = torch.linspace(0, 1, 4)
    return h * REMEMBERED[h.shape[1]]


def counting(self: Any, h: Tensor) -> Tensor:
    COUNTED.calls += 1
    return h * 2 if COUNTED.calls > 10 else h


@functools.cache
def slopes(length: int) -> Tensor:
    return torch.arange(length) / length


@pytest.mark.parametrize("act", [remembering, lambda self, h: h * slopes(4)])
def test_what_forward_keeps_outside_is_no_value_of_the_trace(act: Act) -> None:
    """Once, a table of positions, or a cache, held those that the trace had put there, and the first call failed."""
    expected = losses(act, [lambda: None])
    REMEMBERED.clear()
    slopes.cache_clear()
    assert losses(act, [lambda: None], ours) == pytest.approx(expected, rel=1e-5)


def test_a_number_outside_that_forward_changes_is_refused() -> None:
    """Once, its first value held for ever where it made no difference in the first two calls."""
    with pytest.raises(TraceError, match=r"changes the Python number .*test_outside:COUNTED\.calls"):
        losses(counting, [], ours)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_attribute_that_is_new_is_the_models(is_prepared: bool) -> None:
    """Once, no change of a model that was prepared was followed: its first call knew the trace."""
    begin()
    model = Net(lambda self, h: h * getattr(self, "later", 1.0) * WEIGHT)
    wrapped = ours(model)
    if is_prepared:
        wrapped.prepare(X, Y)
    first = wrapped(X, Y).item()
    wrapped.later = 2.0
    second = wrapped(X, Y).item()
    assert second == pytest.approx(model(X, Y).item()) != first
    HERE.WEIGHT = 2.0  # type: ignore[attr-defined]
    assert wrapped(X, Y).item() == pytest.approx(model(X, Y).item()) != second


class Asked(Net):
    """Has a method that reads more than forward does."""

    of_other = 1.0

    def score(self, h: Tensor) -> tuple[Tensor, str | None]:
        return h * self.of_other, type(self).__doc__

    def where(self) -> str:
        return os.environ.get("RANK", "")


class Lazy(dict[str, Any]):
    """Loads what it holds when it is asked, as a library's table of models."""

    def values(self) -> Any:
        raise ValueError("asked for all of it")

    __iter__ = __len__ = items = values


MODELS = Lazy(own=SimpleNamespace(temp=1.0))


def test_what_code_comes_to_read_later_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, all that another method reads was one on a rank that had called it, and the ranks' calls did not fit."""
    model = Asked(lambda self, h: h)
    guards = started(model)
    assert guards.words("score") == guards.words("where") == guards.words()
    monkeypatch.setenv("RANK", "1")  # as libraries set it, late
    model.seen = 1  # type: ignore[assignment]
    assert guards.words("score").endswith("attributes=seen:1")
    Asked.of_other = 2.0
    assert "of_other:2.0" in guards.words("score")


def test_a_table_that_loads_what_it_holds_is_not_asked() -> None:
    """Once, all models of a library were imported, and one that could not be ended the first call."""
    notices(lambda self, h: h * MODELS["own"].temp, lambda: setattr(MODELS["own"], "temp", 2.0))


def test_a_number_of_a_packages_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its methods are not read: once, those that a library of adapters names led to all of a library of the web."""
    manager: Any = pluggy.PluginManager
    monkeypatch.setattr(manager, "temp", 1.0, raising=False)
    notices(lambda self, h: h * pluggy.PluginManager.temp, lambda: setattr(manager, "temp", 2.0))  # type: ignore[attr-defined]


def test_an_assertion_does_not_lead_to_what_runs_the_tests() -> None:
    """Once, it led to variables of the environment that another thread sets for a moment, and ranks differed."""

    class Checked(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            assert input.dim() == 2
            return super().forward(input) * WEIGHT

    found = {place.path for place in read_outside([Checked(4, 4)], ["forward"])}
    assert any("test_outside" in path for path in found)
    assert not any("pytest" in path or "environ" in path for path in found)
