"""PyTorch's threads are as many as the cores that the process may use."""

import os

import pytest
import torch

from app.engine import host_cores as cores
from app.engine.comm.comm import Meeting
from app.engine.comm.process_group import start_process_group


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Eight processors on four cores, of which the process may use the first six."""
    for cpu in range(8):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path / "cgroup"


def test_two_processors_of_one_core_count_once(host, monkeypatch):
    assert cores.num_own_cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    assert cores.num_own_cores() == 1


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 4), ("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 4)]
)
def test_a_container_has_no_more_than_its_share(host, quota, expected):
    (host / "cpu.max").write_text(f"{quota}\n")
    assert cores.num_own_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("250000", 3)])
def test_a_container_of_cgroup_v1_has_its_share_too(host, quota, expected):
    (host / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (host / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.num_own_cores() == expected


@pytest.mark.parametrize("libraries", ["gloo", "cpu:gloo,npu:hccl"])
def test_ranks_of_a_host_divide_its_threads_whatever_their_devices(libraries, monkeypatch, tmp_path):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 96)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    start_process_group(Meeting(0, 8, tmp_path / "store", 60), libraries)
    assert chosen == [12]


@pytest.mark.parametrize(("variable", "threads", "expected"), [(None, 6, 4), (None, 2, 2), ("6", 6, 6)])
def test_threads_are_the_cores_unless_the_user_says_how_many(host, monkeypatch, variable, threads, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    chosen = [threads]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    cores.use_own_cores()
    assert chosen[-1] == expected
