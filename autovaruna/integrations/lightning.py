"""Defines `AutoVarunaStrategy`: Lightning's Trainer with the module trained over all ranks by AutoVaruna.

The LightningModule is wrapped, and its steps run on all ranks as they stand. Several optimizers train one child each,
and whatever a step calls of these is a call of their wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from autovaruna._torch import replaced
from autovaruna.api import AutoVaruna
from autovaruna.config.settings import resolve
from autovaruna.errors import ConfigError, InputError, TraceError
from autovaruna.integrations.lightning_step import STEPS, WRAPPERS, ModuleOnRanks
from autovaruna.integrations.process_group import init_process_group, local_rank
from autovaruna.integrations.whole_state import RoutedCalls, show_whole_state
from autovaruna.interception.optimizer_proxy import parameters_of
from autovaruna.ranks.environment import get_world

_CONTEXTS = {each: each.replace("training", "train").replace("validation", "val") + "_context" for each in STEPS}
"""What a plugin of precision puts around each step."""


class AutoVarunaEnvironment(TorchElasticEnvironment):
    """Tells Lightning of the ranks that mpirun, torchrun or another launcher has started."""

    def __init__(self) -> None:
        self._world = get_world()

    def world_size(self) -> int:
        return self._world.num_ranks

    def global_rank(self) -> int:
        return self._world.rank

    def local_rank(self) -> int:
        return local_rank(self._world)

    def node_rank(self) -> int:
        return list(dict.fromkeys(self._world.hosts)).index(self._world.hosts[self._world.rank])

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Does nothing: how many ranks there are says the launcher."""


class MetricsMonitor(pl.Callback):
    """Hands ``model.metrics`` to the loggers of a Trainer, as ``autovaruna/NAME`` or ``autovaruna/CHILD/NAME``."""

    _last_step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == self._last_step or trainer.global_step % trainer.log_every_n_steps:
            return
        self._last_step = trainer.global_step
        wrappers: dict[str, AutoVaruna] = pl_module.__dict__.get(WRAPPERS, {})
        for child, wrapper in wrappers.items():
            prefix = f"autovaruna/{child}/" if len(wrappers) > 1 else "autovaruna/"
            numbers = {prefix + name: value for name, value in wrapper.metrics.to_dict().items()}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)


class _Wrappers(dict[str, AutoVaruna]):
    """The wrappers of a LightningModule; a copy of it has none, for one of them may wrap the module itself.

    Attributes:
        whole: runs the steps of a module that is wrapped itself.
    """

    whole: ModuleOnRanks | None = None
    is_in_step = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Wrappers:
        return _Wrappers()

    def is_needed(self, wrapper: AutoVaruna) -> bool:
        """Whether a call of a wrapped child is one of its wrapper: in a step that trains, or of a split model."""
        is_in_training = self.is_in_step and torch.is_grad_enabled()
        return not wrapper.is_plain and (wrapper.is_split or is_in_training)

    def show_states(self) -> None:
        for wrapper in self.values():
            show_whole_state(wrapper, "call trainer.save_checkpoint(path)")


def _on_ranks(name: str) -> Callable[..., Any]:
    """Returns a step of Lightning's that runs on all ranks; one that cannot be traced runs as it is."""

    def step(strategy: AutoVarunaStrategy, *args: Any) -> Any:
        whole = strategy._wrappers.whole
        if whole is not None and whole.is_traced(name):
            with getattr(strategy.precision_plugin, _CONTEXTS[name])():
                try:
                    return whole.run_step(name, args)
                except (InputError, TraceError) as error:
                    whole.give_up(name, error)
        with replaced(strategy._wrappers, "is_in_step", True) if whole is None else whole.as_it_is(name):
            return getattr(DDPStrategy, name)(strategy, *args)

    return step


