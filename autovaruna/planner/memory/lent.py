"""Predicts the memory that ranks of a host share: messages lie there until nobody needs them, and in no rank's heap.

A rank that sends has touched what it has sent, so that it counts for both. Messages of other sizes, and between hosts,
are received into the heap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autovaruna.graph.records import Graph
from autovaruna.planner.memory.stage_tensors import StageTensors
from autovaruna.planner.records import Plan
from autovaruna.schedule import Instruction, Kind

COPIED_BYTES = 64 << 10
"""Tensors of so many bytes are copied into the receiver's own memory when it takes them."""
MAX_BYTES = 8 << 20
"""Larger tensors go another way, and are received into memory that was posted for them."""
LENT_BYTES = 32 << 20
"""So much one rank lends another at once."""
_GRADIENTS = 2
"""Gradients of a cut that are there at once: one in a backward, one that has come meanwhile."""


def is_lent(num_bytes: float) -> bool:
    """Returns whether a tensor that comes from another rank of the host lies in memory that both see."""
    return COPIED_BYTES < num_bytes <= MAX_BYTES


@dataclass(slots=True)
class Lent:
    """What lies in memory that two ranks share, of one stage and in one direction.

    Attributes:
        in_flight: activations of the micro-batches that are in flight.
        ahead: those that have come meanwhile.
        gradients: those of a backward, and those that have come meanwhile.
        of_micro_batch: bytes of the activations of one micro-batch, by the stage that sends them.
    """

    in_flight: float = 0.0
    ahead: float = 0.0
    gradients: float = 0.0
    of_micro_batch: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class SharedBytes:
    """What a rank shares with others for one stage: what it has sent, and what it has received."""

    sent: Lent = field(default_factory=Lent)
    received: Lent = field(default_factory=Lent)


def lent_of_stages(each: Sequence[Lent], program_of: Mapping[int, Sequence[Instruction]]) -> float:
    """Returns what is there for the stages of a rank, if any: it waits for one forward or one backward at a time.

    Stages of one rank seldom have all in flight together that they may, and what a rank has sent lies there until it
    goes backward itself.

    Args:
        each: of the stages.
        program_of: the instructions of the rank of each stage that sends, in order; of replicas, one's.
    """
    ahead, gradients = (max(found, default=0.0) for found in ([o.ahead for o in each], [o.gradients for o in each]))
    sent: dict[int, float] = {}
    for one in each:
        for source, num_bytes in one.of_micro_batch.items():
            _add(sent, source, num_bytes)
    programs = {id(program_of[source]): program_of[source] for source in sent}  # a rank may have several stages
    at_once = sum(_most_in_flight(program, sent) for program in programs.values())
    return min(sum(o.in_flight for o in each) + ahead, at_once) + gradients


def _most_in_flight(program: Iterable[Instruction], num_bytes: Mapping[int, float]) -> float:
    """Returns the most that lies between forward and backward of some stages of a rank, at a time."""
    now = most = 0.0
    for instruction in program:
        if instruction.kind is Kind.FORWARD:
            now += num_bytes.get(instruction.stage, 0.0)
            most = max(most, now)
        if instruction.kind is Kind.BACKWARD:
            now -= num_bytes.get(instruction.stage, 0.0)
    return most


def shared_bytes(graph: Graph, plan: Plan, tensors: Sequence[StageTensors]) -> list[SharedBytes]:
    """Returns what a rank shares with others for each stage of a plan whose ranks are all on one host.

    Args:
        graph: what was planned.
        plan: the plan.
        tensors: of its stages.
    """
    stage_of = {block: s for s, stage in enumerate(plan.stages) for block in stage.blocks}
    shared = [SharedBytes() for _ in plan.stages]
    for stage, own in enumerate(tensors):
        come: dict[int, dict[int, float]] = {}
        for v, num_bytes in own.received.items():
            if v >= 0 and is_lent(num_bytes):
                come.setdefault(stage_of[graph.values[v].producer], {})[v] = num_bytes
        most = plan.stages[stage].in_flight
        for source, forward in come.items():
            if set(plan.stages[source].ranks) != set(plan.stages[stage].ranks):
                back = {v: num_bytes for v, num_bytes in forward.items() if graph.values[v].needs_gradient}
                held, deepest = _at_once(forward, most), _at_once(forward, min(most + 1, plan.num_micro_batches))
                for one in (shared[source].sent, shared[stage].received):
                    one.in_flight += held
                    one.ahead += max(deepest - held, 0.0)
                senders = len(plan.stages[source].ranks)
                _add(shared[source].sent.of_micro_batch, source, sum(forward.values()))
                _add(shared[stage].received.of_micro_batch, source, senders * sum(forward.values()))
                for one in (shared[source].received, shared[stage].sent):
                    one.gradients += _at_once(back, _GRADIENTS)
    return shared


def _add(totals: dict[int, float], key: int, num_bytes: float) -> None:
    totals[key] = totals.get(key, 0.0) + num_bytes


def _at_once(tensors: Mapping[int, float], count: int) -> float:
    return min(float(LENT_BYTES), count * sum(tensors.values()))
