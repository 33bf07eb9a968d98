"""Reads and writes a `Profile`, and the other records of what was measured, as JSON."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from autovaruna.config.files import load_record, write_record
from autovaruna.errors import MeasureError
from autovaruna.profiler.records import FORMAT_VERSION, Profile

Record = TypeVar("Record")


def save_measured(path: str | os.PathLike[str], record: Any) -> None:
    """Writes a profile, or another record of what was measured.

    Raises:
        MeasureError: it cannot be written.
    """
    try:
        write_record(path, record)
    except OSError as error:
        raise MeasureError(f"the profile cannot be written to {path}: {error.strerror or error}") from error


def load_measured(path: str | os.PathLike[str], kind: type[Record]) -> Record:
    """Reads what `save_measured` has written.

    Raises:
        MeasureError: there is no file, or it is damaged; names the key.
    """
    try:
        return load_record(path, kind)
    except OSError as error:
        raise MeasureError(f"the profile {path} cannot be read: {error.strerror or error}; measure first") from error
    except ValueError as error:
        raise MeasureError(f"the profile {path} is damaged: {error}; measure again") from error


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile.

    Raises:
        MeasureError: there is no file, or it is damaged; names the key.
    """
    profile = load_measured(path, Profile)
    complaint = _complaint(profile)
    if complaint:
        raise MeasureError(f"the profile {path} is damaged: {complaint}; measure again")
    return profile


def _complaint(profile: Profile) -> str:
    """Returns what is wrong with a profile as a whole; empty: nothing."""
    sizes, costs = profile.micro_batch_sizes, profile.costs
    if profile.format_version != FORMAT_VERSION:
        return f"format_version is {profile.format_version}, this library reads {FORMAT_VERSION}"
    if not sizes or len(set(sizes)) < len(sizes):
        return f"micro_batch_sizes is {list(sizes)}, expected different whole numbers above 0"
    if len(costs) != len(sizes) or len(set(map(len, costs))) > 1:
        return f"costs has {[len(each) for each in costs]} blocks, expected as many for each of {len(sizes)} sizes"
    return ""