class AutoVarunaStrategy(DDPStrategy):
    """Trains a LightningModule over all ranks: ``Trainer(strategy=AutoVarunaStrategy(num_micro_batches=4))``.

    Args:
        **settings: See ``python -m autovaruna config``.

    Raises:
        ConfigError: a setting is unknown, optimizers share children of the module, or it was planned for evaluation.
    """

    strategy_name = "autovaruna"
    model: Any

    def __init__(self, **settings: Any) -> None:
        resolve(settings)
        super().__init__(cluster_environment=AutoVarunaEnvironment())
        self._settings = settings

    # the ranks

    @property
    def root_device(self) -> torch.device:
        device = self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")
        return torch.device(device.type, self.local_rank) if device.type == "cuda" else device

    @property
    def num_processes(self) -> int:
        world = get_world()
        return world.hosts.count(world.hosts[world.rank])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        init_process_group()

    # the wrappers

    @property
    def _wrappers(self) -> _Wrappers:
        """The wrapper of each wrapped child by its name; that of the LightningModule itself has an empty one."""
        wrappers: _Wrappers = self.lightning_module.__dict__.setdefault(WRAPPERS, _Wrappers())
        return wrappers

    def setup(self, trainer: pl.Trainer) -> None:
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not self._wrappers:
            self.model_to_device()
        if is_fitting:
            self._refuse_plan_for_evaluation()
            self.setup_optimizers(trainer)
        if not self._wrappers:
            self._wrap(trainer, self.optimizers if is_fitting else [])
            self._wrappers.show_states()
        elif self._wrappers.whole is not None:
            self._wrappers.whole.trainer = trainer
        if is_fitting:
            self._wrap_averages(trainer)
        self.setup_precision_plugin()

    def _refuse_plan_for_evaluation(self) -> None:
        if any(each.plan is not None and not each.plan.needs_gradient for each in self._wrappers.values()):
            raise ConfigError(
                f"Got trainer.fit() of a {type(self.lightning_module).__name__} that trainer.validate(), test() or "
                "predict() has planned for evaluation alone. Expected fit() first; to validate before the "
                "first step, pass Trainer(num_sanity_val_steps=-1), or evaluate another instance of the module."
            )

    def _wrap(self, trainer: pl.Trainer, optimizers: list[torch.optim.Optimizer]) -> None:
        settings = {"scaler": getattr(self.precision_plugin, "scaler", None), **self._settings}
        module = self.lightning_module
        if len(optimizers) < 2:
            whole = self._wrappers.whole = ModuleOnRanks(module, trainer)
            self._wrappers[""] = whole.wrap(*optimizers, **settings)
            return
        for optimizer in optimizers:
            name = self._name_of_trained(optimizer)
            wrapper = self._wrappers[name] = AutoVaruna(module.get_submodule(name), optimizer, **settings)
            RoutedCalls(wrapper.module, wrapper, partial(self._wrappers.is_needed, wrapper))

    def _wrap_averages(self, trainer: pl.Trainer) -> None:
        """Wraps the copies of the module that callbacks have made for averages: they are split like the module."""
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            copied = getattr(average, "module", average)
            if isinstance(copied, pl.LightningModule) and not vars(copied).get(WRAPPERS):
                wrappers = vars(copied)[WRAPPERS] = _Wrappers()
                for name, wrapper in self._wrappers.items():
                    wrappers[name] = wrapper.wrap_copy(copied.get_submodule(name))
                wrappers.show_states()

    def _name_of_trained(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns the name of the child that has all parameters of one optimizer of several."""
        module = self.lightning_module
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        found = {
            name
            for name, child in module.named_children()
            if any(id(parameter) in trained for parameter in child.parameters())
        }
        if len(found) == 1 and trained <= {id(each) for each in module.get_submodule(min(found)).parameters()}:
            return str(min(found))
        raise ConfigError(
            f"An optimizer of {type(module).__name__} ({type(optimizer).__name__}) trains "
            f"{', '.join(sorted(found)) or 'no child'}; expected one child of the module for each of several "
            "optimizers. Put what one optimizer trains into one module."
        )

    # steps

    training_step, validation_step, test_step, predict_step = map(_on_ranks, STEPS)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps gradients back, as accumulation over batches asks for."""
        with ExitStack() as stack:
            for wrapper in self._wrappers.values():
                stack.enter_context(wrapper.no_sync())
            yield

    # state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a whole module's state, of which this rank takes its part."""
        state = dict(checkpoint["state_dict"])
        if "" in self._wrappers:
            self._wrappers[""].load_state_dict(state, strict=strict)
            return
        for name, wrapper in self._wrappers.items():
            prefix = f"{name}."
            own = {key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)}
            wrapper.load_state_dict(own, strict=strict)
        self.lightning_module.load_state_dict(state, strict=strict and not self._wrappers)

    def teardown(self) -> None:
        """Leaves the module where it is: of a split one each rank has the numbers of its part."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
