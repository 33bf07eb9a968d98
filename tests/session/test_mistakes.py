"""Mistakes and unusual calls get a sentence that says what to do; `test_advice` follows what is said of a batch."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, InputError, OrderError, TraceError
from autovaruna.errors import PlanError
from autovaruna.graph.call import describe
from autovaruna.ranks.world import World
from tests.catalogue.small import CLASSES, WIDTH, Written, function_of, labelled, two_layers
from tests.rank_threads import run_ranks
from tests.reference import Record, compare, gradients_of
from tests.session.training import QUIET, Setup, on_ranks, pipeline, refuse

BATCH = labelled(6, 0)[1]
X = {"x": BATCH["x"]}
ONE = QUIET | {"num_micro_batches": 2, "plan": Setup(num_micro_batches=2).plan}
TWO = QUIET | {"num_micro_batches": 2, "num_stages": 2, "inputs": "replicated"}


def optional(self: Any, x: Tensor, y: Tensor, options: Any = None) -> Tensor:
    """Has an option object, without any text but where it lies in memory, that scales the result."""
    scale = 1.0 if options is None else options.scale
    return F.cross_entropy(scale * self.last(torch.tanh(self.first(x))), y)


class Options:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_option_objects_are_told_apart_by_what_they_hold() -> None:
    """Equal ones, made anew for each call and on each rank, need no other trace; others do."""

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        losses = [wrapped(**BATCH, options=Options(scale)).item() for scale in (2.0, 2.0, 3.0)]
        assert wrapped.num_traces == 2
        assert losses[0] == losses[1] != losses[2]

    on_ranks(pipeline(2, num_micro_batches=2), two_layers(optional), run)


def test_a_model_that_is_split_is_neither_wrapped_nor_cast_again() -> None:
    """Once, a second wrapper failed at its first call: 'Cannot copy out of meta tensor; no data!'."""

    def run(wrapped: AutoVaruna, optimizer: Any, rank: int) -> None:
        model: Any = wrapped.module
        wrapped(**BATCH).backward()
        assert any(parameter.is_meta for parameter in model.parameters())
        for part in (model, nn.Sequential(model.first, model.last)):
            with pytest.raises(InputError, match=r"split over the ranks by an earlier.*state_dict\(\)"):
                AutoVaruna(part, **TWO)
        model.half()  # once, the stage failed in its first operation, or took a dtype that no other rank knew of
        with pytest.raises(InputError, match=r"is torch.float16 on cpu, expected torch.float32.*torch\.autocast"):
            wrapped(**BATCH)

    on_ranks(pipeline(2, num_micro_batches=2, shares=(0.0,)), two_layers(optional), run)


def step_of(model: Any, arguments: tuple[Any, ...]) -> Record:
    model.zero_grad()
    loss = model(*arguments)
    loss.backward()
    return Record(losses=[loss.detach()], gradients=[gradients_of(getattr(model, "module", model))])


def masking(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Scales its samples in place, and renames a label; the caller's tensors stay as they were."""
    x[:, 0] = 0.5
    x.mul_(2)
    y[y == 1] = 0
    return F.cross_entropy(self.last(torch.tanh(self.first(x)) + x), y)


def bags(self: Any, offsets: Tensor, words: Tensor, y: Tensor) -> Tensor:
    """Averages embeddings in bags that begin at offsets."""
    return F.cross_entropy(self.last(self.bag(words, offsets)), y)


def seldom(self: Any, words: Tensor) -> Tensor:
    """Divides the gradients of embeddings by how often their words are in the batch."""
    return self.table(words).square().mean()


POLICY = two_layers(lambda self, x: torch.distributions.Categorical(logits=self.last(x)))
BAGS = two_layers(bags, bag=nn.EmbeddingBag(9, WIDTH))
OFFSETS = {"offsets": torch.tensor([0, 2, 3, 7]), "words": torch.arange(9), "y": torch.zeros(4).long()}
SELDOM = Written(seldom, table=nn.Embedding(9, WIDTH, scale_grad_by_freq=True))
WORDS_OF_FEW = {"words": torch.arange(8).view(4, 2) % 3}


def statistics(self: Any, x: Tensor) -> Tensor:
    hidden = self.norm(self.first(x))
    with torch.no_grad():
        self.mean.lerp_(hidden.mean(0), 0.1)
    return hidden.square().mean()


