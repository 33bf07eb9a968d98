"""Mistakes, and unusual calls, get a sentence that says what to do, or the numbers of plain PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, InputError, OrderError, TraceError
from autovaruna.runtime.transport.threads import run_ranks
from autovaruna.runtime.world import World
from tests.catalogue.small import CLASSES, WIDTH, labelled
from tests.session.training import QUIET

BATCH = labelled(6, 0)[1]
ONE = QUIET | {"num_micro_batches": 2}
TWO = QUIET | {"num_micro_batches": 2, "num_stages": 2, "inputs": "replicated"}


class Net(nn.Module):
    """Two layers; an option object scales the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor, options: Any = None) -> Tensor:
        scale = 1.0 if options is None else options.scale
        return F.cross_entropy(scale * self.last(torch.tanh(self.first(x))), y)


class Options:
    """Has no text of its own but where it lies in memory."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Function(nn.Module):
    """Holds nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def stepped(wrapped: AutoVaruna) -> AutoVaruna:
    """Makes a step."""
    wrapped(**BATCH).backward()
    return wrapped


def second_derivative() -> None:
    model = Net()
    loss = AutoVaruna(model, **ONE)(**BATCH)
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def empty_first() -> None:
    AutoVaruna(Net(), **ONE)(x=BATCH["x"][:0], y=BATCH["y"][:0])


def script() -> None:
    AutoVaruna(torch.jit.script(nn.Linear(WIDTH, WIDTH)), **ONE)(BATCH["x"])


MISTAKES: tuple[tuple[Callable[[], Any], type[AutoVarunaError], str], ...] = (
    (lambda: pickle.dumps(stepped(AutoVaruna(Net(), **ONE))), InputError, r"pickle.*save_checkpoint\(\)"),
    (second_derivative, OrderError, "create_graph=True"),
    (empty_first, InputError, "empty batch"),
    (script, TraceError, "TorchScript.*take the one that it was made of"),
    (lambda: AutoVaruna(Function(lambda x, y: x), **ONE)(**BATCH), TraceError, "computes nothing"),
)


@pytest.mark.parametrize(("act", "error", "words"), MISTAKES)
def test_mistakes_get_a_sentence(act: Callable[[], Any], error: type[AutoVarunaError], words: str) -> None:
    with pytest.raises(error, match=words):
        act()


def test_a_model_without_parameters_is_one_block() -> None:
    """There is nothing to train, and every operation could be repeated; a stage still has to hold something."""
    model = Function(lambda x, y: (x * y[:, None]).mean())
    assert torch.allclose(AutoVaruna(model, **ONE)(**BATCH), model(**BATCH))


def test_option_objects_are_told_apart_by_what_they_hold() -> None:
    """Equal ones, made anew for each call and on each rank, need no other trace; others do."""

    def be_rank(world: World) -> list[float]:
        torch.manual_seed(0)
        wrapped = AutoVaruna(Net(), **TWO)
        losses = [wrapped(**BATCH, options=Options(scale)).item() for scale in (2.0, 2.0, 3.0)]
        assert wrapped._session.traces is not None and wrapped._session.traces.num_traced == 2
        return losses

    losses = run_ranks(2, be_rank)[0]
    assert losses[0] == losses[1] != losses[2]


def test_a_model_that_is_split_already_is_refused() -> None:
    """Once, a second wrapper failed at its first call: 'Cannot copy out of meta tensor; no data!'."""

    def be_rank(world: World) -> bool:
        model = Net()
        stepped(AutoVaruna(model, **TWO))
        if is_part := any(parameter.is_meta for parameter in model.parameters()):
            for part in (model, nn.Sequential(model.first, model.last)):
                with pytest.raises(InputError, match=r"split over the ranks by an earlier.*state_dict\(\)"):
                    AutoVaruna(part, **TWO)
        return is_part

    assert any(run_ranks(2, be_rank))


def test_a_cast_of_the_inner_module_after_the_split_says_what_to_do() -> None:
    """Once, the stage of each rank failed in its first operation, or took a dtype that no other rank knew of."""

    def be_rank(world: World) -> None:
        wrapped = stepped(AutoVaruna(Net(), **TWO, cuts=["last"]))
        wrapped.module.half()
        with pytest.raises(
            InputError, match=r"weight is torch.float16 on cpu, expected torch.float32.*torch\.autocast"
        ):
            wrapped(**BATCH)

    run_ranks(2, be_rank)


def test_lbfgs_needs_all_parameters_on_each_rank() -> None:
    def be_rank(world: World) -> None:
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(InputError, match=r"LBFGS joins numbers of several parameters.*num_replicas=2"):
            AutoVaruna(model, optimizer, **TWO)(**BATCH)

    run_ranks(2, be_rank)


class Bags(nn.Module):
    """Averages embeddings in bags that begin at offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.last = nn.EmbeddingBag(9, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, offsets: Tensor, words: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.bag(words, offsets)), y)


class Words(nn.Module):
    """Divides the gradients of embeddings by how often their words are in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, scale_grad_by_freq=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words).square().mean()  # type: ignore[no-any-return]


class Steps(nn.Module):
    """Goes on from a state, in which the batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.cell(x, state)[0].mean()  # type: ignore[no-any-return]


class Images(nn.Module):
    """Takes a list of images."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.kernel(each[None]).mean() for each in images]).mean()


NO_BATCH: list[tuple[nn.Module, tuple[Any, ...], str]] = [
    (
        Bags(),
        (torch.tensor([0, 2, 3, 7]), torch.arange(9), torch.zeros(4).long()),
        "offsets says where bags begin .*pad",
    ),
    (
        Steps(),
        (torch.ones(4, 3, WIDTH), torch.ones(1, 4, WIDTH)),
        r"batch, which state \(1, 4, 12\) has in another one",
    ),
    (Words(), (torch.arange(8).view(4, 2) % 3,), "scale_grad_by_freq has gradients go by how often"),
    (
        Images(),
        ([torch.ones(3, 5, 6), torch.ones(3, 6, 5)],),
        "in a list .images_0, images_1. are .*micro_batches=1, dynamic_batch",
    ),
]


@pytest.mark.parametrize(("model", "arguments", "words"), NO_BATCH)
def test_inputs_without_a_batch_in_front_are_told_from_others(
    model: nn.Module, arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        AutoVaruna(model, **ONE)(*arguments)
