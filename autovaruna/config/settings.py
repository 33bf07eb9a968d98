"""Declares every setting once, says what kinds of value there are, and reads them: conf.toml, variables, keywords."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar

from autovaruna.config.files import CONF_DIR_VARIABLE, PACKAGED, at_home, conf_dir, did_you_mean, read_toml, shown
from autovaruna.errors import ConfigError, InputError

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

T = TypeVar("T")
REFUSALS = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What `SettingKind.read` and `SettingKind.parse` raise for a value that they do not accept."""
PREFIX = "AUTOVARUNA_"
_LIST = PACKAGED / "conf.toml"


@dataclass(frozen=True)
class SettingKind:
    """A kind of value; one of `REFUSALS` is raised for a value that it does not accept."""

    expected: str  # what is accepted, for messages
    read: Callable[[object], object]  # turns a value from TOML or a keyword into the setting's, or raises
    parse: Callable[[str], object] = str  # turns the text of a variable into what `read` accepts, or raises


def is_whole(value: Any) -> bool:
    """Says whether something is a whole number, of whatever type: also 4.0, as divisions give it."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Returns a whole number that a script gives; InputError if it is none, or below `least`."""
    if not is_whole(value) or value < least:
        raise InputError(f"{name} is {value!r}; expected a whole number from {least} on.")
    return int(value)


def _checked(value: T, is_fine: object) -> T:
    """Returns a value that is fine; ValueError otherwise."""
    if not is_fine:
        raise ValueError
    return value


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def count(minimum: int = 0) -> SettingKind:
    """Accepts whole numbers of at least `minimum`."""
    return SettingKind(
        f"a whole number of at least {minimum}", lambda value: _checked(value, _is_count(value, minimum)), int
    )


def number(minimum: float = 0.0, below: float = math.inf) -> SettingKind:
    """Accepts numbers from `minimum` up to, not including, `below`."""

    def read(value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(value, is_number and minimum <= value < below))

    bound = "" if below == math.inf else f" and below {below:g}"
    return SettingKind(f"a number of at least {minimum:g}{bound}", read, float)


def choice(*names: str) -> SettingKind:
    """Accepts one of some words."""
    listed = ", ".join(f'"{name}"' for name in names)
    return SettingKind(f"one of {listed}", lambda value: _checked(value, isinstance(value, str) and value in names))


def either(first: SettingKind, second: SettingKind) -> SettingKind:
    """Accepts what one of two kinds accepts, the first one first."""

    def read(value: object) -> object:
        try:
            return first.read(value)
        except REFUSALS:
            return second.read(value)

    def parse(text: str) -> object:
        try:
            return first.read(first.parse(text))
        except REFUSALS:
            return second.parse(text)

    return SettingKind(f"{first.expected}, or {second.expected}", read, parse)


def _boolean(value: object) -> bool:
    return _BOOLEANS[str(_checked(value, isinstance(value, bool | int | str))).strip().lower()]


def _bytes(value: Any) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([a-zA-Z]*)\s*", value)
        if not match:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, float) and value.is_integer():  # TOML's 2e9
        value = int(value)
    return int(_checked(value, _is_count(value)))


def _names(value: Any) -> tuple[str, ...]:
    _checked(value, isinstance(value, Sequence) and not isinstance(value, str))
    return tuple(_checked(name, isinstance(name, str)) for name in value)


def _rank_lists(value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, Mapping):
        value = [value[stage] for stage in range(len(value))]
    _checked(value, isinstance(value, Sequence) and not isinstance(value, str))
    return tuple(tuple(_checked(rank, _is_count(rank)) for rank in ranks) for ranks in value)


