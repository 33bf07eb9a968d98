"""Reads the settings from their sources: conf.toml, then variables, then keywords; the later wins."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autovaruna.config.files import CONF_DIR_VARIABLE, PACKAGED, conf_dir, read_toml
from autovaruna.config.kinds import REFUSALS
from autovaruna.config.settings import Settings, known_names
from autovaruna.errors import ConfigError

__all__ = ["Settings", "log_settings", "resolve"]

PREFIX = "AUTOVARUNA_"
_LIST = PACKAGED / "conf.toml"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A value as a source gives it; `place` names the source and the key, for messages."""

    name: str
    value: object
    place: str
    is_text: bool = False


def resolve(keywords: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings of a run.

    Args:
        keywords: settings by name or alias, as a program gives them.
        environ: variables in place of ``os.environ``.

    Raises:
        ConfigError: a name is unknown or given twice in one source, a value is of the wrong kind, or two settings
            contradict each other.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for entries in (_from_file(environ), _from_variables(environ), _from_keywords(keywords or {})):
        given: dict[str, _Entry] = {}
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


def _from_file(environ: Mapping[str, str]) -> list[_Entry]:
    path = conf_dir(environ) / "conf.toml"
    return [_Entry(key, value, f"{path}: {key}") for key, value in read_toml(path).items()]


def _from_variables(environ: Mapping[str, str]) -> list[_Entry]:
    names = sorted(name for name in environ if name.startswith(PREFIX) and name != CONF_DIR_VARIABLE)
    return [_Entry(name.removeprefix(PREFIX).lower(), environ[name], f"variable {name}", True) for name in names]


def _from_keywords(keywords: Mapping[str, object]) -> list[_Entry]:
    return [_Entry(name, value, f"keyword {name}") for name, value in keywords.items()]


def _read(entry: _Entry) -> tuple[str, object]:
    """Returns the standard name and the value of an entry."""
    known = known_names()
    if entry.name not in known:
        raise ConfigError(f"{entry.place}: there is no such setting{_nearest(entry.name, known)}; {_LIST} has all")
    declaration, alias = known[entry.name]
    try:
        value = alias.kind.parse(str(entry.value)) if entry.is_text else entry.value
        return declaration.name, alias.convert(alias.kind.read(value))
    except REFUSALS:
        raise ConfigError(f"{entry.place} is {entry.value!r}; expected {alias.kind.expected}") from None


def _nearest(name: str, known: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _check_together(settings: Settings) -> None:
    if settings.num_micro_batches and settings.micro_batch_size:
        _contradiction(settings, "num_micro_batches", "micro_batch_size", "set one of them, the other to 0")
    if 0 < settings.max_micro_batches < settings.min_micro_batches:
        _contradiction(settings, "min_micro_batches", "max_micro_batches", "the first is to be at most the second")
    if settings.num_stages and settings.cuts and settings.num_stages != len(settings.cuts) + 1:
        _contradiction(
            settings, "num_stages", "cuts", f"{len(settings.cuts)} cuts make {len(settings.cuts) + 1} stages"
        )
    if settings.num_stages and settings.stage_ranks and settings.num_stages != len(settings.stage_ranks):
        _contradiction(settings, "num_stages", "stage_ranks", "stage_ranks has one list of ranks for each stage")

    if settings.inputs == "per_replica" and not (settings.stage_ranks and all(settings.stage_ranks)):
        _contradiction(settings, "inputs", "stage_ranks", "per_replica needs the ranks of each stage")
    if settings.inputs == "per_replica" and _is_in_two_replicas(settings.stage_ranks):
        _contradiction(settings, "inputs", "stage_ranks", "a rank passes the mini-batch of one replica alone")


def replicas_of(stage_ranks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each replica of a whole model: as many replicas as divide the ranks of every stage.

    With two ranks for one stage and four for another there are two, of one rank and two; with one and two there is one.
    """
    number = math.gcd(*map(len, stage_ranks))
    every = (dict.fromkeys(rank for ranks in stage_ranks for rank in ranks[first::number]) for first in range(number))
    return tuple(map(tuple, every))


def _is_in_two_replicas(stage_ranks: Sequence[Sequence[int]]) -> bool:
    replicas = replicas_of(stage_ranks)
    return sum(map(len, replicas)) > len(set().union(*replicas))


def _contradiction(settings: Settings, first: str, second: str, advice: str) -> None:
    values = [f"{name} = {getattr(settings, name)!r} ({settings.source_of(name)})" for name in (first, second)]
    raise ConfigError(f"{values[0]} and {values[1]} contradict each other: {advice}")
