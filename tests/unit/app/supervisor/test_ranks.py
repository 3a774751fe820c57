"""Guards the plan of several ranks: a process each, near its GPU, never more than there are GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.supervisor.core_claims import OtherInstance
from app.supervisor.expert_placement import NodeCores
from app.supervisor.health import GrpcProbe
from app.supervisor.placement import Gpu, find_gpus, place_ranks, rank_settings
from app.supervisor.plan import ENGINE_HEALTH, plan_ranks
from gpu_service.assembly.process import local_rank
from moebius.config import GpuConfig, MoebiusConfig, ParallelConfig
from moebius.config.loader import load_config
from moebius.errors import ConfigError
from tests.unit.app.supervisor.test_plan import model, planned

__all__ = ["model"]
NODES = {0: NodeCores((0, 1, 2), ((0,), (1,), (2,))), 1: NodeCores((3, 4, 5), ((3,), (4,), (5,)))}
ONE_NODE = {0: NodeCores((0, 1, 2, 3), ((0, 2), (1, 3)))}


def config(tp: int, pp: int = 1, **gpu: object) -> MoebiusConfig:
    """Returns the settings for a number of ranks."""
    return MoebiusConfig(
        gpu=GpuConfig.model_validate(gpu),
        parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
    )


def test_each_rank_is_near_its_gpu() -> None:
    """CPUs of the GPU's node; all of them where the node is not known or there is only one."""
    placed = place_ranks(config(2), [Gpu(1), Gpu(0)], NODES)
    assert [(rank.name, rank.cpus) for rank in placed] == [("gpu", (3, 4, 5)), ("gpu-1", (0, 1, 2))]
    assert [rank.cpus for rank in place_ranks(config(2), [Gpu(-1), Gpu(0)], NODES)] == [(), (0, 1, 2)]
    assert [rank.cpus for rank in place_ranks(config(2), [Gpu(0), Gpu(0)], ONE_NODE)] == [(), ()]


def test_more_ranks_than_gpus_are_refused() -> None:
    """Both sizes are named; on a CPU ranks share the cores instead."""
    with pytest.raises(ConfigError, match=r"2 × pipeline_parallel_size 2 are 4 ranks, .* 3 GPUs"):
        place_ranks(config(2, 2), [Gpu(0)] * 3, NODES)
    placed = place_ranks(config(2, device="cpu"), [Gpu(0)], NODES)
    assert [rank.threads for rank in placed] == [3, 3]
    assert [rank.threads for rank in place_ranks(config(1, gpu_threads=5), [Gpu(0)], NODES)] == [5]


def test_ranks_on_cpus_have_the_cores_that_other_instances_leave() -> None:
    """A thread for each physical core, and no rank runs on CPUs of another instance."""
    placed = place_ranks(config(2, device="cpu"), [], ONE_NODE)
    assert [(rank.threads, rank.cpus) for rank in placed] == [(1, ()), (1, ())]
    left = {0: ONE_NODE[0].without([OtherInstance("port 8000", frozenset((0, 2)))], 0)}
    (alone,) = place_ranks(config(1, device="cpu"), [], left)
    assert alone.cpus == (1, 3)


def test_gpus_are_found_in_the_kernels_files(tmp_path: Path) -> None:
    """Control devices are no GPUs; nodes are unknown when a container hides some of the GPUs."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for address, node in (("0000:3B:00.0", "0"), ("0000:af:00.0", "1")):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address.lower()).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address.lower() / "numa_node").write_text(f"{node}\n")
    assert find_gpus(tmp_path) == (Gpu(0), Gpu(1))
    (tmp_path / "dev" / "nvidia1").unlink()
    assert find_gpus(tmp_path) == (Gpu(-1),)
    assert find_gpus(tmp_path / "nothing") == ()


def test_all_ranks_are_planned_as_one_group(model: Path) -> None:
    """Same settings and rendezvous; rank 0 serves, stops first, and its readiness is everybody's."""
    sizes = {"tensor_parallel_size": "2", "pipeline_parallel_size": "2", "device": "cpu"}
    serve_plan, configs = planned(
        model, expert_transport="local", expert_metrics_port="0", gpu_metrics_port="9500", **sizes
    )
    names = ["gpu", "gpu-1", "gpu-2", "gpu-3"]
    assert set(configs) == {*names, "gateway"}
    assert [configs[name].parallel.rank for name in names] == [0, 1, 2, 3]
    assert len({configs[name].parallel.rank_address for name in names}) == 1
    assert configs["gpu"].parallel.rank_address.startswith("127.0.0.1:")
    assert [configs[name].gpu.gpu_metrics_port for name in names] == [9500, 0, 0, 0]
    specs = {spec.name: spec for spec in serve_plan.plan.processes}
    assert {specs[name].group for name in names} == {"ranks"}
    assert len({specs[name].probe for name in names}) == 1
    stages = [specs[name].stop_stage for name in ("gateway", "gpu", "gpu-1")]
    assert stages == sorted(set(stages))
    alone, _ = planned(model, expert_transport="local")
    assert [spec.group for spec in alone.plan.processes] == ["", ""]


def test_hosts_start_their_own_ranks(model: Path) -> None:
    """Each host starts as many; GPUs are counted from 0 on every host, and only rank 0 is probed."""
    flags = {"model": str(model), "device": "cpu", "tensor_parallel_size": "4", "rank_hosts": "2"}
    flags |= {
        "gpu_metrics_port": "9401",
        "rank_address": "leader:29500",
        "gpu_address": "0.0.0.0:50051",
        "state_dir": str(model.parent / "s"),
    }
    first, second = (plan_ranks(load_config(None, flags | {"host_index": str(index)})) for index in (0, 1))
    assert [spec.name for spec in first.plan.processes] == ["gpu", "gpu-1"]
    assert [spec.name for spec in second.plan.processes] == ["gpu-2", "gpu-3"]
    assert {spec.probe for spec in second.plan.processes} == {GrpcProbe("leader:50051", ENGINE_HEALTH)}
    assert [spec.ends_with_leader for spec in (*first.plan.processes, *second.plan.processes)] == [
        False,
        False,
        True,
        True,
    ]
    placed = place_ranks(second.config, [Gpu(1), Gpu(0)], NODES)
    assert [rank.rank for rank in placed] == [2, 3]
    assert [local_rank(rank_settings(second.config, one).parallel) for one in placed] == [0, 1]
    # One process of each host answers its kubelet's probes.
    ports = [rank_settings(second.config, one).gpu.gpu_metrics_port for one in placed]
    assert ports == [second.config.gpu.gpu_metrics_port, 0]
    with pytest.raises(ConfigError, match="4 ranks, rank_hosts 3"):
        plan_ranks(load_config(None, flags | {"rank_hosts": "3"}))
    with pytest.raises(ConfigError, match="rank_address: empty"):
        plan_ranks(load_config(None, flags | {"rank_address": ""}))