def mask(self: Any, hidden: Tensor) -> Tensor:
    """Fixes the batch size, so that it is kept whole, and has a buffer that it reads alone."""
    return self.mask * hidden.reshape(int(hidden.shape[0]), WIDTH)


def test_an_error_of_the_model_is_all_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The trace cannot be compared with a model that fails, which is no news beside the error."""
    net = Written(lambda self, x: self.words(x).square().mean(), words=nn.Embedding(4, WIDTH))
    with caplog.at_level(logging.INFO, "autovaruna"), pytest.raises(IndexError):
        AutoVaruna(net, **ONE)(torch.tensor([[1, 2], [3, 4]]))
    assert "not compared" not in caplog.text


def test_statistics_of_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autovaruna"):
        norm = nn.Sequential(nn.BatchNorm1d(WIDTH), Written(mask, mask=torch.ones(WIDTH)))
        AutoVaruna(two_layers(statistics, norm=norm, mean=torch.zeros(WIDTH)), **ONE)(**X)
    assert "forward changes mean by the numbers of its samples" in caplog.text


def leaving(self: Any, x: Tensor) -> Tensor:
    """Keeps the mean square of its features in an attribute and a log, a count of samples, and cached positions."""
    hidden = torch.tanh(self.first(x))
    self.places = torch.arange(WIDTH)
    self.extra = [hidden.square().mean()]
    self.seen += x.size(0)
    self.log["size"] = (len(self.log), x.shape[0], self.extra[0].item())
    return self.last(hidden * self.places)


def leaving_one(self: Any, x: Tensor) -> Tensor:
    """Leaves a tensor in an attribute, and in a list."""
    hidden = torch.tanh(self.first(x))
    self.extra = hidden.square().mean()
    self.losses.append(self.extra)
    return self.last(hidden)


def leaver() -> Any:
    model = two_layers(leaving, extra=0.0, places=None, log={}, seen=0)
    nn.utils.parametrizations.weight_norm(model.last)
    return model


def test_attributes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoVaruna(leaver(), **ONE)
    with caplog.at_level(logging.WARNING, "autovaruna"):
        model(**X)
        model.eval()
        model(**X)
    (said,) = (each.getMessage() for each in caplog.records if "leaves tensors" in each.getMessage())
    assert "in extra, log, seen. They stay" in said


def test_what_forward_leaves_in_attributes_is_refused_where_it_is_used() -> None:
    """Once, a loss of it was made of what was there before the call, and trained on without it."""
    inner = two_layers(leaving_one, extra=0.0, losses=[])
    model = AutoVaruna(inner, **ONE)
    for _ in range(2):
        loss = F.cross_entropy(model(**X), BATCH["y"])
        uses: list[Callable[[Any], Any]] = [loss.__add__, partial(torch.add, loss), lambda extra: extra.item(), float]
        for use in uses:
            with pytest.raises(InputError, match=r"uses extra of the model.*return it, too"):
                use(inner.extra)
        with pytest.raises(InputError, match="uses losses of the model"):
            sum(inner.losses)
        inner.losses.clear()
    assert copy.deepcopy(inner).extra == 0.0


def test_a_loss_of_what_a_hook_has_kept_is_refused() -> None:
    inner, kept = leaver(), SimpleNamespace()
    inner.first.register_forward_hook(lambda module, given, made: setattr(kept, "made", made))
    loss = F.cross_entropy(AutoVaruna(inner, **ONE)(**X), BATCH["y"]) + kept.made.square().mean()
    with pytest.raises(OrderError, match="left beside what the model returns"):
        loss.backward()


class OwnError(Exception):
    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(text)
        self.code = code


def raising(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Refuses its inputs in a way of its own."""
    if x.shape[1] in self.refused:
        raise OwnError(7, text="too wide")
    return F.cross_entropy(self.last(self.first(x)), y)


@pytest.mark.parametrize("refusing", [(0, 1), (1,)])
def test_what_forward_raises_on_all_ranks_is_what_they_raise(refusing: tuple[int, ...]) -> None:
    """On one rank alone it is a refusal on all; the script's own except would leave the others behind."""

    def be_rank(world: World) -> None:
        model = two_layers(raising)
        model.refused = [WIDTH] if world.rank in refusing else []
        kind, words = (OwnError, "^too wide") if len(refusing) == 2 else (TraceError, "raises OwnError")
        with pytest.raises(kind, match=words) as found:
            AutoVaruna(model, **TWO)(**BATCH)
        assert getattr(found.value, "code", 7) == 7

    run_ranks(2, be_rank)


