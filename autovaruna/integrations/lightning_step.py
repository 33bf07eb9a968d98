"""Makes steps of a LightningModule what can be traced: functions of tensors that return all that leaves them.

What a step logs, and what it gives to metrics, is an output of the trace; the module logs it, with real values, once
the call is over. A step that goes by more than tensors runs as it is, and what it calls of the module, or of its
children, is called on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from inspect import signature
from operator import attrgetter
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from autovaruna._torch import MODULES, OWN_CALL
from autovaruna.api import AutoVaruna
from autovaruna.errors import InputError
from autovaruna.graph.call import method_of
from autovaruna.graph.guards import Unusable, UsedError, is_constant
from autovaruna.graph.side_effects import left_tensors
from autovaruna.integrations.whole_state import RoutedCalls
from autovaruna.log import warn_once

logger = logging.getLogger(__name__)

_NO_TENSOR, _RESULT, _METRIC = (f"autovaruna: {each} " for each in ("no tensor", "result", "metric"))
"""What stands in a call for numbers and texts of a batch, and in what it returns for metrics and their results."""
_HIDDEN = "numbers or texts of the batch, or batch_idx"
_OF_METRIC = "what a metric returns or holds"
_OF_TENSOR = "a number out of a tensor (item(), size(0))"
_CALLS = "_autovaruna_calls"
WRAPPERS = "_autovaruna_wrappers"
"""Where a LightningModule keeps its wrappers: another Trainer goes on with them, for a split model stays split."""
_MISSING = object()
_LOG = signature(pl.LightningModule.log)
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OF_A_RANK = frozenset({"is_global_zero", "global_rank", "local_rank", "node_rank"})
_MOST_TRACES = 8  # of one step, by what it reads of the Trainer
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class _Result(Unusable):
    """Stands for what a metric returns: a step may log or return it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__(_OF_METRIC)
        self.number = number


class _Recorder:
    """Takes down what a traced step does beside computing: its logs, and its calls of metrics."""

    def __init__(self) -> None:
        self.acts: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return self

    def record(self, path: str, name: str, /, *args: Any, **kwargs: Any) -> _Result:
        if isinstance(kwargs.get("batch_size"), torch.SymInt):  # that of a micro-batch: Lightning knows this rank's
            kwargs.pop("batch_size")
        self.acts.append((path, name, *_without_objects((args, kwargs))))
        return _Result(len(self.acts) - 1)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Records a log: what a step computes is of the global batch already, where it is a mean."""
        given = _LOG.bind(None, *args, **kwargs).arguments
        if isinstance(given["value"], Tensor) and given.get("reduce_fx", "mean") not in ("mean", "avg", torch.mean):
            raise UsedError(f"trainer.log({given['name']!r}, reduce_fx={given['reduce_fx']!r})")
        self.record("", "log", *args, **kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Records a log of several; what a collection of metrics holds, or returns, is known later."""
        if isinstance(dictionary, _MetricInStep | _Result):
            self.record("", "log_dict", dictionary, *args, **kwargs)
            return
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)


class _MetricInStep:
    """Stands for a metric, or a container of some, in a traced step."""

    __slots__ = ("path", "recorder")

    def __init__(self, path: str, recorder: _Recorder) -> None:
        self.path, self.recorder = path, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        return self.recorder.record(self.path, "__call__", *args, **kwargs)

    def __getitem__(self, key: Any) -> _MetricInStep:
        return _MetricInStep(f"{self.path}.{key}", self.recorder)

    def __getattr__(self, name: str) -> Any:
        if name in ("forward", "update", "compute", "reset"):
            return partial(self.recorder.record, self.path, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsedError(_OF_METRIC)


def _without_objects(value: Any) -> Any:
    """Returns what a step has made, without its graph, and with texts for metrics and their results."""
    apply_to_collection(value, (torch.SymInt, torch.SymFloat, torch.SymBool), _refuse_number)
    value = apply_to_collection(value, _Result, lambda each: f"{_RESULT}{each.number}")
    value = apply_to_collection(value, _MetricInStep, lambda each: f"{_METRIC}{each.path}")
    return apply_to_collection(value, Tensor, Tensor.detach)


def _refuse_number(_: Any) -> None:
    raise UsedError(_OF_TENSOR)


class _Calls:
    """Is an attribute of the module while it is called on all ranks; its own attributes are what is called.

    In a call it stands in the place of the Trainer, of which a step may read numbers and texts.
    """

    __slots__ = ("module", "of", "recorder")

    def __init__(self, of: ModuleOnRanks, module: pl.LightningModule, recorder: _Recorder) -> None:
        self.of, self.module, self.recorder = of, module, recorder

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls(self.of, memo.get(id(self.module), self.module), self.recorder)

    def __getattr__(self, name: str) -> Any:
        if name in self.of.names:
            return MethodType(self.of.functions[self.of.names[name]], self)
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.of.trainer, name)
        if name in _OF_A_RANK or not is_constant(value):
            raise UsedError(f"trainer.{name}")
        self.of.reads.setdefault(self.of.running, set()).add(name)
        return value


