"""What ordinary scripts do around a split model gives the numbers of plain PyTorch, or is refused by name."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autovaruna import AutoVaruna, InputError, RankError
from autovaruna.log import error_text
from autovaruna.ranks.world import World
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.rank_threads import run_ranks
from tests.reference import Record, adamw
from tests.session.training import QUIET, Setup, as_plain, descend, held, on_ranks, pipeline

TWO = pipeline(2, num_micro_batches=1)
PER_RANK = pipeline(2, num_micro_batches=2, settings={"inputs": "per_rank"})


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def step(model: Any, optimizer: Any) -> None:
    descend(model(X).square().mean(), optimizer)


def test_strides_of_one_sample_do_not_count() -> None:
    """Once, the last batches of an evaluation ended all ranks: one sample cut out of three has strides of its own."""
    plain = layers()
    rows = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> list[Tensor]:
        with torch.no_grad():
            return [model(x) for x in (rows[rank::2], rows[rank : rank + 1], rows[1:].t()[:, rank : rank + 1].t())]

    first, second = on_ranks(PER_RANK, plain, run)
    with torch.no_grad():
        expected = plain(rows)
    for found, places in ((first, ([0, 2], [0], [1])), (second, ([1], [1], [2]))):
        for out, place in zip(found, places, strict=True):
            torch.testing.assert_close(out, expected[place])


Story = Callable[[Any, Any], Any]


def through_frozen(model: Any, optimizer: Any) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Once, an actor that goes backward through its critic, frozen for that, ended in an error of numpy."""
    step(model, optimizer)
    model.requires_grad_(False)
    actions = X.clone().requires_grad_()
    model(actions).square().mean().backward()
    model.requires_grad_(True)
    step(model, optimizer)
    return actions.grad, dict(model.state_dict())


