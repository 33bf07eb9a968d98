"""Batches padded to their own longest sample: a length that has varied once is not traced again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import RankError
from autovaruna.session import traces
from tests.catalogue import DEVICE, Batch, Case
from tests.catalogue.hugging_face import ENCODER, GPT, HEADS, T5, WIDTH, WORDS, case
from tests.catalogue.small import Written
from tests.products import WHOLE, some
from tests.reference import Record, compare, plain_steps
from tests.session.training import merge, on_ranks, pipeline, share_of, train_rank

NUM_STEPS = 200 if WHOLE else 6
LONGEST = 200
NO_BATCH: Any = None  # batches are drawn


def encode(self: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Encodes padded words, with the mean loss over those that are there."""
    hidden = self.body(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
    return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, "gelu", batch_first=True)  # rounding flips no ReLU
    head, embed = nn.Linear(WIDTH, WORDS), nn.Embedding(WORDS, WIDTH)
    return Written(encode, embed=embed, body=nn.TransformerEncoder(layer, 2), head=head)


def padded(draw: random.Random, size: int, length: int) -> dict[str, Tensor]:
    """Returns words of a drawn number each, the longest of them `length`."""
    lengths = torch.tensor([length, *(draw.randint(1, length) for _ in range(size - 1))], device=DEVICE)
    mask = (torch.arange(length, device=DEVICE) < lengths[:, None]).long()
    words = [[draw.randrange(3, WORDS) for _ in range(length)] for _ in range(size)]
    words = torch.tensor(words, device=DEVICE) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def translated(draw: random.Random, size: int, length: int) -> dict[str, Tensor]:
    """Returns padded words, and labels that are padded to a length of their own."""
    return padded(draw, size, length) | {"labels": padded(draw, size, draw.randint(4, 100))["labels"]}


def drawn(case: Case, num_steps: int) -> list[tuple[Batch, list[int]]]:
    """Returns batches of drawn sizes and lengths, each with the samples of the ranks."""
    draw = random.Random(0)
    batch = translated if case.name == "t5" else padded
    sizes = [draw.randint(2, 8) for _ in range(num_steps)]
    return [(((), batch(draw, size, draw.randint(4, LONGEST))), [size // 2, size - size // 2]) for size in sizes]


PLACES = {"n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 256}
TRANSLATING = {**T5, "dropout_rate": 0.0, "decoder_start_token_id": 0}
CASES = [
    Case("encoder", encoder, NO_BATCH),
    case("gpt2", "GPT2LMHeadModel", {**GPT, **PLACES}, NO_BATCH, has_dropout=False),
    case("t5", "T5ForConditionalGeneration", TRANSLATING, NO_BATCH, has_dropout=False),
    case("bert", "BertForMaskedLM", {**ENCODER, **NO_DROPOUT}, NO_BATCH, has_dropout=False),
]


def train_drawn(case: Case, steps: Sequence[tuple[Batch, list[int]]], num_stages: int = 2) -> tuple[Record, int]:
    """Trains on two ranks; returns the record, and how many traces there were."""

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> tuple[Record, int]:
        own = [share_of(batch, sizes, rank) for batch, sizes in steps]
        record = train_rank(case, model, optimizer, own)
        return record, model.num_traces

    setup = pipeline(num_stages, num_micro_batches=2, settings={"inputs": "per_rank"})
    records, numbers = zip(*on_ranks(setup, case.model(), run, token=case.name), strict=True)
    assert len(set(numbers)) == 1
    return merge(records), numbers[0]


@pytest.mark.parametrize("case", some(CASES, 1), ids=str)
def test_drawn_sizes_and_lengths_are_traced_twice(case: Case) -> None:
    pytest.importorskip(case.needs or "torch")
    steps = drawn(case, NUM_STEPS)
    record, num_traces = train_drawn(case, steps)
    plain = plain_steps(case, [batch for batch, _ in steps])
    plain.buffers = {name: buffer for name, buffer in plain.buffers.items() if name in record.buffers}
    compare(record, plain, rtol=1e-4 if WHOLE else 1e-5)  # rounding grows over 200 steps
    assert num_traces <= 3


def by_steps(self: Any, x: Tensor) -> Tensor:
    """Goes word by word, in Python, so that a trace is for one length alone."""
    state = x.new_zeros(x.shape[0], 4)
    for place in range(x.shape[1]):
        state = torch.tanh(self.first(x[:, place]) + state)
    return self.last(state).square().mean()


def of_lengths(*lengths: int) -> list[tuple[Batch, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [(((torch.randn(4, length, 4, generator=generator).to(DEVICE),), {}), [2, 2]) for length in lengths]


STEPS = Case("steps", lambda: Written(by_steps, first=nn.Linear(4, 4), last=nn.Linear(4, 1)), NO_BATCH)


def test_few_graphs_of_a_model_that_fixes_lengths_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces, "MOST_GRAPHS", 3)
    steps = of_lengths(2, 3, 4, 5, 6, 2, 6, 3)
    record, num_traces = train_drawn(STEPS, steps)
    compare(record, plain_steps(STEPS, [batch for batch, _ in steps]))
    assert num_traces == 7  # 2 and 3 are traced again, the second 6 is not
    said = [each for each in caplog.messages if "dimension 1 of x" in each]
    assert said and "range(x.shape[1])" in said[0] and "more than 3 kinds of calls" in caplog.text


def test_ranks_pass_one_length() -> None:
    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> None:
        model(torch.ones(2, 4 + rank, 4))

    with pytest.raises(RankError, match="pad them to one length on all ranks"):
        on_ranks(pipeline(2, settings={"inputs": "per_rank"}), STEPS.model(), run)