def _dimensions(value: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = dict(value)
    _checked(value, isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
    return tuple(sorted((name, _checked(dimension, _is_count(dimension))) for name, dimension in value.items()))


def _named_numbers(text: str) -> dict[str, int]:
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    return {name.strip(): int(number) for name, number in pairs}


BOOLEAN = SettingKind("true, false, 1, 0, yes or no", _boolean)
BYTES = SettingKind('a number of bytes, as 2000000, "500MB" or "2GiB"', _bytes)
PATH = SettingKind("a path", lambda value: at_home(_checked(value, isinstance(value, str | os.PathLike))))  # type: ignore[arg-type]
TEXT = SettingKind("a text", lambda value: _checked(value, isinstance(value, str)))
NAMES = SettingKind(
    "a list of names (in a variable: separated by commas)", _names, lambda text: text.split(",") if text else []
)
RANK_LISTS = SettingKind("a list of ranks for each stage, as [[0, 1], [2]]", _rank_lists, json.loads)
DIMENSIONS = SettingKind(
    'names of inputs, each with a dimension from 0 on, as {"src": 1} (in a variable: src=1, separated by commas)',
    _dimensions,
    _named_numbers,
)
CALLABLE = SettingKind(
    "a function, given as a keyword",
    lambda value: _checked(value, value is None or callable(value)),
    lambda text: _checked(text, False),
)
AUTO_SEED = either(count(), SettingKind('"auto"', lambda value: _checked(None, value in (None, "auto"))))


_GIGABYTES = SettingKind(number().expected, lambda value: int(number().read(value) * 2**30), float)  # type: ignore[operator]
_RECOMPUTES = SettingKind(BOOLEAN.expected, lambda value: "all" if _boolean(value) else "none")
Sharing: TypeAlias = bool | Literal["auto"]


def _setting(kind: SettingKind, default: T, *aliases: str, **others: SettingKind) -> T:
    """Declares a setting with its aliases, and those that have kinds of their own."""
    return field(default=default, metadata={"kind": kind, "aliases": {**dict.fromkeys(aliases, kind), **others}})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, each read from its sources and of the right kind; conf.toml says what each means."""

    # The plan.
    num_stages: int = _setting(count(), 0, "partition_num", "nstages")
    max_stages_per_rank: int = _setting(count(), 0)
    simplicity: float = _setting(number(0.0, 1.0), 0.02)
    num_replicas: int = _setting(count(), 0, "replica_num")
    num_micro_batches: int = _setting(count(), 0, "pipeline_num")
    micro_batch_size: int = _setting(count(), 0, "chunk_size", "batch_norm_samples")
    min_micro_batches: int = _setting(count(1), 1, "min_pipeline")
    max_micro_batches: int = _setting(count(), 0, "max_pipeline")
    memory_limit_bytes: int = _setting(BYTES, 0, mem_limit_gb=_GIGABYTES)
    memory_margin: float = _setting(number(0, below=1), 0.1, "mem_margin")
    optimizer_bytes_factor: float | Literal["auto"] = _setting(
        either(number(), choice("auto")), "auto", "opt_param_factor"
    )
    shard_optimizer: Sharing = _setting(either(BOOLEAN, choice("auto")), "auto")
    recompute: Literal["auto", "all", "none"] = _setting(
        choice("auto", "all", "none"), "auto", checkpointing=_RECOMPUTES
    )
    schedule: str = _setting(choice("auto", "gpipe", "1f1b", "varuna", "interleaved"), "auto")
    in_flight: int = _setting(count(), 0)
    cuts: tuple[str, ...] = _setting(NAMES, ())
    cutpoints: Literal["only", "prefer", "ignore"] = _setting(choice("only", "prefer", "ignore"), "prefer")
    stage_ranks: tuple[tuple[int, ...], ...] = _setting(RANK_LISTS, (), "stage_to_rank_map")

    # What a step means.
    inputs: Literal["per_rank", "per_replica", "replicated"] = _setting(
        choice("per_rank", "per_replica", "replicated"), "per_rank"
    )
    batch_inputs: tuple[str, ...] = _setting(NAMES, ())
    batch_dims: tuple[tuple[str, int], ...] = _setting(DIMENSIONS, ())
    dynamic_batch: bool = _setting(BOOLEAN, True)
    check_trace: bool = _setting(BOOLEAN, True)
    recheck_trace: bool | float = _setting(either(BOOLEAN, number(0.0, 1.0)), True)
    check_parts: bool = _setting(BOOLEAN, True)
    reduction: Literal["mean", "sum"] = _setting(choice("mean", "sum"), "mean")
    batch_statistics: Literal["exact", "micro-batch"] = _setting(choice("exact", "micro-batch"), "exact")
    micro_batch_weight: Callable[..., float] | None = _setting(CALLABLE, None)
    loss_mode: Literal["auto", "loss", "outputs"] = _setting(choice("auto", "loss", "outputs"), "auto")
    outputs: Literal["all", "loss"] = _setting(choice("all", "loss"), "all")
    seed: int | None = _setting(AUTO_SEED, None)

    # Measuring, and the files of a run.
    profile_iterations: int = _setting(count(1), 5, "profiling_iter")
    profile_cache: bool | str = _setting(either(BOOLEAN, PATH), "auto")
    load_deployment: bool | Literal["auto"] = _setting(either(BOOLEAN, choice("auto")), "auto")
    save_deployment: bool = _setting(BOOLEAN, True)
    deployment_file: str = _setting(PATH, "deployment.json")
    trace_events: bool = _setting(BOOLEAN, False)
    trace_events_file: str = _setting(PATH, "events.trace.json", "event_trace_file")
    dump_graph: str = _setting(PATH, "", "dump_graph_prefix")
    report_dir: str = _setting(PATH, "")

    # The run.
    device: str = _setting(TEXT, "auto")
    offload: bool = _setting(BOOLEAN, False)
    channel: Literal["auto", "mpi", "nccl", "gloo"] = _setting(choice("auto", "mpi", "nccl", "gloo"), "auto")
    compile_stages: bool | Literal["inductor", "aot_eager", "eager"] = _setting(
        either(BOOLEAN, choice("inductor", "aot_eager", "eager")), False
    )
    progress: bool = _setting(BOOLEAN, True)
    verbosity: Literal["none", "short", "full"] = _setting(choice("none", "short", "full"), "short")
    stall_report_seconds: float = _setting(number(), 30.0)
    stall_limit_seconds: float = _setting(number(), 0.0)
    save_on_signal: str = _setting(PATH, "")
    full_tracebacks: bool = _setting(BOOLEAN, False)
    show_settings: bool = _setting(BOOLEAN, False, "show_config_items")

    _sources: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def source_of(self, name: str) -> str:
        """Returns where a setting's value came from: a file, a variable, a keyword or ``default``."""
        assert name in self.as_dict(), name
        return dict(self._sources).get(name, "default")

    def as_dict(self) -> dict[str, Any]:
        """Returns the value of each setting by name."""
        return {each.name: getattr(self, each.name) for each in declarations()}


def declarations() -> tuple[Field[Any], ...]:
    """Returns the declarations: ``name``, ``default`` and, in ``metadata``, kind and aliases."""
    return tuple(each for each in fields(Settings) if "kind" in each.metadata)


def meanings() -> dict[str, str]:
    """Returns what each setting means, as the conf.toml of this package says above its default."""
    found = {}
    for block in _LIST.read_text(encoding="utf-8").split("\n\n"):
        *lines, last = block.strip().splitlines()
        name = last.removeprefix("# (only as a keyword) ").partition(" = ")[0]
        found[name] = " ".join(line.removeprefix("# ") for line in lines).partition(" Also: ")[0]
    return {each.name: found[each.name] for each in declarations()}


def named_settings() -> dict[str, tuple[Field[Any], SettingKind]]:
    """Returns, for each name and alias, the declaration and the kind of its value."""
    known: dict[str, tuple[Field[Any], SettingKind]] = {}
    for each in declarations():
        kinds = {each.name: each.metadata["kind"], **each.metadata["aliases"]}
        known |= {name: (each, kind) for name, kind in kinds.items()}
    return known


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _GivenValue:
    """A value as a source gives it; `place` names the source and the key, for messages."""

    name: str
    value: object
    place: str
    is_text: bool = False


def resolve(keywords: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings of a run, from files, `environ` (``os.environ``) and keywords, by name or alias.

    Raises ConfigError if a name is unknown or given twice in one source, a value is of the wrong kind, or two settings
    contradict each other.
    """
    environ = os.environ if environ is None else environ
    path = conf_dir(environ) / "conf.toml"
    variables = sorted(name for name in environ if name.startswith(PREFIX) and name != CONF_DIR_VARIABLE)
    texts = [
        _GivenValue(name.removeprefix(PREFIX).lower(), environ[name], f"variable {name}", True) for name in variables
    ]
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for entries in (
        [_GivenValue(key, value, f"{path}: {key}") for key, value in read_toml(path).items()],
        texts,
        [_GivenValue(name, value, f"keyword {name}") for name, value in (keywords or {}).items()],
    ):
        given: dict[str, _GivenValue] = {}
        for entry in entries:
            name, value = _read(entry)
            if name in given:
                raise ConfigError(f"{given[name].place} and {entry.place} are the same setting; keep one of them")
            given[name], values[name], sources[name] = entry, value, entry.place
    settings = Settings(**values, _sources=tuple(sources.items()))  # type: ignore[arg-type]
    _check_together(settings)
    return settings


def log_settings(settings: Settings) -> None:
    """Logs each setting and its source."""
    for name, value in settings.as_dict().items():
        logger.info("%s = %r (%s)", name, value, settings.source_of(name))


def _read(entry: _GivenValue) -> tuple[str, object]:
    """Returns the standard name and the value of an entry."""
    known = named_settings()
    if entry.name not in known:
        raise ConfigError(f"{entry.place}: there is no such setting{did_you_mean(entry.name, known)}; {_LIST} has all")
    declaration, kind = known[entry.name]
    try:
        return declaration.name, kind.read(kind.parse(str(entry.value)) if entry.is_text else entry.value)
    except REFUSALS:
        raise ConfigError(f"{entry.place} is {shown(entry.value)}; expected {kind.expected}") from None


def _check_together(settings: Settings) -> None:
    if settings.num_micro_batches and settings.micro_batch_size:
        _contradiction(settings, "num_micro_batches", "micro_batch_size", "set one of them, the other to 0")
    if 0 < settings.max_micro_batches < settings.min_micro_batches:
        _contradiction(settings, "min_micro_batches", "max_micro_batches", "the first is to be at most the second")
    num_cuts = len(settings.cuts)
    if settings.num_stages and num_cuts and settings.num_stages != num_cuts + 1:
        _contradiction(settings, "num_stages", "cuts", f"{num_cuts} cuts make {num_cuts + 1} stages")
    if settings.num_stages and settings.stage_ranks and settings.num_stages != len(settings.stage_ranks):
        _contradiction(settings, "num_stages", "stage_ranks", "stage_ranks has one list of ranks for each stage")

    is_moved = any(dimension for _, dimension in settings.batch_dims)
    if is_moved and not settings.dynamic_batch and settings.num_micro_batches != 1:
        advice = "with num_micro_batches=1 alone, since nothing tells the batch from other dimensions of its length"
        _contradiction(settings, "batch_dims", "dynamic_batch", advice)
    if settings.inputs == "per_replica" and not (settings.stage_ranks and all(settings.stage_ranks)):
        _contradiction(settings, "inputs", "stage_ranks", "per_replica needs the ranks of each stage")
    replicas = replicas_of(settings.stage_ranks) if settings.inputs == "per_replica" else ()
    if sum(map(len, replicas)) > len(set().union(*replicas)):
        _contradiction(settings, "inputs", "stage_ranks", "a rank passes the mini-batch of one replica alone")


def replicas_of(stage_ranks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each replica of a whole model: as many replicas as divide the ranks of every stage.

    With two ranks for one stage and four for another there are two, of one rank and two; with one and two there is one.
    """
    number = math.gcd(*map(len, stage_ranks))
    every = (dict.fromkeys(rank for ranks in stage_ranks for rank in ranks[first::number]) for first in range(number))
    return tuple(map(tuple, every))


def input_groups(settings: Settings, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks that pass the same mini-batch: each alone, all, or those of a replica."""
    if settings.inputs == "replicated":
        return (tuple(range(num_ranks)),)
    if settings.inputs == "per_replica":
        return replicas_of(settings.stage_ranks)
    return tuple((rank,) for rank in range(num_ranks))


def _contradiction(settings: Settings, first: str, second: str, advice: str) -> None:
    values = [f"{name} = {getattr(settings, name)!r} ({settings.source_of(name)})" for name in (first, second)]
    raise ConfigError(f"{values[0]} and {values[1]} contradict each other: {advice}")
