"""Defines `WrappedModel`: a user's model as this rank has it, whole until it is split; refuses what would break it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn

from autovaruna._torch import parameter_table
from autovaruna.errors import InputError
from autovaruna.graph.guards import Guards
from autovaruna.runtime.engine import Engine
from autovaruna.runtime.weights import OwnedState, Placement, StateCopies
from autovaruna.session.device import bring_to_own_device
from autovaruna.session.run import Run

_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


class WrappedModel:
    """A model with its state and guards.

    Attributes:
        state: parameters and buffers by name.
        borrowed: copies of them that the script was given, in which it may write.
        guards: what traces depend on besides tensors.
        engine: runs this rank's part; None: the model is whole yet.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None, run: Run) -> None:
        self.module = module
        self._optimizer, self._run = optimizer, run
        self.bring_to_device()
        self.read_state()
        self.parameter_names = [self.state.first_name[name] for name, _ in module.named_parameters()]
        self._first_parameters = [(ref(each), name) for name, each in self.state.parameters().items()]
        self.borrowed = StateCopies()
        self.guards = Guards(module)
        self.engine: Engine | None = None

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

    def bring_to_device(self) -> None:
        """Moves model and optimizer, wherever a script has put them, to where this rank computes; before the split."""
        self.device = bring_to_own_device(self.module, self._optimizer, self._run.settings)

    def check_parameters(self) -> None:
        """Finds other parameters before the split; refuses them later, and always what other libraries spread."""
        if self.engine is None:
            _refuse_parallel_wrappers(self.module)
            self.bring_to_device()
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
        kinds = {type(each).__name__ for each in parameter_table(module).values()} & {"DTensor"}
        refuse_parallel_wrapper(type(module), path or "The model", kinds)
