"""Defines `OptimizerPart`: the optimizer of a wrapped model, of which this rank steps over its part."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch

from autovaruna.errors import InputError, RankError
from autovaruna.interception.gradients import SCALERS
from autovaruna.interception.modules import DirectCalls
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.runtime.environment import is_alone
from autovaruna.runtime.optimizer import OWN_PART, CutOptimizer, step_over_own_part
from autovaruna.runtime.weights import Placement
from autovaruna.runtime.world import on_all
from autovaruna.session.model import WrappedModel
from autovaruna.session.run import Run


class OptimizerPart:
    """The optimizer, if there is one, with what stands between it and the script.

    Attributes:
        cut: the optimizer, of which this rank has the state of its own parameters; None: there is none.
        proxy: what is due before and after its steps; None: there is none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, model: WrappedModel, run: Run) -> None:
        self.cut: CutOptimizer | None = None
        self.proxy: OptimizerProxy | None = None
        self._model, self._run = model, run
        if optimizer is None:
            return
        cut = CutOptimizer(optimizer, model.names_by_id())
        if not is_alone():
            cut.check()
        proxy = self._watch(cut)
        run.installed.add(SCALERS.acquire())
        proxy.before.append(model.borrowed.write_back)
        if not is_alone():
            self._direct_calls = DirectCalls(model.module)
            run.installed.add(self._direct_calls.stop)
            proxy.before.append(self._refuse_own_gradients)

    def _watch(self, cut: CutOptimizer) -> OptimizerProxy:
        self.cut, self.proxy = cut, OptimizerProxy(cut.optimizer, OWN_PART)
        self._run.installed.add_method(self.proxy.remove)
        metrics = self._run.metrics
        self._run.actions.watch(self.proxy, cut.optimizer, cut.names)
        metrics.follow_optimizer(cut.optimizer)
        self.proxy.before.append(metrics.begin_optimizer)
        self.proxy.after.append(metrics.end_optimizer)
        return self.proxy

    @property
    def raw(self) -> torch.optim.Optimizer | None:
        """The optimizer as the script made it."""
        return None if self.cut is None else self.cut.optimizer

    def follow_groups(self) -> CutOptimizer | None:
        """Returns the optimizer, with the groups of parameters that a script has made after wrapping."""
        if self.cut is not None and self.cut.has_changed:
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
        """Takes an optimizer that was made from ``parameters()`` of this rank after the split. Collective."""
        cut = self._joined(optimizer)
        self._watch(cut)
        self.step_over_part(self._model.placement, device)

    def _joined(self, optimizer: torch.optim.Optimizer) -> CutOptimizer:
        """Returns an optimizer with the groups of all ranks. Collective."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"Got a {type(optimizer).__name__} for an optimizer; expected a torch.optim.Optimizer.")
        model, world = self._model, self._run.world
        names = {id(parameter): name for name, parameter in model.state.parameters().items() if not parameter.is_meta}
        error: Exception | None = None
        try:
            cut = CutOptimizer(optimizer, names)
            cut.check()
        except InputError:
            error = InputError(
                "The optimizer has parameters that this rank does not hold. Expected one that was made after wrapping, "
                "from parameters() of the wrapped model."
            )
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
