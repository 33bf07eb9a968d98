"""Optimizers and clipping of a model that is split, or whose replicas share the optimizer's state.

Weights are those of plain PyTorch, shared state changes no bit, and what cannot be so is refused.
"""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError, RankError
from autovaruna.ranks.world import World
from tests.catalogue import CASES, Case
from tests.catalogue.small import WIDTH, Written, hidden
from tests.products import some
from tests.profiler.own_optimizers import JOINT, SEPARATE, Langevin, Unknown, parameters_of
from tests.rank_threads import run_ranks
from tests.reference import MakeOptimizer, Record, adamw, bit_equal, compare, gradients_of, plain_steps
from tests.session.test_precision import Way, same_bits, train_in
from tests.session.training import QUIET, Setup, as_plain, descend, merge, on_ranks, train_rank, with_state

IMAGES, CHAIN = CASES["conv_net_batch_norm"].without_dropout(), CASES["chain"].without_dropout()
DECLARED = {"optimizer_bytes_factor": 4.0}
TWO = Setup(((0,), (1,)), num_micro_batches=1, settings=DECLARED)
OWN_SAMPLES = replace(TWO, num_micro_batches=2, settings={**DECLARED, "inputs": "per_rank"})
REPLICAS = Setup(((0, 1),), num_micro_batches=1, settings=DECLARED)
SHARED = Setup(((0, 1),), settings={**DECLARED, "shard_optimizer": True})
GRIDS = {
    "2 replicas": SHARED,
    "4 replicas": replace(SHARED, stage_ranks=((0, 1, 2, 3),), num_micro_batches=4),
    "2x2": replace(SHARED, stage_ranks=((0, 1), (2, 3)), num_micro_batches=4),
    "unequal": replace(SHARED, stage_ranks=((0,), (1, 2, 3)), num_micro_batches=6),
    "in another order": replace(SHARED, stage_ranks=((1, 0), (0, 1)), num_micro_batches=4),
    "one of them": replace(SHARED, stage_ranks=((0,), (1,))),
}
Story = Callable[[Any, Any], Any]
CLIPPED = {
    "two": Setup(((0,), (1,)), num_micro_batches=1),
    "idle_rank": Setup(((0,), (1,)), num_ranks=3, num_micro_batches=1),
    "shared_state": Setup(((0, 1), (1, 2)), num_micro_batches=1, settings={"shard_optimizer": True}),
}
LISTS: tuple[Callable[[Any, Any], list[Any]], ...] = (
    lambda model, optimizer: list(model.parameters()),
    lambda model, optimizer: [each for group in optimizer.param_groups for each in group["params"]],
    lambda model, optimizer: list(model.parameters())[1:-1],
)


def loss_of(model: Any, seed: int = 0, case: Case = CHAIN) -> Tensor:
    args, kwargs = case.batch(6, seed)
    return case.loss_of(model(*args, **kwargs), (args, kwargs))


def backward(model: Any, seed: int = 0) -> None:
    loss_of(model, seed).backward()


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    descend(loss_of(model, seed), optimizer)


def steps(model: Any, optimizer: Any, with_closure: bool = False, case: Case = IMAGES) -> None:
    def closure(seed: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, seed, case)
        loss.backward()
        return loss

    for seed in range(3):
        if with_closure:
            optimizer.step(partial(closure, seed))
        else:
            closure(seed)
            optimizer.step()


def hold(story: Story, make: MakeOptimizer, setup: Setup = TWO, case: Case = IMAGES) -> None:
    """Asserts that a story ends in the weights of plain PyTorch, on every rank."""

    def end(model: Any, optimizer: Any) -> Record:
        story(model, optimizer)
        return Record(weights=dict(model.state_dict()))

    as_plain(setup, case, end, make, rtol=1e-4)


