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
from fractions import Fraction
from pathlib import Path

import networkx as nx
from placement_file import Workload, read

from autovaruna.errors import PlanError
from autovaruna.planner.partition import Partition, PartitionNode, PartitionProblem, partition

Devices = dict[str, int]
_TOLERANCE = 1e-6
_MOST_BYTES = 2**53


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
            found = _partition(workload, num_devices, options.seconds)
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
        all_valid = _write(options.output, splits) and all_valid
    return 0 if all_valid else 1


def _write(output: str, splits: dict[str, Devices]) -> bool:
    try:
        Path(output).write_text(json.dumps(splits, indent=1) + "\n")
    except OSError as error:
        print(f"--output cannot be written: {error}; give a file in a folder that is there", file=sys.stderr)
        return False
    return True


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
    size: dict[int, Fraction] = defaultdict(Fraction)
    for name, node in nodes.items():
        size[devices[name]] += Fraction(str(node["size"]))
    limit = workload["maxSizePerFPGA"]
    full = {device: used for device, used in size.items() if used > Fraction(str(limit))}
    return [f"device {device} holds {float(used)} of {limit} bytes" for device, used in full.items()]


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
        str(edge["sourceId"])
        for edge in workload["edges"]
        if (devices[str(edge["sourceId"])] == device) != (devices[str(edge["destId"])] == device)
    }
    compute = sum(float(node["fpgaLatency"]) for name, node in nodes.items() if devices[name] == device)
    return compute + sum(costs[source] for source in crossing)


def _costs(workload: Workload) -> dict[str, float]:
    """Returns the cost of each node's output: that of its edges, the greatest if a file has others."""
    costs: dict[str, float] = {}
    for edge in workload["edges"]:
        source = str(edge["sourceId"])
        costs[source] = max(float(edge["cost"]), costs.get(source, 0.0))
    return costs


def _partition(workload: Workload, num_devices: int, max_seconds: float) -> Partition:
    parts = _parts_of_a_byte(workload)
    try:
        return partition(_problem(workload, parts), num_devices, max_seconds=max_seconds)
    except PlanError as error:
        raise PlanError(f"{error} (each byte of the file counts as {parts})" if parts > 1 else str(error)) from error


def _parts_of_a_byte(workload: Workload) -> int:
    """Returns how many times all sizes have to be taken so that they are whole, or nearly so if their digits are many.

    A workload may count in megabytes.
    """
    sizes = [Fraction(str(node["size"])) for node in workload["nodes"]]
    parts = math.lcm(*(size.denominator for size in sizes))
    most = int(_MOST_BYTES / max(sum(sizes), 1))
    return parts if parts <= most else max(1, most)


def _problem(workload: Workload, parts: int) -> PartitionProblem:
    crossing = _costs(workload)
    nodes = tuple(
        PartitionNode(
            name=str(node["id"]),
            seconds=float(node["fpgaLatency"]),
            crossing_seconds=crossing.get(str(node["id"]), 0.0),
            num_bytes=math.ceil(Fraction(str(node["size"])) * parts),
            is_backward=bool(node.get("isBackwardNode")),
            group=None if node.get("colorClass") is None else str(node["colorClass"]),
        )
        for node in workload["nodes"]
    )
    edges = tuple((str(edge["sourceId"]), str(edge["destId"])) for edge in workload["edges"])
    limit = math.floor(Fraction(str(workload["maxSizePerFPGA"])) * parts)
    return PartitionProblem(nodes, edges, limit_bytes=limit)


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
    options = parser.parse_args(arguments)
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices is {options.devices}; expected 1 or more")
    names = [Path(file).stem for file in options.files]
    if options.output and len(set(names)) < len(names):
        parser.error(f"two of {', '.join(names)} have one name, by which --output tells files apart; give them others")
    return options


if __name__ == "__main__":
    sys.exit(main())
