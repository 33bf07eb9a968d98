"""Replicas that share the optimizer's state train as those that each have all of it, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autovaruna import InputError, RankError
from tests.catalogue import CASES, Case
from tests.profiler.own_optimizers import JOINT, SEPARATE, Langevin, Unknown
from tests.reference import MakeOptimizer, Record, adamw, bit_equal, compare, plain_steps, sgd
from tests.session.test_precision import Way, train_in
from tests.session.training import Setup, held, merge, on_ranks, train_rank, with_state

CASE = CASES["chain"].without_dropout()
SETUPS = {
    "2 replicas": Setup(((0, 1),)),
    "4 replicas": Setup(((0, 1, 2, 3),), 4),
    "2x2": Setup(((0, 1), (2, 3)), 4),
    "unequal": Setup(((0,), (1, 2, 3)), 6),
    "in another order": Setup(((1, 0), (0, 1)), 4),
    "one of them": Setup(((0,), (1,))),
}
TWO = SETUPS["2 replicas"]
Story = Callable[[Any, Any, int], Any]


def shared(setup: Setup, is_shared: bool = True) -> Setup:
    """Returns a setup whose replicas share the optimizer's state."""
    return replace(setup, settings={**setup.settings, "shard_optimizer": is_shared, "optimizer_bytes_factor": 4.0})


def both(story: Story, setup: Setup, case: Case, make: MakeOptimizer) -> list[list[Any]]:
    """Returns what a story gives on each rank, with shared state and without."""
    token = case.name, case.has_dropout
    return [on_ranks(shared(setup, each), case.model(), story, make, token) for each in (True, False)]


def trains_alike(setup: Setup, case: Case, make: MakeOptimizer = adamw, **options: Any) -> list[Record]:
    """Asserts that weights, losses and gradients are bit-equal, on every replica; returns the records of the ranks."""
    batches = [case.batch(7, step) for step in range(3)]

    def run(model: Any, optimizer: Any, rank: int) -> tuple[Record, dict[str, Tensor]]:
        record = train_rank(case, model, optimizer, batches, **options)
        return record, {name: each.detach().clone() for name, each in held(model).items()}

    (found, expected) = both(run, setup, case, make)
    bit_equal(merge([record for record, _ in found]), merge([record for record, _ in expected]))
    for (_, weights), (_, others) in zip(found, expected, strict=True):
        bit_equal(Record(weights=weights), Record(weights=others))
    return [record for record, _ in found]


@pytest.mark.parametrize("make", [sgd, adamw], ids=["momentum", "adamw"])
@pytest.mark.parametrize("name", SETUPS)
def test_training_is_the_same(name: str, make: MakeOptimizer) -> None:
    trains_alike(SETUPS[name], CASE, make)


def test_training_is_plain_pytorchs() -> None:
    batches = [CASE.batch(7, step) for step in range(3)]
    compare(merge(trains_alike(TWO, CASE)), plain_steps(CASE, batches, adamw), rtol=1e-5)


@pytest.mark.parametrize("name", ["tied_three_ways", "conv_net_batch_norm", "frozen", "unused_parameter", "lstm"])
@pytest.mark.parametrize("setup", ["2x2", "unequal"])
def test_ties_over_stages_buffers_and_what_is_not_trained(name: str, setup: str) -> None:
    trains_alike(SETUPS[setup], CASES[name])


@pytest.mark.parametrize("setup", ["2 replicas", "2x2"])
def test_clipping_by_the_norm_of_all(setup: str) -> None:
    trains_alike(SETUPS[setup], CASE, max_norm=0.05)
    trains_alike(SETUPS[setup], CASE, max_norm=0.05, num_accumulated=3)


@pytest.mark.parametrize("name", SEPARATE)
def test_every_optimizer_that_updates_each_parameter_by_itself(name: str) -> None:
    trains_alike(TWO, CASES["conv_net_batch_norm"].without_dropout(), SEPARATE[name])


REFUSED: dict[str, MakeOptimizer] = {
    "Lamb joins numbers": JOINT["lamb_that_clips"],
    "LBFGS joins numbers": JOINT["lbfgs"],
    "Langevin draws random numbers": Langevin,
    "Unknown cannot be tried out": Unknown,
}


@pytest.mark.parametrize("words", REFUSED)
def test_others_are_refused_by_name(words: str) -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=rf"shard_optimizer is true, and {words}.*shard_optimizer=False"):
            backward(model)

    on_ranks(shared(TWO), CASE.model(), run, REFUSED[words], (CASE.name, False))


def test_one_made_after_the_split_is_refused_by_name() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        with pytest.raises(InputError, match="Prodigy joins numbers"):
            JOINT["prodigy"](model.parameters()).step()

    on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False))


def backward(model: Any, seed: int = 0) -> None:
    """Gives the parameters gradients."""
    batch = CASE.batch(6, seed)
    CASE.loss_of(model(*batch[0], **batch[1]), batch).backward()  # type: ignore[no-untyped-call]


def ends_alike(story: Callable[[Any, Any], None], setup: str = "2x2", make: MakeOptimizer = adamw) -> None:
    """Asserts that a story leaves the same bits in the weights of every replica."""

    def run(model: Any, optimizer: Any, rank: int) -> Record:
        story(model, optimizer)
        return with_state(Record(weights={name: each.clone() for name, each in held(model).items()}), model)

    found, expected = both(run, SETUPS[setup], CASE, make)
    for one, other in zip(found, expected, strict=True):
        bit_equal(one, other)


