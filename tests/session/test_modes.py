"""Calls of every kind: outputs mode, scaled losses, hooks, frozen parameters; `test_drawn` has other layers in use."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autovaruna import AutoVaruna
from tests.catalogue import CASES, Case
from tests.catalogue.small import Written, function_of, labelled, two_layers
from tests.products import diagonal, some
from tests.reference import Record, bit_equal, compare, gradients_of, plain_steps, sgd
from tests.session.training import Setup, as_plain, merge, needs_own_autograd, on_ranks, pipeline, train_rank

Backward = Callable[[Any, int], None]
SETUPS = {
    "one": Setup(),
    "three": pipeline(3),
    "recompute": pipeline(2, recompute=True),
    "unequal": Setup(((0,), (1, 2))),
}


def hold(case: Case, backward: Backward, setup: Setup, num_batches: int = 1) -> None:
    """Asserts that a backward for each of some batches gives the gradients of plain PyTorch, added up."""

    def run(model: Any, optimizer: Any = None, rank: int = 0) -> Record:
        for step in range(num_batches):
            args, kwargs = case.batch(7, step)
            backward(model(*args, **kwargs), step)
        return Record(gradients=[gradients_of(model)])

    needs_own_autograd(case, setup)
    found = on_ranks(setup, case, run)
    compare(merge(found), run(case.model()))


@pytest.mark.parametrize("setup", SETUPS)
def test_backward_from_a_given_gradient(setup: str) -> None:
    given = torch.linspace(-1.0, 1.0, 7 * 5).view(7, 5)
    hold(CASES["returned_scores"], lambda output, step: output.backward(given.to(output.device)), SETUPS[setup])


@pytest.mark.parametrize(("name", "setup"), diagonal(["two_losses", "outputs_tuple"], SETUPS))
def test_each_backward_may_start_from_other_outputs(name: str, setup: str) -> None:
    def backward(output: Any, step: int) -> None:
        wanted = [(0,), (1,), (0, 1), (0,)][step]
        torch.stack([output[place].sum() for place in wanted]).sum().backward()

    hold(CASES[name], backward, SETUPS[setup], num_batches=4)


def test_ranks_may_use_different_outputs() -> None:
    case, sizes = CASES["outputs_tuple"], [4, 3]
    model, x = case.model(), case.batch(7, 0)[0][0]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Record:
        own = x.split(sizes)[rank].clone().requires_grad_()
        model(own)[rank].mean().backward()
        return Record(gradients=[gradients_of(model) | {f"x of rank {rank}": own.grad}])

    found = merge(on_ranks(pipeline(2, num_micro_batches=4, settings={"inputs": "per_rank"}), model, run))
    x.requires_grad_()
    first, second = (model(each)[rank].mean() for rank, each in enumerate(x.split(sizes)))
    ((4 * first + 3 * second) / 7).backward()
    own = {f"x of rank {rank}": each for rank, each in enumerate(x.grad.split(sizes))}
    compare(found, Record(gradients=[gradients_of(model) | own]))


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "none"])
def test_outputs_come_in_their_container(kind: str) -> None:
    case, batch = CASES[f"outputs_{kind}"], CASES[f"outputs_{kind}"].batch(7, 0)
    expected, structure = pytree.tree_flatten(case.model()(*batch[0]))

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        output = model(*batch[0])
        assert pytree.tree_structure(output) == structure and model.loss_mode == "outputs"
        for one, other in zip(pytree.tree_leaves(output), expected, strict=True):
            assert one is other is None or torch.testing.assert_close(one, other) is None

    on_ranks(pipeline(2), case, run)


def scored(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scores and their loss, as nanoGPT does."""
    scores = self.last(torch.tanh(self.first(x)))
    return scores, F.cross_entropy(scores, y)


def rebuilt(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an output and a term of a loss, as a variational autoencoder does."""
    hidden = self.first(x)
    return torch.tanh(hidden), hidden.square().mean()


def two_terms(self: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores, loss = scored(self, x, y)
    return scores, loss, self.last.weight.square().sum()


NO_GRADIENT = function_of(lambda gradient: None, torch.mean)
OWN_SAMPLES = "made outside of the model, by each rank"
TUPLES: dict[str, tuple[Any, str, Callable[[Any], Tensor], str | None, dict[str, str]]] = {
    "loss": (scored, "loss", lambda out: out[1], None, {}),
    "no gradient": (scored, "loss", lambda out: out[1] + NO_GRADIENT.apply(out[0]), None, {}),
    "both": (rebuilt, "outputs", lambda out: out[0].mean() + out[1], OWN_SAMPLES, {}),
    "term": (rebuilt, "outputs", lambda out: out[1], r"starts from output\[1\] .*pass loss_mode='loss'", {}),
    "asked": (rebuilt, "loss", lambda out: out[1], None, {"loss_mode": "loss"}),
    "two": (two_terms, "outputs", lambda out: out[1] + out[2], r"output\[1\], output\[2\] .*key 'loss'", {}),
}


@pytest.mark.parametrize("kind", TUPLES)
def test_the_loss_in_a_tuple(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, none was seen beside scores, and a remark said that the script made it outside of the model."""
    forward, mode, loss_of, remark, settings = TUPLES[kind]
    caplog.set_level(logging.INFO, "autovaruna.runtime.step")
    plain = two_layers(forward)
    batch = labelled(8, 0)[1]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> dict[str, Tensor]:
        loss_of(model(**{name: each[4 * rank :][:4] for name, each in batch.items()})).backward()
        assert model.loss_mode == mode
        return gradients_of(model)

    found = on_ranks(pipeline(2, num_micro_batches=2, settings={"inputs": "per_rank", **settings}), plain, run)
    loss_of(plain(**batch)).backward()
    compare(Record(gradients=[found[0] | found[1]]), Record(gradients=[gradients_of(plain)]))
    said = [each for each in caplog.messages if "backward starts from" in each or OWN_SAMPLES in each]
    assert len(said) == (remark is not None) and all(re.search(str(remark), each) for each in said)


@pytest.mark.parametrize(("is_loss", "setup"), diagonal([True, False], SETUPS))
def test_inputs_get_their_gradients(setup: str, is_loss: bool) -> None:
    case = CASES["shared_input" if is_loss else "returned_scores"]
    batch = case.batch(7, 0)

    def gradient(model: Any, optimizer: Any) -> Tensor:
        x = (batch[1]["x"] if is_loss else batch[0][0]).clone().requires_grad_()
        (model(x=x, y=batch[1]["y"]) if is_loss else model(x).square().mean()).mul(3.0).backward()
        return x.grad

    as_plain(SETUPS[setup], case, gradient, rtol=1e-5, atol=1e-7)


def test_hooks_of_parameters_fire_on_the_ranks_that_hold_them() -> None:
    case, batch = CASES["chain"], CASES["chain"].batch(7, 0)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        seen: list[str] = []
        model(**batch[1])
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: seen.append(name))
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: seen.append(f"{name}!"))
        model(**batch[1]).backward()
        own = [name for name, each in model.named_parameters() if not each.is_meta]
        assert sorted(seen) == sorted([*own, *(f"{name}!" for name in own)])

    on_ranks(pipeline(2), case, run)


