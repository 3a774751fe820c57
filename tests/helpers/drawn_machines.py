"""A machine that is only numbers, on which `moebius serve` decides all that comes before a process starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest
import torch

from app import cli, cli_options
from app.commands import running as running_command
from app.commands import serve as serve_command
from app.doctor.facts import Volume
from app.planning import fill
from app.planning.fill import DeviceUse
from app.supervisor import cold_experts, core_division, placement, plan, shortages, tables
from app.supervisor.expert_placement import NodeCores
from app.supervisor.placement import Gpu
from app.supervisor.plan import ServePlan
from gpu_service.assembly import build
from gpu_service.assembly.experts import rank_moe
from gpu_service.core.parallel import ParallelContext
from gpu_service.parallel.group import SoloGroup
from moebius.config import MoebiusConfig
from moebius.config.loader import load_config
from moebius.models.served import read_served_model, with_drafts
from tests.helpers.fake_memory import FakeMemory


@dataclass(frozen=True)
class Machine:
    """What a driver, the kernel and the processor say; bytes."""

    gpu_bytes: tuple[int, ...]  # Of each GPU, what processes may have together.
    ram_bytes: int
    nodes: int
    cores: int  # Of each node.
    gpu_names: tuple[str, ...] = ()  # Empty: the driver does not say.

    @property
    def num_gpus(self) -> int:
        return len(self.gpu_bytes)


class Numbers:
    """What ranks in threads agree on."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self._values = [0] * count

    def minimum(self, rank: int, value: int) -> int:
        """Returns the smallest of all ranks' values, once all have called it."""
        self._values[rank] = value
        self.barrier.wait()
        found = min(self._values)
        self.barrier.wait()
        return found


class Rank(SoloGroup):
    """A rank in a thread of its own, without collectives."""

    def __init__(self, parallel: ParallelContext, numbers: Numbers) -> None:
        self.parallel = parallel
        self._numbers = numbers

    def minimum(self, what: str, value: int) -> int:
        return self._numbers.minimum(self.parallel.rank, value)


