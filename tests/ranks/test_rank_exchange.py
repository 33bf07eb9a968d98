"""Holds exchanges to their laws: everybody has everybody's block, in few messages; what differs is seen by all."""

from __future__ import annotations

import pytest

from autovaruna.ranks.exchange import Parts, RankExchange, keep_part
from autovaruna.ranks.transport.threads import Mailboxes
from autovaruna.session.shared_call import BatchNumbers
from tests.rank_threads import RankThread


class CountedRank(RankThread):
    """A rank whose messages are counted."""

    num_messages = num_bytes = 0

    def send_notice(self, data: bytes, destination: int) -> None:
        self.num_messages += 1
        self.num_bytes += len(data)
        super().send_notice(data, destination)


def exchanged(
    digests: list[tuple[int, int]], flags: list[int], blocks: list[bytes | None]
) -> list[tuple[CountedRank, RankExchange]]:
    """Returns the ranks with their exchanges, which are done."""
    mailboxes = Mailboxes(len(digests))
    ranks = [(CountedRank(rank, mailboxes), Parts({})) for rank in range(len(digests))]
    values = zip(ranks, digests, flags, blocks, strict=True)
    going = [(rank, parts, RankExchange(rank, parts, 1, *given)) for (rank, parts), *given in values]
    is_done = False
    while not is_done:
        for rank, parts, _ in going:
            assert all(keep_part(data, parts) for _, data in rank.poll_notices())
        is_done = not [each for *_, each in going if not each.is_done()]
    return [(rank, exchange) for rank, _, exchange in going]


def test_a_thousand_ranks_tell_their_samples_and_totals_in_ten_messages_of_few_bytes() -> None:
    blocks: list[bytes | None] = [BatchNumbers(8, (), [1000 + rank, 0.5]).to_bytes() for rank in range(1024)]
    for rank, exchange in exchanged([(1, 2)] * 1024, [0] * 1024, blocks)[::100]:
        assert rank.num_messages == 10 and rank.num_bytes < 34_000
        assert BatchNumbers.of_bytes(exchange.blocks()[700]) == BatchNumbers(8, (), [1700, 0.5])


@pytest.mark.parametrize("totals", [None, [], [3, 2.5, [1, 2], [[1.5, 2.0], [3.0, 4.0]], [True, False], 1j, -(2**63)]])
def test_totals_come_as_they_went(totals: list[object] | None) -> None:
    numbers = BatchNumbers(7, (1, 2**32), totals)
    assert BatchNumbers.of_bytes(numbers.to_bytes()) == numbers
