"""Defines `Run`: how far the training of one model is on this rank, what its script has done, and whether it ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from operator import is_
from typing import Any, NoReturn
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from autovaruna.config.settings import Settings, log_settings
from autovaruna.elastic.job_folder import job_place
from autovaruna.elastic.rank_script import SAVED
from autovaruna.graph.guards import is_constant
from autovaruna.interception.ending import ERRORS_IN_FEW_LINES, LISTENING, has_signal, signal_names
from autovaruna.interception.optimizer_proxy import OptimizerProxy
from autovaruna.log import configure, show_all_frames
from autovaruna.profiler.optimizer_trial import asks_for_closure
from autovaruna.ranks.environment import get_world
from autovaruna.ranks.world import World
from autovaruna.runtime.clipping import CLIPPING, METRICS
from autovaruna.runtime.metrics import Metrics
from autovaruna.session.manager_link import ManagerLink
from autovaruna.session.shared_call import digest

logger = logging.getLogger(__name__)
_STEP, _ZERO = "steps of the optimizer", "calls of its zero_grad()"
_NUM_FIRST_STEPS = 8  # of an optimizer of parameters of no wrapped model, whose gradients are compared
_OF_STRANGERS = (
    "the digest of what {} steps by, gradients of this rank's samples for parameters of no wrapped model (compute what "
    "they are for in the wrapped model's forward, or sum them over the ranks; if samples are what is optimised, pass "
    "inputs='replicated', and all of them on every rank),"
)


class ScriptActions:
    """What a script has done with a model and its optimizer: ranks that do other things would train other weights."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter({_STEP: 0, _ZERO: 0})
        self.optimizer: Optimizer | None = None  # the one that is watched
        self._groups: list[str] = []
        self._raw: list[Any] | None = None  # options none of which can change by itself; None: some can
        self._digest = 0
        self._loss = "none"
        self._num_of_strangers = Counter[int]()
        self._strangers: dict[str, int] = {}  # digests of gradients, by the class of what steps by them

    def record(self, act: str) -> None:
        self._counts[act] += 1

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far."""
        return self._counts[_STEP]

    def watch(self, proxy: OptimizerProxy, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> None:
        """Counts what is done with an optimizer from now on; `groups` are names of the whole optimizer's parameters."""
        self.optimizer = optimizer
        self._groups = [f"{len(names)} from {names[0]} to {names[-1]}" if names else "none" for names in groups]
        proxy.after.append(partial(self.record, _STEP))
        proxy.on_clear.append(partial(self.record, _ZERO))
        if asks_for_closure(optimizer):
            proxy.on_loss = self._record_loss

    def _record_loss(self, loss: Any) -> None:
        """Records the loss that a closure has returned: steps go by it."""
        self._loss = repr(loss.item() if isinstance(loss, Tensor) else loss)

    def records_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a step of another optimizer is one of few whose gradients are to be the same on all ranks."""
        self._num_of_strangers[id(optimizer)] += optimizer is not self.optimizer
        return optimizer is not self.optimizer and self._num_of_strangers[id(optimizer)] <= _NUM_FIRST_STEPS

    def record_gradients(self, kind: str, gradients: Sequence[Tensor]) -> None:
        """Records gradients, of parameters of no wrapped model, by which an optimizer of some `kind` steps."""
        if gradients:
            self._strangers[kind] = crc32(repr([digest(each) for each in gradients]).encode())

    def digest(self) -> tuple[Hashable, ...]:
        """Returns what is short, and equal for ranks that have done the same."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        raw = [value for group in groups for name, value in group.items() if name != "params"]
        if self._raw is None or len(raw) != len(self._raw) or not all(map(is_, raw, self._raw)):
            self._raw = raw if all(map(is_constant, raw)) else None
            self._digest = crc32(repr(list(self._options())).encode())
        return (
            *sorted(self._counts.items()),
            type(self.optimizer).__name__,
            self._digest,
            self._loss,
            *self._strangers.items(),
        )

    def words(self) -> dict[str, str]:
        words = {"the optimizer": "none" if self.optimizer is None else type(self.optimizer).__name__}
        words |= {f"the number of {act}": str(count) for act, count in self._counts.items()}
        words[f"the loss by which {words['the optimizer']} goes, which is to be what forward returns,"] = self._loss
        words |= {_OF_STRANGERS.format(kind): str(each) for kind, each in self._strangers.items()}
        return words | {
            f"{name} of the optimizer's group {place}": repr(value) for place, name, value in self._options()
        }

    def _options(self) -> Iterator[tuple[int, str, Any]]:
        """Yields group, name and value of each option that the optimizer's class declares, and the parameters."""
        if self.optimizer is not None:
            yield from ((place, "parameters", names) for place, names in enumerate(self._groups))
            for place, group in enumerate(self.optimizer.param_groups):
                for name in self.optimizer.defaults:
                    yield place, name, _plain(group.get(name))