@pytest.mark.parametrize("name", [*SEPARATE, "sam", "prodigy", "unknown"])
def test_its_steps_are_as_in_plain_pytorch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """One updates each parameter by itself, steps over stand-ins, or every rank holds all parameters."""
    logging.getLogger("autovaruna").propagate = True
    make = {**SEPARATE, **JOINT, "unknown": Unknown}[name]
    hold(lambda model, optimizer: steps(model, optimizer, name == "sam"), make, REPLICAS if name in JOINT else TWO)
    told = "cannot try out whether Unknown updates each parameter by itself" in caplog.text
    assert told == (name == "unknown")


def by_hand(model: Any, optimizer: Any) -> None:
    """Goes over the groups by hand between steps, with hooks, a schedule, a new group and a state that is loaded."""
    held_back, seen = optimizer.param_groups[0]["params"].pop(), []
    optimizer.register_step_pre_hook(lambda own, *_: seen.append(sum(len(each["params"]) for each in own.param_groups)))
    for seed in range(4):
        loss_of(model, seed, IMAGES).backward()
        if seed == 1:
            optimizer.add_param_group({"params": [held_back], "lr": 0.02})
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad.mul_(1 / (1 + each.grad.norm()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed < 2)
        if seed:
            schedule.step()
        if seed == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert seen == [9, 10, 10, 10] and [group["lr"] for group in optimizer.param_groups] == [1e-3 / 8, 0.02 / 8]


def made_later(make: MakeOptimizer) -> Story:
    """Returns steps of an optimizer that is made after the split; once, those that joined lists of tensors raised."""
    return lambda model, optimizer: (steps(model, optimizer), steps(model, make(model.parameters())))


def saved_later(model: Any, optimizer: Any) -> None:
    steps(model, optimizer)
    second = adamw(model.parameters())
    steps(model, second)
    saved = copy.deepcopy((model.state_dict(), second.state_dict()))
    assert len(pickle.loads(pickle.dumps(saved[1]))["state"]) == len(list(model.parameters()))
    steps(model, second)
    model.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    steps(model, second)


def held_by_the_model(model: Any, optimizer: Any) -> None:
    """Once, ranks that have the state of other parameters were told that their calls do not fit together."""
    getattr(model, "module", model).optimizer = optimizer
    steps(model, optimizer)
    steps(model, optimizer)


STORIES: dict[str, Story] = {
    "the call that splits comes from a step": lambda model, optimizer: steps(model, optimizer, with_closure=True),
    "by hand": by_hand,
    "held by the model": held_by_the_model,
    "adafactor made later": made_later(torch.optim.Adafactor),
    "for each made later": made_later(lambda each: torch.optim.ASGD(each, lr=0.1, foreach=True)),
    "saved later": saved_later,
}


@pytest.mark.parametrize("story", STORIES)
def test_other_steps_are_as_in_plain_pytorch(story: str) -> None:
    hold(STORIES[story], adamw)


def step_of_prodigy(model: Any, optimizer: Any) -> None:
    JOINT["prodigy"](model.parameters()).step()


def own_losses(model: Any, optimizer: Any) -> None:
    """Once, replicas went as far as each one's own samples said, and their weights parted without a word."""

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss + model.world.rank

    optimizer.step(closure)


def infinite(model: Any, optimizer: Any) -> None:
    next(iter(model.parameters())).grad.fill_(torch.inf)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def other_norms(model: Any, optimizer: Any) -> None:
    """Is noticed at the next norm, for clipping itself asks nobody."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 + model.world.rank)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def add_stranger(model: Any, optimizer: Any) -> None:
    """Puts a weight into the optimizer that each rank would step over by the gradient of its own samples."""
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    optimizer.step()


def step_of_criterion(model: Any, optimizer: Any) -> None:
    weight = nn.Parameter(torch.ones(()))
    (weight * (1.0 + model.world.rank)).backward()
    torch.optim.SGD([weight], 0.1).step()
    loss_of(model)


def of_other_states(parameters: Any) -> torch.optim.Optimizer:
    """Has a state on one rank alone, as where rank 0 has loaded it."""
    made = adamw(parameters)
    if next(NUMBERS) % 2:
        made.state[parameters_of(made)[0]] = {"step": torch.tensor(3.0)}
    return made


NUMBERS = itertools.count()
SHARING = "shard_optimizer is true, and"
searching = partial(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")
REFUSED: dict[str, tuple[Setup, MakeOptimizer, type[Exception], str, Story | None]] = {
    **{
        name: (TWO, JOINT[name], InputError, "joins numbers of several parameters in its steps.*num_replicas=2", None)
        for name in JOINT  # once, such an optimizer joined what one rank held, without a word
    },
    "a search": (TWO, searching, InputError, "LBFGS joins numbers of several.* inputs='replicated'", None),
    "own losses": (REPLICAS, searching, RankError, "loss by which LBFGS goes, .* forward returns", own_losses),
    "noise": (TWO, Langevin, InputError, "Langevin draws random numbers in its steps", None),
    "shared noise": (SHARED, Langevin, InputError, f"{SHARING} Langevin draws random numbers", None),
    "shared lamb": (SHARED, JOINT["lamb_that_clips"], InputError, f"{SHARING} Lamb joins numbers", None),
    "shared lbfgs": (SHARED, JOINT["lbfgs"], InputError, f"{SHARING} LBFGS joins.*shard_optimizer=False", None),
    "shared unknown": (SHARED, Unknown, InputError, f"{SHARING} Unknown cannot be tried out", None),
    "joint made later": (TWO, adamw, InputError, "joins numbers of several parameters", step_of_prodigy),
    "shared made later": (SHARED, adamw, InputError, "Prodigy joins numbers", step_of_prodigy),
    "joint that cannot be tried": (
        *(TWO, lambda parameters: Unknown(parameters, does_join=True), InputError, r"Rank \d does not hold"),
        lambda model, optimizer: optimizer.step(),
    ),
    "norm of infinity": (TWO, adamw, RuntimeError, "non-finite", infinite),
    "norm of a part": (
        *(TWO, adamw, RankError, r"got a list on rank 0 without that of .*which another rank has"),
        lambda model, _: nn.utils.clip_grad_norm_([each for each in model.parameters() if not each.is_meta], 1.0),
    ),
    "norm of what is computed": (
        *(TWO, adamw, InputError, r"Rank \d does not hold"),
        lambda model, _: float(nn.utils.get_total_norm([each.grad * 2 for each in model.parameters()])),
    ),
    "new strangers": (TWO, adamw, InputError, "1 of the optimizer's .* parameters are not the model's", add_stranger),
    "a loss with weights": (
        OWN_SAMPLES,
        adamw,
        RankError,
        "what SGD steps by, gradients of this rank's.* pass inputs='replicated'",
        step_of_criterion,
    ),
    "other states": (TWO, of_other_states, RankError, "The ranks start from other states of AdamW: ", None),
    "other norms": (TWO, adamw, RankError, "max_norm of the last clipping is 1 on rank 0, 2 on rank 1", other_norms),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(name: str) -> None:
    setup, make, error, words, act = REFUSED[name]

    def run(model: Any, optimizer: Any, rank: int) -> None:
        if act is not None:
            backward(model)
        with pytest.raises(error, match=words):
            loss_of(model) if act is None else act(model, optimizer)

    on_ranks(setup, CHAIN, run, make)


def train_critics(models: list[Any], *optimizers: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Makes steps as soft actor-critic does: each critic learns from the least of what both say."""
    for step in range(3):
        states, actions = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        said = [model(states, actions) for model in models]
        target = torch.minimum(*said).detach() + 1.0
        sum((F.mse_loss(each, target) for each in said), torch.tensor(0.0)).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return [dict(model.state_dict()) for model in models]


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for model in models for each in model.parameters()], 1e-2)


