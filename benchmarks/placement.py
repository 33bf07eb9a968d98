"""Partitions published placement workloads, checks the splits, and prints how good they are.

    python benchmarks/placement.py [FILE...] [--devices k] [--output FILE]

A workload is the JSON of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020). The check
reads the workload anew and shares no code with the partition.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx

from autovaruna.errors import PlanError
from autovaruna.planner.partition import Partition, PartitionNode, PartitionProblem, partition

Workload = dict[str, Any]
Devices = dict[str, int]
_TOLERANCE = 1e-6


def main(arguments: list[str] | None = None) -> int:
    """Partitions each file, prints a line for it, and returns 1 if any split is not valid."""
    options = _parse(arguments)
    splits: dict[str, Devices] = {}
    all_valid = True
    print(f"{'workload':<32} {'k':>3} {'objective':>12} {'lower bound':>12} {'gap %':>8} {'seconds':>8}  valid")
    for path in options.files or [None]:
        name = Path(path).stem if path else "made_up_branches"
        num_devices = options.devices or 0
        begin = time.perf_counter()
        try:
            workload = read(Path(path)) if path else _branches(4, 12)
            num_devices = num_devices or int(workload["maxFPGAs"])
            found = partition(_problem(workload), num_devices, max_seconds=options.seconds)
        except PlanError as error:
            print(f"{name:<32} {num_devices:>3} {error}", flush=True)
            all_valid = False
            continue
        seconds = time.perf_counter() - begin
        splits[name] = dict(found.assignment)
        faults = check(workload, splits[name], num_devices, found.objective)
        all_valid = all_valid and not faults
        print(_line(name, num_devices, found, seconds, faults), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(splits, indent=1) + "\n")
    return 0 if all_valid else 1


def read(path: Path) -> Workload:
    """Reads a workload.

    Raises:
        PlanError: the file cannot be read, lacks something, or has forward edges that lead in a circle.
    """
    try:
        workload = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}; give the file of a workload") from error
    _check_keys(
        path, "the workload", workload, {"maxFPGAs": int, "maxSizePerFPGA": float, "nodes": list, "edges": list}
    )
    for node in workload["nodes"]:
        _check_keys(path, "a node", node, {"id": object, "fpgaLatency": float, "size": float})
    for edge in workload["edges"]:
        _check_keys(path, "an edge", edge, {"sourceId": object, "destId": object, "cost": float})
    _check_order(path, workload)
    return dict(workload)


def _check_keys(path: Path, what: str, record: Any, kinds: dict[str, type]) -> None:
    if not isinstance(record, dict):
        raise PlanError(f"{path}: {what} is {str(record)[:80]!r}; expected an object with {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key not in record:
            raise PlanError(f"{path}: {what} has no {key!r}: {str(record)[:80]}; expected {', '.join(kinds)}")
        expected = (int, float) if kind in (int, float) else kind
        if not isinstance(record[key], expected) or (kind is float and not math.isfinite(record[key])):
            raise PlanError(f"{path}: {what} has {key}={str(record[key])[:80]!r}; expected a finite {kind.__name__}")


def _check_order(path: Path, workload: Workload) -> None:
    is_backward = {str(node["id"]): bool(node.get("isBackwardNode", False)) for node in workload["nodes"]}
    pairs = [(str(edge["sourceId"]), str(edge["destId"])) for edge in workload["edges"]]
    unknown = [pair for pair in pairs if not set(pair) <= is_backward.keys()]
    if unknown:
        raise PlanError(f"{path}: edge {unknown[0]} ends at an id that no node has; add the node or drop the edge")
    order = nx.DiGraph([pair for pair in pairs if not any(is_backward[name] for name in pair)])
    if not nx.is_directed_acyclic_graph(order):
        circle = " -> ".join(source for source, _ in nx.find_cycle(order))
        raise PlanError(f"{path}: forward edges lead in a circle: {circle}; drop one of them")


def check(workload: Workload, devices: Devices, num_devices: int, objective: float) -> list[str]:
    """Lists what is wrong with a split; nothing if it is valid and its greatest load is `objective`."""
    nodes = {str(node["id"]): node for node in workload["nodes"]}
    if set(devices) != set(nodes) or not all(0 <= device < num_devices for device in devices.values()):
        return [f"not every node has one of {num_devices} devices"]
    faults = _parted_classes(nodes, devices) + _full_devices(workload, nodes, devices)
    if not _is_contiguous(workload, nodes, devices):
        faults.append("the devices' forward nodes are no chain of downsets")
    load = max(_load(workload, nodes, devices, device) for device in set(devices.values()))
    if abs(load - objective) > _TOLERANCE * max(1.0, objective):
        faults.append(f"the greatest load is {load}")
    return faults


def _parted_classes(nodes: Workload, devices: Devices) -> list[str]:
    held: dict[object, set[int]] = defaultdict(set)
    for name, node in nodes.items():
        if node.get("colorClass") is not None:
            held[node["colorClass"]].add(devices[name])
    return [f"colour class {colour} is on devices {sorted(on)}" for colour, on in held.items() if len(on) > 1]


def _full_devices(workload: Workload, nodes: Workload, devices: Devices) -> list[str]:
    size: dict[int, float] = defaultdict(float)
    for name, node in nodes.items():
        size[devices[name]] += node["size"]
    limit = workload["maxSizePerFPGA"]
    return [f"device {device} holds {used} of {limit} bytes" for device, used in size.items() if used > limit]


def _is_contiguous(workload: Workload, nodes: Workload, devices: Devices) -> bool:
    """Tells whether no forward edge, over whole devices, leads back: then some order of devices is a chain."""
    between = nx.DiGraph()
    for edge in workload["edges"]:
        source, target = str(edge["sourceId"]), str(edge["destId"])
        if not nodes[source].get("isBackwardNode") and not nodes[target].get("isBackwardNode"):
            between.add_edge(devices[source], devices[target])
    between.remove_edges_from(list(nx.selfloop_edges(between)))
    return bool(nx.is_directed_acyclic_graph(between))


def _load(workload: Workload, nodes: Workload, devices: Devices, device: int) -> float:
    costs = _costs(workload)
    crossing = {
        edge["sourceId"]
        for edge in workload["edges"]
        if (devices[str(edge["sourceId"])] == device) != (devices[str(edge["destId"])] == device)
    }
    compute = sum(float(node["fpgaLatency"]) for name, node in nodes.items() if devices[name] == device)
    return compute + sum(costs[source] for source in crossing)


def _costs(workload: Workload) -> dict[object, float]:
    """Returns the cost of each node's output: that of its edges, the greatest if a file has others."""
    costs: dict[object, float] = {}
    for edge in workload["edges"]:
        costs[edge["sourceId"]] = max(float(edge["cost"]), costs.get(edge["sourceId"], 0.0))
    return costs