def _plain(value: object) -> object:
    """Returns an option as a number or a text; what is neither says nothing, for it may differ between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if is_constant(value) else None


class Run:
    """The state of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.installed = ExitStack()  # undoes what was put on objects of the script; holds nothing of the model
        self.actions = ScriptActions()
        self.is_stop_wanted = False  # whether the script of this rank wants the run to end
        self.is_stop_agreed = False  # whether all ranks know, since the same call: they end together, at one step
        self.metrics = Metrics()
        self.num_calls = 0  # of the model so far
        self.is_synchronising = True  # whether gradients are summed over ranks now
        self._is_listening = False
        self._number = self._first_step = 0

    @cached_property
    def world(self) -> World:
        """The ranks; the first use starts MPI."""
        world = get_world()
        configure(world.rank, verbosity=self.settings.verbosity)
        show_all_frames(self.settings.full_tracebacks)
        world.watch.stalls.report_seconds = self.settings.stall_report_seconds
        world.watch.stalls.limit_seconds = self.settings.stall_limit_seconds
        if self.settings.show_settings:
            log_settings(self.settings)
        return world

    @cached_property
    def manager(self) -> ManagerLink | None:
        """The link to the manager of the job; None: there is none."""
        place = job_place()
        return None if place is None else ManagerLink(place, self.world)

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far; without one, calls of the model."""
        return self.num_calls if self.actions.optimizer is None else self.actions.num_steps

    @property
    def step(self) -> int:
        """The number that the script gives the state as it is now."""
        return self._first_step + self.num_steps

    def set_step(self, step: int) -> None:
        """Sets the number that the script gives the state as it is now."""
        self._first_step = step - self.num_steps

    @property
    def of_model(self) -> str:
        """Says, behind what ranks do together, which model they do it with: the first one needs no word."""
        if not self._number:
            self.world.num_models += 1
            self._number = self.world.num_models
        return "" if self._number == 1 else f" (model {self._number})"

    def install(self) -> None:
        """Installs what every run has in the user's process."""
        self.installed.callback(ERRORS_IN_FEW_LINES.acquire())
        self.installed.callback(CLIPPING.acquire())
        METRICS.add(self.metrics)
        if self.settings.save_on_signal:
            self.listen()

    def listen(self) -> None:
        """Hears signals that ask the process to end, from now on."""
        if not self._is_listening:
            self._is_listening = True
            self.installed.callback(LISTENING.acquire())

    @property
    def is_stop_wanted_here(self) -> bool:
        """Whether this rank's script wants the run to end, or a signal has come: what it reports at the next call."""
        return self.is_stop_wanted or has_signal()

    def end(self, step: int) -> NoReturn:
        """Ends this rank with `SAVED`, once the state is saved under its number; every rank does."""
        names = signal_names() or "a signal on another rank"
        logger.warning("got %s: saved step %d, and end with status %d", names, step, SAVED)
        raise SystemExit(SAVED)
