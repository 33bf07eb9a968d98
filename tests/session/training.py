"""Trains models of the catalogue with AutoVaruna on ranks that are threads, on plans that a test lays down."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from autovaruna import AutoVaruna, AutoVarunaError, TraceError
from autovaruna.graph.call import CallSpec
from autovaruna.graph.export.run import DEFAULTS, TraceOptions
from autovaruna.graph.records import Graph
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.profiler.optimizer_trial import Steps, steps_of
from autovaruna.ranks.world import World
from autovaruna.runtime import optimizer
from autovaruna.session import traces
from tests.catalogue import DEVICE, Batch, Case, batch_size
from tests.catalogue.small import labelled
from tests.rank_threads import run_ranks
from tests.reference import MakeOptimizer, Record, bit_equal, compare, copied, gradients_of, part, plain_steps, sgd

Ranks = tuple[tuple[int, ...], ...]
QUIET: dict[str, Any] = {"load_deployment": False, "save_deployment": False, "progress": False, "seed": 5}


@dataclass(frozen=True)
class Setup:
    """How a model is to be run."""

    stage_ranks: Ranks = ((0,),)
    num_micro_batches: int = 3
    shares: tuple[float, ...] = ()  # where stages start, as shares of the blocks; empty: evenly
    recompute: bool = False  # whether all stages but the last recompute
    schedule: str = "1f1b"
    num_ranks: int = 0  # 0: as many as `stage_ranks` names
    hosts: str = ""  # a letter for each rank's; empty: all are on one
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of them

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.num_ranks or 1 + max(rank for ranks in self.stage_ranks for rank in ranks)

    def plan(self, graph: Graph) -> Plan:
        """Returns the plan for a graph; raises TooFewBlocksError."""
        num_blocks, num_stages = len(graph.blocks), len(self.stage_ranks)
        if num_blocks < num_stages:
            raise TooFewBlocksError(num_blocks)
        shares = self.shares or tuple(stage / num_stages for stage in range(1, num_stages))
        starts = [0]
        for stage, share in enumerate(shares, 1):
            starts.append(min(max(round(share * num_blocks), starts[-1] + 1), num_blocks - num_stages + stage))
        ends = [*starts[1:], num_blocks]
        stages = [
            StagePlan(tuple(range(start, end)), ranks, self.recompute, self._depth(stage), 1.0, 2.0)
            for stage, (start, end, ranks) in enumerate(zip(starts, ends, self.stage_ranks, strict=True))
        ]
        return Plan(tuple(stages), self.world_size, self.num_micro_batches, 1.0, self.schedule)

    def _depth(self, stage: int) -> int:
        return self.num_micro_batches if self.schedule == "gpipe" else len(self.stage_ranks) - stage


def pipeline(num_stages: int, **changes: Any) -> Setup:
    """Returns the setup of a pipeline with one rank a stage."""
    return Setup(tuple((stage,) for stage in range(num_stages)), **changes)


@contextmanager
def work_shared(token: object = None) -> Iterator[None]:
    """Has equal optimizers of torch's tried out once, and equal models (`token`) traced once."""
    tried = patch.object(optimizer, "steps_of", try_once)
    with tried, trace_shared(token) if token is not None else nullcontext():
        yield


def trace_shared(token: object) -> AbstractContextManager[Any]:
    """Lets equal models (`token`) share their graphs."""
    return patch.object(traces, "trace", partial(trace_once, token))


class TooFewBlocksError(Exception):
    """A graph cannot be cut into as many stages as asked for."""


_known: dict[Any, TracedModel] = {}
_one_at_a_time = Lock()


def trace_once(
    token: object, model: nn.Module, call: CallSpec, device: torch.device, options: TraceOptions = DEFAULTS
) -> TracedModel:
    """Traces a call of one of several equal models; the graph holds no numbers, so it serves them all.

    A graph that calls modules of the model, kept whole, serves that model alone.
    """
    key = token, repr(model), call.key, replace(options, micro_batch_size=0) if options.is_dynamic else options
    with _one_at_a_time:
        if key in _known:
            return _known[key]
        traced = trace(model, call, device, options)
        if not traced.has_kept_modules:
            _known[key] = traced
        return traced


_tried: dict[Any, Steps] = {}


