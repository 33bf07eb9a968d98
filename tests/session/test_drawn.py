"""Draws whole runs at random (models, calls, plans) and holds them to plain PyTorch, and to each other's bits.

Calls take other paths through the model, of other sizes, with and without gradients; between them parameters are
frozen and set free, gradients are added up, kept back and clipped, and the state leaves the model and comes back.
``DRAWN_GRAPHS=1000 pytest tests/session/test_drawn.py`` draws as many, ``DRAWN_FROM=5000`` from that seed on. Others
are drawn in which samples may meet: each gives the numbers of plain PyTorch or is refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna
from autovaruna.errors import InputError, PlanError, TraceError
from tests.catalogue import PLAIN, REFUSED
from tests.catalogue.case import Batch, Case
from tests.catalogue.drawn import NUM_PATHS, draw_case, draw_mixed
from tests.catalogue.small import WIDTH
from tests.products import drawn_seeds, some
from tests.reference import OPTIMIZERS, Record, bit_equal, compare, micro_batches, plain_micro_batched, plain_steps
from tests.session.training import Setup, TooFewBlocksError, merge, on_ranks, train

STEPS = 2
ONCE_WRONG = (68, 255)  # a value and the same under another name on both sides of a cut
SCHEDULES = ("gpipe", "1f1b", "varuna", "interleaved")
Forward = Callable[[Batch], Tensor]
WRONG_CALLS = (560,)  # a layer that one stage uses before and after another
KINDS = ("train", "train", "train", "accumulate", "keep", "evaluate", "freeze", "reload", "clip")
CASES = [case.without_dropout() for case in PLAIN if not case.has_batch_norm]


def draw_setup(chance: random.Random, case: Case, num_stages: int) -> Setup:
    """Returns any placement of stages: unequal replicas (each has buffers of its own), several stages a rank."""
    num_ranks = chance.randint(1, 4)
    schedule = chance.choice(SCHEDULES)
    most = 1 if schedule == "interleaved" or case.has_batch_norm else num_ranks
    ranks = tuple(tuple(chance.sample(range(num_ranks), chance.randint(1, most))) for _ in range(num_stages))
    if schedule == "interleaved":
        ranks = tuple((stage % num_ranks,) for stage in range(num_stages))
    num_micro_batches, shares = chance.randint(1, 7), tuple(sorted(chance.random() for _ in range(num_stages - 1)))
    recompute = chance.random() < 0.4
    return Setup(ranks, num_micro_batches, shares, recompute, schedule, num_ranks=num_ranks)


def hold(case: Case, setup: Setup, size: int, optimizer: str) -> None:
    """Compares a run with one on a single rank, bit for bit where that is promised, and with plain PyTorch."""
    batches = [case.batch(size, step) for step in range(STEPS)]
    got = train(case, setup, batches, OPTIMIZERS[optimizer])
    alone = train(case, Setup(((0,),), setup.num_micro_batches), batches, OPTIMIZERS[optimizer])
    if all(len(ranks) == 1 for ranks in setup.stage_ranks):
        bit_equal(got, alone)
    else:
        compare(got, alone)
    if not case.has_dropout:
        steps = [micro_batches(batch, setup.num_micro_batches) for batch in batches]
        compare(got, plain_micro_batched(case, steps, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("seed", sorted({*drawn_seeds(5), *ONCE_WRONG}))
def test_a_drawn_graph_trains_as_plain_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    case = draw_case(seed, chance.randint(6, 20))
    if chance.random() < 0.5:
        case = case.without_dropout()
    for num_stages in range(chance.randint(1, 5), 0, -1):
        try:
            hold(case, draw_setup(chance, case, num_stages), chance.randint(1, 12), chance.choice(list(OPTIMIZERS)))
        except TooFewBlocksError:
            continue
        return


@dataclass(frozen=True)
class Script:
    """A loop of training, the same for a plain model and for a wrapped one."""

    seed: int  # what it does depends on this alone
    case: Case

    def run(self, model: nn.Module, whole: nn.Module, optimizer: Any, forward: Forward, clip: Any) -> list[Tensor]:
        """Runs it and returns the losses; `whole` is the model that was given, `model` what is called and saved."""
        chance, losses = random.Random(self.seed), list[Tensor]()
        acts = ["train", *(chance.choice(KINDS) for _ in range(7)), "train"]
        names = [name for name, _ in whole.named_parameters() if not name.startswith("embedding")]
        chance = random.Random(chance.random())
        for act in acts:
            args, kwargs = self.case.batch(chance.randint(1, 9), chance.randrange(1000))
            batch = args, {**kwargs, "path": chance.randrange(NUM_PATHS)}
            name, is_free = chance.choice(names), chance.random() < 0.5
            if act in ("train", "accumulate", "keep", "clip"):
                with model.no_sync() if act == "keep" and isinstance(model, AutoVaruna) else nullcontext():
                    losses.append(forward(batch))
                if act == "clip":
                    clip(0.3)
                if act in ("train", "clip"):
                    optimizer.step()
                    optimizer.zero_grad()
            elif act == "evaluate":
                with torch.no_grad():
                    model.eval()
                    losses.append(forward(batch))
                    model.train()
            elif act == "freeze":
                dict(whole.named_parameters())[name].requires_grad_(is_free)
            else:
                model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        return losses


def plain(script: Script, case: Case, setup: Setup, make_optimizer: Any) -> Record:
    """Runs a script on the model itself, micro-batch by micro-batch."""
    model = case.model()
    optimizer = make_optimizer(model.parameters())

    def forward(batch: Batch) -> Tensor:
        parts, size = micro_batches(batch, setup.num_micro_batches), batch[0][0].shape[0]
        total = torch.zeros(())
        for args, kwargs in parts:
            loss = model(*args, **kwargs) * (args[0].shape[0] / size)
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
        return total

    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    losses = script.run(model, model, optimizer, forward, clip)
    return Record(losses, weights=dict(model.state_dict()))


def wrapped(script: Script, case: Case, setup: Setup, make_optimizer: Any) -> Record:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Record:
        def forward(batch: Batch) -> Tensor:
            loss = model(*batch[0], **batch[1])
            if loss.requires_grad:
                loss.backward()
            return loss.detach()

        losses = script.run(model, model.module, optimizer, forward, model.clip_grad_norm_)
        return Record(losses, weights=dict(model.state_dict()))

    return merge(on_ranks(setup, case, run, make_optimizer))


@pytest.mark.parametrize("seed", sorted({*drawn_seeds(3), *WRONG_CALLS}))
def test_any_calls_train_as_plain_pytorch(seed: int) -> None:
    chance = random.Random(seed)
    case = draw_case(seed, chance.randint(5, 18)).without_dropout()
    script, make_optimizer = Script(seed, case), OPTIMIZERS[chance.choice(list(OPTIMIZERS))]
    for num_stages in range(chance.randint(1, 4), 0, -1):
        setup = draw_setup(chance, case, num_stages)
        try:
            got = wrapped(script, case, setup, make_optimizer)
        except TooFewBlocksError:
            continue
        except PlanError as refusal:  # a shared layer is at a stage too late for a path that needs it early
            assert "another order" in str(refusal)
            return
        compare(got, plain(script, case, setup, make_optimizer))
        return


@pytest.mark.parametrize("seed", dict.fromkeys([*drawn_seeds(25, times=100), 531]))
def test_a_drawn_model_that_may_mix_samples_is_right_or_refused(seed: int) -> None:
    """Micro-batches are of three, two and two samples; in the 531st model all that are looked at are masked."""
    case = draw_mixed(seed)
    batch, setup = case.batch(7, seed), Setup(num_micro_batches=3)
    try:
        got = train(case, setup, [batch])
    except (TraceError, InputError):
        return
    compare(got, plain_steps(case, [batch]), rtol=2e-4)


@pytest.mark.parametrize("case", [case.without_dropout() for case in REFUSED], ids=str)
def test_what_compares_samples_or_draws_by_numpy_is_right_or_refused(case: Case) -> None:
    batch = case.batch(6, 1)
    try:
        got = train(case, Setup(num_micro_batches=3), [batch])
    except TraceError as error:
        assert "Expected" in str(error)
        return
    if case.is_always_random:  # the seed decides what it draws; that no plan changes it is for test_kept.py
        assert got.losses[0].isfinite()
    else:
        compare(got, plain_micro_batched(case, [micro_batches(batch, 3)]))


def draw_sizes(chance: random.Random, num_ranks: int) -> list[int]:
    """Returns samples for each rank: some, and not as many as a tensor without samples has numbers."""
    while True:
        sizes = [chance.choice([0, 1, 2, 3, 5]) for _ in range(num_ranks)]
        if sum(sizes) not in (0, WIDTH):
            return sizes


@pytest.mark.parametrize("seed", some(range(60), 8))
def test_any_setup_trains_as_plain_pytorch(seed: int) -> None:
    chance, case = random.Random(seed), CASES[seed % len(CASES)]
    setup = draw_setup(chance, case, chance.randint(1, min(4, case.max_stages)))
    setup = replace(setup, num_micro_batches=setup.num_ranks + chance.randint(0, 4))
    sizes = [draw_sizes(chance, setup.world_size) for _ in range(3)]
    batches = [case.batch(sum(each), step) for step, each in enumerate(sizes)]
    optimizer = OPTIMIZERS[chance.choice(list(OPTIMIZERS))]
    options = {"max_norm": chance.choice([None, 0.1]), "num_accumulated": chance.choice([1, 3])}
    compare(train(case, setup, batches, optimizer, sizes, **options), plain_steps(case, batches, optimizer, **options))
