"""Defines `Graph`: the model as plain data, for whoever plans without a model.

A graph is a list of blocks in one fixed order (the order of execution on one process). A block is a group of traced
operations that is never cut; a cut lies between two blocks. A stage is a set of blocks that is closed under the
order of its neighbours. No torch here: a graph goes to JSON and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from autovaruna.config.files import Amount, Whole

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes that depends on the micro-batch: ``fixed_bytes + sample_bytes * micro_batch_size``."""

    fixed_bytes: Amount
    sample_bytes: Amount

    def at(self, micro_batch_size: float) -> float:
        return self.fixed_bytes + self.sample_bytes * micro_batch_size


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block makes and later blocks use: what crosses a cut."""

    name: str
    producer: Whole
    consumers: tuple[Whole, ...]
    size: Size
    needs_gradient: bool


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the caller passes; it goes straight to the blocks that use it."""

    name: str
    consumers: tuple[Whole, ...]
    size: Size


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of samples that the model returns: each rank gets the rows of its own."""

    name: str
    producer: Whole
    size: Size


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, under its first name, and the blocks that use it (several: it is tied)."""

    name: str
    num_bytes: Whole
    needs_gradient: bool
    blocks: tuple[Whole, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A group of operations that is never cut.

    `name` is ``module.path/node``, unique in the graph. `signature` is equal for blocks that do the same work on
    the same shapes and dtypes, so that one measurement serves all of them.
    """

    index: Whole
    name: str
    module: str
    nodes: tuple[str, ...]
    signature: str
    buffer_bytes: Whole
    num_flops_per_sample: Amount


@dataclass(frozen=True, slots=True)
class CutMark:
    """A cut point that the user put into the model, by its path.

    `block` is the first block after it; -1: there can be no cut, and `reason` says why.
    """

    name: str
    block: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced model as data.

    `blocks` are in execution order, so any split of them into consecutive ranges is a valid partition.
    `fingerprint` changes with any operation, shape, dtype or parameter of the model, and with its cut points.
    """

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    fingerprint: str
    cut_marks: tuple[CutMark, ...] = ()
    outputs: tuple[Output, ...] = ()
    format_version: int = FORMAT_VERSION

    def complaint(self) -> str:
        """Returns what is wrong with what a file says; empty: nothing."""
        most = len(self.blocks)
        if [block.index for block in self.blocks] != list(range(most)) or not most:
            return "blocks are not numbered from 0 on"
        used = [(each.name, each.consumers) for each in self.values]
        used += [(each.name, each.consumers) for each in self.inputs]
        used += [(each.name, (each.producer,)) for each in self.values]
        used += [(each.name, (each.producer,)) for each in self.outputs]
        used += [(each.name, each.blocks) for each in self.parameters]
        used += [(each.name, (each.block,)) for each in self.cut_marks if each.block != -1]
        odd = [name for name, blocks in used if not all(0 <= block < most for block in blocks)]
        return f"{odd[0]} is of a block that there is not" if odd else ""