def initialised_anew(model: Any, optimizer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Once, ranks drew for their own weights alone: other numbers, and shuffles that differed from then on."""
    step(model, optimizer)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        nn.init.normal_(weight, 0, 0.1, generator=generator)
        nn.init.trunc_normal_(weight, generator=generator)
        if weight.dim() > 1:
            nn.init.orthogonal_(weight, generator=generator)
            nn.init.kaiming_uniform_(weight, generator=generator)
        weight.data.uniform_(-1, 1, generator=generator)
    return torch.randperm(8, generator=generator), dict(model.state_dict())


def decayed(shadow: list[Tensor], model: Any) -> None:
    """Updates an average as diffusers does."""
    for mean, weight in zip(shadow, model.parameters(), strict=True):
        mean.sub_(0.1 * (mean - weight))


def as_new(shadow: list[Tensor], model: Any) -> None:
    shadow[:] = [mean * 0.9 + weight * 0.1 for mean, weight in zip(shadow, model.parameters(), strict=True)]


def averaged(update: Callable[[list[Tensor], Any], None], model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Once, the first update after the split was refused, though each needs the numbers of one weight alone."""
    shadow = [each.clone().detach() for each in getattr(model, "module", model).parameters()]
    for _ in range(3):
        step(model, optimizer)
        with torch.no_grad():
            update(shadow, model)
            for weight, mean in zip(model.parameters(), shadow, strict=True):
                weight.copy_(mean)
    assert sum(not each.is_meta for each in shadow) == len(held(model))
    return {name: each.detach() for name, each in model.state_dict().items()}


def normed(norm_type: float, model: Any, optimizer: Any) -> list[Tensor]:
    norms = []
    for _ in range(2):
        if isinstance(model, AutoVaruna):
            norms.append(model.parameter_norm(norm_type).cpu())
        else:
            norms.append(nn.utils.get_total_norm(list(model.parameters()), norm_type).detach())
        step(model, optimizer)
    return norms


def precise_copies(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Once, gradients of copies that are elsewhere were to be read, to compare those of an unknown optimizer."""
    model(X)  # from here on weights are where they stay, and copies of them as well
    precise = [each.detach().double().clone().requires_grad_() for each in model.parameters()]
    own = torch.optim.AdamW(precise, lr=0.1)
    for _ in range(2):
        model(X).square().mean().backward()
        for copied, weight in zip(precise, model.parameters(), strict=True):
            copied.grad, weight.grad = weight.grad.double(), None
        own.step()
        with torch.no_grad():
            for copied, weight in zip(precise, model.parameters(), strict=True):
                weight.copy_(copied)
    return dict(model.state_dict())


def optimised_samples(model: Any, optimizer: Any) -> Tensor:
    """Changes samples, as an attack does; once, no error said that all ranks are to have all of them."""
    samples = X.clone().requires_grad_()
    own = torch.optim.Adam([samples], lr=0.1)
    for _ in range(3):
        descend(model(samples).square().mean(), own)
    return samples.detach()


AROUND: dict[str, tuple[Story, dict[str, float]]] = {
    "samples that are optimised": (optimised_samples, {}),
    "steps of copies in a higher precision": (precise_copies, {}),
    "gradients of inputs through a frozen model": (through_frozen, {}),
    "weights that are drawn anew": (initialised_anew, {"rtol": 0, "atol": 0}),
    "an average in a list of clones": (partial(averaged, decayed), {}),
    "an average in new tensors": (partial(averaged, as_new), {}),
    "the norm of all weights": (partial(normed, 2.0), {"rtol": 1e-6, "atol": 0}),
    "the greatest of all weights": (partial(normed, float("inf")), {"rtol": 1e-6, "atol": 0}),
}


@pytest.mark.parametrize("what", AROUND)
def test_what_is_done_around_a_split_model_is_as_in_plain_pytorch(what: str) -> None:
    story, tolerances = AROUND[what]
    found = as_plain(TWO, layers(), story, **tolerances)
    assert "norm" not in what or found[0] == found[1]


def test_copies_that_are_made_too_early_are_told_in_our_words() -> None:
    """Once, torch's words were all that was said: what is on meta, and whose it is, a script does not know."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        early = [each.detach().double().clone().requires_grad_() for each in model.parameters()]
        model(X).square().mean().backward()
        with pytest.raises(RuntimeError) as found:
            for copied, weight in zip(early, model.parameters(), strict=True):
                copied.grad = weight.grad.double()  # type: ignore[union-attr]
        assert "(copies, moments) to be made after the first call" in error_text(found.value)

    on_ranks(TWO, layers(), run)


CASE = CASES["conv_net_batch_norm"].without_dropout()
SETUPS = {"two": TWO, "replicas": Setup(((0, 1),), num_micro_batches=1)}


def loss_of(model: Any, seed: int) -> Tensor:
    batch = CASE.batch(7, seed)
    return CASE.loss_of(model(*batch[0], **batch[1]), batch)


def step_on(model: Any, optimizer: Any, seed: int) -> None:
    descend(loss_of(model, seed), optimizer)


def evaluated(model: Any) -> tuple[Any, Tensor]:
    """Returns a model with its loss in eval mode."""
    model.eval()
    with torch.no_grad():
        return model, loss_of(model, 9)


def average_of_states(model: Any, optimizer: Any) -> Any:
    """Goes over two states in parallel, as timm does; and averages a copy of the inner module."""
    mean, inner = copy.deepcopy(model), copy.deepcopy(getattr(model, "module", model))
    for seed in range(2):
        step_on(model, optimizer, seed)
        with torch.no_grad():
            for each in (mean, inner):
                for kept, new in zip(each.state_dict().values(), model.state_dict().values(), strict=True):
                    kept.copy_(0.7 * kept + 0.3 * new.to(kept.device))
    torch.testing.assert_close(list(inner.state_dict().values()), list(mean.state_dict().values()))
    return evaluated(mean)


def edits(model: Any, optimizer: Any) -> Any:
    """Changes weights by hand: clamps, decays, copies, steps, and writes into a state."""
    for seed in range(2):
        before = [each.detach().clone() for each in model.parameters()]
        step_on(model, optimizer, seed)
        with torch.no_grad():
            for each, old in zip(model.parameters(), before, strict=True):
                each.clamp_(-0.1, 0.1).add_(each - old, alpha=0.5)
        for each in model.parameters():
            each.data = each.data * 0.99
    state = model.state_dict()
    state[next(iter(state))].mul_(2)
    del state
    loss_of(model, 3).backward()
    for each in model.parameters():
        each.data.sub_(each.grad, alpha=0.1)
    return evaluated(model)


def optimizer_in_backward(model: Any, optimizer: Any) -> Any:
    """Steps each parameter when its gradient is there, by hooks that return something, and keeps no gradient."""
    own = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step(parameter: Tensor) -> Tensor:
        own[parameter].step()
        own[parameter].zero_grad()
        return parameter

    for each in own:
        each.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        loss_of(model, seed).backward()
    return evaluated(model)


STORIES: tuple[Story, ...] = (average_of_states, edits, optimizer_in_backward)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_it_is_as_in_plain_pytorch(story: Story, setup: str) -> None:
    def end(model: Any, optimizer: Any) -> Record:
        told, loss = story(model, optimizer)
        return Record([loss.clone()], weights=dict(told.state_dict()))

    as_plain(SETUPS[setup], CASE, end, adamw, rtol=1e-4)


def test_all_ranks_list_all_parameters() -> None:
    def run(model: Any, optimizer: Any, rank: int = 0) -> list[Any]:
        step_on(model, optimizer, 0)
        first = next(iter(model.parameters()))
        return [[(name, each.shape) for name, each in model.named_parameters()], first.device, first.dtype]

    plain = CASE.model()
    assert on_ranks(SETUPS["two"], CASE, run, adamw) == [run(plain, adamw(plain.parameters()))] * 2


class DistributedDataParallel(nn.Module):
    """Has the name of torch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"


def split(act: Callable[[Any], Any]) -> Story:
    """Returns an act after a step."""
    return lambda model, optimizer: (step(model, optimizer), act(model))


def graded(act: Callable[[Any], Any]) -> Story:
    """Returns an act after a backward."""
    return lambda model, optimizer: (model(X).square().mean().backward(), act(model))


def pairs(model: Any) -> Any:
    """Returns zeros of a script, each with a weight."""
    return zip([torch.zeros(each.shape) for each in model.parameters()], model.parameters(), strict=True)


MOVED = r"split over the ranks.*weight, torch.float32 on cpu, one of"
PICKLED = r"pickle.*state_dict\(\).*save_checkpoint\(\).*deepcopy"


def joined(name: str) -> str:
    return rf"Rank \d does not hold .* got ({name})\(\).*copy\.deepcopy\(model\)"


REFUSED: dict[str, tuple[Story, str]] = {
    "half": (split(lambda model: model.half()), MOVED),
    "double": (split(lambda model: model.to(torch.float64)), MOVED),
    "pickle before": (lambda model, _: pickle.dumps(model), PICKLED),
    "pickle": (split(pickle.dumps), PICKLED),
    "copy": (split(copy.copy), PICKLED),
    "a sparse input": (
        lambda model, _: model(X.to_sparse()),
        r"input input is a sparse .* torch.sparse_coo.*to_dense\(\)",
    ),
    "another library's wrapper": (
        lambda *_: AutoVaruna(DistributedDataParallel(layers()), **QUIET, num_micro_batches=2)(X),
        r"wrapped by DistributedDataParallel.*leave that wrapper out",
    ),
    "drawing by numbers": (
        split(lambda model: [torch.poisson(each.detach().abs()) for each in model.parameters()]),
        r"got poisson\(\) of its numbers",
    ),
    # an alias could not be told that its numbers are elsewhere from now on
    "into others' memory": (split(lambda model: [a.data.add_(b) for a, b in pairs(model)]), joined("add_")),
    "into a view": (split(lambda model: [a[:].mul_(b.detach()) for a, b in pairs(model)]), joined("mul_")),
    # once, an average skipped what was elsewhere without a word, and penalties and norms were those of one rank
    "average": (graded(lambda model: [a.data.lerp_(b, 0.5) for a, b in pairs(model)]), joined("lerp_")),
    "penalty": (
        graded(lambda model: torch.zeros(()) + sum(each.pow(2).sum() for each in model.parameters())),
        joined("add"),
    ),
    "norms": (graded(lambda model: torch.stack([each.grad.norm() for each in model.parameters()])), joined("stack")),
    "norm": (graded(lambda model: [each.grad.norm().item() for each in model.parameters()]), joined("item")),
    "vector": (graded(lambda model: nn.utils.parameters_to_vector(model.parameters())), joined("cat")),
    "module": (graded(lambda model: model.module(X)), joined("linear")),
    "copies": (graded(lambda model: [copy.copy(each) for each in model.parameters()]), joined("__reduce_ex__")),
    "backward": (graded(lambda model: [each.sum().backward() for each in model.parameters()]), joined("backward")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_all_on_one_rank_or_another_s_wrapper_is_refused(what: str) -> None:
    act, words = REFUSED[what]

    def run(model: Any, optimizer: Any, rank: int) -> None:
        with pytest.raises(InputError, match=words):
            act(model, optimizer)

    on_ranks(TWO, layers(), run)


def test_names_of_samples_among_the_inputs_are_refused_with_what_to_write() -> None:
    def run(model: AutoVaruna, _: Any, rank: int) -> Tensor:
        batch = {"x": X, "names": [f"a{rank}"]}
        with pytest.raises(RankError, match=r"argument 0\['names'\]\[0\] is 'a0' on rank 0, .*leave it out.*is_tensor"):
            model(batch)
        return model({name: each for name, each in batch.items() if torch.is_tensor(each)}).detach()

    plain = Written(lambda self, batch: self.last(batch["x"]), last=layers())
    torch.testing.assert_close(on_ranks(PER_RANK, plain, run), [plain({"x": X}).detach()] * 2)


WRAPPERS: dict[str, Callable[[AutoVaruna], object]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": lambda model: nn.DataParallel(nn.Sequential(model, nn.ReLU())),
    "FSDPModule": lambda model: type("FSDPAutoVaruna", (FSDPModule, type(model)), {}),  # what fully_shard() does
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_another_library_s_wrapper_is_refused_around_ours(name: str) -> None:
    """Once, it ended in an error of torch's own, or in a wait for ranks that were elsewhere."""
    model = AutoVaruna(layers())
    with pytest.raises(InputError, match=f"AutoVaruna wraps is wrapped by {name} of torch.*leave that wrapper out"):
        WRAPPERS[name](model)
    assert nn.Sequential(model)[0] is model


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """Has the name of torch's, and the optimizer that it is made of."""

    def __init__(self, parameters: Any, optimizer_class: Any, **options: Any) -> None:
        self.optim = optimizer_class(parameters, **options)
        super().__init__(self.optim.param_groups, options)


ZeroRedundancyOptimizer.__module__ = "torch.distributed.optim.zero_redundancy_optimizer"


def test_torch_s_sharing_optimizer_is_refused_with_what_to_write() -> None:
    """Once, it ended in words about a process group that cannot be pickled."""

    def be_rank(world: World) -> None:
        net = layers()
        with pytest.raises(InputError, match=r"made of, Adam\(model\.parameters\(\), .*shard_optimizer=True"):
            AutoVaruna(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1))

    run_ranks(2, be_rank)


class Named(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return input_ids * scale

    def encode(self, input_ids: Tensor) -> Tensor:
        return input_ids


def test_signatures_are_the_model_s_own() -> None:
    """Once, a trainer that goes by the names in ``inspect.signature(model.forward)`` saw none of them."""
    plain, model = Named(), AutoVaruna(Named())
    for got, expected in ((model.forward, plain.forward), (model.encode, plain.encode), (model, plain)):
        assert signature(got) == signature(expected)
    model.module.forward = types.MethodType(lambda self, x: x, model.module)
    assert [*signature(model.forward).parameters] == ["x"]
    assert signature(copy.deepcopy(model).forward) == signature(model.forward)
    model.forward = plain.forward
    assert model(torch.ones(1), scale=2.0) == 2


def test_one_channel_lies_in_memory_in_any_order() -> None:
    nchw = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    nhwc = nchw.reshape(4, 8, 8, 1).permute(0, 3, 1, 2)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    as_plain(TWO, net, lambda model, optimizer: [model(x).detach() for x in (nchw, nhwc, nchw)])


def test_a_move_that_changes_nothing_is_none() -> None:
    """Once, ``model.to(device)`` in a loop ended all ranks at its second time."""

    def run(model: AutoVaruna, optimizer: Any, rank: int) -> None:
        for _ in range(2):
            assert model.to("cpu") is model.float() is model
            step(model, optimizer)

    on_ranks(TWO, layers(), run)
