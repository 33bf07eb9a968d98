"""Models whose batch is not the first dimension: ``batch_dims`` names it, and the numbers are plain PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autovaruna import AutoVaruna
from autovaruna.config.settings import resolve
from autovaruna.errors import ConfigError, InputError, TraceError
from autovaruna.graph.call import describe
from tests.reference import Record, sgd
from tests.session.training import Setup, on_ranks, pipeline, with_state

WORDS, WIDTH, LAYERS, BATCH = 20, 8, 2, 5
Hidden = tuple[Tensor, Tensor]


class Language(nn.Module):
    """Is PyTorch's own example of a language model: words ``(time, batch)``, rows of all of them as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.encoder = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, LAYERS)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, WORDS)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int) -> Hidden:
        weight = next(self.parameters())
        return weight.new_zeros(LAYERS, batch, WIDTH), weight.new_zeros(LAYERS, batch, WIDTH)


class Translator(nn.Module):
    """Is an encoder and a decoder as ``nn.Transformer`` has them: time first, masks beside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, "gelu")
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, src: Tensor, tgt: Tensor, tgt_mask: Tensor, src_key_padding_mask: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        given = self.embed(src) if bias is None else self.embed(src) + bias
        hidden = self.body(
            given,
            self.embed(tgt),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask,
        )
        return self.head(hidden)


def made(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def columns(tensor: Tensor, sizes: Sequence[int], rank: int, dimension: int = 1) -> Tensor:
    """Returns the samples of a rank; all of them where ranks are not given some of their own."""
    return tensor.split(list(sizes), dimension)[rank].contiguous() if sizes else tensor


def weights_of(model: AutoVaruna) -> dict[str, Tensor]:
    return with_state(Record(), model).weights


def assert_alike(found: dict[str, Tensor], plain: nn.Module) -> None:
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


def train_language(
    model: Any, optimizer: Any, lengths: Sequence[int], sizes: Sequence[int] = (), rank: int = 0
) -> list[Tensor]:
    """Trains over parts of one text, with the hidden state from call to call; returns what the calls return."""
    own, outputs = sizes[rank] if sizes else BATCH, []
    hidden: Hidden = model.init_hidden(own)
    for step, length in enumerate(lengths):
        text = columns(drawn(step, length + 1, BATCH), sizes, rank)
        hidden = (hidden[0].detach(), hidden[1].detach())
        output, hidden = model(text[:-1], hidden)
        F.nll_loss(output, text[1:].reshape(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs += [output.detach().view(length, own, WORDS), hidden[0].detach(), hidden[1].detach()]
    model.eval()
    with torch.no_grad():
        output, hidden = model(drawn(99, 4, own), hidden)  # other words on each rank, of another number of samples
    return outputs


DIMS = {"batch_dims": {"words": 1, "hidden": 1}}
PER_RANK = {**DIMS, "inputs": "per_rank"}
REPLICAS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("setup", "sizes", "lengths"),
    [
        (pipeline(2, num_micro_batches=2, settings=DIMS), (), (4, 4, 4)),
        (pipeline(2, num_micro_batches=4, settings=PER_RANK), (3, 2), (4, 4, 4)),
        (pipeline(2, num_micro_batches=2, settings=PER_RANK), (3, 2), (4, 6, 3, 5, 2)),
        (pipeline(1, num_micro_batches=3, settings=DIMS), (), (5, 5)),
        (Setup(REPLICAS, 4, settings={**DIMS, "inputs": "per_replica", "stage_ranks": REPLICAS}), (3, 3, 2, 2), (4, 4)),
    ],
    ids=["replicated", "uneven", "lengths", "one process", "replicas"],
)
def test_a_language_model_hands_its_state_from_call_to_call(
    setup: Setup, sizes: Sequence[int], lengths: Sequence[int]
) -> None:
    """What it returns is one row for each word, time before batch: micro-batches lie between each other in there."""
    plain: Any = made(Language)
    begin = copy.deepcopy(plain)
    expected = train_language(plain, sgd(plain.parameters()), lengths)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        if setup.stage_ranks == REPLICAS:
            return train_language(model, optimizer, lengths, (3, 2), rank % 2), weights_of(model)
        return train_language(model, optimizer, lengths, sizes, rank), weights_of(model)

    own = (3, 2) if setup.stage_ranks == REPLICAS else sizes
    for rank, (outputs, weights) in enumerate(on_ranks(setup, begin, run)):
        for found, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, columns(right, own, rank % max(1, len(own))))
        assert_alike(weights, plain)


def train_translator(model: Any, optimizer: Any, sizes: Sequence[int], rank: int) -> list[Tensor]:
    """Trains with masks and an input that needs a gradient, for batches of several sizes; returns its gradients."""
    found = []
    for step, share in enumerate(sizes):
        total = 2 * share + 1
        own = [] if rank < 0 else [share + 1, share]
        src, tgt = (columns(drawn(step + place, 7 + place, total), own, rank) for place in range(2))
        padding = columns(torch.arange(7)[None] >= 4 + drawn(step, total, 1) % 4, own, rank, 0)
        noise = torch.randn(7, total, WIDTH, generator=torch.Generator().manual_seed(step))
        bias = columns(noise, own, rank).requires_grad_()
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        logits = model(src, tgt[:-1], mask, src_key_padding_mask=padding, bias=bias)
        F.cross_entropy(logits.flatten(0, 1), tgt[1:].reshape(-1)).backward()
        found += [logits.detach(), bias.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_an_encoder_with_a_decoder_takes_time_first() -> None:
    """A mask has no batch, a padding mask has it first; inputs get their gradients, for the rank's own loss."""
    sizes, plain = (2, 3), made(Translator)
    begin = copy.deepcopy(plain)
    expected = train_translator(plain, sgd(plain.parameters()), sizes, -1)
    setup = pipeline(
        2, num_micro_batches=2, settings={"inputs": "per_rank", "batch_dims": {"src": 1, "tgt": 1, "bias": 1}}
    )

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        return train_translator(model, optimizer, sizes, rank), weights_of(model)

    for rank, (found, weights) in enumerate(on_ranks(setup, begin, run)):
        for place, (each, right) in enumerate(zip(found, expected, strict=True)):
            own = [sizes[place // 2] + 1, sizes[place // 2]]
            torch.testing.assert_close(each, columns(right, own, rank))
        assert_alike(weights, plain)


class Turned(nn.Module):
    """Takes the batch first, and returns rows with time before batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).transpose(0, 1)
        rows = hidden.reshape(-1, WIDTH).relu()
        return self.second(rows), rows.view(hidden.shape).flatten(1)


def test_rows_with_time_before_batch_come_back_in_their_order() -> None:
    """Once, rows of micro-batches were put one behind the other: samples of one got the labels of another."""
    plain, x = made(Turned), torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    begin, weights = copy.deepcopy(plain), torch.arange(60.0).view(20, 3)

    def step(model: Any) -> list[Tensor]:
        rows, flat = model(x)
        ((rows * weights).mean() + flat.square().mean()).backward()
        return [rows.detach(), flat.detach()]

    expected = step(plain)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        outputs = step(model)
        return outputs, {name: each.grad for name, each in model.named_parameters() if not each.is_meta}

    for outputs, gradients in on_ranks(pipeline(2, num_micro_batches=2), begin, run):
        for found, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, right)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_a_refusal_names_the_setting() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        return model(drawn(1, 4, 3), (torch.zeros(2, 3, WIDTH), torch.zeros(2, 3, WIDTH)))

    with pytest.raises((InputError, TraceError), match=r"batch_dims=\{'words': 1\}"):
        on_ranks(pipeline(2, num_micro_batches=2), made(Language), run)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"word": 1}, r"batch_dims names word, .*Expected names of forward's arguments: words, hidden"),
        ({"words": 2}, r"dimension 2 of words is the batch: got words of the shape \(4, 3\)"),
        ({"words": 1}, r"fixes|mixes"),
    ],
)
def test_a_wrong_dimension_is_said(dims: dict[str, int], message: str) -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        return model(drawn(1, 4, 3), (torch.zeros(2, 3, WIDTH), torch.zeros(2, 3, WIDTH)))

    with pytest.raises((InputError, TraceError), match=message):
        on_ranks(pipeline(2, num_micro_batches=2, settings={"batch_dims": dims}), made(Language), run)


def test_names_cover_arguments_and_what_is_in_them() -> None:
    """A name is one of an argument, not the beginning of another's: ``src`` is not ``src_mask``."""

    class Model(nn.Module):
        def forward(self, src: Tensor, src_mask: Tensor, state: Any = None, *rest: Tensor) -> Tensor:
            return src

    def dimensions(**dims: int) -> list[int | None]:
        inputs = describe(Model(), args, {}, batch_dims=list(dims.items()))[1].inputs
        return [spec.dimension if spec.is_batch else None for spec in inputs]

    args = (torch.zeros(7, 3), torch.zeros(7, 7), (torch.zeros(2, 3, 4), [torch.zeros(3)]), torch.zeros(5, 3))
    assert dimensions(src=1, state=1, state_1=0, rest=1) == [1, None, 1, 0, 1]
    assert dimensions(src=1, state_0=1) == [1, None, 1, 0, None]


def test_the_setting_is_read_from_each_source() -> None:
    given = (("src", 1), ("tgt", 0))
    assert resolve({"batch_dims": {"tgt": 0, "src": 1}}).batch_dims == given
    assert resolve(environ={"AUTOVARUNA_BATCH_DIMS": "src=1, tgt=0"}).batch_dims == given
    for wrong in ({"src": -1}, {"src": "1"}, "src", {1: 1}):
        with pytest.raises(ConfigError, match="names of inputs, each with a dimension"):
            resolve({"batch_dims": wrong})
    with pytest.raises(ConfigError, match="contradict each other"):
        resolve({"batch_dims": {"src": 1}, "dynamic_batch": False})


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        rows = self.head(self.rnn(self.embed(words))[0]).view(-1, WORDS)
        return F.cross_entropy(rows, labels.view(-1), ignore_index=0)


class Packed(Scored):
    """Packs words, time first, by lengths that have the batch alone."""

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(words), lengths.cpu(), enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], total_length=words.shape[0])[0])


