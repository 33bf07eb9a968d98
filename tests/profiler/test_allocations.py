"""The meter of what is allocated on the CPU: what kernels take for themselves counts, and nothing of other threads."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from autovaruna.profiler import bytes
from autovaruna.profiler.bytes import AllocationMeter

NUM_BYTES = 1 << 20


def megabyte() -> torch.Tensor:
    return torch.empty(NUM_BYTES, dtype=torch.uint8)


def test_it_finds_the_most_at_once_and_goes_on_from_what_is_there() -> None:
    before = megabyte()
    with AllocationMeter() as meter:
        first = megabyte()
        second = megabyte()
        del second
        assert meter.restart() == 2 * NUM_BYTES
        del before
        assert meter.restart() == NUM_BYTES
        del first
        assert meter.restart() == NUM_BYTES and meter.restart() == 0


def test_memory_of_a_kernel_counts() -> None:
    """An index of 32 bits is made one of 64 inside the operation, which returns one number."""
    numbers, places = torch.ones(8), torch.zeros(NUM_BYTES, dtype=torch.int32)
    known = [numbers, places]
    with bytes.meter_of(torch.device("cpu"), known) as meter:
        numbers.index_select(0, places).sum()
        peak = meter.restart()
    with bytes._OperationMeter(set()) as seen:
        torch.ones(8).sum()
        operations = seen.restart()
    assert peak >= 4 * NUM_BYTES > operations


def test_threads_do_not_see_each_other() -> None:
    found: dict[int, int] = {}

    def work(count: int) -> None:
        for _ in range(5):
            with AllocationMeter() as meter:
                held = [megabyte() for _ in range(count)]
                found[count] = meter.restart()
                del held

    threads = [Thread(target=work, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {count: count * NUM_BYTES for count in (1, 2, 3)}


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with AllocationMeter():
        megabyte()
    assert capfd.readouterr() == ("", "")


def test_a_script_that_is_profiled_stays_so() -> None:
    with torch.profiler.profile() as profiler:
        with bytes.meter_of(torch.device("cpu"), []) as meter:
            kept = torch.ones(NUM_BYTES, dtype=torch.uint8)
            assert meter.restart() == NUM_BYTES
        del kept
        torch.ones(3).exp()
    assert any(event.key == "aten::exp" for event in profiler.key_averages())