def try_once(optimizer: torch.optim.Optimizer, device: torch.device) -> Steps:
    """Tries one of several optimizers of torch's that are equal but for their numbers; others are tried each."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return steps_of(optimizer, device)
    groups = [
        [(name, str(value)) for name, value in group.items() if name != "params"]
        + [(tuple(each.shape), each.dtype, each.requires_grad) for each in group["params"]]
        for group in optimizer.param_groups
    ]
    key = (type(optimizer), device, str(groups), *vars(optimizer), *(len(each) for each in optimizer.state.values()))
    with _one_at_a_time:
        if key not in _tried:
            _tried[key] = steps_of(optimizer, device)
        return _tried[key]


def refuse(
    model: nn.Module | Case,
    words: str,
    arguments: Mapping[str, Any] | None = None,
    error: type[AutoVarunaError] = TraceError,
    **settings: Any,
) -> None:
    """Asserts that a first call, with two micro-batches, is refused with some words, a regular expression.

    Without arguments it is one with six labelled samples. The plan is laid down; a case is traced once, as in `train`.
    """
    token = token_of(model) if isinstance(model, Case) else None
    settings = {"num_micro_batches": 2, **settings, **QUIET}
    plan = Setup(num_micro_batches=settings["num_micro_batches"]).plan
    with work_shared(token), pytest.raises(error, match=words):
        wrapped = AutoVaruna(model.model() if isinstance(model, Case) else model, plan=plan, **settings)
        wrapped(**(arguments or labelled(6, 0)[1]))


def measure(case: Case, size: int = 6) -> None:
    """Makes a step on a plan that is searched, for which all parts of a model are measured."""
    args, kwargs = case.batch(size, 0)
    with trace_shared(token_of(case)):
        AutoVaruna(case.model(), num_micro_batches=2, **QUIET)(*args, **kwargs).backward()


def token_of(case: Case) -> tuple[str, bool]:
    """Returns what names the equal models of a case."""
    return case.name, case.has_dropout


def train_as_plain(case: Case, setup: Setup, *sizes: int, exact: bool = False) -> None:
    """Asserts that training on a batch of each size gives the numbers, or the bits, of plain PyTorch."""
    batches = [case.batch(size, step) for step, size in enumerate(sizes)]
    (bit_equal if exact else compare)(train(case, setup, batches), plain_steps(case, batches))


def same_gradients(setup: Setup, model: nn.Module, act: Callable[[Any], None], rtol: float = 1e-5) -> None:
    """Asserts that what a script does with a model gives the gradients of plain PyTorch on every rank."""

    def run(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
        act(wrapped)
        return gradients_of(wrapped)

    found = on_ranks(setup, model, run)
    act(model)
    expected = gradients_of(model)
    for gradients in found:
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients}, rtol=rtol, atol=rtol / 100)


def as_plain(
    setup: Setup,
    model: nn.Module | Case,
    story: Callable[[Any, Any], Any],
    make_optimizer: MakeOptimizer = sgd,
    **tolerances: float,
) -> list[Any]:
    """Asserts that what a story makes of a model and its optimizer is on every rank what plain PyTorch makes of it.

    Records agree within `rtol` of the scale of their tensors. Returns what each rank has made.
    """

    def run(wrapped: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Any:
        return story(wrapped, optimizer)

    if isinstance(model, Case):
        needs_own_autograd(model, setup)
    found = on_ranks(setup, model, run, make_optimizer)
    plain = model.model() if isinstance(model, Case) else model
    expected = story(plain, make_optimizer(plain.parameters()))
    agree: Callable[..., None] = compare if isinstance(expected, Record) else torch.testing.assert_close
    for each in found:
        agree(each, expected, **tolerances)
    return found


def descend(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Goes backward from a loss, and makes a step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


Run = Callable[[AutoVaruna, torch.optim.Optimizer, int], Any]


def on_ranks(
    setup: Setup,
    model: nn.Module | Case,
    run: Run,
    make_optimizer: MakeOptimizer = sgd,
    token: object = None,
    timeout: float = 500.0,
    wrap: Callable[..., AutoVaruna] = AutoVaruna,
) -> list[Any]:
    """Runs ``run(model, optimizer, rank)`` on every rank, each with a copy of `model`, wrapped by `wrap`.

    Ranks trace a case once, and so do others that have a `token`.
    """
    if isinstance(model, Case):
        model, token = model.model(), token or token_of(model)
    copies = [copy.deepcopy(model) for _ in range(setup.world_size)]
    settings = {**QUIET, "num_micro_batches": setup.num_micro_batches, "inputs": "replicated", **setup.settings}
    settings["plan"] = setup.plan

    def be_rank(world: World) -> Any:
        optimizer = make_optimizer(copies[world.rank].parameters())
        return run(wrap(copies[world.rank], optimizer, **settings), optimizer, world.rank)

    with work_shared(token):
        return run_ranks(setup.world_size, be_rank, timeout, setup.hosts)


def needs_own_autograd(case: Case, setup: Setup) -> None:
    """Skips, on a GPU, what goes backward from outputs on ranks that are threads, which share autograd's thread."""
    if DEVICE.type == "cuda" and case.loss is not None and setup.world_size > 1:
        pytest.skip("on a GPU ranks that are threads share one thread of autograd, in which each waits for the others")


