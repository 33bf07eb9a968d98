"""Defines `Wrapped`: a user's model with its optimizer, whole on every rank until it is split."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn

from autovaruna.checkpoint.state import ModelInTraining
from autovaruna.config.settings import Settings, log_settings
from autovaruna.errors import InputError, RankError
from autovaruna.graph.guards import Guards
from autovaruna.interception.exits import ERRORS_IN_FEW_LINES
from autovaruna.interception.installed import Installed
from autovaruna.interception.modules import DirectCalls
from autovaruna.interception.optimizer import OptimizerProxy
from autovaruna.interception.scaler import SCALERS
from autovaruna.interception.signals import LISTENING
from autovaruna.log import configure, show_all_frames
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.environment import get_world, is_alone
from autovaruna.runtime.optimizer import OWN_PART, CutOptimizer
from autovaruna.runtime.progress import job_place
from autovaruna.runtime.weights import OwnedState, Placement, StateCopies
from autovaruna.runtime.world import World
from autovaruna.session.borders import Morphing, Stopping
from autovaruna.session.calls import Digest, ScriptActions
from autovaruna.session.machine import bring_to_own_device


class Wrapped:
    """A model and its optimizer, as this rank has them."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, settings: Settings) -> None:
        self.module = module
        self.settings = settings
        self.device = bring_to_own_device(module, optimizer, settings)
        self.state = OwnedState(module)
        self.parameter_names = [self.state.first_name[name] for name, _ in module.named_parameters()]
        self._first_parameters = [(ref(each), name) for name, each in self.state.parameters().items()]
        self.optimizer = None if optimizer is None else CutOptimizer(optimizer, self._names())
        self.proxy = None if optimizer is None else OptimizerProxy(optimizer, OWN_PART)
        self.installed = Installed()
        self.acts = ScriptActions()  # what the script has done with both
        self.state_copies = StateCopies()  # what the script was given to write into
        self.installed.add(ERRORS_IN_FEW_LINES.use())
        if self.optimizer is not None and self.proxy is not None:
            self.installed.add_method(self.proxy.remove)
            self.installed.add(SCALERS.use())
            self.acts.watch(self.proxy, self.optimizer.optimizer, self.optimizer.names)
            self.proxy.before.append(self.state_copies.write_back)
            if not is_alone():
                self.optimizer.check()
                self._direct_calls = DirectCalls(module)
                self.installed.add(self._direct_calls.stop)
                self.proxy.before.append(self._refuse_own_gradients)
        self.guards = Guards(module)
        self.engine: Engine | None = None  # None: the model is whole yet
        self.num_calls = 0
        self.is_synchronising = True  # whether gradients are summed over ranks now
        self.stopping = Stopping()
        self._is_listening = False
        if settings.save_on_signal:
            self.listen()
        self._number = 0

    @cached_property
    def world(self) -> World:
        """The ranks; the first use starts MPI."""
        world = get_world()
        configure(world.rank)
        show_all_frames(self.settings.full_tracebacks)
        world.watch.stalls.report_seconds = self.settings.stall_report_seconds
        world.watch.stalls.limit_seconds = self.settings.stall_limit_seconds
        if self.settings.show_settings:
            log_settings(self.settings)
        return world

    @cached_property
    def morphing(self) -> Morphing | None:
        """What this rank does for the manager of its job; None: there is none."""
        place = job_place()
        return None if place is None else Morphing(place, self.world)

    def listen(self) -> None:
        """Notes signals that ask the process to end, from now on."""
        if not self._is_listening:
            self._is_listening = True
            self.installed.add(LISTENING.use())

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far; without one, calls of the model."""
        return self.num_calls if self.optimizer is None else self.acts.num_steps

    @property
    def of_model(self) -> str:
        """Says, behind what ranks do together, which model they do it with: the first one needs no word."""
        if not self._number:
            self.world.num_models += 1
            self._number = self.world.num_models
        return "" if self._number == 1 else f" (model {self._number})"

    @property
    def placement(self) -> Placement:
        """Who holds which parameter; before the split every rank holds all."""
        return self.engine.placement if self.engine is not None else Placement({}, self.world.num_ranks)

    @property
    def raw_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer as the script made it."""
        return None if self.optimizer is None else self.optimizer.optimizer

    def subject(self) -> ModelInTraining:
        """Returns what checkpoints are of."""
        self.state_copies.write_back()
        self.follow_groups()
        engine = self.engine
        placement, seed = (None, None) if engine is None else (engine.placement, engine.seed)
        return ModelInTraining(self.world, self.state, placement, self.optimizer, seed, self.num_calls)

    def take_state(self) -> None:
        """Takes parameters and buffers as they are now; before the split only."""
        self.state = OwnedState(self.module)

    def settle(self) -> None:
        """Brings the model, wherever a script has put it, to where this rank computes; before the split only."""
        self.device = bring_to_own_device(self.module, self.raw_optimizer, self.settings)

    def check_parameters(self) -> None:
        """Takes the parameters as they are, before the split; refuses others later, and what other libraries wrap."""
        if self.engine is None:
            _refuse_parallel_wrappers(self.module)
            self.settle()
            if self.guards.replaced():
                self.take_state()
            return
        if replaced := self.guards.replaced():
            raise InputError(
                f"Parameters of the model have been replaced after the first call: got other ones for {replaced[:5]}. "
                "Expected the same ones, which are split over the ranks; copy numbers into them (copy_(), "
                "load_state_dict()), or wrap the changed model anew."
            )
        self.state.check_types()

    def _refuse_own_gradients(self) -> None:
        """Refuses a step by gradients of this rank's samples alone: the script has gone backward beside the wrapper."""
        path = self._direct_calls.take()
        if path and self.settings.inputs != "replicated" and self.world.num_ranks > 1:
            raise InputError(
                f"The script has called {path} beside the wrapper and gone backward through it: got gradients of this "
                "rank's samples alone, with which the copies of the weights would drift apart. Expected calls of the "
                "wrapped model, model(...), or of a method of it, model.method(...), whose gradients are summed; "
                "compute in there what the loss needs, and call modules for a log in torch.no_grad()."
            )

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

    def follow_groups(self) -> CutOptimizer | None:
        """Returns the optimizer, with the groups of parameters that a script has made after wrapping."""
        if self.optimizer is not None and self.optimizer.has_changed:
            self.optimizer.follow(self._names(), self.state.parameters())
        return self.optimizer

    def joined_optimizer(self, optimizer: torch.optim.Optimizer) -> CutOptimizer:
        """Returns an optimizer that was made from ``parameters()`` of this rank, with the groups of all. Collective."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"Got a {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer.")
        names = {id(parameter): name for name, parameter in self.state.parameters().items() if not parameter.is_meta}
        error: Exception | None = None
        try:
            cut = CutOptimizer(optimizer, names)
            cut.check()
        except InputError:
            error = InputError(
                "The optimizer has parameters that this rank does not hold. Expected one that was made after wrapping, "
                "from parameters() of the wrapped model."
            )
        self.world.agree(error, "registering the optimizer")
        of_ranks = self.world.gather_objects(cut.names, "registering the optimizer")
        if len({len(groups) for groups in of_ranks}) > 1:
            raise RankError(
                f"The ranks' optimizers have {[len(groups) for groups in of_ranks]} groups of parameters. Expected as "
                "many on every rank; a group may be empty."
            )
        order = {name: place for place, name in enumerate(self.parameter_names)}
        cut.adopt([sorted(set().union(*groups), key=order.__getitem__) for groups in zip(*of_ranks, strict=True)])
        return cut

    def digest(self) -> Digest:
        """Returns what is short, and equal for ranks whose scripts have done the same since the start."""
        engine = () if self.engine is None else self.engine.doings
        return *self.acts.digest(), *engine, self.is_synchronising

    def doings(self) -> dict[str, str]:
        """Returns what this rank's script has done since the start, in words."""
        engine = {} if self.engine is None else self.engine.words
        return {**self.acts.words(), **engine, "no_sync()": "off" if self.is_synchronising else "on"}

    def _names(self) -> dict[int, str]:
        """Returns the first name of each parameter, by identity, those included that this rank has let go."""
        first = {id(each): name for known, name in self._first_parameters if (each := known()) is not None}
        return first | {id(each): name for name, each in self.state.parameters().items()}


_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


def is_parallel(wrapper: type) -> bool:
    """Says whether a class is one of torch's that train over the ranks."""
    return bool(_parallel_kinds(wrapper))


def _parallel_kinds(wrapper: type) -> set[str]:
    return {kind.__name__ for kind in wrapper.__mro__ if kind.__module__.startswith("torch.")} & _PARALLEL


def refuse_parallel_wrapper(wrapper: type, what: str, others: Collection[str] = ()) -> None:
    """Refuses `what` a class of torch's that trains over the ranks wraps; `others` are names of more such classes."""
    for kind in (*_parallel_kinds(wrapper), *others):
        raise InputError(
            f"{what} is wrapped by {kind} of torch: got two libraries that would both spread the model over the ranks. "
            "Expected the model itself; leave that wrapper out (fully_shard() and parallelize_module() as well), and "
            "torch.distributed with it."
        )


def _refuse_parallel_wrappers(model: nn.Module) -> None:
    """Refuses a model that torch itself would train over the ranks, or of which ranks have shards."""
    for path, module in model.named_modules():
        kinds = {type(each).__name__ for each in module._parameters.values()} & {"DTensor"}
        refuse_parallel_wrapper(type(module), path or "The model", kinds)