@pytest.mark.parametrize("setup", ["2 replicas", "unequal"])
def test_gradients_that_are_kept_back(setup: str) -> None:
    def story(model: Any, optimizer: Any) -> None:
        for step in range(2):
            with model.no_sync():
                backward(model, 3 * step)
                backward(model, 3 * step + 1)
            if step:
                model.allreduce_grads()
            else:
                backward(model, 3 * step + 2)
            optimizer.step()
            optimizer.zero_grad()

    ends_alike(story, setup)


def test_gradients_add_up_whether_cleared_or_zeroed() -> None:
    def story(model: Any, optimizer: Any) -> None:
        for step in range(4):
            backward(model, step)
            backward(model, step + 1)
            optimizer.step()
            if step == 2:
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=step > 0)

    ends_alike(story)


@pytest.mark.parametrize("scale", [2.0**40, 2.0**12])
@pytest.mark.parametrize("setup", ["2 replicas", "unequal"])
def test_a_scaler_scales_skips_and_grows_alike(setup: str, scale: float) -> None:
    way = Way(autocast=torch.float16, scale=scale, max_norm=0.5)
    batches = [CASE.batch(6, step) for step in range(4)]
    found, expected = (train_in(way, CASE, shared(SETUPS[setup], each), batches, adamw) for each in (True, False))
    assert found.scales == expected.scales
    bit_equal(found.record, expected.record)


def test_overflow_that_one_rank_finds_skips_the_step_on_all() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> bool:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        batch = CASE.batch(6, 0)
        scaler.scale(CASE.loss_of(model(*batch[0], **batch[1]), batch)).backward()
        if rank == 1:
            next(each.grad for each in held(model).values() if not each.grad.is_meta).view(-1)[0] = torch.inf
        before = [each.detach().clone() for each in held(model).values()]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**11
        return all(map(torch.equal, before, held(model).values()))

    assert all(on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False)))


def test_the_state_is_whole_for_the_script_and_shared_in_memory() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> tuple[dict[str, Any], int]:
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        own = sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.dim())
        return copy.deepcopy(optimizer.state_dict()), own

    found, expected = both(run, SETUPS["4 replicas"], CASE, adamw)
    assert sum(own for _, own in found) == expected[0][1] and max(own for _, own in found) < 0.5 * expected[0][1]
    for state, _ in found:
        assert state["param_groups"] == expected[0][0]["param_groups"]
        torch.testing.assert_close(state["state"], expected[0][0]["state"], rtol=0, atol=0)


@pytest.mark.parametrize("later", [False, True])
def test_a_state_that_is_loaded(later: bool) -> None:
    def story(model: Any, optimizer: Any) -> None:
        if later:
            backward(model)
            optimizer = adamw(model.parameters())
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        backward(model, 5)
        optimizer.step()

    ends_alike(story)


def test_what_is_loaded_before_the_split() -> None:
    def story(model: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(saved))
        backward(model)
        optimizer.step()

    plain = CASE.model()
    before = adamw(plain.parameters())
    backward(plain)
    before.step()
    saved = before.state_dict()
    ends_alike(story)


def test_a_step_with_a_closure() -> None:
    def story(model: Any, optimizer: Any) -> None:
        def closure(seed: int = 0) -> Tensor:
            optimizer.zero_grad()
            batch = CASE.batch(6, seed)
            loss: Tensor = CASE.loss_of(model(*batch[0], **batch[1]), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):
            optimizer.step(closure)

    ends_alike(story)


def test_gradients_of_others_are_elsewhere() -> None:
    """A sum over gradients must not be that of one rank."""

    def run(model: Any, optimizer: Any, rank: int) -> int:
        backward(model)
        for each in model.parameters():
            each.grad.mul_(1 / (1 + each.grad.norm()))
        for total in (lambda each: each.grad.norm() ** 2, lambda each: each.grad.square().sum()):
            with pytest.raises(
                InputError, match=rf"Rank {rank} does not hold the gradient of .* on ranks \[{1 - rank}\]"
            ):
                float(sum(map(total, model.parameters())))
        assert not any(each.is_meta for each in model.parameters())
        return sum(each.grad.is_meta for each in model.parameters())

    counts = on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False))
    assert sum(counts) == len(list(CASE.model().parameters()))


def test_a_second_backward_is_refused_on_every_rank_once_weights_have_changed() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        batch = CASE.batch(6, 0)
        loss = CASE.loss_of(model(*batch[0], **batch[1]), batch)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="weights have changed"):
            loss.backward()

    on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False))


def test_copies_of_the_model_follow() -> None:
    def story(model: Any, optimizer: Any) -> None:
        average: Any = None
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            average = average or copy.deepcopy(model)
            with torch.no_grad():
                for own, other in zip(average.parameters(), model.parameters(), strict=True):
                    own.lerp_(other, 0.5)
        model.load_state_dict(average.state_dict())

    ends_alike(story)


def test_what_is_frozen_and_thawed_between_steps() -> None:
    def story(model: Any, optimizer: Any) -> None:
        names = [name for name, _ in model.named_parameters()]
        for step, frozen in enumerate(([], names[:3], names[2:5], [])):
            for name, each in model.named_parameters():
                each.requires_grad_(name not in frozen)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    ends_alike(story, "2 replicas")


def test_a_rank_that_does_not_step_is_told_of() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        if rank == 0:
            optimizer.step()
        backward(model)

    with pytest.raises(RankError, match=r"rank 0 waits for a sum or a copy among ranks \(0, 1\)"):
        on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False))


def test_the_model_may_be_saved_by_pickle(tmp_path: Path) -> None:
    """As where each replica has all of the state."""

    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        optimizer.step()
        torch.save(dict(model.module.named_parameters()), tmp_path / str(rank))

    on_ranks(shared(TWO), CASE.model(), run, adamw, (CASE.name, False))
    one, other = (torch.load(tmp_path / str(rank), weights_only=False) for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)
