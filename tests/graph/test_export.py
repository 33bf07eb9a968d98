"""What torch.export makes of models, and state that it would hide."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.evidence.verify import compare
from tests.catalogue.small import Written
from tests.graph.models import CPU, traced

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Act = Callable[[Any, Tensor], Any]
GLOBAL = {"calls": 0}
TABLE: dict[str, Tensor] = {}
KNOWN: Tensor | None = None


def branching(self: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the branch
        return x
    return -x


def linear(forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return Written(forward, layer=nn.Linear(4, 4), **parts)


LOOSE, UNTRAINED = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
OWN, NOISE = {"coins": random.Random(0)}, numpy.random.default_rng(0)
CONTRASTIVE = linear(lambda self, x: ((out := self.layer(x)) @ out.T).logsumexp(dim=1).mean())  # the product
FIXED = linear(lambda self, x: x.reshape(3, 4) + self.layer.bias)  # the reshape
SEARCHED = linear(lambda self, x: self.layer(x) + UNTRAINED.detach() + LOOSE)  # the loose tensor
ALPHA = [torch.zeros(4, requires_grad=True)]
HELD = linear(lambda self, x: self.layer(x) * self.alpha[0].sigmoid(), alpha=ALPHA)  # the loose attribute


class Thrown(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OWN["coins"].random()  # the coin


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(NOISE.normal())  # the noise


LINES = {
    "the coin": (Thrown(4, 4), ("draws from", "OWN, a Random", "pass the number as a tensor")),
    "the noise": (Noisy(4, 4), ("NOISE, a Generator of numpy", "torch.rand")),
    "the loose tensor": (SEARCHED, ("a tensor (4,)", "nn.Parameter", "requires_grad_(False)")),
    "the loose attribute": (HELD, ("nn.Parameter", "requires_grad_(False)")),
    "the branch": (Written(branching), ("Written", f"{__file__}:", "if x.sum() > 0", "torch.where")),
    "the product": (CONTRASTIVE, ("Written", "dynamic_batch=False")),
    "the reshape": (FIXED, ("Written", "dynamic_batch=False")),
}


@pytest.mark.parametrize("mark", LINES)
def test_an_error_names_the_line_and_says_what_to_do(mark: str) -> None:
    """A branch on numbers, a contrastive loss, a fixed batch size, and what needs a gradient that no rank would sum."""
    model, words = LINES[mark]
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    number = next(number for number, line in lines if line.endswith(f"# {mark}"))
    with pytest.raises(TraceError) as caught:
        traced(model, X)
    assert all(each in str(caught.value) for each in (*words, str(number)))


def test_what_needs_a_gradient_and_gets_none_is_left_alone() -> None:
    def untrained(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * UNTRAINED
        return self.last(x) + UNTRAINED.detach()

    assert traced(Written(untrained, last=nn.Linear(4, 4)), X).constants


def test_a_bound_on_the_batch_size_is_said() -> None:
    """A queue of earlier samples has room for so many new ones; torch fails where it reports that."""
    model = Written(lambda self, x: torch.cat([self.queue[x.shape[0] :], x]).mean(), queue=torch.zeros(24, 4))
    with pytest.raises(TraceError, match=r"it holds for batch <= .* alone.*dynamic_batch=False"):
        traced(model, X)


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(TraceError, match=r"weight has no shape yet.*run one batch"):
        traced(nn.Sequential(nn.LazyLinear(3)), X)


def test_placeholders_and_attributes_have_the_users_names() -> None:
    """Inputs are called as in the signature, parameters and buffers as in the state, ties by both of their names."""
    model = nn.Module()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    model.second.weight = model.first.weight
    model.forward = lambda sample: model.second(model.first(sample))
    found = traced(model, sample=X)
    assert [node.name for node in found.module.graph.find_nodes(op="placeholder")] == ["sample"]
    attributes = {str(node.target) for node in found.module.graph.find_nodes(op="get_attr")}
    assert attributes <= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert found.parameters["second.weight"] == "first.weight"
    assert next(p for p in found.graph.parameters if p.name == "first.weight").blocks == (0, 1)


def test_tracing_leaves_the_model_alone() -> None:
    """Parameters are the same objects with the same numbers, on meta too; the generator does not move."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Tanh())
    tensors = dict(model.state_dict(keep_vars=True))
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    state = torch.get_rng_state()
    traced(model, X)
    assert all(tensor is tensors[name] for name, tensor in model.state_dict(keep_vars=True).items())
    assert all(torch.equal(tensor, copies[name]) for name, tensor in tensors.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_fingerprint_tells_models_apart() -> None:
    """Another operation, shape or dtype is another graph; another batch size, other weights, none (meta) are not."""
    calls = [(nn.Linear(4, 4), nn.Tanh(), X), (nn.Linear(4, 4), nn.ReLU(), X), (nn.Linear(4, 5), nn.Tanh(), X)]
    calls += [(nn.Linear(4, 4).double(), nn.Tanh(), X.double()), (nn.Linear(4, 4), nn.Tanh(), torch.zeros(6, 4))]
    calls += [(nn.Linear(4, 4, device="meta"), nn.Tanh(), X)]
    *others, same, empty = (traced(nn.Sequential(layer, act), x).graph.fingerprint for layer, act, x in calls)
    assert len({*others}) == 4 and same == empty == others[0]


class Stateful(nn.Module):
    """Has state of many kinds, of which it may keep one, and may multiply by what that says."""

    of_class: ClassVar[list[int]] = []

    def __init__(self, act: Act, is_used: bool = True) -> None:
        super().__init__()
        self.layer, self.act, self.is_used = nn.Linear(4, 4), act, is_used
        self.seen, self.options, self.held, self.last = list[int](), {"calls": 0}, {"last": torch.zeros(())}, None
        self.counter, self.numbers, self.prev = SimpleNamespace(calls=0, last=None), itertools.count(1), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        scale = self.act(self, x)
        return out * scale if self.is_used else out


def grow(values: list[int]) -> int:
    values.append(1)
    return len(values)


def count(numbers: dict[str, int]) -> int:
    numbers["calls"] += 1
    return numbers["calls"]


def count_in_object(self: Any, x: Tensor) -> int:
    self.counter.calls += 1
    return self.counter.calls


def keep_in_dict(self: Any, x: Tensor) -> Tensor:
    last, self.held["last"] = self.held["last"], x.detach().mean()
    return last


def check(model: nn.Module) -> None:
    """Traces a model, and compares the trace with two calls of it."""
    compare(traced(model, X), model, [X], CPU)


def carry(self: Any, x: Tensor) -> Tensor:
    last, self.prev = self.prev, x.detach().mean()
    return last


def write(self: Any, x: Tensor) -> Tensor:
    return self.prev.mul_(0.5).add_(x.detach().mean())


def hand_on(holder: Callable[[Any], Any], put: Callable[[Tensor], Any] = torch.clone) -> Act:
    """Returns what gives the samples that the last call has left, if there are any, and leaves its own."""

    def act(self: Any, x: Tensor) -> Any:
        last, holder(self).last = holder(self).last, put(x.detach())
        return 1.0 if last is None else last[0] if isinstance(last, tuple) else last

    return act


def keep(make: Act) -> Act:
    """Returns what gives what it kept in its first call."""

    def act(self: Any, x: Tensor) -> Any:
        self.last = make(self, x) if self.last is None else self.last
        return self.last

    return act


class Kept:
    """Is given what forward keeps."""

    last: Tensor | None = None


def in_table(self: Any, x: Tensor) -> Tensor:
    if "mean" not in TABLE:
        TABLE["mean"] = x.detach().abs().mean(0)
    return TABLE["mean"]


def in_global(self: Any, x: Tensor) -> Tensor:
    global KNOWN
    KNOWN = x.detach().abs().mean(0) if KNOWN is None else KNOWN
    return KNOWN


PYTHON = r"changes Python state.*register_buffer\(\)|computes something else"
LEFT = "next call computes something else: got changes of "
DIFFER: dict[str, tuple[Act, str]] = {
    "list": (lambda self, x: grow(self.seen), PYTHON),
    "list of its class": (lambda self, x: grow(self.of_class), PYTHON),
    "dict": (lambda self, x: count(self.options), PYTHON),
    "dict outside": (lambda self, x: count(GLOBAL), PYTHON),
    "object": (count_in_object, PYTHON),
    "tensor in a dict": (keep_in_dict, PYTHON),
    "iterator": (lambda self, x: next(self.numbers), PYTHON),
    "number in a tensor": (carry, r"\bprev\b.*register_buffer\(\)"),
    "tensor in place": (write, r"\bprev\b.*register_buffer\(\)"),
    # once, a state of as many samples as the batch has, empty before the first call, stayed empty
    "samples": (hand_on(lambda self: self), LEFT + "last,"),
    "samples in an object": (hand_on(lambda self: self.counter), LEFT + r"counter\.last,"),
    "samples in a tuple": (hand_on(lambda self: self, lambda x: (x, 1)), LEFT + "last,"),
    # once, each call kept its own: with the same samples and weights a second call gives the same
    "mean of the first batch": (keep(lambda self, x: x.detach().abs().mean(0)), LEFT + "last,"),
    "first features": (keep(lambda self, x: self.layer(x).detach()), LEFT + "last,"),
    "first weights": (keep(lambda self, x: self.layer.weight.detach().mean(0)), LEFT + "last,"),
    "a table outside": (in_table, LEFT + ".*TABLE,"),
    "a global": (in_global, LEFT + ".*KNOWN,"),
    "a class": (hand_on(lambda self: Kept), LEFT + ".*Kept.last,"),  # once, a warning and wrong numbers
}


@pytest.mark.parametrize("what", DIFFER)
def test_what_calls_differ_by_is_refused_by_name_and_what_none_reads_left_alone(what: str) -> None:
    """Once, each but numbers of modules stayed as it was traced, without a word."""
    act, words = DIFFER[what]
    with pytest.raises(TraceError, match=words):
        check(Stateful(act))
    if act is not write:  # which no copy would have
        check(Stateful(act, is_used=False))
    assert not TABLE and KNOWN is None and Kept.last is None


def keep_state(self: Any, x: Tensor) -> Tensor:
    """Keeps the state of its cell from call to call, as recurrent models of tutorials do."""
    state = self.cell(x, self.state)
    self.state = tuple(each.detach() for each in state)
    return state[0]  # type: ignore[no-any-return]


def test_state_of_samples_that_a_model_keeps_is_refused_by_its_name_with_what_to_write() -> None:
    """Passing it is held by `test_a_language_model_hands_its_state_from_call_to_call`; a buffer would be no way."""
    with pytest.raises(TraceError, match=r"got changes of state, .*cannot be one: pass it as an argument, the batch f"):
        check(Written(keep_state, cell=nn.LSTMCell(4, 4), state=None))


def write_first(self: Any, x: Tensor) -> Tensor:
    self.prev = x.detach()
    return self.prev


def fill(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "places"):
        self.places = torch.arange(4)
    return self.places


SAME: tuple[Act, ...] = (
    *(write_first, fill, lambda self, x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(1.0)),
    keep(lambda self, x: self.layer.weight.detach().sign().abs()[0]),
)


@pytest.mark.parametrize("act", SAME)
def test_a_tensor_that_is_made_in_each_call_or_the_same_is_left_alone(act: Act) -> None:
    check(Stateful(act))


def test_a_branch_on_large_batches_is_refused_unless_they_are_huge() -> None:
    """Libraries ask whether a tensor is too large for a kernel: there is no batch of so many samples."""

    def branching(self: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x) + self.layer(y.flatten().reshape(x.shape[0], -1))
        if x.shape[0] >= self.many or out.numel() > 2**40:
            out = out.tanh()
        return out.square().mean()

    model = Written(branching, layer=nn.Linear(4, 4), many=2**20)
    assert traced(model, X, X).greatest == 2**20 - 1
    model.many = 64
    words = r"at .*x\.shape\[0\] >= self\.many.*it holds for batch <= 63 alone.*dynamic_batch=False"
    with pytest.raises(TraceError, match=words):
        traced(model, X, X)


def hooking(self: Any, x: Tensor) -> list[Tensor]:
    """Hooks a layer in its first call, as transformers do to collect the outputs of layers."""
    if not hasattr(self, "is_hooked"):
        self.layer.register_forward_hook(lambda module, args, out: self.found.append(out))
        self.is_hooked = True
    self.found = found = []
    returned = [self.layer(x).tanh(), *found]
    self.found = None
    return returned


def test_a_hook_that_forward_registers_is_registered_once() -> None:
    """Once, the hook stayed and the note of it went: the next call collected each output twice."""
    model = Written(hooking, layer=nn.Linear(4, 4), found=None)
    found = traced(model, X)
    assert not model.layer._forward_hooks and len(found.outputs) == 2
    compare(found, model, [X], CPU)