def test_two_models_have_two_optimizers() -> None:
    """Once, an optimizer of both was refused at the first call, and what to write was not said; it is as exact."""
    judge = lambda self, states, actions: self.net(torch.cat((states, actions), 1))  # noqa: E731
    pair = [Written(judge, net=hidden(nn.Tanh())) for _ in range(2)]
    settings: dict[str, Any] = {**QUIET, **DECLARED, "inputs": "replicated", "plan": TWO.plan}

    def run(world: World) -> list[dict[str, Tensor]]:
        own = copy.deepcopy(pair)
        with pytest.raises(InputError, match=r"Two models have two: Adam\(first.parameters\(\), ...\) goes to"):
            AutoVaruna(own[0], adam(*own), **settings)
        own = copy.deepcopy(pair)
        apart = [adam(each) for each in own]
        return train_critics([AutoVaruna(each, one, **settings) for each, one in zip(own, apart, strict=True)], *apart)

    ranks = run_ranks(2, run)
    expected = train_critics(pair, adam(*pair))
    for found in ranks:
        torch.testing.assert_close(found, expected)


def test_a_rank_that_does_not_step_is_told_of() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        backward(model)
        if rank == 0:
            optimizer.step()
        backward(model)

    with pytest.raises(RankError, match=r"rank 0 waits for a sum or a copy among ranks \(0, 1\)"):
        on_ranks(SHARED, CHAIN, run, adamw)


