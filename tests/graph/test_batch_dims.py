"""Models whose batch is not the first dimension: ``batch_dims`` names it, and the numbers are plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.config.settings import resolve
from autovaruna.errors import AutoVarunaError, ConfigError
from tests.catalogue.small import Written
from tests.compatibility.language import WIDTH, WORDS, WordModel
from tests.products import some
from tests.reference import sgd
from tests.session.training import Setup, descend, on_ranks, pipeline, refuse

BATCH = 5
Hidden = tuple[Tensor, Tensor]
Share = Callable[..., Tensor]


def translate(self: Any, src: Tensor, tgt: Tensor, tgt_mask: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
    """Has an encoder and a decoder as ``nn.Transformer`` has them: time first, masks beside."""
    masks = {"tgt_mask": tgt_mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    return self.head(self.body(self.embed(src) + bias, self.embed(tgt), **masks))  # type: ignore[no-any-return]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def all_of(tensor: Tensor, dimension: int = 1) -> Tensor:
    """Returns the samples that a process alone has."""
    return tensor


def hold(setup: Setup, plain: nn.Module, story: Callable[[Any, Any, Share], list[Tensor]]) -> None:
    """Asserts that a story gives each rank its part of the numbers of plain PyTorch, and all ranks its weights."""

    def share(rank: int) -> Share:
        """Returns what gives a rank, or a pair of ranks, its half of a global batch, or all of it."""
        if not setup.settings.get("inputs", "").startswith("per_"):
            return all_of
        return lambda tensor, dimension=1: tensor.tensor_split(2, dimension)[rank % 2].contiguous()

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        return story(model, optimizer, share(rank)), dict(model.state_dict())

    ranks = on_ranks(setup, plain, run, token=plain.forward.__func__)  # type: ignore[attr-defined]
    expected = story(plain, sgd(plain.parameters()), all_of)
    for rank, (found, weights) in enumerate(ranks):
        torch.testing.assert_close(found, [share(rank)(each) if each.dim() else each for each in expected])
        torch.testing.assert_close(weights, dict(plain.state_dict()))


DIMS = {"batch_dims": {"words": 1, "hidden": 1}}
PER_RANK = {**DIMS, "inputs": "per_rank"}
REPLICAS = ((0, 1), (2, 3))
SETUPS: dict[str, tuple[Setup, Sequence[int]]] = {
    "lengths": (pipeline(2, num_micro_batches=2, settings=PER_RANK), (4, 6, 3)),
    "uneven": (pipeline(2, num_micro_batches=4, settings=PER_RANK), (4, 4)),
    "replicas": (Setup(REPLICAS, 4, settings={**DIMS, "inputs": "per_replica", "stage_ranks": REPLICAS}), (4, 4)),
    "replicated": (pipeline(2, num_micro_batches=2, settings=DIMS), (4, 4)),
    "one process": (pipeline(1, num_micro_batches=3, settings=DIMS), (5, 5)),
}


@pytest.mark.parametrize("name", some([*SETUPS], 2))
def test_a_language_model_hands_its_state_from_call_to_call(name: str) -> None:
    """What it returns is one row for each word, time before batch: micro-batches lie between each other in there."""

    def story(model: Any, optimizer: Any, share: Share) -> list[Tensor]:
        """Trains over parts of one text; returns what the calls return."""
        own, outputs = share(torch.zeros(1, BATCH)).shape[1], []
        hidden: Hidden = model.init_hidden(own)
        for step, length in enumerate(lengths):
            text = share(drawn(step, length + 1, BATCH))
            hidden = (hidden[0].detach(), hidden[1].detach())
            output, hidden = model(text[:-1], hidden)
            descend(F.nll_loss(output, text[1:].reshape(-1)), optimizer)
            outputs += [output.detach().view(length, own, WORDS), hidden[0].detach(), hidden[1].detach()]
        model.eval()
        with torch.no_grad():
            model(drawn(99, 4, own), hidden)  # other words on each rank, of another number of samples
        return outputs

    setup, lengths = SETUPS[name]
    hold(setup, WordModel(), story)


def test_an_encoder_with_a_decoder_takes_time_first() -> None:
    """A mask has no batch, a padding mask has it first; inputs get their gradients, for the rank's own loss."""

    def story(model: Any, optimizer: Any, share: Share) -> list[Tensor]:
        """Trains with masks and an input that needs a gradient, for batches of several sizes; returns its gradients."""
        found = []
        for step, total in enumerate((5, 7)):
            src, tgt = (share(drawn(step + place, 7 + place, total)) for place in range(2))
            padding = share(torch.arange(7)[None] >= 4 + drawn(step, total, 1) % 4, 0)
            noise = torch.randn(7, total, WIDTH, generator=torch.Generator().manual_seed(step))
            bias = share(noise).clone().requires_grad_()
            mask = nn.Transformer.generate_square_subsequent_mask(7)
            logits = model(src, tgt[:-1], mask, padding=padding, bias=bias)
            descend(F.cross_entropy(logits.flatten(0, 1), tgt[1:].reshape(-1)), optimizer)
            found += [logits.detach(), bias.grad]
        return found

    settings = {"inputs": "per_rank", "batch_dims": {"src": 1, "tgt": 1, "bias": 1}}
    body = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, "gelu")
    model = Written(translate, embed=nn.Embedding(WORDS, WIDTH), body=body, head=nn.Linear(WIDTH, WORDS))
    hold(pipeline(2, num_micro_batches=2, settings=settings), model, story)