class Padded:
    """Is a batch of the script's own class, as that of a detector."""

    def __init__(self, tensors: Tensor, mask: Tensor | None) -> None:
        self.tensors, self.mask, self.scale = tensors, mask, 2.0

    def decompose(self) -> tuple[Tensor, Tensor | None]:
        return self.tensors, self.mask

    @property
    def scaled(self) -> Tensor:
        return self.scale * self.tensors


class Encoded(UserDict[str, Any]):
    """Is a mapping with attributes, and more beside that no model reads, as a tokenizer's."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        super().__init__(data)
        self.texts = [object()]

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["data"][name]


class Named(dict[str, Any]):
    __getattr__ = dict.__getitem__  # type: ignore[assignment]


def taking(self: Any, samples: Any, y: Tensor) -> Tensor:
    """Takes a batch in an object, by its methods."""
    if isinstance(samples, Padded):
        (x, mask), scaled = samples.decompose(), samples.scaled
        assert mask is not None
        x = x + scaled * mask
    else:
        x = samples.tensors * samples["mask"]
    return F.cross_entropy(self.last(torch.tanh(self.first(x))), y)


OBJECTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "object": lambda x, mask: Padded(x, mask),
    "mapping": lambda x, mask: Encoded({"tensors": x, "mask": mask}),
    "dict": lambda x, mask: Named(tensors=x, mask=mask),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_batch_may_be_in_an_object(kind: str) -> None:
    """Once, no argument was a batch. Names are those of attributes and keys."""
    arguments, model = (OBJECTS[kind](BATCH["x"], torch.ones(6, WIDTH)), BATCH["y"]), two_layers(taking)
    compare(step_of(AutoVaruna(model, **ONE), arguments), step_of(model, arguments))
    assert describe(model, arguments, {})[1].inputs[0].name == "samples_tensors"


class Hiding(OrderedDict[str, Any]):
    """Is more than its attributes and items."""


def blocks(self: Any, x: Tensor) -> Tensor:
    """Has a size that rounds to one for small batches, which is no constant."""
    return self.last(x) * int(torch.ceil(torch.tensor(x.shape[0] / 32)))


Refused = tuple[nn.Module, str, dict[str, Any] | None, type[AutoVarunaError]]
REFUSED: dict[str, Refused] = {
    "changed arguments": (two_layers(masking), r"changes its arguments x, y in place.*x\.clone\(\)", None, TraceError),
    "no tensors": (POLICY, "returns nothing but Categorical, which hides its tensors", X, TraceError),
    "offsets": (BAGS, "offsets says where bags begin .*pad", OFFSETS, TraceError),
    "frequencies": (SELDOM, "scale_grad_by_freq has gradients go by how often", WORDS_OF_FEW, TraceError),
    "rounded sizes": (two_layers(blocks), r"int\(\) of a tensor", X, TraceError),
    "an object that hides its tensors": (
        *(two_layers(taking), r"argument samples is a Hiding, which hides .*register_pytree_node"),
        *({"samples": Hiding(tensors=BATCH["x"]), "y": BATCH["y"]}, InputError),
    ),
    "a module in a dict": (
        *(two_layers(taking), r"argument samples_inner is a Linear, which hides"),
        *({"samples": {"inner": nn.Linear(2, 2)}, "y": BATCH["y"]}, InputError),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_mistake_is_named(what: str) -> None:
    refuse(*REFUSED[what])


class TwoSteps(torch.optim.SGD):
    """Wants a closure, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it requires a closure"
        return super().step(closure)


def test_an_optimizer_that_wants_a_closure_is_told_the_settings() -> None:
    model = two_layers(optional)
    with pytest.raises(PlanError, match=r"(?s)requires a closure.*optimizer_bytes_factor.*num_stages=1 and num"):
        AutoVaruna(model, TwoSteps(model.parameters(), lr=0.1), num_micro_batches=2, **QUIET)(**BATCH)


