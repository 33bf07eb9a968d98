"""Precisions: the same bits on any partition, those of plain PyTorch with one micro-batch, and the scaler's skips."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autovaruna import AutoVaruna
from autovaruna.errors import AutoVarunaError, InputError
from autovaruna.ranks.world import World
from tests.catalogue import CASES, DEVICE, Batch, Case
from tests.catalogue.small import Written, words
from tests.products import diagonal
from tests.rank_threads import run_ranks
from tests.reference import MakeOptimizer, Record, bit_equal, buffers_of, compare, gradients_of, part, sgd, weights_of
from tests.session.training import QUIET, Setup, as_plain, held, merge, on_ranks, pipeline, with_state

ONE_STAGE = pipeline(1)


@dataclass(frozen=True)
class Way:
    """A precision to train in."""

    weights: torch.dtype = torch.float32  # and of the inputs
    autocast: torch.dtype | None = None  # around the call
    scale: float = 0.0  # what the scaler starts with; 0: there is none
    max_norm: float = 0.0  # clips the gradients; 0: not

    def around(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(DEVICE.type, dtype=self.autocast)

    def scaler(self) -> torch.amp.GradScaler:
        scale = self.scale or 1.0
        return torch.amp.GradScaler(DEVICE.type, init_scale=scale, growth_interval=2, enabled=self.scale > 0)

    def cast(self, given: Any) -> Any:
        """Returns a model, or a batch, in the dtype of the weights."""
        if isinstance(given, nn.Module):
            return given.to(self.weights)
        return pytree.tree_map_only(Tensor, lambda x: x.to(self.weights) if x.is_floating_point() else x, given)


WAYS = {
    "float64": Way(torch.float64),
    "float32": Way(),
    "autocast": Way(autocast=torch.bfloat16),
    "bfloat16": Way(torch.bfloat16),
    "scaler": Way(autocast=torch.float16, scale=2.0**12, max_norm=1.0),
}


@dataclass
class Trained:
    """What training gave."""

    record: Record
    scales: list[float]  # of the scaler after each step


def same_bits(found: Trained, expected: Trained) -> None:
    bit_equal(found.record, expected.record)
    assert found.scales == expected.scales


def wrap_with_scaler(way: Way, *given: Any, **settings: Any) -> AutoVaruna:
    """Wraps a model for a loop with a scaler, which is then the model's ``scaler``."""
    scaler = way.scaler()
    wrapped = AutoVaruna(*given, scaler=scaler, **settings)
    wrapped.scaler = scaler  # type: ignore[assignment]
    return wrapped


