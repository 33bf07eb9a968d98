"""Keeps measured costs on disk, so that what was measured once is not measured again, by any model or program.

A directory for each environment (device, threads, versions, see `environment`), in it a file for each part and
micro-batch size. A file is written whole under another name and then renamed, so any number of ranks and programs may
write at once: a reader finds all of a file or none of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autovaruna.json_text import load_record, write_record
from autovaruna.profiler.measure import Key, PartCost

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class _Entry:
    """A file of the cache: a measured part, and by what it was measured."""

    signature: str
    micro_batch_size: int
    iterations: int
    environment: dict[str, Any]
    cost: PartCost
    format_version: int = FORMAT_VERSION


class ProfileCache:
    """Measured costs of one environment.

    Args:
        directory: Where all costs lie; made when something is written.
        environment: What they depend on besides the part and the micro-batch size.
        iterations: Samples of a measurement; costs of fewer are not used.
    """

    def __init__(self, directory: str | os.PathLike[str], environment: Mapping[str, Any], iterations: int) -> None:
        self.environment = dict(environment)
        self.iterations = iterations
        digest = hashlib.sha256(json.dumps(self.environment, sort_keys=True).encode()).hexdigest()[:16]
        self.directory = Path(directory) / digest

    def read(self, keys: Iterable[Key]) -> dict[Key, PartCost]:
        """Returns what is known of some parts. A file that cannot be used is named in a warning and left out."""
        found: dict[Key, PartCost] = {}
        for key in keys:
            path = self._path(key)
            try:
                entry = load_record(path, _Entry)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                logger.warning("measuring again: the saved cost %s cannot be used (%s)", path, error)
                continue
            if entry.format_version != FORMAT_VERSION:
                logger.warning("measuring again: the saved cost %s has format %d", path, entry.format_version)
            elif entry.iterations >= self.iterations:
                found[key] = entry.cost
        logger.info("%d measured costs came from %s", len(found), self.directory)
        return found

    def write(self, costs: Mapping[Key, PartCost]) -> None:
        """Saves costs. Where nothing can be written a warning says so, once."""
        try:
            for key, cost in costs.items():
                entry = _Entry(*key, self.iterations, self.environment, cost)
                write_record(self._path(key), entry, is_synced=False)
        except OSError as error:
            reason = error.strerror or error
            logger.warning("measured costs are not kept: %s cannot be written (%s)", self.directory, reason)

    def _path(self, key: Key) -> Path:
        return self.directory / f"{key[0]}-{key[1]}.json"