def turned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the batch first, and returns rows with time before batch."""
    hidden = self.first(x).transpose(0, 1)
    rows = hidden.reshape(-1, WIDTH).relu()
    return self.second(rows), rows.view(hidden.shape).flatten(1)


def test_rows_with_time_before_batch_come_back_in_their_order() -> None:
    """Once, rows of micro-batches were put one behind the other: samples of one got the labels of another."""
    x, weights = torch.randn(BATCH, 4, WIDTH), torch.arange(60.0).view(20, 3)

    def story(model: Any, optimizer: Any, share: Share) -> list[Tensor]:
        rows, flat = model(x)
        descend((rows * weights).mean() + flat.square().mean(), optimizer)
        return [rows.detach(), flat.detach()]

    model = Written(turned, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 3))
    hold(pipeline(2, num_micro_batches=2), model, story)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, r"batch_dims=\{'words': 1, 'hidden_0': 1, 'hidden_1': 1\}"),
    ({"batch_dims": {"word": 1}}, r"batch_dims names word, .*Expected names of forward's arguments: words, hidden"),
    ({"batch_dims": {"words": 2}}, r"dimension 2 of words is the batch: got words of the shape \(4, 3\)"),
    ({"batch_dims": {"words": 1}}, r"fixes|mixes"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_a_missing_or_wrong_dimension_is_said(settings: dict[str, Any], message: str) -> None:
    model = WordModel()
    refuse(model, message, {"words": drawn(1, 4, 3), "hidden": model.init_hidden(3)}, AutoVarunaError, **settings)


def test_the_setting_is_read_from_each_source() -> None:
    given = (("src", 1), ("tgt", 0))
    assert resolve({"batch_dims": {"tgt": 0, "src": 1}}).batch_dims == given
    assert resolve(environ={"AUTOVARUNA_BATCH_DIMS": "src=1, tgt=0"}).batch_dims == given
    for wrong in ({"src": -1}, {"src": "1"}, "src", {1: 1}):
        with pytest.raises(ConfigError, match="names of inputs, each with a dimension"):
            resolve({"batch_dims": wrong})
    with pytest.raises(ConfigError, match="contradict each other"):
        resolve({"batch_dims": {"src": 1}, "dynamic_batch": False})


def scored(self: Any, words: Tensor, labels: Tensor) -> Tensor:
    rows = self.head(self.rnn(self.embed(words))[0]).view(-1, WORDS)
    return F.cross_entropy(rows, labels.view(-1), ignore_index=0)


def branching(self: Any, words: Tensor) -> Tensor:
    """Has a part that goes by numbers, and is kept whole."""
    return self.head(self.branch(self.embed(words)))


@pytest.mark.parametrize("forward", [scored, branching])
def test_models_of_every_kind_take_time_first(forward: Callable[..., Tensor]) -> None:
    """Losses count over the global batch; what is kept whole finds the batch where it is."""
    inputs = {"words": drawn(1, 4, BATCH)} | ({"labels": drawn(2, 4, BATCH) % 3} if forward is scored else {})

    def story(model: Any, optimizer: Any, share: Share) -> list[Tensor]:
        output: Tensor = model(*map(share, inputs.values()))
        descend(output if output.dim() == 0 else output.square().mean(), optimizer)
        return [output.detach()]

    parts = {"embed": nn.Embedding(WORDS, WIDTH), "rnn": nn.GRU(WIDTH, WIDTH), "head": nn.Linear(WIDTH, WORDS)}
    layer = nn.Linear(WIDTH, WIDTH)
    branch = Written(lambda self, x: self.layer(x) if float(x.abs().sum()) >= 0 else x, layer=layer)
    model = Written(forward, **parts, branch=branch)
    settings = {"batch_dims": dict.fromkeys(inputs, 1), "inputs": "per_rank"}
    hold(pipeline(2, num_micro_batches=4, settings=settings), model, story)