def _problem(workload: Workload) -> PartitionProblem:
    crossing = _costs(workload)
    nodes = tuple(
        PartitionNode(
            name=str(node["id"]),
            seconds=float(node["fpgaLatency"]),
            crossing_seconds=crossing.get(node["id"], 0.0),
            num_bytes=-int(-node["size"] // 1),
            is_backward=bool(node.get("isBackwardNode", False)),
            group=None if node.get("colorClass") is None else str(node["colorClass"]),
        )
        for node in workload["nodes"]
    )
    edges = tuple((str(edge["sourceId"]), str(edge["destId"])) for edge in workload["edges"])
    return PartitionProblem(nodes, edges, limit_bytes=int(workload["maxSizePerFPGA"]))


def _line(name: str, num_devices: int, found: Partition, seconds: float, faults: list[str]) -> str:
    verdict = "valid" if not faults else "NOT VALID: " + "; ".join(faults)
    return (
        f"{name:<32} {num_devices:>3} {found.objective:>12.6g} {found.lower_bound:>12.6g} {100 * found.gap:>8.4f} "
        f"{seconds:>8.2f}  {verdict}"
    )


def _branches(num_branches: int, length: int) -> Workload:
    """Makes up a training step of parallel branches, which has ``(length + 1) ** num_branches`` downsets and two."""
    last = num_branches * length + 1
    paths = [[0, *range(1 + i * length, 1 + (i + 1) * length), last] for i in range(num_branches)]
    pairs = [pair for path in paths for pair in itertools.pairwise(path)]
    draw = random.Random(0)
    nodes = [
        {"id": i + side, "fpgaLatency": draw.uniform(0.2, 3.0), "size": 1, "isBackwardNode": side, "colorClass": i}
        for i in range(0, 2 * last + 2, 2)
        for side in (0, 1)
    ]
    edges = [{"sourceId": 2 * a, "destId": 2 * b, "cost": 0.1} for a, b in pairs]
    edges += [{"sourceId": 2 * b + 1, "destId": 2 * a + 1, "cost": 0.1} for a, b in pairs]
    return {"maxFPGAs": 6, "maxSizePerFPGA": 1000, "nodes": nodes, "edges": edges}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="workloads, as JSON (default: one made up)")
    parser.add_argument("--devices", type=int, metavar="k", help="number of devices (default: the workload's maxFPGAs)")
    parser.add_argument("--seconds", type=float, default=50.0, help="time for each workload (default: 50)")
    parser.add_argument("--output", metavar="FILE", help="write {workload: {node id: device}} as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