def train_in(
    way: Way, case: Case, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd, setup: Setup = ONE_STAGE
) -> Trained:
    def run(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Trained:
        found = loop(way, case, wrapped, optimizer, wrapped.scaler, batches)
        return Trained(with_state(found.record, wrapped), found.scales)

    model, token = way.cast(case.model()), (case.name, case.has_dropout, str(way))
    results = on_ranks(setup, model, run, make_optimizer, token, wrap=partial(wrap_with_scaler, way))
    assert all(each.scales == results[0].scales for each in results), "scales differ between ranks"
    return Trained(merge([each.record for each in results]), results[0].scales)


def plain_in(way: Way, case: Case, batches: Sequence[Batch], make_optimizer: MakeOptimizer = sgd) -> Trained:
    model = way.cast(case.model())
    found = loop(way, case, model, make_optimizer(model.parameters()), way.scaler(), batches)
    found.record.weights, found.record.buffers = weights_of(model), buffers_of(model)
    return found


def loop(way: Way, case: Case, model: Any, optimizer: Any, scaler: Any, batches: Sequence[Batch]) -> Trained:
    """Is the loop of an ordinary script."""
    record, scales = Record(), list[float]()
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
    return Trained(record, scales)


def mix(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Leaves autocast and enters it in the middle, with and without gradients; has dropout, BatchNorm and a tie."""
    h = self.drop(self.first(self.words(x)))
    with torch.autocast(DEVICE.type, enabled=False):
        with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            turn = h @ h.transpose(1, 2)
        h = h + torch.softmax(turn.to(self.second.weight.dtype), -1) @ self.second(h.to(self.second.weight.dtype))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        h = h + self.third(self.norm(h.to(self.second.weight.dtype))).to(h.dtype)
    h = self.drop(self.batch_norm(h.transpose(1, 2))).transpose(1, 2).to(self.words.weight.dtype)
    return F.cross_entropy(F.linear(h, self.words.weight)[:, 0].float(), y)


def mixed(rate: float = 0.3) -> nn.Module:
    layers = {name: nn.Linear(12, 12) for name in ("first", "second", "third")}
    norms = {"norm": nn.LayerNorm(12), "batch_norm": nn.BatchNorm1d(12)}
    return Written(mix, words=nn.Embedding(23, 12), drop=nn.Dropout(rate), **layers, **norms)


MIXED = Case("mixed", mixed, words, has_dropout=True, has_batch_norm=True)
MIXED_BATCHES = [MIXED.batch(7, step) for step in range(3)]
SURE = Case("mixed_sure", lambda: mixed(0.0), words, has_batch_norm=True)
CASE = CASES["chain"]
HALF = Way(autocast=torch.float16, scale=2.0**12)
BATCHES = [CASE.batch(6, step) for step in range(4)]
SCALED = {
    "two": pipeline(2),
    "replicas": Setup(((0,), (1, 2))),
    "idle_rank": Setup(((0,), (1,)), num_ranks=3),
    "shared state": Setup(((0, 1),), settings={"shard_optimizer": True}),
}
SETUPS = {
    "two": pipeline(2),
    "three_gpipe": pipeline(3, schedule="gpipe"),
    "two_recompute": pipeline(2, recompute=True, schedule="varuna"),
    "three_recompute_uneven": pipeline(3, recompute=True, shares=(0.2, 0.9)),
}


@cache
def one_stage(way: str) -> Trained:
    return train_in(WAYS[way], MIXED, MIXED_BATCHES)


@pytest.mark.parametrize(("way", "setup"), diagonal(WAYS, SETUPS))
def test_no_partition_changes_a_bit(way: str, setup: str) -> None:
    same_bits(train_in(WAYS[way], MIXED, MIXED_BATCHES, setup=SETUPS[setup]), one_stage(way))


@pytest.mark.parametrize("way", [*WAYS, "an optimizer that unscales itself"])
def test_one_micro_batch_gives_the_bits_of_plain_pytorch(way: str) -> None:
    given: Any = HALF, CASE, BATCHES, partial(torch.optim.SGD, lr=0.05, fused=True)
    if way in WAYS:
        given = WAYS[way], SURE, MIXED_BATCHES, sgd
    same_bits(train_in(*given, setup=pipeline(3, num_micro_batches=1)), plain_in(*given))


@pytest.mark.parametrize("way", WAYS)
def test_replicas_change_the_order_of_a_sum_alone(way: str) -> None:
    setups = Setup(((0, 1), (2, 3, 4))), ONE_STAGE
    found, expected = (train_in(WAYS[way], CASE, [CASE.batch(7, 0)], setup=setup) for setup in setups)
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

    as_plain(pipeline(2, num_micro_batches=1), case, story, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [2.0**40, 2.0**18, 2.0**-30])
def test_scales_too_large_and_too_small_end_in_the_steps_of_plain_pytorch(scale: float) -> None:
    """Overflow skips steps and halves the scale, growth doubles it; small gradients vanish as they do there."""
    way = Way(autocast=torch.float16, scale=scale, max_norm=0.5)
    found, expected = train_in(way, CASE, BATCHES, setup=pipeline(3, num_micro_batches=1)), plain_in(way, CASE, BATCHES)
    if scale > 2.0**30:
        assert found.scales == [scale / 2, scale / 4, scale / 8, scale / 16]
    for each in (found, expected):
        each.record.gradients = []
    same_bits(found, expected)


@pytest.mark.parametrize("setup", [*SCALED, "not known at the call"])
def test_overflow_on_one_rank_skips_the_step_on_all(setup: str) -> None:
    """A scaler that was made before the library was imported, say, joins when it unscales."""
    is_known = setup in SCALED

    def run(model: Any, optimizer: Any, rank: int) -> None:
        loss = model(*BATCHES[0][0], **BATCHES[0][1])
        scaler: Any = model.scaler if is_known else HALF.scaler()
        scaler.scale(loss).backward()
        before = [parameter.detach().clone() for parameter in held(model).values()]
        if rank == 1:
            next(each.grad for each in held(model).values() if not each.grad.is_meta).view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**11
        assert all(torch.equal(old, new) for old, new in zip(before, held(model).values(), strict=True))

    wrap = partial(wrap_with_scaler, HALF) if is_known else AutoVaruna
    on_ranks(SCALED.get(setup, pipeline(2)), CASE.model(), run, wrap=wrap)


WRAP = partial(AutoVaruna, **QUIET, num_micro_batches=2, plan=Setup(num_micro_batches=2).plan)


def gradient_of_step(wrap: Callable[..., Any], before: Any = None, num_after: int = 0) -> Tensor:
    """Returns the gradient of a step whose scaler, or what hides it, is made before the model is wrapped, or after."""
    gc.collect()  # earlier tests have left some
    model = CASE.model()
    optimizer = sgd(model.parameters())
    wrapped = wrap(model, optimizer)
    scalers = [HALF.scaler() for _ in range(num_after)]
    with HALF.around():
        loss = wrapped(*BATCHES[0][0], **BATCHES[0][1])
    scaler = before() if callable(before) else before or scalers[0]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])


def test_a_scaler_that_is_not_given_is_found_and_one_of_several_must_be_named() -> None:
    """Else float16 gradients would vanish before the loop scales them."""
    found = gradient_of_step(WRAP, num_after=1)
    with pytest.raises(AutoVarunaError, match="scaler=scaler"):
        gradient_of_step(WRAP, num_after=2)
    scaler = HALF.scaler()
    assert torch.equal(found, gradient_of_step(partial(WRAP, scaler=scaler), scaler))


def test_a_scaler_made_before_is_found_wherever_it_is_and_one_made_too_late_is_refused() -> None:
    plain = gradient_of_step(lambda model, optimizer: model, HALF.scaler())
    for hides in (lambda scaler: scaler, lambda scaler: lambda: scaler):
        assert (gradient_of_step(WRAP, hides(HALF.scaler())) - plain).abs().max() <= 1e-2 * plain.abs().max()
    with pytest.raises(InputError, match=r"scaler=scaler"):
        gradient_of_step(WRAP, HALF.scaler)


def test_a_plan_measured_in_bfloat16_trains_as_plain_pytorch() -> None:
    way, models = WAYS["autocast"], [CASE.model() for _ in range(2)]

    def be_rank(world: World) -> Record:
        optimizer = sgd(models[world.rank].parameters())
        wrapped = AutoVaruna(models[world.rank], optimizer, **QUIET)
        own = part(BATCHES[0], 3 * world.rank, 3 * world.rank + 3)
        found = loop(way, CASE, wrapped, optimizer, way.scaler(), [own])
        return with_state(found.record, wrapped)

    compare(merge(run_ranks(2, be_rank)), plain_in(way, CASE, BATCHES[:1]).record, rtol=2e-2)
