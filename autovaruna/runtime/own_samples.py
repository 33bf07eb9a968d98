"""Cuts this rank's mini-batch into micro-batches, and hands these out to the stages that use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autovaruna.runtime.batch import MicroBatch
from autovaruna.runtime.job import Job
from autovaruna.runtime.mail import Mail, Parcel


class OwnSamples:
    """The mini-batch of this rank.

    Args:
        inputs: Its tensors by input name.
        job: The call.
        rank: This rank.
        mail: Carries tensors.
    """

    def __init__(self, inputs: Mapping[str, Tensor], job: Job, rank: int, mail: Mail) -> None:
        self._inputs = inputs
        self._job = job
        self._rank = rank
        self._mail = mail
        self._slices: dict[str, Mapping[int, Tensor]] = {}

    def of(self, part: MicroBatch, name: str) -> Tensor:
        """Returns a micro-batch's part of an input; all of one that is no batch."""
        slices = self._slices.get(name)
        if slices is None:
            whole = self._inputs[name].detach()
            if name not in self._job.split.traced.batch_inputs:
                return whole
            parts = self._job.batch.owned_by(self._rank)
            pieces = torch.unsafe_split_with_sizes(whole, [each.size for each in parts])
            slices = self._slices[name] = {each.index: piece for each, piece in zip(parts, pieces, strict=True)}
        return slices[part.index].contiguous()

    def send(self, parcels: Iterable[tuple[MicroBatch, Parcel]]) -> None:
        """Starts to send micro-batches to the stages that use them."""
        for part, parcel in parcels:
            self._mail.send([self.of(part, name) for name in parcel.names], parcel.kind)