class InThisProcess:
    """A pool of processes that computes where fakes are seen."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done


def install(monkeypatch: pytest.MonkeyPatch, machine: Machine, directory: Path) -> None:
    """Makes every question that `serve` asks of the machine one about this one; files go to `directory`."""
    devices = directory / "dev"
    devices.mkdir(parents=True, exist_ok=True)
    for number in range(machine.num_gpus):
        (devices / f"nvidia{number}").touch()
    gpus = (Gpu(-1),) * machine.num_gpus
    cores = tuple((cpu,) for cpu in range(machine.cores * machine.nodes))
    nodes = {
        (node if machine.nodes > 1 else -1): NodeCores(
            tuple(cpu for (cpu,) in cores[node * machine.cores : (node + 1) * machine.cores]),
            cores[node * machine.cores : (node + 1) * machine.cores],
        )
        for node in range(machine.nodes)
    }
    uses = tuple(DeviceUse(nbytes, nbytes) for nbytes in machine.gpu_bytes)
    shared = Volume(Path("/dev/shm"), True, True, "tmpfs", machine.ram_bytes // 2, machine.ram_bytes // 2)
    monkeypatch.setattr(cli_options, "DEVICES", devices)
    for module in (placement, plan, cold_experts, tables):
        monkeypatch.setattr(module, "find_gpus", lambda root=None: gpus)
    monkeypatch.setattr(fill, "gpu_memory", lambda: uses)
    monkeypatch.setattr(fill, "gpu_names", lambda: list(machine.gpu_names))
    monkeypatch.setattr(fill, "available_memory", lambda: machine.ram_bytes)
    monkeypatch.setattr(fill, "ProcessPoolExecutor", InThisProcess)
    topology = SimpleNamespace(
        server_nodes=lambda: list(nodes), recommended_threads=lambda: machine.cores * machine.nodes
    )
    monkeypatch.setattr("moebius.host.topology.Topology.detect", lambda *_: topology)
    monkeypatch.setattr(core_division, "usable_nodes", lambda: (dict(nodes), None))
    monkeypatch.setattr(core_division, "DIRECTORY", directory / "cores")
    monkeypatch.setattr(core_division, "measure_missing", lambda *_: None)
    monkeypatch.setattr(shortages, "read_volume", lambda path: replace(shared, path=path))
    monkeypatch.setattr(shortages, "read_memory_limit", lambda root: None)
    monkeypatch.setattr(shortages, "total_memory", lambda root: machine.ram_bytes)
    sizes = machine.gpu_bytes
    monkeypatch.setattr(
        "gpu_service.assembly.rank_plan.make_device_memory",
        lambda device: FakeMemory(sizes[device.index]) if device.type == "cuda" else None,
    )
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=sizes[device.index]),
    )
    monkeypatch.setattr("gpu_service.experts.streaming.make.may_be_limited", lambda: False)
    # Files of text are other tests' concern; nothing is started.
    monkeypatch.setattr(serve_command, "check_files", lambda *_, **__: None)


class Planned(Exception):
    """Raised in place of starting processes."""

    def __init__(self, serve_plan: ServePlan) -> None:
        self.serve_plan = serve_plan


def serve(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, directory: Path, words: list[str]
) -> list[MoebiusConfig]:
    """Runs a command line of `moebius serve` up to what every process decides before it loads.

    Returns the settings that each engine chose. Raises what they would refuse with.
    """
    install(monkeypatch, machine, directory)

    @contextlib.contextmanager
    def capture(serve_plan: ServePlan, *_: object) -> Iterator[None]:
        raise Planned(serve_plan)
        yield  # which makes it a generator

    monkeypatch.setattr(running_command, "running", capture)
    assert words[:2] == ["moebius", "serve"]
    arguments = [*words[1:], "--port", "0", "--state-dir", str(directory / "s")]
    try:
        _serve_command().main(arguments, standalone_mode=False)
    except Planned as found:
        return _engines(found.serve_plan, directory, machine.num_gpus > 0)
    raise AssertionError("serve came back without having planned anything")


@cache
def _serve_command() -> Any:
    """Returns the real command line, whose hundreds of options take a while to build."""
    return cli._command("serve")


def _engines(serve_plan: ServePlan, directory: Path, has_gpus: bool) -> list[MoebiusConfig]:
    ranks = []
    for path, text in serve_plan.plan.files:
        file = directory / path.name
        file.write_text(text)
        config = load_config(file)
        if path.stem.startswith("gpu"):
            ranks.append(config)
    numbers = Numbers(len(ranks))

    def chosen(config: MoebiusConfig) -> MoebiusConfig:
        try:
            return _chosen(config, has_gpus, numbers)
        except BaseException:
            numbers.barrier.abort()
            raise

    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        done = [pool.submit(chosen, config) for config in ranks]
    problems = [problem for each in done if (problem := each.exception()) is not None]
    # Ranks that waited for one that refuses have no reason of their own.
    own = [problem for problem in problems if not isinstance(problem, threading.BrokenBarrierError)]
    for problem in own or problems:
        raise problem
    return [each.result() for each in done]


def _chosen(config: MoebiusConfig, has_gpus: bool, numbers: Numbers) -> MoebiusConfig:
    """Returns the settings as `build_engine` has them before it loads."""
    config = with_drafts(config)
    parallel = ParallelContext.place(config.parallel, config.parallel.rank)
    model_config, group = read_served_model(config), Rank(parallel, numbers)
    on_gpu = has_gpus and config.gpu.device != "cpu"
    moe = rank_moe(config, model_config, group)
    # Without CUDA no tensor can be named one of a GPU's: the composed model has no memory until it is loaded.
    model = build._shaped_model(config, model_config, torch.device("meta" if on_gpu else "cpu"), group)
    model.device = torch.device("cuda", parallel.rank) if on_gpu else torch.device("cpu")
    memory, config, _ = build._plan_memory(config, model, moe, group)
    if not on_gpu:
        memory.num_pages(model, None, None)
    return config
