"""Tensors through torch.distributed: with gloo here, by the code that drives NCCL on GPUs."""

from __future__ import annotations

import pytest
import torch

from autovaruna.errors import ConfigError, RankError
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.profiler.records import LinkCost
from autovaruna.runtime.transport.torch_channel import lacking_for_nccl, open_channel, open_to_measure, pairs_of
from autovaruna.runtime.world import World
from autovaruna.session.machine import measure_links, measure_sums
from tests.catalogue import PLAIN
from tests.ranks import run_ranks
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
DTYPES += [torch.complex64]


def plan_on(*stage_ranks: tuple[int, ...]) -> Plan:
    """Returns a plan on these ranks."""
    stages = tuple(StagePlan((i,), ranks, False, 1, 1.0, 2.0) for i, ranks in enumerate(stage_ranks))
    return Plan(stages, 1 + max(map(max, stage_ranks)), 4, 1.0, "1f1b")


def gloo(world: World) -> World:
    """Connects two ranks both ways."""
    open_channel("gloo", plan_on((0,), (1,)), world, CPU)
    return world


def test_tensors_of_every_dtype_and_of_no_elements_arrive() -> None:
    def talk(world: World) -> list[torch.Tensor]:
        gloo(world)
        sent = [torch.randn(3, 2).to(dtype) for dtype in DTYPES] + [torch.empty(0)]
        if world.rank == 0:
            world.send(sent, 1, 7).wait()
            return sent
        buffers = [torch.empty_like(tensor) for tensor in sent]
        world.receive(buffers, 0, 7).wait()
        return buffers

    sent, received = run_ranks(2, talk)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_both_may_send_first_and_take_in_another_order() -> None:
    """The way to hang with NCCL: everything is sent before anything is received, and is wanted the other way round."""

    def talk(world: World) -> list[float]:
        gloo(world)
        other = 1 - world.rank
        for tag in range(5):
            world.send([torch.full((1000,), float(10 * world.rank + tag))], other, tag)
        found = []
        for tag in reversed(range(5)):
            buffer = torch.empty(1000)
            world.receive([buffer], other, tag).wait()
            found.append(float(buffer[0]))
        return found

    assert run_ranks(2, talk) == [[14, 13, 12, 11, 10], [4, 3, 2, 1, 0]]


def test_receives_posted_ahead_take_messages_in_order() -> None:
    def talk(world: World) -> list[int]:
        gloo(world)
        if world.rank == 0:
            for i in range(20):
                world.send([torch.tensor([i])], 1, 0)
            return []
        buffers = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
        for pending in [world.receive([buffer], 0, 0) for buffer in buffers]:
            pending.wait()
        return [int(buffer) for buffer in buffers]

    assert run_ranks(2, talk)[1] == list(range(20))


def test_a_message_of_another_size_is_an_error() -> None:
    def talk(world: World) -> None:
        gloo(world)
        if world.rank == 0:
            world.send([torch.zeros(3)], 1, 0).wait()
        else:
            world.receive([torch.zeros(4)], 0, 0).wait()

    with pytest.raises(RankError, match="12 bytes where 16 were expected"):
        run_ranks(2, talk)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("stage_ranks", [((0,), (1,)), ((0, 1), (2,)), ((0, 1),)])
def test_training_through_gloo_is_training(stage_ranks: tuple[tuple[int, ...], ...], is_shared: bool) -> None:
    case = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
    setup = Setup(stage_ranks, 4, settings={"channel": "gloo", "shard_optimizer": is_shared})
    sizes = [[2] * setup.world_size] * 2
    batches = [case.batch(2 * setup.world_size, step) for step in range(2)]
    compare(train(case, setup, batches, sgd, sizes), plain_steps(case, batches, sgd))


def test_links_and_sums_are_measured_the_way_that_tensors_will_take() -> None:
    def measure(world: World) -> tuple[list[str], LinkCost, LinkCost]:
        open_to_measure("gloo", world, CPU)
        taken: list[str] = []
        carrier = world.carrier
        assert carrier is not None
        for name in ("post_send", "start_all_reduce"):
            act = getattr(carrier, name)
            setattr(carrier, name, lambda *args, act=act, name=name: taken.append(name) or act(*args))
        link, _ = measure_links(world, CPU)
        sums = measure_sums(world, [1 << 20], CPU)
        open_channel("gloo", plan_on((0, 1), (2,)), world, CPU)  # the same one goes on
        assert world.carrier is carrier and carrier.sends_to(2 - world.rank // 2)
        return sorted(set(taken)), link, sums

    for taken, link, sums in run_ranks(3, measure):
        assert taken == ["post_send", "start_all_reduce"]
        assert 0 < link.latency_seconds < 1 and 0 < link.bytes_per_second < float("inf")
        assert 0 < sums.bytes_per_second < float("inf")


def test_nccl_is_refused_without_a_gpu_for_each_rank() -> None:
    def choose(world: World) -> list[str]:
        with pytest.raises(ConfigError, match="rank 0 computes on cpu"):
            open_channel("nccl", plan_on((0,), (1,)), world, CPU)
        return lacking_for_nccl(world, CPU)

    assert all(any("cpu" in reason for reason in each) for each in run_ranks(2, choose))


def test_pairs_are_those_that_the_plan_lets_talk() -> None:
    assert set(pairs_of(plan_on((0, 1), (2, 3)))) == {(0, 2), (2, 0), (1, 3), (3, 1)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_training_through_nccl_is_training() -> None:
    case = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
    setup = Setup(((0,), (1,)), 4, settings={"channel": "nccl"})
    batches = [case.batch(4, 0)]
    compare(train(case, setup, batches, sgd, [[2, 2]]), plain_steps(case, batches, sgd))
