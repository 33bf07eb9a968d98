"""Traces the model that a function of the user's builds (`load_target`), measures it here, and saves the profile."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autovaruna.commands.config import add_settings, settings_of
from autovaruna.commands.printing import add_json, show, show_json
from autovaruna.config.files import check_writable
from autovaruna.config.settings import Settings
from autovaruna.errors import ConfigError, InputError
from autovaruna.graph.call import describe
from autovaruna.graph.export.run import TraceOptions
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from autovaruna.log import progress_bar, progress_lines, write_error
from autovaruna.profiler.cache import cache_of, save_measured
from autovaruna.profiler.measure import lasting_parts, measure, measuring_seconds, merge, to_profile
from autovaruna.profiler.records import Profile
from autovaruna.session.model import find_device

EXAMPLE = "autovaruna measure examples/gpt3.py:build --micro-batch-sizes 1,2,4 -o profile.json"
_EXPECTED = (
    "Expected MODULE:FUNCTION or FILE.py:FUNCTION, a function without arguments that returns (model, args, kwargs)"
)
_LONG_SECONDS, _MOST_SECONDS = 60, 600
"""How long measuring may take before that is told, and before it is refused unless it is asked for."""
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_DRAWING = {"uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"}


@dataclass(frozen=True)
class Target:
    """A model and one call of it."""

    model: nn.Module
    traced: TracedModel
    tensors: tuple[Tensor, ...]

    @property
    def batch_size(self) -> int:
        """Samples in the call."""
        return self.traced.call.batch_size


class _WithoutRandomNumbers(TorchFunctionMode):
    """Leaves tensors as they are that were to be filled with random numbers."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING:  # of a tensor, of torch.nn.init, or what stands for that
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def load_target(
    name: str, settings: Settings, device: torch.device | None = None, *, has_weights: bool = True
) -> Target:
    """Builds and traces the model that a function returns, with random weights if it `has_weights`; else InputError."""
    with nullcontext() if has_weights else _WithoutRandomNumbers():
        function = _find(name)
        with _running(f"{name} failed"), progress_lines(f"building the model of {name}"):
            made = function()
        model, args, kwargs = _returned(name, made)
    tensors, call = describe(model, args, kwargs, settings.batch_inputs, batch_dims=settings.batch_dims)
    if call.batch_size < 1:
        raise InputError(f"{name} returned a call of no samples. Expected a batch of one or more. {_EXPECTED}.")
    size = settings.micro_batch_size or call.batch_size
    options = TraceOptions(settings.dynamic_batch, size, settings.loss_mode)
    with progress_bar("tracing the model"):
        traced = trace(model, call, device or find_device(model, settings), options)
    return Target(model, traced, () if any(tensor.is_meta for tensor in tensors) else tuple(tensors))


def _find(name: str) -> Callable[[], Any]:
    place, colon, attribute = name.rpartition(":")
    if not (place and colon and attribute.isidentifier()):
        raise InputError(f"Got {name!r}. {_EXPECTED}.")
    module = _of_file(name, Path(place)) if place.endswith(".py") else _of_module(name, place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"{place} has no function {attribute!r}. {_EXPECTED}.")
    return function  # type: ignore[no-any-return]


