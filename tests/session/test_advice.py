"""The settings that a refusal names are parsed out of its text and passed: the model then trains as plain PyTorch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError
from tests.catalogue.small import CLASSES, WIDTH, Written, labelled
from tests.products import some
from tests.reference import gradients_of
from tests.session.training import QUIET, Setup

X, Y = labelled(6, 0)[1].values()
_SETTING = re.compile(r"\b(\w+)=('[\w-]+'|\{[^}]*\}|\[[^\]]*\]|True|False|\d+)")


def language(self: Any, tokens: Tensor, state: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Takes (time, batch), with a state (layers, batch, width)."""
    h, _ = self.cell(self.words(tokens), state)
    return F.cross_entropy(self.last(h).flatten(0, 1), y.flatten())


def decoder(self: Any, outputs: Tensor, hidden: Tensor, y: Tensor) -> Tensor:
    """Attends to (batch, time, width), by a state (1, batch, width)."""
    scores = torch.tanh(self.query(hidden.permute(1, 0, 2)) + self.key(outputs)).sum(2)
    context = torch.bmm(scores.softmax(-1).unsqueeze(1), outputs)
    return F.cross_entropy(self.last(self.cell(context, hidden)[0][:, 0]), y)


def translating(self: Any, source: Tensor, target: Tensor) -> Tensor:
    """Takes (time, batch) of two lengths, and goes on word by word."""
    _, state = self.cell(self.words(source))
    steps = []
    for word in target[:-1]:
        step, state = self.cell(self.words(word)[None], state)
        steps.append(self.last(step[0]))
    return F.cross_entropy(torch.stack(steps).flatten(0, 1), target[1:].flatten())


def dice(self: Any, x: Tensor, y: Tensor) -> Tensor:
    share, wanted = self.last(x).softmax(1), F.one_hot(y, CLASSES)
    return 1 - 2 * (share * wanted).sum() / (share.sum() + wanted.sum())


def decayed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.last(x), y, reduction="sum") / x.shape[0] + self.last.weight.square().sum()


def contrastive(self: Any, x: Tensor) -> Tensor:
    h = self.last(x)
    return F.cross_entropy(h @ h.T, torch.arange(x.shape[0]))


def hashed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.last(x), y) * len({x.shape[0], y.shape[0]})