def clip_by_norm(parameters: list[Any]) -> Any:
    """Clips once by the second norm and once by the largest number, in the two ways that torch has."""
    return [nn.utils.clip_grad_norm_(parameters, *way) for way in ((0.1, 2.0, False, True), (0.01, torch.inf))]


def clip_by_value(parameters: list[Any]) -> Any:
    """Clips each number, as parameters are on any device: torch chooses the way."""
    nn.utils.clip_grad_value_(parameters, 2e-3)
    nn.utils.clip_grad_value_(parameters, 1e-3)


def total_norm(parameters: list[Any]) -> Any:
    return nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


@pytest.mark.parametrize("setup", CLIPPED)
def test_clipping_is_as_in_plain_pytorch(setup: str) -> None:
    """Once, it was refused, for it would have clipped by the norm of one rank; without a gradient nothing counts.

    The model's own method takes any kind of norm.
    """

    def run(model: Any, optimizer: Any, rank: int) -> list[Any]:
        found: list[Any] = []
        for what in LISTS:
            for clip in (clip_by_norm, clip_by_value, total_norm):
                model.zero_grad()
                backward(model)
                found += [clip(what(model, optimizer)), gradients_of(model)]
        for norm_type in (2.0, 1.0, torch.inf):
            model.zero_grad()
            backward(model)
            plain_clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()))
            found += [getattr(model, "clip_grad_norm_", plain_clip)(0.05, norm_type), gradients_of(model)]
        if not (first := next(iter(model.parameters()))).is_meta:
            first.grad = None
        return [*found, total_norm(list(model.parameters()))] if setup == "two" else found

    plain = CHAIN.model()
    expected = run(plain, adamw(plain.parameters()), 0)
    for found in on_ranks(CLIPPED[setup], CHAIN, run, adamw):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, {name: wanted[name] for name in got} if isinstance(got, dict) else wanted)


def with_and_without(setup: Setup) -> tuple[Setup, Setup]:
    return setup, replace(setup, settings={**setup.settings, "shard_optimizer": False})


def both(story: Callable[[Any, Any, int], Any], setup: Setup, case: Case, make: MakeOptimizer) -> list[list[Any]]:
    """Returns what a story gives on each rank, with shared state and without."""
    return [on_ranks(each, case, story, make) for each in with_and_without(setup)]


