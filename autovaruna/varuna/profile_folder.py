"""Reads and writes the folder of a profile: graph, costs and cluster as JSON, beside it each measurement."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autovaruna.errors import MeasureError
from autovaruna.graph.records import Graph
from autovaruna.kinds import at_home
from autovaruna.profiler.profile_file import load_measured, load_profile, save_measured
from autovaruna.profiler.records import Cluster, Profile
from autovaruna.varuna.grids import Measured


@dataclass(frozen=True)
class Facts:
    """What a profile says besides graph, costs and cluster.

    Attributes:
        gpus_per_node: ranks on a host.
        optimizer_bytes_factor: bytes of optimizer state for each byte of a trained parameter.
    """

    gpus_per_node: int
    optimizer_bytes_factor: float


class ProfileFolder:
    """A folder with a profile.

    Args:
        path: Where it is; made when something is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(at_home(path))
        self.measurements = self.path / "measurements"

    def write(self, graph: Graph, cluster: Cluster, facts: Facts) -> None:
        """Writes all but the costs.

        Raises:
            MeasureError: it cannot be written.
        """
        for name, record in (("graph", graph), ("cluster", cluster), ("facts", facts)):
            save_measured(self._file(name), record)

    def write_costs(self, profile: Profile) -> None:
        """Writes the costs.

        Raises:
            MeasureError: they cannot be written.
        """
        save_measured(self._file("profile"), profile)

    def read(self) -> tuple[Measured, Facts]:
        """Reads everything.

        Raises:
            MeasureError: a file is missing or damaged, or they do not belong together; says which.
        """
        profile = load_profile(self._file("profile"))
        graph = load_measured(self._file("graph"), Graph)
        cluster = load_measured(self._file("cluster"), Cluster)
        facts = load_measured(self._file("facts"), Facts)
        if profile.fingerprint != graph.fingerprint:
            raise MeasureError(
                f"the profile in {self.path} is of several models: the costs are of graph {profile.fingerprint}, the "
                f"graph is {graph.fingerprint}; measure again into an empty folder"
            )
        return Measured(graph, profile, cluster), facts

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.json"
