"""What ordinary scripts do around a split model gives the numbers of plain PyTorch, or is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from tests.reference import sgd
from tests.session.training import held, on_ranks, pipeline

TWO = pipeline(2, num_micro_batches=1)
PER_RANK = pipeline(2, num_micro_batches=2, settings={"inputs": "per_rank"})


def layers() -> nn.Sequential:
    """Makes three layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def images() -> nn.Sequential:
    """Makes two kernels for grey images."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def step(model: Any, optimizer: Any) -> float:
    """Makes a step; returns its loss."""
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_strides_of_one_sample_do_not_count() -> None:
    """Once, the last batches of an evaluation ended all ranks: one sample cut out of three has strides of its own."""
    plain = layers()
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[Tensor]:
        with torch.no_grad():
            return [
                model(mine) for mine in (rows[rank::2], rows[rank : rank + 1], rows[1:].t()[:, rank : rank + 1].t())
            ]

    first, second = on_ranks(PER_RANK, plain, run)
    with torch.no_grad():
        expected = plain(rows)
    for found, places in ((first, ([0, 2], [0], [1])), (second, ([1], [1], [2]))):
        for out, place in zip(found, places, strict=True):
            torch.testing.assert_close(out, expected[place])


def test_one_channel_lies_in_memory_in_any_order() -> None:
    plain = images()
    nchw = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    nhwc = nchw.reshape(4, 8, 8, 1).permute(0, 3, 1, 2)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[Tensor]:
        return [model(x).detach() for x in (nchw, nhwc, nchw)]

    with torch.no_grad():
        expected = plain(nchw)
    for outputs in on_ranks(TWO, plain, run):
        for out in outputs:
            torch.testing.assert_close(out, expected)


def test_a_move_that_changes_nothing_is_none() -> None:
    """Once, ``model.to(device)`` in a loop ended all ranks at its second time."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        for _ in range(2):
            assert model.to("cpu") is model.float() is model
            step(model, optimizer)
        for change in (model.half, lambda: model.to(torch.float64)):
            with pytest.raises(InputError, match=r"split over the ranks.*weight, torch.float32 on cpu, one of"):
                change()

    on_ranks(TWO, layers(), run)


@pytest.mark.parametrize("is_split", [False, True])
def test_the_wrapper_is_not_pickled(is_split: bool) -> None:
    """Once, before the first call, it was a TypeError of pickle."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        if is_split:
            step(model, optimizer)
        for act in (pickle.dumps, copy.copy):
            with pytest.raises(InputError, match=r"pickle.*state_dict\(\).*save_checkpoint\(\).*deepcopy"):
                act(model)

    on_ranks(TWO, layers(), run)


def test_a_model_in_another_library_s_wrapper_is_refused() -> None:
    class DistributedDataParallel(nn.Module):
        """Has the name of torch's."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=r"wrapped by DistributedDataParallel.*leave that wrapper out"):
            model(X)

    on_ranks(TWO, DistributedDataParallel(layers()), run)


def test_sparse_inputs_are_named() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=r"input input is a sparse .* torch.sparse_coo.*to_dense\(\)"):
            model(X.to_sparse())

    on_ranks(TWO, layers(), run)


def initialise_anew(model: Any) -> None:
    """Draws all weights anew, by several of torch's ways."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        nn.init.normal_(weight, 0, 0.1, generator=generator)
        nn.init.trunc_normal_(weight, generator=generator)
        if weight.dim() > 1:
            nn.init.orthogonal_(weight, generator=generator)
            nn.init.kaiming_uniform_(weight, generator=generator)
        weight.data.uniform_(-1, 1, generator=generator)
    drawn.append(torch.randperm(8, generator=generator))


def add_noise(model: Any) -> None:
    """Adds noise to weights."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data.add_(torch.zeros_like(weight).normal_(generator=generator))
        weight.data.mul_(torch.empty_like(weight).bernoulli_(0.5, generator=generator))
    drawn.append(torch.randperm(8, generator=generator))


drawn: list[Tensor] = []


@pytest.mark.parametrize("edit", [initialise_anew, add_noise])
def test_edits_draw_what_plain_pytorch_draws(edit: Callable[[Any], None]) -> None:
    """Once, ranks drew for their own weights alone: other numbers, and shuffles that differed from then on."""
    plain = layers()
    drawn.clear()

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> dict[str, Tensor]:
        step(model, optimizer)
        edit(model)
        return model.state_dict()

    states = on_ranks(TWO, plain, run)
    step(plain, sgd(plain.parameters()))
    edit(plain)
    assert len(drawn) == 3 and all(torch.equal(each, drawn[0]) for each in drawn)
    for state in states:
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_what_draws_by_the_numbers_of_a_weight_is_refused() -> None:
    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        step(model, optimizer)
        with pytest.raises(InputError, match=r"got poisson\(\) of its numbers"):
            for weight in model.parameters():
                torch.poisson(weight.detach().abs())

    on_ranks(TWO, layers(), run)