def test_the_callers_generator_is_untouched() -> None:
    case, batch = CASES["dropout"], CASES["dropout"].batch(7, 0)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        for _ in range(2):
            before = torch.get_rng_state()
            model(**batch[1]).backward()
            assert torch.equal(before, torch.get_rng_state())

    on_ranks(Setup(((0,), (0,)), recompute=True), case, run)


FROZEN = diagonal([((0,), (1,), (2,)), ((0,), (0,), (1,))], ["1f1b", "varuna", "gpipe", "1f1b"])


@pytest.mark.parametrize(("ranks", "schedule"), some(FROZEN, 2), ids=str)
def test_what_was_planned_frozen_may_be_trained(ranks: Any, schedule: str) -> None:
    """Gradients then go back where none did when the order of instructions was chosen."""
    case, setup = CASES["skip"], Setup(ranks, 5, schedule=schedule)

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Record:
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_("head" in name)
        train_rank(case, model, optimizer, [case.batch(7, 0)])
        for parameter in model.module.parameters():
            parameter.requires_grad_(True)
        return train_rank(case, model, optimizer, [case.batch(7, 1), case.batch(7, 2)])

    bit_equal(*(merge(on_ranks(each, case, run)) for each in (setup, Setup(((0,),), 5))))


def test_modules_are_those_of_the_model() -> None:
    case = CASES["conv_net_batch_norm"]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> Record:
        first = train_rank(case, model, optimizer, [case.batch(7, 0)])
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        second = train_rank(case, model, optimizer, [case.batch(7, 1)])
        assert [*dict(model.named_modules())] == [*dict(case.model().named_modules())]
        torch.testing.assert_close(second.buffers, first.buffers, rtol=0, atol=0)
        return second

    got, one = (merge(on_ranks(setup, case, run)) for setup in (pipeline(3), Setup()))
    bit_equal(got, one)


@pytest.mark.parametrize("name", ["dropout", "lstm", "conv_net_batch_norm", "outputs_dict"])
def test_one_process_without_settings_is_the_plain_model(name: str) -> None:
    case, model = CASES[name], CASES[name].model()
    optimizer = sgd(model.parameters())
    wrapped, batches = AutoVaruna(model, optimizer, progress=False), [case.batch(7, step) for step in range(3)]
    torch.manual_seed(11)
    found = train_rank(case, wrapped, optimizer, batches, max_norm=0.1)
    torch.manual_seed(11)
    bit_equal(found, plain_steps(case, batches, max_norm=0.1))


def keeping(self: Any, x: Tensor) -> Any:
    self.last = {"y": self.layer(x), "n": object()}
    return self.last


def test_one_process_returns_the_models_own_objects() -> None:
    model = Written(keeping, layer=nn.Linear(3, 3))
    assert AutoVaruna(model)(torch.ones(2, 3)) is model.last
    assert AutoVaruna(nn.Sequential(model))[0] is model


def turned(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Returns views that lie in memory in another order than that of their dimensions."""
    out = self.last(self.first(x))
    return out, out.view(-1, 2, 3).transpose(1, 2), out.t()


@pytest.mark.parametrize("num_micro_batches", (1, 2))
def test_outputs_lie_in_memory_as_in_plain_pytorch(num_micro_batches: int) -> None:
    """Once, the last bit of a mean over them differed, which adds them up in the order of memory."""
    plain, x = Written(turned, first=nn.Linear(4, 6), last=nn.Linear(6, 6)), torch.randn(6, 4)
    expected = [each.stride() for each in plain(x)]

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        outputs = model(x)
        assert [each.stride() for each in outputs] == expected
        torch.testing.assert_close(outputs[2].t(), outputs[0])

    on_ranks(pipeline(2, num_micro_batches=num_micro_batches), plain, run)
