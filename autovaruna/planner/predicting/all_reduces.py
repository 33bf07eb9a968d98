"""Predicts gradient all-reduces: a ring sends ``2 (n - 1) / n`` of the bytes over its slowest link."""

from __future__ import annotations

from collections.abc import Collection

from autovaruna.profiler.records import Cluster


class AllReduces:
    """All-reduces on a cluster.

    `all_reduce_bytes_per_second` was measured over all ranks, so over the slowest link there is. A ring that stays
    within one of several hosts is faster in the ratio of a local message to a remote one.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self._local_gain = cluster, _local_gain(cluster)
        self._costs: dict[tuple[int, ...], tuple[float, float]] = {}

    def seconds(self, ranks: tuple[int, ...], num_bytes: float) -> float:
        """Returns the predicted seconds to all-reduce `num_bytes` over some ranks."""
        cost = self._costs.get(ranks)
        if cost is None:
            cost = self._costs[ranks] = self.cost(len(ranks), is_local=self.is_local(ranks))
        latency, seconds_per_byte = cost
        return latency + seconds_per_byte * num_bytes

    def cost(self, num_ranks: int, *, is_local: bool) -> tuple[float, float]:
        """Returns what a ring of so many ranks takes, in seconds: once, and for each byte; nothing for one rank.

        Args:
            num_ranks: of the ring.
            is_local: whether they share a host.
        """
        if num_ranks < 2:
            return 0.0, 0.0
        bandwidth = self.cluster.all_reduce_bytes_per_second * (self._local_gain if is_local else 1.0)
        latency = self.cluster.all_reduce_latency_seconds * num_ranks
        return latency, 2 * (num_ranks - 1) / num_ranks / bandwidth

    def is_local(self, ranks: Collection[int]) -> bool:
        """Returns whether the ranks share a host."""
        hosts = map(self.cluster.hosts.__getitem__, ranks)
        first = next(hosts, "")
        return all(host == first for host in hosts)


def _local_gain(cluster: Cluster) -> float:
    local, remote = cluster.local_link.bytes_per_second, cluster.remote_link.bytes_per_second
    return local / remote if len(set(cluster.hosts)) > 1 and local > remote else 1.0
