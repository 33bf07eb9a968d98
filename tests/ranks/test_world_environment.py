"""Holds how a process finds out its ranks and its cores, and how ranks end."""

import pytest
import torch
import torch.distributed as dist

from autovaruna.errors import ConfigError
from autovaruna.interception.ending import status_of
from autovaruna.ranks.environment import count_cores, count_sharing, get_world, num_ranks_in, share_threads
from autovaruna.ranks.torch_channel import neighbours
from autovaruna.session import links


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_launchers_are_recognised(name: str) -> None:
    assert num_ranks_in({name: "3"}) == 3
    assert num_ranks_in({"PATH": "/bin", name: ""}) == 1


def test_a_process_group_of_some_of_the_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, all ranks trained one model, where the script meant one for each group."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_backend": "gloo"}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    for name, text in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=r"has 2 processes, but the launcher started 4.*--nproc-per-node 2"):
        get_world()


def test_ranks_share_cores_with_those_whose_cores_overlap() -> None:
    places = [("a", [0, 1]), ("a", [1, 2]), ("a", [3]), ("b", [0, 1])]
    assert [count_sharing(places, rank) for rank in range(4)] == [2, 2, 1, 1]
    bound = [("a", (0,)), ("a", (1,)), ("b", (0,))]  # as mpirun binds two ranks of a host
    assert [count_cores(bound, rank) for rank in range(3)] == [2, 2, 1]


def test_the_users_number_of_threads_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        share_threads(1, 4)
        assert torch.get_num_threads() == 1
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        share_threads(8, 2)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("argument", "status"), [(None, 0), (0, 0), (3, 3), (256, 0), ("message", 1), (False, 0)])
def test_exit_status_is_pythons(argument: object, status: int) -> None:
    assert status_of(argument) == status


def test_every_kind_of_link_is_measured_and_no_rank_twice_at_once() -> None:
    pairs = neighbours(("a", "b", "a", "b"))
    assert pairs == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    rounds = links.rounds_of(pairs)
    assert sorted(pair for some in rounds for pair in some) == pairs
    for some in rounds:
        ranks = [rank for pair in some for rank in pair]
        assert len(ranks) == len(set(ranks))
