"""A user's model and optimizer as this rank has them, and where it computes; refuses what would break them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from itertools import chain
from threading import get_ident
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor, nn

from autovaruna._torch import convert_tensors, parameter_table
from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError, InputError, RankError
from autovaruna.graph.guards import Guards, is_constant
from autovaruna.interception.gradients import SCALERS
from autovaruna.interception.modules import DirectCalls, is_own_code
from autovaruna.interception.optimizer_proxy import OptimizerProxy, parameters_of, watch_steps
from autovaruna.ranks.environment import is_alone, local_rank_in
from autovaruna.ranks.exchange import differences
from autovaruna.ranks.world import on_all
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.optimizer import OWNERSHIP, CutOptimizer, step_over_own_part
from autovaruna.runtime.remote_parameter import RemoteTensor
from autovaruna.runtime.weights import OwnedState, Placement, StateCopies
from autovaruna.session.run import Run, ScriptActions
from autovaruna.session.shared_call import digest

logger = logging.getLogger(__name__)
_FIRST_GPU = torch.device("cuda", 0)
_wrapped: WeakSet[WrappedModel] = WeakSet()  # all of the process
_SHARING = "ZeroRedundancyOptimizer"
_OF_FUNCTIONAL_CALL = (
    "The model was called with a tensor in the place of its parameter {}: got torch.func.functional_call() of the "
    "wrapped model, or the like. Expected it inside of a forward, with what the tensors are made of: wrap a module "
    "whose forward calls functional_call(self.net, parameters, (x,))."
)
_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


class WrappedModel:
    """A model with its state and guards."""

    state: OwnedState  # parameters and buffers by name

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run) -> None:
        self.module = module
        self._optimizer, self._run = optimizer, run
        self.move_to_device()
        self.read_state()
        self.parameter_names = [self.state.first_name[name] for name, _ in module.named_parameters()]
        self._first_parameters = [(ref(each), name) for name, each in self.state.parameters().items()]
        self.borrowed = StateCopies()  # of parameters and buffers, which the script was given and may write in
        self.guards = Guards(module)  # what traces depend on besides tensors
        self.engine: Engine | None = None  # runs this rank's part; None: the model is whole yet
        _wrapped.add(self)
        if not is_alone() and run.settings.inputs != "replicated":
            run.installed.callback(watch_steps(partial(_record_strangers, run.actions, get_ident())))

    @property
    def placement(self) -> Placement:
        """Who holds which parameter; before the split every rank holds all."""
        return self.engine.placement if self.engine is not None else Placement({}, self._run.world.num_ranks)

    @property
    def is_split(self) -> bool:
        """Whether some ranks lack a parameter."""
        return self.placement.splits(self.parameter_names)

    def names_by_id(self) -> dict[int, str]:
        """Returns the first name of each parameter, by identity; of those that this rank has released as well."""
        first = {id(each): name for known, name in self._first_parameters if (each := known()) is not None}
        return first | {id(each): name for name, each in self.state.parameters().items()}

    def counted_parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters whose gradients this rank counts where all ranks together count each once."""
        placement, rank = self.placement, self._run.world.rank
        return [each for name, each in self.state.parameters().items() if placement.steppers_of(name)[0] == rank]

    def read_state(self) -> None:
        """Finds parameters and buffers as they are now; before the split only."""
        self.state = OwnedState(self.module)

    def move_to_device(self) -> None:
        """Moves model and optimizer, wherever a script has put them, to where this rank computes; before the split."""
        self.device = move_to_own_device(self.module, self._optimizer, self._run.settings)

    def check_parameters(self) -> None:
        """Finds other parameters before the split; refuses them later, and always what other libraries spread."""
        if self.engine is None:
            for path, module in self.module.named_modules():
                kinds = {type(each).__name__ for each in parameter_table(module).values()} & {"DTensor"}
                refuse_parallel_wrapper(type(module), path or "The model", kinds)
                if others := [name for name, each in parameter_table(module).items() if type(each) is Tensor]:
                    raise InputError(_OF_FUNCTIONAL_CALL.format(others[0]))
            self.move_to_device()
            if self.guards.replaced():
                self.read_state()
            return
        if replaced := self.guards.replaced():
            raise InputError(
                f"Parameters of the model have been replaced after the first call: got other ones for {replaced[:5]}. "
                "Expected the same ones, which are split over the ranks; copy numbers into them (copy_(), "
                "load_state_dict()), or wrap the changed model anew."
            )
        self.state.check_types()

    def refuse_changes(self, change: Callable[[Tensor], Tensor]) -> None:
        """Raises InputError if a move or a cast of a model that is split would change where or what a tensor is."""
        for name, tensor in chain(self.state.parameters().items(), self.state.buffers().items()):
            changed = change(tensor)  # which one of the GPUs a script names does not count
            is_another_gpu = changed.device.type == tensor.device.type and changed.device != tensor.device
            if changed is not tensor and not (is_another_gpu and changed.dtype is tensor.dtype):
                raise InputError(
                    f"The model has been split over the ranks: got to(), cuda() or a cast after the first call, which "
                    f"would make {name}, {tensor.dtype} on {tensor.device}, one of {changed.dtype} on "
                    f"{changed.device}. Move or cast it before the first call; for lower precision from then on, use "
                    "torch.autocast around the call."
                )


