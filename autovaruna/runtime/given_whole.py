"""Says which inputs a micro-batch has whole, where one of its operations raises: their numbers may not fit to it."""

from __future__ import annotations

from collections.abc import Iterable

from autovaruna.graph.call import InputSpec
from autovaruna.runtime.batch import GlobalBatch, MicroBatch


def given_whole(inputs: Iterable[InputSpec], part: MicroBatch, batch: GlobalBatch) -> str:
    """Returns a sentence about the inputs that are no batch; none if the micro-batch is all that a rank passed."""
    whole = [f"{each.name} {each.words()}" for each in inputs if not each.is_batch and each.shape]
    if not whole or part.size == batch.num_samples_of(part.origin):
        return ""
    return (
        f". Every micro-batch has its own samples, but all of {', '.join(whole)}, whose first dimension is not the "
        "batch. If numbers in there name samples (the edges of a graph, say), pass "
        f"num_micro_batches={len(batch.groups)}, so that each is all that a rank passes"
    )
