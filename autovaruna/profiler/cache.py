"""Keeps on disk what was measured: a `Profile` in a file, the costs of parts, for any model or program, and links.

The cache has a directory for each environment (device, threads, versions), in it a file for each part and micro-batch
size. A file is written whole under another name and then renamed, so any number of ranks and programs may write.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch

from autovaruna.config.files import conf_dir, load_record, write_record
from autovaruna.config.settings import Settings
from autovaruna.errors import MeasureError
from autovaruna.profiler.measure import Key, PartCost, device_name
from autovaruna.profiler.records import LinkCost
from autovaruna.profiler.work import MeasuredPart

Record = TypeVar("Record")
_LASTING_SECONDS = 7 * 24 * 3600.0  # of a link


def save_measured(path: str | os.PathLike[str], record: Any) -> None:
    """Writes a profile, or another record of what was measured; MeasureError if it cannot be written."""
    try:
        write_record(path, record)
    except OSError as error:
        raise MeasureError(f"the profile cannot be written to {path}: {error.strerror or error}") from error


def load_measured(path: str | os.PathLike[str], kind: type[Record]) -> Record:
    """Reads what `save_measured` has written; MeasureError, with the key, if there is no file or it is damaged."""
    try:
        record = load_record(path, kind)
        if complaint := getattr(record, "complaint", str)():  # about the record as a whole
            raise ValueError(complaint)
        return record
    except OSError as error:
        raise MeasureError(f"the profile {path} cannot be read: {error.strerror or error}; measure first") from error
    except ValueError as error:
        raise MeasureError(f"the profile {path} is damaged: {error}; measure again") from error


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CacheEntry:
    """A file of the cache: a measured part, and by what it was measured."""

    signature: str
    micro_batch_size: int
    iterations: int
    environment: dict[str, Any]
    cost: PartCost

    def is_of(self, key: Key, part: MeasuredPart) -> bool:
        return (self.signature, self.micro_batch_size) == key and self.cost.fits(part)


class ProfileCache:
    """Measured costs of one environment, on which they depend besides the part and the micro-batch size.

    Costs of fewer samples than `iterations` are not used.
    """

    def __init__(self, directory: str | os.PathLike[str], environment: Mapping[str, Any], iterations: int) -> None:
        self.environment = dict(environment)
        self.iterations = iterations
        digest = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.directory = Path(directory) / digest

    def read(self, parts: Mapping[Key, MeasuredPart]) -> dict[Key, PartCost]:
        """Returns what is known of some parts. A file that cannot be used is named in a warning and left out."""
        found: dict[Key, PartCost] = {}
        for key, part in parts.items():
            entry = _read(self._path(key), _CacheEntry, methodcaller("is_of", key, part), "cost", "part")
            if entry and entry.iterations >= self.iterations:
                found[key] = entry.cost
        logger.debug("%d measured costs came from %s", len(found), self.directory)
        return found

    def write(self, costs: Mapping[Key, PartCost]) -> None:
        """Saves costs. Where nothing can be written a warning says so, once."""
        entries = {
            self._path(key): _CacheEntry(*key, self.iterations, self.environment, cost) for key, cost in costs.items()
        }
        _write(entries, self.directory, "costs")

    def _path(self, key: Key) -> Path:
        return self.directory / f"{key[0]}-{key[1]}.json"


@dataclass(frozen=True)
class _LinkEntry:
    """A file of the cache: a link, or the sums of some ranks, and what is told of it."""

    name: str
    cost: LinkCost

    def is_of(self, name: str) -> bool:
        return self.name == name


class LinkCache:
    """Measured links, by names that say between which hosts and how, for a week: networks change."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory) / "links"

    def read(self, names: Iterable[str]) -> dict[str, LinkCost]:
        """Returns what is known of some links. A file that cannot be used is named in a warning and left out."""
        found = {}
        for name in names:
            path = self._path(name)
            entry = None if _is_old(path) else _read(path, _LinkEntry, methodcaller("is_of", name), "link", "link")
            if entry:
                found[name] = entry.cost
        return found

    def write(self, links: Mapping[str, LinkCost]) -> None:
        """Saves links, and tells of one that has changed. Where nothing can be written a warning says so, once."""
        entries = {self._path(name): _LinkEntry(name, cost) for name, cost in links.items()}
        for path, entry in entries.items():
            with suppress(OSError, ValueError):
                now, before = entry.cost.bytes_per_second, load_record(path, _LinkEntry).cost.bytes_per_second
                if abs(now - before) > before / 2:
                    text = "the network has changed: %s carries %.3g bytes a second, %.3g when it was measured before"
                    logger.warning(text, entry.name, now, before, extra={"is_alike": True})
                    break
        _write(entries, self.directory, "links")

    def _path(self, name: str) -> Path:
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _is_old(path: Path) -> bool:
    """Says whether a file was written too long ago for what it says of a network."""
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > _LASTING_SECONDS
    return False


def _read(path: Path, kind: type[Record], is_of: Callable[[Record], bool], what: str, of: str) -> Record | None:
    """Returns a saved record; None: there is none, or it cannot be used, as a warning says."""
    try:
        entry = load_record(path, kind)
        if not is_of(entry):
            raise ValueError(f"it is of another {of}")
        return entry
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("measuring again: the saved %s %s cannot be used (%s)", what, path, error)
        return None


def _write(entries: Mapping[Path, Any], directory: Path, what: str) -> None:
    """Saves records. Where nothing can be written a warning says so, once."""
    try:
        for path, entry in entries.items():
            write_record(path, entry, is_synced=False)
    except OSError as error:
        logger.warning("measured %s are not kept: %s cannot be written (%s)", what, directory, error.strerror or error)


def environment(device: torch.device, num_sharing: int = 1) -> dict[str, Any]:
    """Returns what measured costs are valid for."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "ranks_on_host": num_sharing,
        "torch": torch.__version__,
        "method": _method(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cuda":
        return found | {"processor": _processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    kernels = ("flash", "mem_efficient", "cudnn", "math")
    return found | {
        "cuda": torch.version.cuda,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "attention": [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in kernels],
    }


@lru_cache(maxsize=1)
def _processor() -> str:
    lines = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(named, platform.processor() or platform.machine())


@lru_cache(maxsize=1)
def _method() -> str:
    """Returns a digest of how is measured: the source of the files that do."""
    sources = [Path(__file__).with_name(name).read_bytes() for name in ("bytes.py", "measure.py", "work.py")]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def cache_of(settings: Settings, device: torch.device, num_sharing: int = 1) -> ProfileCache | None:
    """Returns where measured costs are kept, if the settings want that; arguments as in `environment`."""
    directory = _directory(settings)
    if directory is None:
        return None
    return ProfileCache(directory, environment(device, num_sharing), settings.profile_iterations)


def link_cache_of(settings: Settings) -> LinkCache | None:
    """Returns where measured links are kept, if the settings want that."""
    directory = _directory(settings)
    return None if directory is None else LinkCache(directory)


def _directory(settings: Settings) -> Path | None:
    """Returns where what was found out of models is kept; None: the settings do not want that."""
    if settings.profile_cache is False:
        return None
    is_own = settings.profile_cache not in (True, "auto")
    return Path(str(settings.profile_cache)) if is_own else conf_dir(os.environ) / "profiles"