def _record_strangers(actions: ScriptActions, thread: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Records gradients by which an optimizer of parameters of no wrapped model steps: no rank has summed them."""
    is_script = get_ident() == thread and not is_own_code()  # ranks may be threads; the library tries optimizers, too
    if is_script and actions.records_gradients(optimizer):
        known = set().union(*(model.names_by_id() for model in list(_wrapped)))
        strangers = [each for each in parameters_of(optimizer) if id(each) not in known]
        if any(isinstance(each, RemoteTensor) for each in strangers):  # the script's copies of weights, each here once
            return
        gradients = [each.grad for each in strangers if each.grad is not None]
        actions.record_gradients(type(optimizer).__name__, gradients)


class WrappedOptimizer:
    """The optimizer, if there is one, of which this rank steps over its part."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, model: WrappedModel, run: Run) -> None:
        self.cut: CutOptimizer | None = None  # this rank has the state of its own parameters
        self.proxy: OptimizerProxy | None = None  # what is due before and after its steps
        self._model, self._run = model, run
        self._listed: list[int] = []  # parameters in the groups, when they were looked at
        if optimizer is not None:
            cut = CutOptimizer(optimizer, model.names_by_id())
            if not is_alone():
                _refuse_sharing(optimizer)
                cut.check()
            self._watch(cut)

    def _watch(self, cut: CutOptimizer) -> None:
        """Installs what is due around the optimizer's steps, until the run ends."""
        self.cut, self.proxy = cut, OptimizerProxy(cut.optimizer, OWNERSHIP)
        remove, installed, metrics = WeakMethod(self.proxy.remove), self._run.installed, self._run.metrics
        installed.callback(lambda: None if (method := remove()) is None else method())
        installed.callback(SCALERS.acquire())
        self._run.actions.watch(self.proxy, cut.optimizer, cut.names)
        self.proxy.on_clear.append(self._drop_kept)
        metrics.follow_optimizer(cut.optimizer)
        self.proxy.before += [metrics.begin_optimizer, self._model.borrowed.write_back]
        self.proxy.after.append(metrics.end_optimizer)
        if not is_alone():
            self._direct_calls = DirectCalls(self._model.module)
            installed.callback(self._direct_calls.stop)
            self.proxy.before += [self._refuse_own_gradients, self._refuse_new_strangers]

    def _drop_kept(self) -> None:
        """Drops gradients that were kept back, where a script drops those of the optimizer's parameters."""
        engine = self._model.engine
        if engine is not None and engine.rank.backwards.owes_gradients and (cut := self.follow_groups()) is not None:
            engine.rank.backwards.drop_kept(set(chain(*cut.names)))

    @property
    def raw(self) -> torch.optim.Optimizer | None:
        """The optimizer as the script made it."""
        return None if self.cut is None else self.cut.optimizer

    def follow_groups(self) -> CutOptimizer | None:
        """Returns the optimizer, with the groups of parameters that a script has made after wrapping."""
        if self.cut is not None:
            self.cut.follow(self._model.names_by_id(), self._model.state.parameters())
        return self.cut

    def step_over_part(self, placement: Placement, device: torch.device) -> None:
        """Has the optimizer step over this rank's part, if it will have but a part and may. Collective."""
        assert self.cut is not None and self.proxy is not None
        if placement.divides(chain(*self.cut.names)):
            is_shared, num_ranks = bool(placement.owners), self._run.world.num_ranks
            act = partial(step_over_own_part, self.proxy, self.cut.optimizer, num_ranks, device, is_shared=is_shared)
            on_all(self._run.world, act, f"trying the optimizer{self._run.of_model}")

    def adopt(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Adopts an optimizer that was made from ``parameters()`` of this rank after the split. Collective."""
        cut = self._joined(optimizer)
        self._watch(cut)
        if self._model.engine is not None:
            self._model.engine.rank.loss_scale.follow(optimizer)
        self.step_over_part(self._model.placement, device)

    def _joined(self, optimizer: torch.optim.Optimizer) -> CutOptimizer:
        """Returns an optimizer with the groups of all ranks. Collective."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"Got a {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer.")
        model, world = self._model, self._run.world
        names = {id(parameter): name for name, parameter in model.state.parameters().items() if not parameter.is_meta}
        for group in optimizer.param_groups:  # parameters() lists those of other ranks, too
            group["params"][:] = [each for each in group["params"] if not each.is_meta]
        error: Exception | None = None
        try:
            cut = CutOptimizer(optimizer, names)
            cut.check()
        except InputError:
            error = InputError("Got other parameters: expected an optimizer made after wrapping, from parameters().")
        world.agree(error, "registering the optimizer")
        of_ranks = world.gather_objects(cut.names, "registering the optimizer")
        if len({len(groups) for groups in of_ranks}) > 1:
            raise RankError(
                f"The ranks' optimizers have {[len(groups) for groups in of_ranks]} groups of parameters. Expected as "
                "many on every rank; a group may be empty."
            )
        order = {name: place for place, name in enumerate(model.parameter_names)}
        cut.adopt([sorted(set().union(*groups), key=order.__getitem__) for groups in zip(*of_ranks, strict=True)])
        return cut

    def compare_state(self) -> None:
        """Raises RankError unless the ranks start from one state of the optimizer. Collective."""
        optimizer, names, world = self.raw, self._model.names_by_id(), self._run.world
        if optimizer is None:
            return
        own = {
            f"{key} of {names.get(id(parameter), '')}": str(digest(value) if isinstance(value, Tensor) else value)
            for parameter, state in optimizer.state.items()
            for key, value in (state.items() if isinstance(state, dict) else ())
            if is_constant(value) or (isinstance(value, Tensor) and not value.is_meta)
        }
        if found := differences(world.gather_objects(own, f"comparing states of the optimizer{self._run.of_model}")):
            raise RankError(
                f"The ranks start from other states of {type(optimizer).__name__}: {found}. Expected the same one on "
                "every rank, for each steps over its part with its own: load it on all of them "
                "(optimizer.load_state_dict()), not on rank 0 alone."
            )

    def _refuse_new_strangers(self) -> None:
        """Refuses parameters of no wrapped model that the script has put into the optimizer since it was wrapped."""
        assert self.cut is not None
        listed = [*map(id, parameters_of(self.cut.optimizer))]
        if listed != self._listed and self._model.engine is not None:
            cut = self.follow_groups()
            assert cut is not None
            cut.check()
            self._listed = [*map(id, parameters_of(self.cut.optimizer))]

    def _refuse_own_gradients(self) -> None:
        """Refuses a step by gradients of this rank's samples alone: the script has gone backward beside the wrapper."""
        path = self._direct_calls.pop()
        if path and self._run.settings.inputs != "replicated" and self._run.world.num_ranks > 1:
            raise InputError(
                f"The script has called {path} beside the wrapper and gone backward through it: got gradients of this "
                "rank's samples alone, with which the copies of the weights would drift apart. Expected calls of the "
                "wrapped model, model(...), or of a method of it, model.method(...), whose gradients are summed; "
                "compute in there what the loss needs, and call modules for a log in torch.no_grad()."
            )


def parallel_kinds(wrapper: type) -> set[str]:
    """Returns the names of torch's classes that train over the ranks, of those that a class is made of."""
    return {kind.__name__ for kind in wrapper.__mro__ if kind.__module__.startswith("torch.")} & _PARALLEL


def refuse_parallel_wrapper(wrapper: type, what: str, others: Collection[str] = ()) -> None:
    """Refuses `what` a class of torch's that trains over the ranks wraps; `others` are names of more such classes."""
    for kind in (*parallel_kinds(wrapper), *others):
        raise InputError(
            f"{what} is wrapped by {kind} of torch: got two libraries that would both spread the model over the ranks. "
            "Expected the model itself; leave that wrapper out (fully_shard() and parallelize_module() as well), and "
            "torch.distributed with it."
        )


def _refuse_sharing(optimizer: torch.optim.Optimizer) -> None:
    """Refuses torch's optimizer that shares its state out over the ranks."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.")]
    if _SHARING in kinds:
        inner = type(getattr(optimizer, "optim", optimizer)).__name__
        raise InputError(
            f"The optimizer is a {_SHARING} of torch: got two libraries that would both share its state out over the "
            f"ranks. Expected the optimizer that it is made of, {inner}(model.parameters(), ...), and the setting "
            "shard_optimizer=True: replicas then share its state."
        )


def find_device(model: nn.Module, settings: Settings) -> torch.device:
    """Returns where this rank computes: where the setting says or the model is, or a GPU for one on ``meta``."""
    if settings.device != "auto":
        return _named(settings.device)
    tensors = [*model.parameters(), *model.buffers()]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_meta))
    is_on_meta = bool(tensors) and not devices
    if devices == [_FIRST_GPU] or (is_on_meta and torch.cuda.is_available()):
        return _own_gpu()
    return devices[0] if devices else torch.device("cpu")


def move_to_own_device(model: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> torch.device:
    """Moves a model's tensors, the same objects, and its optimizer's state to where this rank computes."""
    device = find_device(model, settings)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta} - {device}
    if not before or (settings.device == "auto" and before != {_FIRST_GPU}):
        return device

    def moves(value: object) -> bool:
        """Whether a part of an optimizer's state goes along; counts of steps on the CPU are to stay there."""
        return isinstance(value, Tensor) and value.device in before and (value.is_cuda or value.dim() > 0)

    logger.info("the model goes from %s to %s, where this rank computes", ", ".join(map(str, before)), device)
    convert_tensors(model, lambda each: each if each.is_meta else each.to(device))
    for state in optimizer.state.values() if optimizer is not None else ():
        state.update({name: each.to(device) for name, each in state.items() if moves(each)})
    return device


def on_own_gpu(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns inputs on the GPU of this rank; those that a script has put on another one are copied."""
    if device.type != "cuda":
        return tensors
    return [each.to(device) if each.is_cuda and each.device != device else each for each in tensors]


def _own_gpu() -> torch.device:
    """Returns the current GPU if the script has chosen one, else the one with this rank's number on its host."""
    current, number = torch.cuda.current_device(), local_rank_in(os.environ)
    if current == 0 and number is not None:
        return torch.device("cuda", number % torch.cuda.device_count())
    return torch.device("cuda", current)


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None:
            torch.cuda.init()
            return _own_gpu()
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device is {name!r}, which cannot be used here: {str(error).splitlines()[0]}. Expected auto, cpu, cuda, "
            "or cuda:0 and so on."
        ) from error
