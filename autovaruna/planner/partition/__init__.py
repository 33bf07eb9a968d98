"""Splits a directed acyclic graph over a chain of devices so that the greatest load is smallest, and proves it."""

from autovaruna.planner.partition.problem import Border, Partition, PartitionNode, PartitionProblem
from autovaruna.planner.partition.solve import partition

__all__ = ["Border", "Partition", "PartitionNode", "PartitionProblem", "partition"]