def test_numbers_that_follow_from_no_weight_are_here() -> None:
    """Once, ``init_hidden`` of a language model's script gave a tensor that is elsewhere."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        step(model, optimizer)
        for weight in model.parameters():
            made = weight.new_zeros(2, 3), weight.new_full((2,), 7.0), torch.ones_like(weight), weight.new(2, 3).zero_()
            assert [each.sum().item() for each in made] == [0, 14, weight.numel(), 0]
            assert all(type(each) is Tensor and each.dtype is weight.dtype for each in made)

    on_ranks(TWO, layers(), run)


def decayed(shadow: list[Tensor], model: Any) -> None:
    """Updates an average as diffusers does."""
    for mean, weight in zip(shadow, model.parameters(), strict=True):
        mean.sub_(0.1 * (mean - weight))


def in_place(shadow: list[Tensor], model: Any) -> None:
    """Updates an average by two operations in place."""
    for mean, weight in zip(shadow, model.parameters(), strict=True):
        mean.mul_(0.9).add_(weight, alpha=0.1)


def as_new(shadow: list[Tensor], model: Any) -> None:
    """Makes a new tensor each time."""
    shadow[:] = [mean * 0.9 + weight * 0.1 for mean, weight in zip(shadow, model.parameters(), strict=True)]


def for_each(shadow: list[Tensor], model: Any) -> None:
    """Updates all at once."""
    weights = list(model.parameters())
    torch._foreach_sub_(shadow, torch._foreach_mul(torch._foreach_sub(shadow, weights), 0.1))


AVERAGES = decayed, in_place, as_new, for_each


@pytest.mark.parametrize("update", AVERAGES)
def test_an_average_in_a_list_of_clones(update: Callable[[list[Tensor], Any], None]) -> None:
    """Once, the first update after the split was refused, though each needs the numbers of one weight alone."""
    plain = layers()

    def run(model: Any, optimizer: Any, rank: int) -> dict[str, Tensor]:
        shadow = [each.clone().detach() for each in getattr(model, "module", model).parameters()]
        for _ in range(3):
            step(model, optimizer)
            with torch.no_grad():
                update(shadow, model)
                for weight, mean in zip(model.parameters(), shadow, strict=True):
                    weight.copy_(mean)
        held_here = held(model) if isinstance(model, AutoVaruna) else dict(model.named_parameters())
        assert sum(not each.is_meta for each in shadow) == len(held_here)
        return {name: each.detach() for name, each in model.state_dict().items()}

    expected = run(plain, sgd(plain.parameters()), 0)
    for state in on_ranks(TWO, layers(), run):
        torch.testing.assert_close(state, expected)


FOLLOWERS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "add_": lambda model, own: [a.data.add_(b) for a, b in zip(own, model.parameters(), strict=True)],
    "mul_": lambda model, own: [a[:].mul_(b) for a, b in zip(own, model.parameters(), strict=True)],
}


@pytest.mark.parametrize("what", FOLLOWERS)
def test_an_average_whose_memory_others_use_is_refused(what: str) -> None:
    """An alias could not be told that its numbers are elsewhere from now on."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        step(model, optimizer)
        own = [torch.zeros(each.shape) for each in model.parameters()]
        with pytest.raises(InputError, match=rf"got {what}\(\).*copy\.deepcopy\(model\)"), torch.no_grad():
            FOLLOWERS[what](model, own)

    on_ranks(TWO, layers(), run)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_of_all_weights(norm_type: float) -> None:
    plain = layers()

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[float]:
        before = model.parameter_norm(norm_type).item()
        step(model, optimizer)
        return [before, model.parameter_norm(norm_type).item()]

    found = on_ranks(TWO, plain, run)
    expected = []
    for _ in range(2):
        expected.append(nn.utils.get_total_norm(list(plain.parameters()), norm_type).item())
        step(plain, sgd(plain.parameters()))
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-6)


class WithLoss(nn.Module):
    """Returns its loss: the whole step is in the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("pattern", [(1, 0), (0, 1, 0), (0, 0)])
def test_sums_are_delayed_between_forward_and_backward(has_loss: bool, pattern: tuple[int, ...]) -> None:
    """RaNNC's own tests have it there, where it counted one call late."""
    plain = WithLoss() if has_loss else layers()
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(len(pattern))]

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return model(x) if has_loss else model(x).square().mean()  # type: ignore[no-any-return]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> dict[str, Tensor]:
        for x, is_delayed in zip(batches, pattern, strict=True):
            loss = loss_of(model, x[2 * rank : 2 * rank + 2])
            model.delay_grad_allreduce(bool(is_delayed))
            before = {name: each.grad.clone() for name, each in held(model).items() if each.grad is not None}
            loss.backward()
            assert (
                not is_delayed
                or before == {}
                or all(
                    torch.equal(each.grad, before[name]) for name, each in held(model).items() if each.grad is not None
                )
            )
        return {name: each.grad for name, each in held(model).items() if each.grad is not None}

    found = on_ranks(PER_RANK, plain, run)
    for x in batches:
        loss_of(plain, x).backward()
    for gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