def test_a_function_transform_around_the_wrapper_is_refused() -> None:
    """Once, it ended in torch's words about storage."""
    wrapped = AutoVaruna(Written(lambda self, x: self.last(x), last=nn.Linear(WIDTH, CLASSES)), **ONE)
    with pytest.raises(InputError, match=r"function transform of torch.func .* Expected a plain call"):
        torch.func.jacrev(wrapped)(X["x"])


def scaled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weights = {name: 0.9 * each for name, each in self.last.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(self.last, weights, (torch.tanh(self.first(x)),)), y)


def test_a_function_of_weights_is_part_of_forward() -> None:
    """As the error says that is raised where the wrapper itself is called so."""
    model = two_layers(scaled)
    compare(
        step_of(AutoVaruna(copy.deepcopy(model), **ONE), (BATCH["x"], BATCH["y"])),
        step_of(model, tuple(BATCH.values())),
    )


CLIPPED = function_of(lambda gradient: gradient.clamp(-0.002, 0.002))


def test_gradients_that_are_clipped_on_the_way_are_not_scaled_afterwards() -> None:
    """Once, those of a loss that a script divides were those of the whole loss, clipped and then divided."""
    model = two_layers(lambda self, x, y: F.cross_entropy(self.last(CLIPPED.apply(torch.tanh(self.first(x)))), y))
    (model(**BATCH) / 4).backward()
    expected = gradients_of(model)
    model.zero_grad()
    with pytest.raises(InputError, match=r"backward of .*Own at .*: got 0.25 times the loss.*loss_mode='outputs'"):
        (AutoVaruna(model, **ONE)(**BATCH) / 4).backward()
    model.zero_grad()
    (AutoVaruna(model, loss_mode="outputs", **ONE)(**BATCH) / 4).backward()
    torch.testing.assert_close(gradients_of(model), expected)


class Switched(torch.autograd.Function):
    """Clips gradients where a flag is on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: Tensor) -> Tensor:
        ctx.save_for_backward(flag)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0] > 0, gradient.clamp(-0.002, 0.002), gradient), None


def clipping_by_hook(self: Any, x: Tensor) -> Tensor:
    if x.requires_grad and self.flag.item() > 0:
        x.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
    return x * 1.0


@pytest.mark.parametrize("is_kept", [False, True], ids=["function", "module"])
def test_nor_are_those_that_a_buffer_lets_be_clipped_later(is_kept: bool) -> None:
    """Once, what is kept whole was tried with the flag as it was, or with one number, by chance."""
    clip = Written(clipping_by_hook if is_kept else lambda self, x: Switched.apply(x, self.flag), flag=torch.zeros(()))
    model = two_layers(
        lambda self, x, y: F.cross_entropy(self.last(self.clip(torch.tanh(self.first(x)))), y), clip=clip
    )
    with pytest.raises(InputError, match=r"got 0.25 times the loss"):
        (AutoVaruna(model, **ONE)(**BATCH) / 4).backward()


FACTOR = SimpleNamespace(value=1.0)
SCALED = function_of(lambda gradient: FACTOR.value * gradient)


def test_what_a_backward_reads_may_not_change_after_the_call() -> None:
    """Once, the step had gone backward with the number of before."""
    model = two_layers(lambda self, x, y: F.cross_entropy(self.last(SCALED.apply(torch.tanh(self.first(x)))), y))
    wrapped = AutoVaruna(model, **ONE)
    wrapped(**BATCH).backward()
    loss = wrapped(**BATCH)
    FACTOR.value = 2.0
    with pytest.raises(InputError, match=r"reads .*value, which has changed since the call: got 2\.0.*with 1\.0"):
        loss.backward()


def test_an_input_that_lies_otherwise_is_refused_where_forward_asks_for_that() -> None:
    """Once, it took the branch of the first one."""
    model = two_layers(
        lambda self, x, y: F.cross_entropy(self.last(self.first(x)) * (1.0 if x.is_contiguous() else 2.0), y)
    )
    wrapped = AutoVaruna(model, **ONE)
    wrapped(**BATCH).backward()
    with pytest.raises(InputError, match=r"how a tensor lies in memory at .*is_contiguous.*Expected x\.contiguous\(\)"):
        wrapped(x=BATCH["x"].t().contiguous().t(), y=BATCH["y"])
