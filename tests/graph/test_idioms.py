"""Idioms that a trace takes for something else, checks of numbers, and operations with wishes of their own."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna import AutoVaruna, InputError
from autovaruna.graph.export.assertions import passing
from tests.catalogue.case import Case
from tests.catalogue.small import CLASSES, WIDTH, Classifier, Written, labelled, two_layers
from tests.products import some
from tests.reference import bit_equal, compare, micro_batches, plain_micro_batched, plain_steps
from tests.session.training import QUIET, measure, pipeline, refuse, train, train_as_plain

Function = Callable[[Any, Tensor, Tensor], Tensor]
SIZE, STEPS, CONTIGUOUS = 6, 2, torch.contiguous_format
FIRST, LAST = (lambda: nn.Linear(WIDTH, WIDTH)), (lambda: nn.Linear(WIDTH, CLASSES))


def steps(function: Function) -> nn.Module:
    """Returns a function between two layers."""
    return two_layers(
        lambda self, x, y: function(self, torch.tanh(self.first(x)), y),
        codes=torch.randn(7, WIDTH),
        compiled=torch.compile(FIRST(), backend="eager"),
        layers=nn.ModuleDict({name: FIRST() for name in ("block-1", "2-3", "class", "a b")}),
    )


def counted(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Uses a loss that cannot be traced, on as many numbers as the labels say."""
    scores = self.last(x)[None].expand(4, -1, -1).log_softmax(-1)
    return F.ctc_loss(scores, y.masked_select(y > 0), torch.full_like(y, 4), (y > 0).long())


