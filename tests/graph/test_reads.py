"""Holds that what a piece needs from outside is known without making it."""

from __future__ import annotations

import pytest

from autovaruna.graph.pieces.extract import Source, extract, reads
from tests.profiler.models import traced_case


@pytest.mark.parametrize("name", ["chain", "tied", "skip", "three_users", "shared_input", "constant", "bert", "t5"])
def test_reads_are_the_arguments_of_the_piece(name: str) -> None:
    _, graph, _ = traced_case(name, 3)
    half = len(graph.graph.blocks) // 2
    for blocks in (graph.graph.blocks[:half], graph.graph.blocks[half:]):
        nodes = [node for block in blocks for node in block.nodes]
        made = {block.index for block in blocks}
        outputs = [value.name for value in graph.graph.values if value.producer in made]
        piece = extract(graph, nodes, outputs)
        assert reads(graph, nodes, outputs) == (piece.named(Source.VALUE), piece.named(Source.INPUT))
