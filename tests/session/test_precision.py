"""Precisions: the same bits on any partition, those of plain PyTorch with one micro-batch, and the scaler's skips."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autovaruna import AutoVaruna
from autovaruna.errors import AutoVarunaError, InputError
from autovaruna.runtime.world import World
from tests.catalogue import CASES, DEVICE, Batch, Case
from tests.catalogue.small import words
from tests.products import diagonal
from tests.ranks import run_ranks
from tests.reference import MakeOptimizer, Record, bit_equal, buffers_of, compare, gradients_of, sgd, weights_of
from tests.session.training import (
    QUIET,
    Setup,
    as_plain,
    held,
    merge,
    needs_own_autograd,
    on_ranks,
    pipeline,
    share_of,
    with_state,
)


@dataclass(frozen=True)
class Way:
    """A precision to train in.

    Attributes:
        weights: dtype of the parameters and of the inputs.
        autocast: dtype of the autocast around the call; None: there is none.
        scale: what the scaler starts with; 0: there is none.
        max_norm: clips the gradients; 0: not.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 0.0
    max_norm: float = 0.0

    def around(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(DEVICE.type, dtype=self.autocast)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(
            DEVICE.type, init_scale=self.scale or 1.0, growth_interval=2, enabled=self.scale > 0
        )

    def cast(self, given: Any) -> Any:
        """Returns a model, or a batch, in the dtype of the weights."""
        if isinstance(given, nn.Module):
            return given.to(self.weights)

        def convert(leaf: Any) -> Any:
            return leaf.to(self.weights) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return pytree.tree_map(convert, given)


WAYS = {
    "float64": Way(torch.float64),
    "float32": Way(),
    "autocast": Way(autocast=torch.bfloat16),
    "bfloat16": Way(torch.bfloat16),
    "scaler": Way(autocast=torch.float16, scale=2.0**12, max_norm=1.0),
}


@dataclass
class Trained:
    """What training gave: the record, and the scaler's scale after each step."""

    record: Record
    scales: list[float]


def scaled_by(way: Way) -> Callable[..., AutoVaruna]:
    """Returns what wraps a model for a loop with a scaler, which is then the model's ``scaler``."""

    def wrap(*given: Any, **settings: Any) -> AutoVaruna:
        scaler = way.scaler()
        wrapped = AutoVaruna(*given, scaler=scaler, **settings)
        wrapped.scaler = scaler  # type: ignore[assignment]
        return wrapped

    return wrap


def train_in(
    way: Way, case: Case, setup: Setup, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd
) -> Trained:
    def run(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Trained:
        record, scales = loop(way, case, wrapped, optimizer, wrapped.scaler, batches)
        return Trained(with_state(record, wrapped), scales)

    results = on_ranks(
        setup,
        way.cast(case.model()),
        run,
        make_optimizer,
        wrap=scaled_by(way),
        token=(case.name, case.has_dropout, str(way)),
    )
    assert all(each.scales == results[0].scales for each in results), "scales differ between ranks"
    return Trained(merge([each.record for each in results]), results[0].scales)


def plain_in(way: Way, case: Case, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd) -> Trained:
    model = way.cast(case.model())
    record, scales = loop(way, case, model, make_optimizer(model.parameters()), way.scaler(), batches)
    record.weights, record.buffers = weights_of(model), buffers_of(model)
    return Trained(record, scales)


def loop(
    way: Way, case: Case, model: Any, optimizer: torch.optim.Optimizer, scaler: Any, batches: Sequence[Batch]
) -> tuple[Record, list[float]]:
    """Is the loop of an ordinary script."""
    record, scales = Record(), []
    plain_clip = lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
    clip = getattr(model, "clip_grad_norm_", plain_clip)
    for args, kwargs in map(way.cast, batches):
        with way.around():
            loss = case.loss_of(model(*args, **kwargs), (args, kwargs))
        scaler.scale(loss).backward()
        record.losses.append(loss.detach())
        if way.max_norm:
            scaler.unscale_(optimizer)
            clip(way.max_norm)
        record.gradients.append({name: each.nan_to_num() for name, each in gradients_of(model).items()})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return record, scales


class Mixed(nn.Module):
    """Leaves autocast and enters it in the middle, with and without gradients; has dropout, BatchNorm and a tie."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 12)
        self.first, self.second, self.third = (nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.batch_norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(self.first(self.words(x)))
        with torch.autocast(DEVICE.type, enabled=False):
            with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
                turn = h @ h.transpose(1, 2)
            h = h + torch.softmax(turn.to(self.second.weight.dtype), -1) @ self.second(h.to(self.second.weight.dtype))
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            h = h + self.third(self.norm(h.to(self.second.weight.dtype))).to(h.dtype)
        h = self.drop(self.batch_norm(h.transpose(1, 2))).transpose(1, 2).to(self.words.weight.dtype)
        return F.cross_entropy(F.linear(h, self.words.weight)[:, 0].float(), y)


MIXED = Case("mixed", Mixed, words, has_dropout=True, has_batch_norm=True)
MIXED_BATCHES = [MIXED.batch(7, step) for step in range(3)]
SURE = Case("mixed_sure", lambda: Mixed(0.0), words, has_batch_norm=True)
SETUPS = {
    "two": pipeline(2),
    "three_gpipe": pipeline(3, schedule="gpipe"),
    "two_recompute": pipeline(2, recompute=True, schedule="varuna"),
    "two_zero_bubble": pipeline(2, schedule="zero_bubble"),
    "three_recompute_uneven": pipeline(3, recompute=True, shares=(0.2, 0.9)),
}


@cache
def one_stage(way: str) -> Trained:
    return train_in(WAYS[way], MIXED, pipeline(1), MIXED_BATCHES)


@pytest.mark.parametrize(("way", "setup"), diagonal(WAYS, SETUPS))
def test_no_partition_changes_a_bit(way: str, setup: str) -> None:
    found = train_in(WAYS[way], MIXED, SETUPS[setup], MIXED_BATCHES)
    bit_equal(found.record, one_stage(way).record)
    assert found.scales == one_stage(way).scales


@pytest.mark.parametrize("way", WAYS)
def test_one_micro_batch_gives_the_bits_of_plain_pytorch(way: str) -> None:
    found = train_in(WAYS[way], SURE, pipeline(3, num_micro_batches=1), MIXED_BATCHES)
    expected = plain_in(WAYS[way], SURE, MIXED_BATCHES)
    bit_equal(found.record, expected.record)
    assert found.scales == expected.scales


@pytest.mark.parametrize("way", WAYS)
def test_replicas_change_the_order_of_a_sum_alone(way: str) -> None:
    found = train_in(WAYS[way], CASES["chain"], Setup(((0, 1), (2, 3, 4))), [CASES["chain"].batch(7, 0)])
    expected = train_in(WAYS[way], CASES["chain"], pipeline(1), [CASES["chain"].batch(7, 0)])
    compare(found.record, expected.record, rtol=2e-2 if way == "bfloat16" else 1e-5)


def test_each_call_has_a_precision_of_its_own() -> None:
    """Trains in bfloat16, evaluates in float32, and trains on; outputs have the dtype that plain PyTorch gives them."""
    case = CASES["returned_scores"]
    args, kwargs = case.batch(7, 0)

    def story(model: Any, optimizer: Any) -> list[Tensor]:
        bfloat16, outputs = torch.autocast(DEVICE.type, dtype=torch.bfloat16), []
        for around in (bfloat16, torch.no_grad(), bfloat16):
            with around:
                outputs.append(model(*args, **kwargs))
            if outputs[-1].requires_grad:
                outputs[-1].sum().backward()
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
        assert [each.dtype for each in outputs] == [torch.bfloat16, torch.float32, torch.bfloat16]
        return [each.detach() for each in outputs]

    setup = pipeline(2, num_micro_batches=1)
    needs_own_autograd(case, setup)
    as_plain(setup, case.model(), story, rtol=0, atol=0)


CASE = CASES["chain"]
HALF = Way(autocast=torch.float16, scale=2.0**12)
BATCHES = [CASE.batch(6, step) for step in range(4)]
SCALED = {
    "two": pipeline(2),
    "replicas": Setup(((0,), (1, 2))),
    "idle_rank": Setup(((0,), (1,)), num_ranks=3),
    "shared state": Setup(((0, 1),), settings={"shard_optimizer": True}),
}


@pytest.mark.parametrize("scale", [2.0**40, 2.0**18, 2.0**-30])
def test_scales_too_large_and_too_small_end_in_the_steps_of_plain_pytorch(scale: float) -> None:
    """Overflow skips steps and halves the scale, growth doubles it; small gradients vanish as they do there."""
    way = Way(autocast=torch.float16, scale=scale, max_norm=0.5)
    found, expected = train_in(way, CASE, pipeline(3, num_micro_batches=1), BATCHES), plain_in(way, CASE, BATCHES)
    assert found.scales == expected.scales
    if scale > 2.0**30:
        assert found.scales == [scale / 2, scale / 4, scale / 8, scale / 16]
    bit_equal(replace(found.record, gradients=[]), replace(expected.record, gradients=[]))


def test_an_optimizer_that_unscales_itself_is_scaled_too() -> None:
    fused = partial(torch.optim.SGD, lr=0.05, fused=True)
    found = train_in(HALF, CASE, pipeline(2, num_micro_batches=1), BATCHES, fused)
    expected = plain_in(HALF, CASE, BATCHES, fused)
    assert found.scales == expected.scales
    bit_equal(found.record, expected.record)


@pytest.mark.parametrize("setup", SCALED)
def test_overflow_on_one_rank_skips_the_step_on_all(setup: str) -> None:
    def run(model: Any, optimizer: Any, rank: int) -> tuple[float, list[bool]]:
        loss = model(*BATCHES[0][0], **BATCHES[0][1])
        model.scaler.scale(loss).backward()
        before = [parameter.detach().clone() for parameter in held(model).values()]
        if rank == 1:
            next(each.grad for each in held(model).values() if not each.grad.is_meta).view(-1)[0] = torch.inf
        model.scaler.step(optimizer)
        model.scaler.update()
        kept = [torch.equal(old, new) for old, new in zip(before, held(model).values(), strict=True)]
        return model.scaler.get_scale(), kept

    results = on_ranks(SCALED[setup], CASE.model(), run, wrap=scaled_by(HALF))
    assert {scale for scale, _ in results} == {2.0**11}
    assert all(all(kept) for _, kept in results)


def test_a_scaler_that_was_not_known_at_the_call_joins_when_it_unscales() -> None:
    """As one that was made before the library was imported."""

    def run(model: Any, optimizer: Any, rank: int) -> float:
        loss = model(*BATCHES[0][0], **BATCHES[0][1])
        scaler: Any = HALF.scaler()
        scaler.scale(loss).backward()
        if rank == 1:
            next(iter(held(model).values())).grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return float(scaler.get_scale())

    assert on_ranks(SCALED["two"], CASE.model(), run) == [2.0**11] * 2


def scaled_gradient(setup: Setup, num_scalers: int, wrap: Any = AutoVaruna) -> Tensor:
    """Returns a gradient of the first call of a loop with a scaler, before it is unscaled."""

    def run(model: Any, optimizer: Any, rank: int) -> Tensor:
        scalers = [HALF.scaler() for _ in range(num_scalers)]
        with HALF.around():
            loss = model(*BATCHES[0][0], **BATCHES[0][1])
        (getattr(model, "scaler", None) or scalers[0]).scale(loss).backward()
        return torch.cat([parameter.grad.view(-1) for parameter in held(model).values()])

    gc.collect()
    gradient: Tensor = on_ranks(setup, CASE.model(), run, wrap=wrap)[0]
    return gradient


def test_a_scaler_that_is_not_given_is_found() -> None:
    """Else float16 gradients would vanish before the loop scales them."""
    found = scaled_gradient(pipeline(1, num_micro_batches=2), num_scalers=1)
    assert torch.equal(found, scaled_gradient(pipeline(1, num_micro_batches=2), num_scalers=0, wrap=scaled_by(HALF)))


def with_own_scaler(hidden: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
    """Returns the gradient of a step whose scaler is made before the model is wrapped, and plain PyTorch's."""

    def step(wrap: Callable[..., Any]) -> Tensor:
        model = CASE.model()
        optimizer, scaler = sgd(model.parameters()), HALF.scaler()
        scaler = hidden(scaler)
        wrapped = wrap(model, optimizer)
        with HALF.around():
            loss = wrapped(*BATCHES[0][0], **BATCHES[0][1])
        held = scaler() if callable(scaler) else scaler
        held.scale(loss).backward()
        held.unscale_(optimizer)
        return torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])

    gc.collect()
    plan = Setup(num_micro_batches=2).plan
    return step(partial(AutoVaruna, **QUIET, num_micro_batches=2, plan=plan)), step(lambda model, optimizer: model)


def test_a_scaler_that_was_made_before_is_found() -> None:
    ours, plain = with_own_scaler(lambda scaler: scaler)
    assert (ours - plain).abs().max() <= 1e-2 * plain.abs().max()


def test_one_that_nothing_shows_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"scaler=scaler"):
        with_own_scaler(lambda scaler: lambda: scaler)


def test_one_of_several_scalers_must_be_named() -> None:
    with pytest.raises(AutoVarunaError, match="scaler=scaler"):
        scaled_gradient(pipeline(1, num_micro_batches=2), num_scalers=2)


def test_a_plan_measured_in_bfloat16_trains_as_plain_pytorch() -> None:
    """Each rank passes half of a batch."""
    way, models = WAYS["autocast"], [CASE.model() for _ in range(2)]

    def be_rank(world: World) -> Record:
        optimizer = sgd(models[world.rank].parameters())
        wrapped = AutoVaruna(models[world.rank], optimizer, **QUIET)
        record, _ = loop(way, CASE, wrapped, optimizer, way.scaler(), [share_of(BATCHES[0], [3, 3], world.rank)])
        return with_state(record, wrapped)

    compare(merge(run_ranks(2, be_rank)), plain_in(way, CASE, BATCHES[:1]).record, rtol=2e-2)
