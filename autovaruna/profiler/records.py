"""Defines `Profile`: what a graph costs on the machine at hand, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autovaruna.config.files import Amount, Count, Positive, Rate

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of one block for one micro-batch, on one rank.

    `saved_bytes` is what forward keeps for backward (parameters not counted); `work_bytes` what a call needs on top
    while it runs.
    """

    forward_seconds: Amount
    backward_seconds: Amount
    saved_bytes: Amount
    work_bytes: Amount


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A message of n bytes takes ``latency_seconds + n / bytes_per_second``.

    Meanwhile each end computes, but for ``n * busy_seconds_per_byte``, in which its processor has the message.
    """

    latency_seconds: Amount
    bytes_per_second: Rate
    busy_seconds_per_byte: Amount = 0.0

    def seconds(self, num_bytes: Amount) -> float:
        """Returns the predicted seconds for a message of `num_bytes`."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """A step of the optimizer.

    Attributes:
        seconds_per_parameter: for each trained tensor; seconds_per_byte on top.
        work_of_all: bytes that it needs while it runs for each byte of all trained parameters (all at once, foreach).
        work_of_largest: the same for each byte of the largest one (one after the other).
    """

    seconds_per_parameter: Amount = 0.0
    seconds_per_byte: Amount = 0.0
    work_of_all: Amount = 0.0
    work_of_largest: Amount = 0.0

    def seconds(self, num_parameters: float, num_bytes: Amount) -> float:
        """Returns the predicted seconds of a step over so many tensors of so many bytes in all."""
        return self.seconds_per_parameter * num_parameters + self.seconds_per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs: ``costs[i][k]`` is block k at ``micro_batch_sizes[i]`` samples.

    `device` names what was measured; `is_measured` is False for a roofline prediction.
    """

    fingerprint: str
    device: str
    micro_batch_sizes: tuple[Count, ...]
    costs: tuple[tuple[BlockCost, ...], ...]
    is_measured: bool = True
    format_version: int = FORMAT_VERSION

    def complaint(self) -> str:
        """Returns what is wrong with what a file says; empty: nothing."""
        sizes, costs = self.micro_batch_sizes, self.costs
        if self.format_version != FORMAT_VERSION:
            return f"format_version is {self.format_version}, this library reads {FORMAT_VERSION}"
        if not sizes or len(set(sizes)) < len(sizes):
            return f"micro_batch_sizes is {list(sizes)}, expected different whole numbers above 0"
        if len(costs) != len(sizes) or len(set(map(len, costs))) > 1:
            return f"costs has {[len(each) for each in costs]} blocks, expected as many for each of {len(sizes)} sizes"
        return ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks: their hosts, memory limits, relative speeds and links.

    Attributes:
        speeds: measured speed of each rank relative to the rank that was profiled (1.0: as fast).
        local_link: a message between two ranks of one host.
        all_reduce_bytes_per_second: bandwidth of an all-reduce over all ranks, in the bytes that a ring sends from each
            rank: ``2 (n - 1) / n`` times those of the tensor. This and the next are of ranks with a core each.
        all_reduce_latency_seconds: what an all-reduce takes for each rank that takes part, whatever its bytes.
        overhead_seconds: what the executor adds to each instruction.
        process_bytes: what a rank holds beside its stages, over a process that has not traced a model.
        own_process_bytes: the same of each rank, of which that is the most; empty where it is not known.
        fragmentation: bytes that the allocator takes for each byte that micro-batches make and free, holes with them.
        memory_margin: the share of what the user has said, or the machine has, that the limits leave free.
        cores_per_rank: of the host with the fewest; less than 1 where ranks share cores.
    """

    hosts: tuple[str, ...]
    memory_bytes: tuple[Positive, ...]
    speeds: tuple[Positive, ...]
    local_link: LinkCost
    remote_link: LinkCost
    all_reduce_bytes_per_second: Rate
    all_reduce_latency_seconds: Amount = 0.0
    overhead_seconds: Amount = 0.0
    process_bytes: Amount = 0.0
    fragmentation: Amount = 1.0
    own_process_bytes: tuple[Amount, ...] = ()
    memory_margin: Amount = 0.0
    cores_per_rank: Positive = 1.0
    format_version: int = FORMAT_VERSION

    def complaint(self) -> str:
        """Returns what is wrong with what a file says; empty: nothing."""
        if not self.hosts:
            return "hosts is empty, expected the host of each rank"
        for name in ("memory_bytes", "speeds", "own_process_bytes"):
            numbers = getattr(self, name)
            if len(numbers) != self.num_ranks and (numbers or name != "own_process_bytes"):
                return f"{name} has {len(numbers)} numbers, expected one for each of {self.num_ranks} ranks"
        return ""

    @property
    def num_ranks(self) -> int:
        """The number of ranks N."""
        return len(self.hosts)

    def link(self, source: int, destination: int) -> LinkCost:
        """Returns the link between two ranks."""
        return self.local_link if self.hosts[source] == self.hosts[destination] else self.remote_link