class _OwnWeights(TorchFunctionMode):
    """Refuses what a step that is not traced computes of weights by itself, of which each rank sees its own samples."""

    def __init__(self, of: ModuleOnRanks, hook: str) -> None:
        super().__init__()
        self._of, self._hook = of, hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.grad_fn is not None and not self._of.is_calling:
            found = {id(each) for each in args if isinstance(each, nn.Parameter)}
            names = [name for name, each in self._of.module.named_parameters() if id(each) in found]
            if names:
                raise InputError(
                    f"{self._hook} of {type(self._of.module).__name__} computes with {names[0]} itself: the gradient "
                    f"would be of this rank's samples alone. It is not traced ({self._of.reasons[self._hook]}). "
                    f"Expected a {self._hook} of tensors alone, or one that uses weights by self(...) and its modules."
                )
        return made


class ModuleOnRanks:
    """A LightningModule that is wrapped as a whole: its steps, and calls of it and its children, on all ranks.

    Attributes:
        reasons: why a step, by its name, is not traced.
    """

    def __init__(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        self.module, self.trainer = module, trainer
        self.reasons: dict[str, str] = {}
        self.names: dict[str, str] = {}  # what is called, by a name that also says what it reads of the Trainer
        self.reads: dict[str, set[str]] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.running = ""
        self.is_calling = self._is_in_step = False
        self._calls = _Calls(self, module, _Recorder())
        self._routes = {"forward": module} | dict(_called_children(module))
        self._hidden: list[tuple[nn.Module, str, Any]] = [(module, _CALLS, self._calls), (module, WRAPPERS, None)]
        for each in [each for each in module.modules() if isinstance(each, pl.LightningModule)]:
            self._hidden += [(each, name, None) for name in ("_trainer", "_current_fx_name", "_metric_attributes")]
        self._hidden += [(each, OWN_CALL, None) for each in self._routes.values()]
        self._hidden += _metrics_in(module, "", self._calls.recorder)
        self.wrapper: AutoVaruna | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns none: a copy of the module is a plain one."""

    def wrap(self, *args: Any, **kwargs: Any) -> AutoVaruna:
        """Wraps the module; from now on calls of it, and of its children, may be calls on all ranks."""
        with _in_place(self._hidden):
            self.wrapper = AutoVaruna(self.module, *args, **kwargs)
        for path, module in self._routes.items():
            RoutedCalls(module, partial(self.run, path), self._is_needed)
        return self.wrapper

    def _is_needed(self) -> bool:
        """Whether a call of the module or a child is one on all ranks: in a step that trains, or of a split model."""
        assert self.wrapper is not None
        is_in_training = self._is_in_step and torch.is_grad_enabled()
        return not self.wrapper.is_plain and (self.wrapper.is_split or is_in_training)

    # steps

    def is_traced(self, hook: str) -> bool:
        """Whether a step may be traced: not on one process, nor if it goes backward or has turned out to need more."""
        if self.wrapper is None or self.wrapper.is_plain or hook in self.reasons:
            return False
        if hook == "training_step" and not self.module.automatic_optimization:
            self.reasons[hook] = "it goes backward itself"
            return False
        return self.wrapper.plan is not None or not self.trainer.sanity_checking

    def run_step(self, hook: str, args: Sequence[Any]) -> Any:
        """Runs a step on all ranks, and logs what it logs.

        Raises:
            TraceError, InputError: on every rank; it cannot be traced.
        """
        given = [apply_to_collection(args[0], (str, bytes, int, float), lambda _: _NO_TENSOR), *args[1:]]
        given[1:2] = [_NO_TENSOR for _ in args[1:2]]  # batch_idx, another one in each step
        return self.run(hook, *given)

    def run(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step, the module itself, or a child, on all ranks; does what it has left to do. Collective."""
        assert self.wrapper is not None
        name = self._name(path)
        with _in_place([*self._hidden, (self, "is_calling", True)]):
            found = self.wrapper.call_part(f"{_CALLS}.{name}", *args, **kwargs)
        results: list[Any] = []

        def real(text: str) -> Any:
            if text.startswith(_RESULT):
                return results[int(text.removeprefix(_RESULT))]
            return self.module.get_submodule(text.removeprefix(_METRIC)) if text.startswith(_METRIC) else text

        for owner, name, own_args, own_kwargs in found["acts"]:
            own_args, own_kwargs = apply_to_collection((own_args, own_kwargs), str, real)
            results.append(getattr(self.module.get_submodule(owner), name)(*own_args, **own_kwargs))
        returned = apply_to_collection(found["returned"], str, real) if path in STEPS else found["returned"]
        if "loss" not in found:
            return returned
        return found["loss"] if returned is None else {**returned, "loss": found["loss"]}

    def _name(self, path: str) -> str:
        """Returns the name of what is called, another one where what it reads of the Trainer is another."""
        if path not in self.functions:
            self.functions[path] = self._function(path)
        values = {name: getattr(self.trainer, name) for name in sorted(self.reads.get(path, ()))}
        name = path.replace(".", "_") + (f"_{sha256(repr(values).encode()).hexdigest()[:16]}" if values else "")
        if name not in self.names and [*self.names.values()].count(path) > _MOST_TRACES and path in STEPS:
            raise self._error(path, f"is another one for each {', '.join(f'trainer.{each}' for each in values)}")
        self.names[name] = path
        return name

    def _error(self, path: str, what: str) -> InputError:
        return InputError(f"{path} of {type(self.module).__name__} {what}.")

    def _function(self, path: str) -> Callable[..., Any]:
        """Returns what can be traced: a function of tensors, with the names of its arguments."""

        def call(calls: _Calls, *args: Any, **kwargs: Any) -> dict[str, Any]:
            module, recorder, is_step = calls.module, calls.recorder, path in STEPS
            recorder.acts = []
            places: list[Any] = [(module, "log", recorder.log), (module, "log_dict", recorder.log_dict)]
            places += [(module, "_trainer", calls), (self, "running", path)]
            given = [apply_to_collection(each, str, _hidden) for each in args] if is_step else args
            called: Any = module if path == "forward" else attrgetter(path)(module)
            try:
                with _in_place(places):
                    returned = called(*given, **kwargs)
                kept = _without_objects(returned) if is_step else returned
            except UsedError as used:
                if used.name in (_HIDDEN, _OF_METRIC, _OF_TENSOR) or used.name.startswith("trainer."):
                    raise self._error(path, f"goes by {used.name}, which is no tensor") from used
                raise
            if is_step and (left := left_tensors(module)):
                raise self._error(path, f"leaves tensors in {', '.join(left)}")
            found = {"returned": kept, "acts": recorder.acts}
            return found if path != "training_step" else found | self._with_loss(returned)

        method = method_of(self.module, path)
        call.__wrapped__ = getattr(method, "__func__", method)  # type: ignore[attr-defined]
        return call

    def _with_loss(self, returned: Any) -> dict[str, Any]:
        """Returns the loss by its name, and the rest without a gradient."""
        is_dict = isinstance(returned, Mapping)
        loss = returned.get("loss") if is_dict else returned
        if not isinstance(loss, Tensor):
            raise self._error("training_step", "returns no loss")
        rest = {name: each for name, each in returned.items() if name != "loss"} if is_dict else None
        return {"loss": loss, "returned": _without_objects(rest)}

    @contextmanager
    def as_it_is(self, hook: str) -> Iterator[None]:
        """Surrounds a step that is not traced."""
        assert self.wrapper is not None
        is_checked = hook == "training_step" and hook in self.reasons and self.wrapper.settings.inputs != "replicated"
        with _in_place([(self, "_is_in_step", True)]), _OwnWeights(self, hook) if is_checked else nullcontext():
            yield

    def give_up(self, hook: str, error: Exception) -> None:
        """Records why a step is not traced."""
        self.reasons[hook] = str(error).rstrip(".")
        if self.trainer.is_global_zero:
            text = (
                f"{hook} of {type(self.module).__name__} is not traced, and runs on each rank's own samples, as in "
                f"DistributedDataParallel; self(...) and modules that it calls run on all ranks ({self.reasons[hook]})"
            )
            warn_once(logger, self.module, text)


def _hidden(text: str) -> Any:
    return Unusable(_HIDDEN) if text == _NO_TENSOR else text


@contextmanager
def _in_place(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Puts values into the dicts of objects, whatever their classes make of a new attribute."""
    before = [(vars(owner), name, vars(owner).get(name, _MISSING)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            vars(owner)[name] = value
        yield
    finally:
        for own, name, value in before:
            if value is _MISSING:
                del own[name]
            else:
                own[name] = value


def _is_metric(module: nn.Module) -> bool:
    inner = [*module.children()]
    return isinstance(module, Metric | MetricCollection) or (
        isinstance(module, _CONTAINERS) and bool(inner) and all(map(_is_metric, inner))
    )


def _metrics_in(module: nn.Module, path: str, recorder: _Recorder) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yields what stands in the place of metrics, and that the modules that have them do not."""
    own = [name for name, child in module.named_children() if _is_metric(child)]
    if own:
        yield module, MODULES, {name: each for name, each in vars(module)[MODULES].items() if name not in own}
    for name, child in module.named_children():
        if name in own:
            yield module, name, _MetricInStep(f"{path}{name}", recorder)
        else:
            yield from _metrics_in(child, f"{path}{name}.", recorder)


def _called_children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the children with weights or buffers that a step may call, those in containers as well."""
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _called_children(child, f"{path}{name}.")
        elif not _is_metric(child) and any(True for each in (child.parameters(), child.buffers()) for _ in each):
            yield f"{path}{name}", child