def trains_alike(setup: Setup, case: Case, make: MakeOptimizer = adamw, **options: Any) -> Record:
    """Asserts that shared state changes no bit of weights, losses and gradients, on any replica."""
    batches = [case.batch(7, step) for step in range(3)]

    def run(model: Any, optimizer: Any, rank: int) -> tuple[Record, dict[str, Tensor]]:
        record = train_rank(case, model, optimizer, batches, **options)
        return record, {name: each.detach().clone() for name, each in model.named_parameters() if not each.is_meta}

    found, expected = both(run, setup, case, make)
    bit_equal(merge([record for record, _ in found]), merge([record for record, _ in expected]))
    for (_, weights), (_, others) in zip(found, expected, strict=True):
        bit_equal(Record(weights=weights), Record(weights=others))
    return merge([record for record, _ in found])


@pytest.mark.parametrize("name", GRIDS)
def test_shared_state_changes_no_bit(name: str) -> None:
    """Clipped by the norm of all, too, and over several calls."""
    found = trains_alike(GRIDS[name], CHAIN, max_norm=0.05, num_accumulated=3)
    batches = [CHAIN.batch(7, step) for step in range(3)]
    compare(found, plain_steps(CHAIN, batches, adamw, max_norm=0.05, num_accumulated=3))


ALIKE: dict[str, tuple[Setup, Case, MakeOptimizer]] = {
    **{name: (GRIDS["2x2"], CASES[name], adamw) for name in ("tied_three_ways", "frozen", "lstm")},
    **{name: (GRIDS["unequal"], CASES[name], adamw) for name in ("conv_net_batch_norm", "unused_parameter")},
    **{name: (SHARED, IMAGES, SEPARATE[name]) for name in some([*SEPARATE], 3)},
}


@pytest.mark.parametrize("name", ALIKE)
def test_ties_buffers_what_is_not_trained_and_any_optimizer_of_single_parameters_share_state(name: str) -> None:
    trains_alike(*ALIKE[name])


def kept_back(model: Any, optimizer: Any) -> None:
    for number in range(2):
        with model.no_sync():
            backward(model, 3 * number)
            backward(model, 3 * number + 1)
        model.allreduce_grads() if number else backward(model, 2)
        optimizer.step()
        optimizer.zero_grad()


def cleared_or_zeroed(model: Any, optimizer: Any) -> None:
    for number in range(4):
        backward(model, number)
        backward(model, number + 1)
        optimizer.step()
        model.zero_grad() if number == 2 else optimizer.zero_grad(set_to_none=number > 0)


def loaded(model: Any, optimizer: Any) -> None:
    for number in range(4):
        step(model, optimizer, number)
        if number == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(model, optimizer, 5)


def loaded_later(model: Any, optimizer: Any) -> None:
    backward(model)
    loaded(model, adamw(model.parameters()))


@cache
def earlier() -> dict[str, Any]:
    """Returns the state of an optimizer that has stepped; ranks that are threads do not build models at once."""
    plain = CHAIN.model()
    before = adamw(plain.parameters())
    step(plain, before)
    return before.state_dict()


def loaded_before(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(earlier()))
    step(model, optimizer)


def averaged(model: Any, optimizer: Any) -> None:
    average: Any = None
    for number in range(3):
        step(model, optimizer, number)
        average = average or copy.deepcopy(model)
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.5)
    model.load_state_dict(average.state_dict())


def frozen_and_thawed(model: Any, optimizer: Any) -> None:
    names = [name for name, _ in model.named_parameters()]
    for number, frozen in enumerate(([], names[:3], names[2:5], [])):
        for name, each in model.named_parameters():
            each.requires_grad_(name not in frozen)
        step(model, optimizer, number)


ENDS: dict[str, Story] = {
    "closures": lambda model, optimizer: steps(model, optimizer, with_closure=True, case=CHAIN),
    **{each.__name__: each for each in (cleared_or_zeroed, loaded_later, loaded_before, averaged, frozen_and_thawed)},
    "kept back": kept_back,
}