def weighed(self: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Has a weight for each of as many classes as there are samples."""
    return F.cross_entropy(self.classes(x), y, weight=weight)


def joined_rows(self: Any, x: Tensor, joined: Tensor) -> Tensor:
    """Joins the nodes of one graph by a matrix."""
    return self.last(joined @ x.relu()).log_softmax(1)[:, 0].mean().neg()


def add_positions(self: Any, x: Tensor) -> Tensor:
    return x + self.table[: x.shape[0]]  # the positions


def encode(self: Any, src: Tensor, y: Tensor) -> Tensor:
    """Takes (time, batch) through an encoder, with a mask made from the length of what it is given."""
    length = src.shape[0] if isinstance(self.places, Written) else len(src)
    h = self.layers(self.places(self.words(src)), mask=torch.log(torch.tril(torch.ones(length, length))))
    return F.cross_entropy(self.last(h).flatten(0, 1), y.flatten())


def masked(self: Any, src: Tensor, mask: Tensor) -> Tensor:
    """Has a mask of time and time, as long as what seems to be the batch: once, the two were nodes and edges."""
    return self.last(self.layers(self.words(src), mask))


def of(function: Callable[..., Any], **parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: Written(function, last=nn.Linear(WIDTH, CLASSES), **parts)


def time_first(places: nn.Module, forward: Callable[..., Tensor] = encode) -> Callable[[], nn.Module]:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0), 2, enable_nested_tensor=False)
    return of(forward, words=nn.Embedding(9, WIDTH), places=places, layers=layers)


STATE = torch.zeros(1, 6, WIDTH)
RNN = {"words": nn.Embedding(9, WIDTH), "cell": nn.LSTM(WIDTH, WIDTH)}
DECODER = {"query": nn.Linear(WIDTH, WIDTH), "key": nn.Linear(WIDTH, WIDTH)}
DECODER |= {"cell": nn.GRU(WIDTH, WIDTH, batch_first=True)}
TOKENS, MASK = torch.arange(30).view(5, 6) % CLASSES, torch.zeros(5, 5).bool()
TOGETHER = "inputs", "num_micro_batches", "dynamic_batch"
IN_ONE = r"inputs='replicated', num_micro_batches=1, dynamic_batch=False together"
BY_PLACES = time_first(Written(add_positions, table=torch.randn(5000, 1, WIDTH)))
FOLLOWED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "a state": (of(language, **RNN), (TOKENS, (STATE, STATE), TOKENS), {}, ("batch_dims",)),
    "a hidden state": (of(decoder, **DECODER), (torch.randn(6, 4, WIDTH), STATE, Y), {}, ("batch_dims",)),
    "two lengths": (of(translating, **RNN), (TOKENS, TOKENS[:3]), {}, ("batch_dims",)),
    "a ratio of sums": (of(dice), (X, Y), {}, ("num_micro_batches", "inputs")),
    "a mean": (of(decayed), (X, Y), {"reduction": "sum"}, ("reduction",)),
    "no loss": (of(lambda self, x: self.last(x)), (X,), {"loss_mode": "loss"}, ("loss_mode",)),
    "weights of classes": (
        *(of(weighed, classes=nn.Linear(WIDTH, 6)), (X, Y, torch.arange(1.0, 7.0)), {}, ("batch_inputs",)),
    ),
    "samples that meet": (of(contrastive), (X,), {}, TOGETHER),
    "a graph": (of(joined_rows), (X, torch.randn(6, 6)), {}, TOGETHER),
    "a state in one": (of(language, **RNN), (TOKENS, (STATE, STATE), TOKENS), {}, TOGETHER),
    "time first": (time_first(nn.Identity()), (TOKENS, TOKENS), {}, ("batch_dims",)),
    "time first, in one": (time_first(nn.Identity()), (TOKENS, TOKENS), {}, TOGETHER),
    "time first, with a mask": (time_first(nn.Identity(), masked), (TOKENS, MASK), {}, ("batch_dims",)),
    "positions": (BY_PLACES, (TOKENS, TOKENS), {}, ("batch_dims",)),
    "positions, in one": (BY_PLACES, (TOKENS, TOKENS), {}, TOGETHER),
    "a hashed size": (of(hashed), (X, Y), {}, ("dynamic_batch",)),
}


CAUSES = {
    "a graph": r"joined \(6, 6\) joins rows of x \(6, 12\).*",
    "a state in one": r"which state_0 \(1, 6, 12\), .*",
    "time first, in one": r"self\.layers\(self.*batch_first=False\) takes the first one for time.*",
    "positions, in one": r"# the positions\): it holds for batch <= 5000 alone.*batch_first=True.*",
}


def named_in(text: str) -> dict[str, Any]:
    """Returns the last value that a text names for each setting: what was got comes first."""
    return {name: ast.literal_eval(value) for name, value in _SETTING.findall(text)}


@pytest.mark.parametrize("case", some([*FOLLOWED], 4))
def test_advice_leads_on(case: str) -> None:
    make, arguments, settings, names = FOLLOWED[case]
    model = make()
    settings = {"num_micro_batches": 2, **settings}
    words = rf"test_advice\.py:\d+ \(.*{CAUSES[case]}{IN_ONE}" if case in CAUSES else ""
    with pytest.raises(AutoVarunaError, match=words) as refused:
        AutoVaruna(make(), plan=Setup(num_micro_batches=2).plan, **settings, **QUIET)(*arguments)
    named = named_in(str(refused.value))
    settings |= {name: named[name] for name in names}
    model.zero_grad()  # cases share modules
    expected = model(*arguments)
    expected.square().mean().backward()
    gradients = gradients_of(model)
    model.zero_grad()
    plan = Setup(num_micro_batches=settings["num_micro_batches"]).plan
    loss = AutoVaruna(model, plan=plan, **settings, **QUIET)(*arguments)
    loss.square().mean().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients_of(model), gradients)