def _of_module(name: str, place: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _running(f"The module of {name} cannot be imported"):
        return importlib.import_module(place)


def _of_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"The file of {name} does not exist. {_EXPECTED}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as python FILE.py does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _running(f"The file of {name} cannot be run"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _running(failure: str) -> Iterator[None]:
    """Names what an error of the user's code makes impossible."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InputError(f"{failure}: {_text_of(error)}. {_EXPECTED}.") from error


def _returned(name: str, value: Any) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) != 3:
        raise InputError(f"{name} returned {_kinds(parts)}. {_EXPECTED}.")
    model, args, kwargs = parts
    if not (isinstance(model, nn.Module) and isinstance(args, tuple | list) and isinstance(kwargs, Mapping)):
        raise InputError(f"{name} returned {_kinds(parts)}. {_EXPECTED}: a module, a tuple, a dict.")
    return model, args, kwargs


def _kinds(parts: Sequence[Any]) -> str:
    return "(" + ", ".join(type(part).__name__ for part in parts) + ")"


def _text_of(error: BaseException) -> str:
    """Returns what an error of the user's code says, and the last line of that code, not of a library's."""
    text = (str(error).strip() or "no message").splitlines()[0]
    files = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    known = [each for each in files if "importlib" not in each[0] and __file__ != each[0]]
    libraries = ("<", *(f"{path}/" for path in _LIBRARIES))
    users = [each for each in known if not each[0].startswith(libraries)] or known
    where = f" at {users[-1][0]}:{users[-1][1]}" if users else ""
    return f"{type(error).__name__}: {text}{where}"


def measure_here(
    target: Target, sizes: Sequence[int], settings: Settings, *, is_asked: bool = True
) -> tuple[Profile, int]:
    """Measures what the cache does not know; returns the profile, and how many parts that were.

    ConfigError if that will take more than ten minutes and nobody has asked for it.
    """
    traced, device = target.traced, find_device(target.model, settings)
    if not settings.dynamic_batch:
        sizes = [traced.sizes.batch_size]
    cache, lasting = cache_of(settings, device), lasting_parts(traced, sizes)
    known = cache.read(lasting) if cache else {}
    if device.type == "cpu":
        _weigh(measuring_seconds(traced, sizes, known), is_asked)
    with progress_bar("measuring") as advance:
        fresh = measure(
            traced,
            target.model,
            sizes,
            device,
            iterations=settings.profile_iterations,
            known=known,
            inputs=target.tensors,
            on_progress=advance,
        )
    if cache:
        cache.write({key: fresh[key] for key in lasting if key in fresh})
    return to_profile(traced, merge([known, fresh]), device), len(fresh)


def _weigh(seconds: float, is_asked: bool) -> None:
    """Tells how long measuring will take, if that is long, and how to do without; refuses what nobody wants."""
    time = f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
    way_out = "autovaruna plan ... --device h100 (or a file that describes your device) predicts it in place of that"
    if seconds > _MOST_SECONDS and not is_asked:
        raise ConfigError(
            f"To measure this model on this machine takes about {time}. Expected {_MOST_SECONDS // 60} minutes at "
            f"most: {way_out}; --measure measures it all the same"
        )
    if seconds > _LONG_SECONDS:
        write_error(f"measuring the model on this machine will take about {time}; {way_out}\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="a function that returns (model, args, kwargs)")
    parser.add_argument("-o", "--output", default="profile.json", metavar="FILE", help="the profile (profile.json)")
    parser.add_argument("--micro-batch-sizes", default="", metavar="1,2,4", help="samples in a micro-batch")
    add_json(parser)
    add_settings(
        parser, ("device", "profile_iterations", "profile_cache", "batch_inputs", "batch_dims", "dynamic_batch")
    )


def run(options: argparse.Namespace) -> None:
    """Measures a model on this machine and saves the profile."""
    check_writable("--output", options.output)
    settings = settings_of(options)
    sizes = read_sizes(options.micro_batch_sizes)
    target = load_target(options.target, settings)
    quarter, whole = max(1, target.batch_size // 4), target.batch_size  # small ones cost more for each sample
    profile, num_measured = measure_here(target, sizes or sorted({quarter, whole}), settings)
    save_measured(options.output, profile)
    if options.json:
        show_json(asdict(profile) | {"file": options.output, "num_measured": num_measured})
        return
    sizes_text = ", ".join(map(str, profile.micro_batch_sizes))
    show(
        f"{len(target.traced.graph.blocks)} blocks at {sizes_text} samples on {profile.device}: measured "
        f"{num_measured} distinct parts, the others were known; saved to {options.output}"
    )


def read_sizes(text: str) -> list[int]:
    """Returns micro-batch sizes from a text such as ``1,2,4``; ConfigError for something else."""
    try:
        sizes = sorted({int(size) for size in text.split(",")}) if text else []
    except ValueError:
        sizes = [0]
    if any(size < 1 for size in sizes):
        raise ConfigError(f"--micro-batch-sizes is {text!r}; expected whole numbers above 0, as 1,2,4")
    return sizes