def matrices(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Uses the root of a matrix that has one."""
    square = x[:, :9].view(-1, 3, 3)
    root = torch.linalg.cholesky(square @ square.mT + torch.eye(3, device=x.device))
    return F.cross_entropy(self.last(x) * root.sum((1, 2))[:, None], y)


def converted(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Converts modules to what they are already, as routers do that may be of another dtype than the model."""
    self.last = self.last.to(x.dtype)
    return F.cross_entropy(self.last(self.layers.to(x.device)["class"](x)), y)


def spectra(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Masks the spectrum of a signal, and goes back by a function that looks at the numbers of its window."""
    window = torch.hann_window(4)
    spectrum = torch.stft(x, 4, 2, window=window, return_complex=True)
    back = torch.istft(spectrum * spectrum.abs().sigmoid(), 4, 2, window=window, length=WIDTH)
    return F.cross_entropy(self.last(back), y)


def dispatched(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sends parts of samples through all experts, with sizes that fit in a way that torch's solver does not see."""
    rows, experts = x.flatten().view(-1, 4), self.first.weight.view(9, 4, 4)
    scores = torch.sigmoid(rows.sum(1, keepdim=True) * experts[:, 0, 0])
    routed = rows.repeat(9, 1) * scores.t().reshape(-1, 1)
    mixed = torch.bmm(routed.view(9, -1, 4), experts).view(-1, 4).reshape(9, -1, 4).sum(0)
    return F.cross_entropy(self.last(rows.clone().add_(mixed).view(x.shape)), y)


def behind(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Goes past autograd through ``data``, of values and of a buffer, which it changes and assigns."""
    with torch.no_grad():
        self.codes.data[0].mul_(0.9).add_(x.data.mean(0))
    self.codes.data = self.codes / 2
    nearest = self.codes[(x.data @ self.codes.t()).argmax(1)]
    return F.cross_entropy(self.last(x + (nearest - x).data), y)


@torch.compile(backend="eager")
def squashed(x: Tensor) -> Tensor:
    return torch.tanh(x) / 2


def named(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Calls layers whose names are no names of Python."""
    for layer in self.layers.values():
        x = layer(x)
    return F.cross_entropy(self.last(x), y)


def without_gradient(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Looks at a weight, of which it makes a view without a gradient, as a normalisation by its spectrum does."""
    with torch.no_grad():
        weight = self.first.weight.view(WIDTH, WIDTH)
        scale = weight.t().mv(weight.new_ones(WIDTH)).norm()
    return F.cross_entropy(self.last(x @ weight / scale), y)


def looked_at(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Looks at tensors without a gradient, through operations that return their argument itself; it keeps its own."""
    with torch.no_grad():
        scale = self.last.weight.cpu().norm() + x.to(x.device).flatten(1).norm(dim=1, keepdim=True)
    return F.cross_entropy(self.last(x / scale), y)


PASSING: dict[str, Function] = {
    # torch computes distances in one of two ways, by the batch size
    "distances": lambda m, x, y: F.cross_entropy(m.last(x) * torch.cdist(x, m.codes).min(1)[0][:, None], y),
    "looks at its numbers": lambda m, x, y: F.gaussian_nll_loss(m.last(x).sum(1), y.float(), x.exp().sum(1)),
    "counted": counted,
    "probabilities": lambda m, x, y: F.binary_cross_entropy(m.last(x).sigmoid(), F.one_hot(y, CLASSES).float()),
    "matrices": matrices,
    "order of memory": lambda m, x, y: F.cross_entropy(m.last(x.t().to(x.dtype, memory_format=CONTIGUOUS).t()), y),
    "dispatched": dispatched,
    "behind autograd": behind,
    "wrapped by torch.compile": lambda m, x, y: F.cross_entropy(m.last(m.compiled(squashed(x))), y),
    "names that Python has not": named,
    "without gradient": without_gradient,
    "looked at": looked_at,
    "converted": converted,
    # once, what was there before a draw filled it counted, in some steps
    "whole paths": lambda m, x, y: F.cross_entropy(m.last(x * x.new_empty(x.shape[0], 1).bernoulli_(1.0)), y),
    # once, one that fixes its batch size
    "taken along": lambda m, x, y: F.cross_entropy(m.last(torch.take_along_dim(x, x.argsort(dim=1), dim=1)), y),
    "spectra": spectra,
}


def mapped(self: Any, x: Tensor) -> Tensor:
    """Maps a function over samples, and takes its derivative."""
    slope = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.layer(row)).sum()))(x)
    return torch.func.vmap(self.layer)(x) + slope


def along(self: Any, x: Tensor) -> Tensor:
    """Takes the derivative of a layer along a direction; what it calls is kept whole with it."""
    return torch.func.jvp(lambda each: torch.tanh(self.layer(each)), (x,), (torch.ones_like(x),))[1]


def windows(self: Any, x: Tensor) -> Tensor:
    """Cuts samples into windows and puts them together again, by a number that it computes, as Swin transformers do."""
    s0 = torch.tanh(x.view(-1, WIDTH // 4) * self.layer.bias[: WIDTH // 4])  # a name that torch has for a size, too
    return x + s0.view(int(s0.shape[0] / (WIDTH / (WIDTH // 4))), -1)


def loop(self: Any, x: Tensor) -> Tensor:
    """Goes over its samples one by one."""
    return torch.stack([self.layer(x[k]) * x[k].square().sum() for k in range(x.shape[0])])


def of_lengths(self: Any, x: Tensor) -> Tensor:
    """Treats each sample by a length of its own."""
    lengths = (x > 0).sum(1).clamp(min=1).tolist()
    return x * torch.stack([x[k, :length].mean() for k, length in enumerate(lengths)])[:, None]


def layer_of(function: Callable[..., Tensor]) -> nn.Module:
    return Written(function, layer=FIRST())


KEPT: dict[str, Callable[[], nn.Module]] = {
    # What a transform traces would be a constant; the module that uses one is kept whole, and can recompute.
    "transforms": lambda: nn.Sequential(layer_of(mapped), nn.LayerNorm(WIDTH), layer_of(along)),
    "samples counted in Python": lambda: nn.Sequential(*map(layer_of, (windows, loop, windows, of_lengths))),
}


@pytest.mark.parametrize("kind", KEPT)
def test_modules_are_kept_whole(kind: str) -> None:
    case = Case(kind, lambda: Classifier(nn.Sequential(FIRST(), KEPT[kind](), LAST())), labelled)
    plain_steps(case, [case.batch(SIZE, 0)])  # torch compiles what it needs for jvp at the first one of a process
    trains(case, recompute=True)


def trains(case: Case, recompute: bool = False) -> None:
    """Asserts that one micro-batch has plain PyTorch's bits, and three its numbers; and that parts can be measured."""
    batches = [case.batch(SIZE, step) for step in range(STEPS)]
    plain = plain_micro_batched(case, [micro_batches(batch, 3) for batch in batches])
    bit_equal(train(case, pipeline(2, num_micro_batches=1, recompute=recompute), batches), plain_steps(case, batches))
    compare(train(case, pipeline(2), batches), plain)
    measure(case)


@pytest.mark.parametrize("name", some([*PASSING], 7))
def test_right_numbers(name: str) -> None:
    trains(Case(name, lambda: steps(PASSING[name]), labelled))


def test_places_of_a_mask_are_counted_over_the_batch() -> None:
    """Once, a mean over them was refused."""

    def picked(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.last(x), y, reduction="none")[torch.where(y > 0)[0]].mean()

    train_as_plain(Case("places of a mask", lambda: steps(picked), labelled), pipeline(2), SIZE, SIZE)


def held(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Reaches a weight by a list."""
    x = torch.tanh(self.first(x)) * self.held[0].mean(1) + torch.stack(self.held).sum((0, 1))
    return F.cross_entropy(self.last(x), y)


def test_a_weight_that_a_list_holds_is_the_models() -> None:
    """Once, it was a constant there, without a gradient."""

    def make() -> nn.Module:
        model: nn.Module = two_layers(held)
        model.held = [model.first.weight]
        return model

    trains(Case("a weight in a list", make, labelled))


@torch.jit.script
def scripted_gate(x, slope: float):
    return x * torch.sigmoid(slope * x)


for _ in range(3):  # torch specialises it for the sizes that it has met
    scripted_gate(torch.ones(2, 3, requires_grad=True), 1.5).sum().backward()


def scripted(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Calls a function of TorchScript."""
    return F.cross_entropy(self.last(scripted_gate(x, 1.5)), y)


def joined(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Joins two batches, whose sizes are equal though nothing compares them, and compares all samples of both."""
    both = torch.cat([x, F.one_hot(y, WIDTH).to(x.dtype)])
    scores = self.last(both) @ self.last(both).t()
    return F.cross_entropy(scores, torch.arange(2 * x.shape[0], device=x.device))


def contrastive(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Compares all samples, as CLIP does: the label of each is its place."""
    scores = self.last(x) @ self.last(self.layers["class"](x)).t()
    labels = torch.arange(len(scores), device=x.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def length(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Divides by a length that is the batch's, and views by it."""
    return F.cross_entropy(self.last(x).view(len(x), -1) + x.new_zeros(len(y), CLASSES), y, reduction="sum") / len(x)


@pytest.mark.parametrize(
    ("function", "num_micro_batches"),
    [(scripted, 1), (scripted, 3), (joined, 1), (contrastive, 1), (length, 1), (length, 3)],
)
def test_some_have_plain_pytorch_s_numbers(function: Function, num_micro_batches: int) -> None:
    """A function of TorchScript has kernels of its own, and bits; `joined` has the numbers with one micro-batch."""
    case = Case(function.__name__, lambda: steps(function), labelled)
    train_as_plain(case, pipeline(2, num_micro_batches=num_micro_batches), SIZE, SIZE, exact=function is joined)


FIXED: dict[str, Function] = {
    "integer": lambda m, x, y: F.cross_entropy(m.last(x), y, reduction="sum") / int(x.shape[0]),
    "viewed": lambda m, x, y: F.cross_entropy(m.last(x).view(int(x.shape[0]), -1), y),
    "loop": lambda m, x, y: sum(F.cross_entropy(m.last(x[k : k + 1]), y[k : k + 1]) for k in range(len(x))) / len(x),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_batch_size_is_traced_anew_where_there_is_one_micro_batch(name: str, caplog: Any) -> None:
    """One warning names the line, for any number of sizes."""
    case = Case(f"fixed {name}", lambda: steps(FIXED[name]), labelled)
    train_as_plain(case, pipeline(2, num_micro_batches=1), SIZE, SIZE + 2, SIZE, exact=True)
    told = {each.message for each in caplog.records if "anew for each other size" in each.message}
    assert len(told) == 1
    assert re.search(r"test_idioms\.py:\d+ \(.*(len|int)\(.*(Write|Expected) x\.shape\[0\]", told.pop())


def sparse(is_buffer: bool) -> nn.Module:
    """Has a weight with sparse gradients, or a sparse buffer."""
    table = nn.Embedding(CLASSES, CLASSES, sparse=not is_buffer)
    mixer = torch.eye(CLASSES).to_sparse() if is_buffer else torch.eye(CLASSES)
    return Written(lambda self, x, y: F.cross_entropy(self.table(y) @ self.mixer, y), table=table, mixer=mixer)


def inference(self: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        weight = torch.tanh(self.first(x))
    return F.cross_entropy(self.last(x * weight.clone()), y)


def seeded(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Draws the same numbers in each call; once, other ones than plain PyTorch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return F.cross_entropy(self.last(x * torch.rand(WIDTH)), y)


def shorten(self: Any, x: Tensor, y: Tensor) -> Tensor:
    self.codes.data = self.codes[:3]
    return F.cross_entropy(self.last(x), y)


def clamped(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if y.max() >= CLASSES:
        y = y.clamp(max=CLASSES - 1)
    return F.cross_entropy(self.last(x), y)


TRANSFORM = r"uses a function transform of torch\.func.*Move the line into a submodule"
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "loop": (steps(FIXED["loop"]), r"fixes its batch size at .*range\(len\(x\)\).*Write x\.shape\[0\]"),
    "integer": (steps(FIXED["integer"]), r"fixes its batch size.*int\(x\.shape\[0\]\).*Write x\.shape\[0\]"),
    "integer of data": (
        steps(lambda m, x, y: F.cross_entropy(m.last(x)[:, : int(y.max())], y)),
        r"int\(\) of a tensor at .*int\(y\.max\(\)\).*Expected x\.item\(\)",
    ),
    "by bytes": (
        steps(lambda m, x, y: F.cross_entropy(m.last(torch.where((x > 0).byte(), x, 2 * x)), y)),
        r"at .*byte\(\).*expected predicate to be bool",
    ),
    "backward": (
        steps(lambda m, x, y: torch.autograd.grad(m.last(x).sum(), x, create_graph=True)[0].square().mean()),
        r"goes backward itself \(torch\.autograd\.grad\) at .*create_graph.*into a submodule",
    ),
    "a generator": (
        steps(lambda m, x, y: F.cross_entropy(m.last(x + torch.rand(x.shape, generator=torch.Generator())), y)),
        r"draws from a torch\.Generator at .*generator=.*Expected draws without generator=",
    ),
    "a seed": (
        steps(seeded),
        r"seeds torch's generator at .*torch\.manual_seed\(0\).*in a buffer",
    ),  # once, other numbers
    "inference": (steps(inference), r"inference_mode\(\) at .*torch\.tanh.*Expected torch\.no_grad"),
    "data of another shape": (steps(shorten), r"got \(3, 12\) .*Keep the shape"),
    "another dtype": (
        steps(lambda m, x, y: F.cross_entropy(m.last.double()(x.double()), y)),
        r"converts weight of a Linear at .*double.*would be torch\.float64.*convert it before it is wrapped",
    ),
    "a length by numbers": (
        steps(lambda m, x, y: F.cross_entropy(m.last(x), y, torch.bincount(y, minlength=CLASSES).float())),
        r"at .*bincount.*a length there follows from the numbers.*Expected.*F\.one_hot\(y, C\)\.sum\(0\)",
    ),
    "a map": (steps(lambda m, x, y: torch.func.vmap(m.last)(x).square().mean()), TRANSFORM),
    "a derivative": (  # before torch 2.12, its jacrev calls autograd.grad in Python
        steps(lambda m, x, y: torch.func.vmap(torch.func.jacrev(m.last))(x).square().mean()),
        r"goes backward itself.*into a submodule" if torch.__version__ < "2.12" else TRANSFORM,
    ),
    "sparse gradients": (sparse(False), r"sparse=True at .*Expected sparse=False"),
    "a sparse buffer": (sparse(True), "mixer"),
    "a branch that is no check": (steps(clamped), r"y\.max\(\) >= CLASSES"),
    "the largest": (  # once, without a line
        steps(lambda m, x, y: F.cross_entropy(m.last(x), y, reduction="none").topk(3).values.mean()),
        r"fixes its batch size or mixes the samples of a batch at .*topk\(3\)",
    ),
    "every second": (
        steps(lambda m, x, y: F.cross_entropy(m.last(x)[::2], y[::2])),
        r"fixes its batch size or mixes the samples of a batch at .*\[::2\]",
    ),
    "a batch size in a set": (
        steps(lambda m, x, y: F.cross_entropy(m.last(x), y) * len({x.shape[0], y.shape[0]})),
        r"at .*test_idioms\.py.*len\(\{x\.shape.*is hashed there.*dynamic_batch=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_their_line(name: str) -> None:
    """The error says what to write instead."""
    refuse(*REFUSED[name])


def checked(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Checks its labels, and what it computes, in its own forward."""
    if y is not None and y.max() >= CLASSES:
        raise ValueError(f"Label {y.max()} is too large")
    out = torch.tanh(self.first(x))
    if not (out.abs() <= 1).all():
        reason = "tanh is broken"
        raise ValueError(reason)
    with torch.no_grad():
        assert out.isfinite().all().item(), "not finite"
    return F.cross_entropy(self.last(out), y)


CASE = Case("checked", lambda: two_layers(checked), labelled)


def test_checks_change_no_number() -> None:
    trains(CASE)


@pytest.mark.parametrize(("x", "y", "line"), [(0.0, CLASSES, "y.max.. >= CLASSES"), (float("nan"), 0, "<= 1")])
def test_what_a_check_refuses_is_refused(x: float, y: int, line: str) -> None:
    """It looks at the numbers of every micro-batch, and names the line."""
    given = CASE.batch(SIZE, 0)[1]
    given["x"][-1], given["y"][-1] = x, y
    with pytest.raises(ValueError, match=r"too large|broken"):
        CASE.model()(**given)
    model = AutoVaruna(CASE.model(), num_micro_batches=2, **QUIET)
    with pytest.raises(InputError, match=rf"raises at test_idioms\.py:\d+ \(.*{line}"):
        model(**given)


def scheduled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Goes by numbers of tensors that it holds, as a solver does by its times."""
    later = self.times[1:] > self.times[:-1]
    assert later.all() or (~later).all(), "times must go one way"
    for begin, end in zip(self.times[:-1], self.times[1:], strict=True):
        x = x + (end - begin) * torch.tanh(self.first(x)) if begin < 0.5 else x * float(end)
    left, right = x.split(self.widths.tolist(), 1)
    return F.cross_entropy(self.last(torch.cat([right, left], 1)), y)


def test_numbers_that_a_model_holds_may_decide() -> None:
    """Once it was refused, or kept whole in a submodule. Another tensor, and other numbers, are traced anew."""
    model = two_layers(scheduled)
    model.times, model.widths = torch.linspace(0, 1, 5), torch.tensor([4, WIDTH - 4])
    given, wrapped = labelled(SIZE, 0)[1], AutoVaruna(model, num_micro_batches=2, **QUIET)
    for times in (model.times, torch.linspace(0.4, 0.9, 5), torch.linspace(1, 0, 3)):
        model.times = times
        torch.testing.assert_close(wrapped(**given), model(**given))
    model.times.add_(0.5)
    torch.testing.assert_close(wrapped(**given), model(**given))


def scattered(self: Any, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Puts rows that belong to samples, but to no one sample each, where the samples want them."""
    wanted = (y == 1)[:, None]
    torch._assert_async(y.min() >= 0, "labels")
    torch._check_tensor_all_with(ValueError, wanted.sum() * WIDTH == rows.numel(), lambda: "rows do not match")
    return F.cross_entropy(self.last(self.first(x).masked_scatter(wanted, rows)), y)


def test_checks_of_torch_are_kept() -> None:
    """Rows that are no batch go to every micro-batch; the check of the model's own says that they are too many."""
    given = {**labelled(SIZE, 0)[1], "y": torch.tensor([1, 0] * (SIZE // 2)), "rows": torch.ones(SIZE // 2, WIDTH)}
    two_layers(scattered)(**given).backward()
    model = AutoVaruna(two_layers(scattered), num_micro_batches=2, **QUIET)
    line = r"raises at test_idioms\.py:\d+ \(torch\._"
    with pytest.raises(InputError, match=line + "check_tensor_all_with.*every micro-"):
        model(**given)
    with pytest.raises(InputError, match=line + "assert_async"):
        model(**{**given, "y": given["y"] - 2})


KINDS = {
    "if t: raise E": False,
    "if not t: raise E": True,
    "if a is None and (t > b.max() or\n   t < 0): raise E": False,
    "assert t": True,
    "assert not t.any()": False,
    "assert torch.all(t).item()": True,
    "assert t.any().item() == a": None,
    "if a: pass\nelif t: raise E": False,
    "if t: a = 1": None,
    "if t:\n  if a: return\n  raise E": None,
    "assert t and u": True,
    "if t and u: raise E": None,
    "if 0 < t < 1: raise E": None,
    "assert t or u": None,
    "if a or not t: raise E": None,
    "if bool(t) is False: raise E": None,
    "if any(t): raise E": None,
    "if t in a: raise E": None,
    "while t: raise E": None,
}


@pytest.mark.parametrize(("code", "wanted"), KINDS.items())
def test_only_what_raises_or_does_nothing_is_a_check(code: str, wanted: bool | None, tmp_path: Path) -> None:
    """What a tensor must be follows from the code; where that cannot be told, the line is no check."""
    path = tmp_path / "code.py"
    path.write_text("def f():\n" + textwrap.indent(code, " "))
    line = 3 if "elif" in code or "\n   " in code else 2
    assert passing(str(path), line) is wanted
