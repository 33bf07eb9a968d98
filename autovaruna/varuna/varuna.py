"""Defines `Varuna`: Varuna's own interface over this library's planner, runtime and checkpoints."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autovaruna._torch import parameter_table, parse_to
from autovaruna.api import AutoVaruna
from autovaruna.config.settings import replicas_of, whole_number
from autovaruna.errors import CheckpointError, InputError, OrderError
from autovaruna.ranks.environment import get_world
from autovaruna.ranks.world import World
from autovaruna.session.manager_link import report_end
from autovaruna.session.session import as_in_training
from autovaruna.varuna.grid import Grid, StageMap, device_of, local_rank_of, read_map
from autovaruna.varuna.profiler import find_grid
from autovaruna.varuna.step import (
    GetBatch,
    JobSignals,
    StepScale,
    check_inputs,
    finish_gradients,
    loss_of,
    mean_loss,
    on_device,
    pop_gradients,
    sample_batch,
)

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


def tie(model: nn.Module, pairs: Sequence[tuple[str, str]] | None) -> None:
    """Ties the parameters of each pair, in place; the first name's numbers stay.

    Pairs may form chains. Tied parameters get one gradient, the sum over all their uses, whatever stages these are on.
    Raises InputError if a name is no parameter, or a pair differs in shape or dtype.
    """
    for pair in pairs or ():
        if isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"shared_weights holds {pair!r}; expected pairs of parameter names.")
        first, second = (_parameter(model, name) for name in pair)
        if first is not second:
            _check(pair, first, second)
            _replace(model, second, first)


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    known = dict(model.named_parameters(remove_duplicate=False))
    if name not in known:
        near = get_close_matches(name, known, 3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise InputError(f"shared_weights names {name!r}, which is no parameter of {type(model).__name__}{hint}")
    return known[name]


def _check(pair: Sequence[str], first: nn.Parameter, second: nn.Parameter) -> None:
    if first.shape != second.shape or first.dtype != second.dtype:
        raise InputError(
            f"shared_weights ties {pair[0]} {tuple(first.shape)} {first.dtype} and {pair[1]} {tuple(second.shape)} "
            f"{second.dtype}; expected two parameters of one shape and dtype."
        )
    if not first.is_meta and not second.is_meta and not torch.equal(first, second):
        logger.warning("%s and %s are tied, but differ: the numbers of %s stay", pair[0], pair[1], pair[0])


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in parameter_table(module).items():
            if parameter is old:
                parameter_table(module)[name] = new


class Varuna(nn.Module):
    """Trains a model with cut points on a grid of stages and replicas; one step is one call of `step`.

    Wrapping plans and splits the model. The optimizer is made afterwards, from ``parameters()`` of this rank's stages,
    and registered with `set_optimizer`. The ranks of a replica pass the same inputs, other replicas pass others.

    Args:
        model: The whole model, on the CPU or on ``meta``; its loss is what it returns, alone or under ``loss``.
        stage_to_rank_map: Ranks of each stage, as ``{0: [0, 2], 1: [1, 3]}`` or ``"0,2;1,3"``; None: found.
        get_batch_fn: Returns a batch of ``get_batch_fn(size, device=...)`` samples as keyword arguments of the model.
        batch_size: Samples of a step, over all replicas.
        chunk_size: Most samples of a micro-batch; None: found.
        fp16: Whether to compute in float16 under ``torch.autocast``, with a scaled loss.
        local_rank: This rank's number on its host; -1: from the launcher.
        device: Number of a GPU, or a device as torch names it; -1: the GPU of `local_rank`, without one the CPU.
        shared_weights: Pairs of names of parameters that are one.
        from_cache: Whether saved plans and measurements are used, where they are valid.
        auto_partitioned: Whether the model may be cut anywhere, whatever cut points it has.
        settings: More settings, as for `AutoVaruna`.

    Raises:
        InputError: an argument cannot be used; says which.
        PlanError: the model cannot be cut so.
    """

    model: AutoVaruna
    samples: slice
    """Which samples of a global batch this rank's replica passes to `step`."""

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: StageMap,
        get_batch_fn: GetBatch,
        batch_size: int,
        chunk_size: int | None,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str | torch.device | None = -1,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        from_cache: bool = True,
        auto_partitioned: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.world: World = get_world()
        self.rank = self.world.rank
        self.local_rank = local_rank_of(self.world) if local_rank < 0 else local_rank
        self.device = device_of(device, self.local_rank)
        self.fp16 = bool(fp16)
        self.global_batch_size = whole_number("batch_size", batch_size)
        known = set(self.world.gather_objects(self.global_batch_size, "agreeing on the batch size"))
        if len(known) > 1:
            raise InputError(
                f"batch_size is {sorted(known)} on the ranks; expected that of all replicas, on every rank."
            )
        chunk_size = whole_number("chunk_size", chunk_size) if chunk_size else None
        tie(model, shared_weights)
        model.to(self.device) if self.device.type != "cpu" else None
        self.iteration = self.current_step = 0
        self.average_loss = self.grad_norm = float("nan")
        self.optimizer: torch.optim.Optimizer | None = None
        self._scale = StepScale(self.device) if fp16 else None
        self._has_stepped = False
        self._signals = JobSignals(self.world, partial(report_end, self.world))
        settings = {
            "optimizer_bytes_factor": 2.0,  # the optimizer comes later; AdamW's is as large as any
            "cutpoints": "ignore" if auto_partitioned else "only",
            **({} if from_cache else {"load_deployment": False, "profile_cache": False}),
            **settings,
            "device": str(self.device),
            "inputs": "per_replica",
        }
        grid = read_map(stage_to_rank_map, self.world.num_ranks)
        if grid is None:
            with as_in_training(model), self._precision():
                sample = sample_batch(get_batch_fn, model, self.global_batch_size, self.device)
                grid, chunk_size = find_grid(model, sample, self.global_batch_size, chunk_size, settings, self.world)
        self._set_place(grid, chunk_size)
        self.__dict__["model"] = self._wrap(model, grid, get_batch_fn, settings)  # names stay the model's own

    def _set_place(self, grid: Grid, chunk_size: int | None) -> None:
        """Sets where this rank is in the grid; a replica may have several ranks of one stage, if others have fewer."""
        batch_size, num_replicas = self.global_batch_size, len(replicas_of(grid))
        if batch_size < num_replicas:
            raise InputError(
                f"batch_size is {batch_size} for {num_replicas} replicas; expected at least one sample for each."
            )
        self.stage_to_rank_map = {stage: list(ranks) for stage, ranks in enumerate(grid)}
        self.partitions, self.data_depth, self.data_parallel = len(grid), num_replicas, num_replicas > 1
        self.stage, index = next((stage, each.index(self.rank)) for stage, each in enumerate(grid) if self.rank in each)
        self.rank_within_stage = index % num_replicas
        sizes = [len(range(first, batch_size, num_replicas)) for first in range(num_replicas)]  # first ones: one more
        self.batch_size, start = sizes[self.rank_within_stage], sum(sizes[: self.rank_within_stage])
        self.samples = slice(start, start + self.batch_size)
        self._chunk_size, self._leaders = chunk_size, grid[0][:num_replicas]

    def _wrap(self, model: nn.Module, grid: Grid, get_batch_fn: GetBatch, settings: dict[str, Any]) -> AutoVaruna:
        """Plans and splits the model over the ranks of the grid."""
        if self._chunk_size:
            each = math.ceil(self.global_batch_size / (self.data_depth * self._chunk_size))
            settings["num_micro_batches"] = min(self.data_depth * each, self.global_batch_size)
        wrapped = AutoVaruna(model, scaler=self._scaler, **{**settings, "stage_ranks": [list(ranks) for ranks in grid]})
        with as_in_training(model), self._precision():
            sample = sample_batch(get_batch_fn, model, self.batch_size, self.device)
            wrapped.prepare(**sample)
        return wrapped

    def _precision(self) -> Any:
        return torch.autocast(self.device.type, dtype=torch.float16) if self.fp16 else nullcontext()

    # what it is

    @property
    def micro_batch_size(self) -> int:
        """Most samples of a micro-batch."""
        plan = self.model.plan
        assert plan is not None
        return self._chunk_size or math.ceil(self.global_batch_size / plan.num_micro_batches)

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return self._scale.scaler if self._scale else None

    # steps

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | str = "dynamic",
        init_loss_scale: float = 2**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Registers the optimizer, which was made from ``parameters()`` after wrapping. Collective.

        Args:
            loss_scale: With fp16: a number, or ``dynamic``.
            init_loss_scale: The first one of a dynamic scale.
            min_loss_scale: The least one.

        Raises:
            InputError: the optimizer has other parameters.
        """
        for group in optimizer.param_groups:
            group["params"][:] = [each for each in group["params"] if each is not self._placeholder]
        self.model.adopt(optimizer)
        if self._scale is not None:
            self._scale.configure(loss_scale, init_loss_scale, min_loss_scale)
        self.optimizer = optimizer
        self._keep_state()  # first: SIGUSR1 is for the script's handler, if it has one
        self._signals.install()
        optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_stepped", True))

    def _keep_state(self) -> None:
        """Has the state kept in memory of hosts from now on, if a manager looks after the job."""
        self.model.keep_on_hosts(self.iteration, scaler=self._scaler, extra=self._extra)

    def _extra(self) -> dict[str, int]:
        return {"iteration": self.iteration}

    def get_loss_scale(self) -> float | None:
        """Returns the scale of the loss; None without fp16."""
        return self._scale.value if self._scale else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises OrderError: a call is either a step or an evaluation."""
        raise OrderError("Varuna runs whole steps: got a call of the model. Call step(inputs) or evaluate(inputs).")

    def step(self, inputs: Mapping[str, Any], clip_grad_max_norm: float | None = None) -> tuple[float, bool]:
        """Runs forward and backward of one global batch and leaves its gradients in ``.grad``. Collective.

        Gradients that an optimizer's step has used are dropped first; others are added to. A handler of SIGUSR1 runs at
        the start of a step, the same one on every rank, so that it may write a checkpoint and exit.

        Args:
            inputs: Keyword arguments of the model: this replica's samples, the same on all its ranks.
            clip_grad_max_norm: Most that the norm of all gradients, over all ranks, may be.

        Returns:
            The mean loss over the global batch; and whether a gradient overflowed on any rank. Then all gradients are
            gone, on every rank, so that a step of the optimizer changes nothing.

        Raises:
            InputError: the inputs are no dictionary, or do not fit those of other ranks.
            OrderError: there is no optimizer yet.
        """
        if self.optimizer is None:
            raise OrderError(
                "step() needs an optimizer: make it from parameters(), then call set_optimizer(optimizer)."
            )
        self._signals.handle()
        batch = on_device(check_inputs(inputs, "step() got"), self.device)
        if self._has_stepped:
            self.zero_grad()
        earlier = pop_gradients(self.parameters()) if self._scale else []
        with torch.enable_grad(), self._precision():
            loss = loss_of(self.model(**batch))
        (loss * self._scale.value if self._scale else loss).backward()  # type: ignore[no-untyped-call]
        norm, has_overflow = finish_gradients(
            self.model, list(self.parameters()), self._scale, earlier, clip_grad_max_norm
        )
        self.grad_norm = self.grad_norm if norm is None else norm
        if has_overflow:
            self.zero_grad()
        self.iteration += 1
        self.current_step += 1
        self.average_loss = loss.item()
        return self.average_loss, has_overflow

    def evaluate(self, inputs: Mapping[str, Any], batch_size: int | None = None) -> float:
        """Returns the mean loss over the inputs of all replicas, in eval mode, on every rank. Collective.

        Args:
            inputs: Keyword arguments of the model: this replica's samples, the same on all its ranks.
            batch_size: Most samples that are on their way at once, over all replicas; None: as in training.
        """
        most = whole_number("batch_size", self.global_batch_size if batch_size is None else batch_size)
        batch = on_device(check_inputs(inputs, "evaluate() got"), self.device)
        with self._precision():
            return mean_loss(self.model, batch, most, self._leaders, self.world)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this rank."""
        self._has_stepped = False
        super().zero_grad(set_to_none)

    # state

    def checkpoint(
        self,
        global_store: str | os.PathLike[str],
        step: int | None = None,
        tempdir: str | None = None,
        shard: bool = False,
        on_demand: bool = False,
    ) -> None:
        """Writes a checkpoint: weights, buffers, optimizer, loss scale and random state. Collective.

        Args:
            global_store: Folder of all checkpoints, which every rank reaches.
            step: Number of the checkpoint; None: the steps done so far.
            tempdir: Folder of this host to write to first; the copy to `global_store` goes on in the background.
            shard: Whether replicas share the writing.
            on_demand: Whether it must be complete on return, as before the process ends.
        """
        self.model.save_checkpoint(
            global_store,
            step=self.iteration if step is None else step,
            tempdir=tempdir,
            background=tempdir is not None and not on_demand,
            shard=shard,
            scaler=self._scaler,
            extra=self._extra(),
        )

    def load_checkpoint(
        self, global_store: str | os.PathLike[str], iteration: int | str, check_complete: bool = True
    ) -> None:
        """Loads a checkpoint that was written by any number of ranks, on any grid. Collective.

        The optimizer's state is loaded into the one that `set_optimizer` has registered before.

        Args:
            iteration: Its number, or ``latest``.
            check_complete: Whether a checkpoint that is not complete is an error; it is never loaded in any case: with
                False the newest complete one is loaded in its place.
        """
        if self.optimizer is None:
            logger.warning("loading without the optimizer's state: call set_optimizer() before, to go on with it")
        info = self.model.load_from_hosts(None if iteration == "latest" else int(iteration), scaler=self._scaler)
        try:
            info = info or self.model.load_checkpoint(global_store, step=iteration, scaler=self._scaler)
        except CheckpointError as error:
            if check_complete:
                raise
            logger.warning("loading the newest complete checkpoint: %s", error)
            info = self.model.load_checkpoint(global_store, step="latest", scaler=self._scaler)
        extra = info.extra if isinstance(info.extra, Mapping) else {}
        self.iteration = int(extra.get("iteration", info.step or 0))
        self._keep_state()

    # the module that it shows

    def train(self, mode: bool = True) -> Self:
        """Sets training mode on the model."""
        self.training = mode
        if "model" in self.__dict__:
            self.model.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Stays where the model is, since wrapping has put it there; InputError for another device or a dtype."""
        device, dtype, *_ = parse_to(*args, **kwargs)
        if dtype is not None or (device is not None and torch.empty(0, device=device).device != self.device):
            raise InputError(
                f"The model is split and on {self.device}: got to({device or dtype}). Pass device= to Varuna."
            )
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the whole model's state under its own names, on every rank. Collective."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a whole model's state, of which this rank takes its part."""
        return self.model.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of this rank by the model's names; an empty one if there are none, for optimizers."""
        every = self.model.named_parameters(prefix, recurse, remove_duplicate)
        own = [(name, parameter) for name, parameter in every if not parameter.is_meta]
        yield from own or [("no_parameters", self._placeholder)]

    @cached_property
    def _placeholder(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers of the model, under its own names."""
        yield from self.model.named_buffers(prefix, recurse, remove_duplicate)
