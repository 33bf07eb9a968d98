"""Keeps measured costs on disk, so that what was measured once is not measured again, by any model or program.

A directory for each environment (device, threads, versions, see `environment`), in it a file for each part and
micro-batch size. A file is written whole under another name and then renamed, so any number of ranks and programs may
write at once: a reader finds all of a file or none of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autovaruna.json_text import parse
from autovaruna.profiler.checked import check, with_checksum
from autovaruna.profiler.measure import Key, PartCost
from autovaruna.profiler.memory import Bytes, Made

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


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
                content = parse(path.read_text(encoding="utf-8"))
                check(content)
                if content["iterations"] >= self.iterations:
                    found[key] = _cost(content)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, KeyError) as error:
                logger.warning("measuring again: the saved cost %s cannot be used (%s)", path, _reason(error))
        logger.info("%d measured costs came from %s", len(found), self.directory)
        return found

    def write(self, costs: Mapping[Key, PartCost]) -> None:
        """Saves costs. Where nothing can be written a warning says so, once."""
        try:
            for key, cost in costs.items():
                self._write(key, cost)
        except OSError as error:
            logger.warning("measured costs are not kept: %s cannot be written (%s)", self.directory, _reason(error))

    def _write(self, key: Key, cost: PartCost) -> None:
        content = {
            "format_version": FORMAT_VERSION,
            "signature": key[0],
            "micro_batch_size": key[1],
            "iterations": self.iterations,
            "environment": self.environment,
            **asdict(cost),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(with_checksum(content), file, indent=1)
            os.replace(name, self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: Key) -> Path:
        return self.directory / f"{key[0]}-{key[1]}.json"


def _cost(content: Mapping[str, Any]) -> PartCost:
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format_version is {content['format_version']}, expected {FORMAT_VERSION}")
    counted = content["num_bytes"]
    return PartCost(
        _amount(content["forward_seconds"]),
        _amount(content["backward_seconds"]),
        Bytes(
            inside=_whole(counted["inside"]),
            saved_values=tuple((_whole(place), _whole(num_bytes)) for place, num_bytes in counted["saved_values"]),
            made=tuple(
                Made(_whole(made["place"]), _whole(made["num_bytes"]), bool(made["is_saved"]))
                for made in counted["made"]
            ),
            forward_work=_whole(counted["forward_work"]),
            work=_whole(counted["work"]),
        ),
        _amount(content["weight_seconds"]),
        _amount(content["split_seconds"]),
        _whole(content["deferred_bytes"]),
    )


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"got {value!r}, expected a number of 0 or more")
    return float(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"got {value!r}, expected a whole number")
    return int(_amount(value))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