@pytest.mark.parametrize("name", ENDS)
def test_shared_state_ends_in_the_same_weights(name: str) -> None:
    earlier()

    def run(model: Any, optimizer: Any, rank: int) -> Record:
        ENDS[name](model, optimizer)
        return with_state(Record(), model)

    found, expected = both(run, GRIDS["unequal" if name == "kept back" else "2x2"], CHAIN, adamw)
    for one, other in zip(found, expected, strict=True):
        bit_equal(one, other)


@pytest.mark.parametrize(("setup", "scale"), [("2 replicas", 2.0**40), ("unequal", 2.0**12)])
def test_a_scaler_scales_skips_and_grows_alike(setup: str, scale: float) -> None:
    way, batches = Way(autocast=torch.float16, scale=scale, max_norm=0.5), [CHAIN.batch(6, step) for step in range(4)]
    same_bits(*(train_in(way, CHAIN, batches, adamw, each) for each in with_and_without(GRIDS[setup])))


def test_the_state_is_whole_for_the_script_and_shared_in_memory() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> tuple[dict[str, Any], int]:
        for number in range(2):
            step(model, optimizer, number)
        own = sum(each.nbytes for state in optimizer.state.values() for each in state.values() if each.dim())
        return copy.deepcopy(optimizer.state_dict()), own

    found, expected = both(run, GRIDS["4 replicas"], CHAIN, adamw)
    assert sum(own for _, own in found) == expected[0][1] and max(own for _, own in found) < 0.5 * expected[0][1]
    for state, _ in found:
        assert state["param_groups"] == expected[0][0]["param_groups"]
        torch.testing.assert_close(state["state"], expected[0][0]["state"], rtol=0, atol=0, check_device=False)


def test_gradients_of_others_are_elsewhere(tmp_path: Path) -> None:
    """A sum over gradients must not be that of one rank; weights are on all, and may be saved by pickle."""

    def run(model: Any, optimizer: Any, rank: int) -> int:
        backward(model)
        for each in model.parameters():
            each.grad.mul_(1 / (1 + each.grad.norm()))
        words = rf"Rank {rank} does not hold the gradient of .* on ranks \[{1 - rank}\]"
        for total in (lambda each: each.grad.norm() ** 2, lambda each: each.grad.square().sum()):
            with pytest.raises(InputError, match=words):
                float(sum(map(total, model.parameters())))
        assert not any(each.is_meta for each in model.parameters())
        torch.save(dict(model.module.named_parameters()), tmp_path / str(rank))
        return sum(each.grad.is_meta for each in model.parameters())

    counts = on_ranks(SHARED, CHAIN, run, adamw)
    assert sum(counts) == len(list(CHAIN.model().parameters()))
    one, other = (torch.load(tmp_path / str(rank), weights_only=False) for rank in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    def run(model: Any, optimizer: Any, rank: int) -> None:
        step(model, optimizer)
        optimizer.param_groups[0]["betas"] = None
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        with pytest.raises(TypeError):
            optimizer.step()
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))

    on_ranks(TWO, CHAIN, run, adamw)


def tied(self: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ self.weight) @ self.weight.t()).square().mean()


def test_one_parameter_is_trained_with_shared_state(caplog: pytest.LogCaptureFixture) -> None:
    """Once, it was refused: there was no second one to try the optimizer with."""
    caplog.set_level(logging.INFO, "autovaruna.session.preparation")

    def story(model: Any, optimizer: Any) -> dict[str, Tensor]:
        for _ in range(3):
            descend(model(torch.linspace(-1.0, 1.0, 6 * WIDTH).view(6, WIDTH)), optimizer)
        return dict(model.state_dict())

    as_plain(SHARED, Written(tied, weight=nn.Parameter(torch.eye(WIDTH) / 2)), story, adamw)
    assert caplog.text.count("shard_optimizer has nothing to share out") == 1