class Branching(Scored):
    """Has a part that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.branch(self.embed(words)))


class Branch(nn.Linear):
    """Goes by numbers, and is kept whole."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.abs().sum()) >= 0 else x


@pytest.mark.parametrize(
    ("kind", "inputs", "dims"),
    [
        (Scored, [drawn(1, 4, BATCH), drawn(2, 4, BATCH) % 3], {"words": 1, "labels": 1}),
        pytest.param(
            *(Packed, [drawn(1, 4, BATCH), torch.tensor([4, 2, 3, 1, 4])], {"words": 1}),
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch cannot trace the layer behind it"),
        ),
        (Branching, [drawn(1, 4, BATCH)], {"words": 1}),
    ],
)
def test_models_of_every_kind_take_time_first(
    kind: type[nn.Module], inputs: list[Tensor], dims: dict[str, int]
) -> None:
    """Losses count over the global batch; what is packed, or kept whole, finds the batch where it is."""
    plain, sizes = made(kind), (3, 2)
    begin = copy.deepcopy(plain)

    def step(model: Any, optimizer: Any, inputs: Sequence[Tensor]) -> Tensor:
        output: Tensor = model(*inputs)
        (output if output.dim() == 0 else output.square().mean()).backward()
        optimizer.step()
        return output.detach()

    expected = step(plain, sgd(plain.parameters()), inputs)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Any:
        own = [columns(each, sizes, rank, each.dim() - 1) for each in inputs]
        return step(model, optimizer, own), weights_of(model)

    setup = pipeline(2, num_micro_batches=4, settings={"batch_dims": dims, "inputs": "per_rank"})
    for rank, (output, weights) in enumerate(on_ranks(setup, begin, run)):
        torch.testing.assert_close(output, expected if expected.dim() == 0 else columns(expected, sizes, rank))
        assert_alike(weights, plain)
