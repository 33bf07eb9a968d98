"""Tensors through torch.distributed: with gloo here, by the code that drives NCCL on GPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from autovaruna.errors import ConfigError
from autovaruna.planner.records import Plan, StagePlan
from autovaruna.profiler.cache import LinkCache
from autovaruna.profiler.records import LinkCost
from autovaruna.ranks.torch_channel import lacking_for_nccl, open_channel, open_to_measure
from autovaruna.ranks.world import World
from autovaruna.session.links import measure_links, measure_sums
from tests.catalogue import DEVICE, PLAIN
from tests.rank_threads import run_ranks
from tests.ranks.world_laws import LAWS
from tests.reference import compare, plain_steps, sgd
from tests.session.training import Setup, train

CPU = torch.device("cpu")
CASE = next(case for case in PLAIN if case.max_stages >= 4).without_dropout()
LAWS_OF_MESSAGES = (
    *("sends_every_dtype_in_a_ring", "sends_nothing", "keeps_the_order_sent", "sends_objects"),
    *("forgets_finished_sends", "refuses_another_size"),
)


def plan_on(*stage_ranks: tuple[int, ...]) -> Plan:
    """Returns a plan on these ranks."""
    stages = tuple(StagePlan((i,), ranks, False, 1, 1.0, 2.0) for i, ranks in enumerate(stage_ranks))
    return Plan(stages, 1 + max(map(max, stage_ranks)), 4, 1.0, "1f1b")


def open_for(setting: str, plan: Plan, world: World, device: torch.device) -> None:
    open_channel(setting, set(plan.pairs()), plan.groups(), world, device)


def gloo(world: World) -> World:
    """Connects two ranks both ways."""
    open_for("gloo", plan_on((0,), (1,)), world, CPU)
    return world


@pytest.mark.parametrize("law", LAWS_OF_MESSAGES)
def test_law(law: str) -> None:
    run_ranks(2, lambda world: LAWS[law](gloo(world)))


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


@pytest.mark.skipif(DEVICE.type == "cuda", reason="gloo carries tensors on the CPU alone")
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("stage_ranks", [((0,), (1,)), ((0, 1), (2,)), ((0, 1),)])
def test_training_through_gloo_is_training(stage_ranks: tuple[tuple[int, ...], ...], is_shared: bool) -> None:
    setup = Setup(stage_ranks, 4, settings={"channel": "gloo", "shard_optimizer": is_shared})
    sizes = [[2] * setup.world_size] * 2
    batches = [CASE.batch(2 * setup.world_size, step) for step in range(2)]
    compare(train(CASE, setup, batches, sgd, sizes), plain_steps(CASE, batches, sgd))


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
        open_for("gloo", plan_on((0, 1), (2,)), world, CPU)  # the same one goes on
        assert world.carrier is carrier and carrier.sends_to(2 - world.rank // 2)
        return sorted(set(taken)), link, sums

    for taken, link, sums in run_ranks(3, measure):
        assert taken == ["post_send", "start_all_reduce"]
        assert 0 < link.latency_seconds < 1 and 0 < link.bytes_per_second < float("inf")
        assert 0 < sums.bytes_per_second < float("inf")


def test_what_a_message_takes_of_a_processor_is_measured_between_hosts_alone() -> None:
    def measure(world: World) -> tuple[LinkCost, LinkCost]:
        return measure_links(world, CPU)

    for local, remote in run_ranks(3, measure, hosts="aab"):
        assert local.busy_seconds_per_byte == 0.0 <= remote.busy_seconds_per_byte < 1e-7


def test_nccl_is_refused_without_a_gpu_for_each_rank() -> None:
    def choose(world: World) -> list[str]:
        with pytest.raises(ConfigError, match="rank 0 computes on cpu"):
            open_for("nccl", plan_on((0,), (1,)), world, CPU)
        return lacking_for_nccl(world, CPU)

    assert all(any("cpu" in reason for reason in each) for each in run_ranks(2, choose))


def test_gloo_is_refused_for_tensors_on_a_gpu() -> None:
    """The story: on a GPU, gloo sent from addresses that the host does not have, and the process was aborted."""

    def choose(world: World) -> None:
        device = torch.device("cuda", 0) if world.rank else CPU
        with pytest.raises(ConfigError, match=r"gloo.*rank 1 computes on cuda\. Pass channel='mpi'"):
            open_for("gloo", plan_on((0,), (1,)), world, device)

    run_ranks(2, choose)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_training_through_nccl_is_training() -> None:
    setup = Setup(((0,), (1,)), 4, settings={"channel": "nccl"})
    batches = [CASE.batch(4, 0)]
    compare(train(CASE, setup, batches, sgd, [[2, 2]]), plain_steps(CASE, batches, sgd))


def test_links_between_hosts_are_measured_once_and_any_rank_that_has_them_tells_all(tmp_path: Path) -> None:
    """Rank 2 is the second of its host and reads no cache; later, rank 0 has none either."""

    def measure(world: World, reading: tuple[int, ...]) -> tuple[LinkCost, LinkCost]:
        world.hosts = ("a", "b", "b")
        cache = LinkCache(tmp_path / str(world.rank)) if world.rank in reading else None
        _, remote = measure_links(world, CPU, cache)
        return remote, measure_sums(world, [1 << 20], CPU, cache)

    first = run_ranks(3, partial(measure, reading=(0, 1)))
    assert run_ranks(3, partial(measure, reading=(1,))) == first == [first[0]] * 3
    assert run_ranks(3, partial(measure, reading=())) != first


def test_what_sums_take_is_of_the_gradients_that_were_summed(tmp_path: Path) -> None:
    def measure(world: World) -> list[LinkCost]:
        world.hosts = ("a", "b")
        cache = LinkCache(tmp_path)
        return [measure_sums(world, [size], CPU, cache) for size in (1 << 10, 1 << 20, 1 << 10)]

    for small, large, again in run_ranks(2, measure):
        assert small == again != large