def train(
    case: Case,
    setup: Setup,
    batches: Sequence[Batch],
    make_optimizer: MakeOptimizer = sgd,
    sizes: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Record:
    """Trains for a call a global batch, and puts the records of the ranks together; `options` are for `train_rank`.

    `sizes` says how many samples each rank passes of each batch; without it all ranks pass all of them.
    """
    needs_own_autograd(case, setup)
    if sizes:
        setup = replace(setup, settings={**setup.settings, "inputs": "per_rank"})

    def run(model: AutoVaruna, optimizer: torch.optim.Optimizer, rank: int) -> Record:
        own = [share_of(batch, given, rank) for batch, given in zip(batches, sizes, strict=True)] if sizes else batches
        return train_rank(case, model, optimizer, own, **options)

    records = on_ranks(setup, case, run, make_optimizer)
    return merge(weighted_losses(case, records, sizes))


def weighted_losses(case: Case, records: Sequence[Record], sizes: Sequence[Sequence[int]]) -> Sequence[Record]:
    """Puts the loss of the global batch in the place of the losses that ranks made of outputs of their own."""
    if not sizes or case.loss is None or records[0].losses[0].item() == records[-1].losses[0].item():
        return records
    columns = zip(*(record.losses for record in records), strict=True)
    losses = [weighted_mean(column, given) for column, given in zip(columns, sizes, strict=True)]
    return [replace(record, losses=losses) for record in records]


def share_of(batch: Batch, sizes: Sequence[int], rank: int) -> Batch:
    """Returns the mini-batch of a rank, of a global batch that is cut into `sizes`."""
    assert sum(sizes) == batch_size(batch)
    start = sum(sizes[:rank])
    return part(batch, start, start + sizes[rank])


def weighted_mean(losses: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns the mean of the ranks' own losses over all samples."""
    return torch.stack([loss * size for loss, size in zip(losses, sizes, strict=True) if size]).sum() / sum(sizes)


def train_rank(
    case: Case,
    model: AutoVaruna,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    max_norm: float | None = None,
    num_accumulated: int = 1,
) -> Record:
    """Trains on one rank; the gradients in its record are those that the rank holds."""
    record = Record()
    for call, batch in enumerate(batches, 1):
        loss = case.loss_of(model(*batch[0], **batch[1]), batch)
        loss.backward()
        record.losses.append(copied(loss))
        if call % num_accumulated:
            continue
        if max_norm is not None:
            model.clip_grad_norm_(max_norm)
        record.gradients.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return with_state(record, model)


def held(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}


def with_state(record: Record, model: AutoVaruna) -> Record:
    """Adds the whole model's weights and buffers to a record. Collective."""
    state = model.state_dict()
    names = dict(model.module.named_parameters(remove_duplicate=False))
    record.weights = {name: copied(value) for name, value in state.items() if name in names}
    record.buffers = {name: copied(value) for name, value in state.items() if name not in names}
    return record


def merge(records: Sequence[Record]) -> Record:
    """Puts the records of all ranks together, which must agree bit for bit in what several of them have."""
    first = records[0]
    merged = Record(first.losses, [{} for _ in first.gradients], first.weights, first.buffers)
    for rank, record in enumerate(records):
        assert len(record.losses) == len(first.losses), "losses differ"
        assert all(map(_are_equal, record.losses, first.losses)), "losses differ"
        for name, value in {**first.weights, **first.buffers}.items():
            assert _are_equal({**record.weights, **record.buffers}[name], value), f"{name} differs on rank {rank}"
        for step, gradients in enumerate(record.gradients):
            for name, gradient in gradients.items():
                known = merged.gradients[step].setdefault(name, gradient)
                assert _are_equal(known, gradient), f"gradient of {name} differs on rank {rank} in step {step}"
    return merged


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits, those that are no numbers included."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
