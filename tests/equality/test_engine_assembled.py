"""Guards the assembly of an engine for a device: built whole from a configuration, it says what a CPU's says.

The device is the host here: its stream, graphs and expert client are the host's twins, everything else is
what a GPU gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from structlog.testing import capture_logs

from gpu_service import main as service
from gpu_service.assembly import build, kv_memory, rank_plan
from gpu_service.assembly import experts as expert_assembly
from gpu_service.assembly import steps as step_assembly
from gpu_service.assembly.ahead import AheadOfWake
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.engine.prompt_graphs import PromptGraphs
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.ops import backends
from moebius.config import MoebiusConfig
from moebius.models.layers.layer import Layers
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.fake_memory import GIB, FakeMemory
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import noted_replays
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("assembled")
    make_tiny_model("glm4_moe", found)
    return found


def _capturable(layers: Layers, cache: KVCache, *_: object) -> CapturableAttention:
    return CapturableAttention(layers, cache)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """From here on engines are assembled as for a GPU."""
    monkeypatch.setattr(build, "device_stream", lambda _: HostDeviceStream())
    monkeypatch.setattr(
        step_assembly, "make_attention", lambda layers, cache, *_: CapturableAttention(layers, cache)
    )
    monkeypatch.setattr(step_assembly, "CudaDeviceStream", HostDeviceStream)
    monkeypatch.setattr(step_assembly, "CudaGraphs", lambda _: RecordedOperations())
    monkeypatch.setattr(expert_assembly, "make_expert_client", lambda *_: DenseExperts(directory, 10))


def config_for(directory: Path, gpu: dict[str, Any], placement: dict[str, Any]) -> MoebiusConfig:
    """Returns a small pool, and graphs for up to four requests."""
    small: dict[str, Any] = {
        "num_pages": 96,
        "page_size": 4,
        "max_num_seqs": 6,
        "cuda_graph_max_batch_size": 4,
    }
    # Graphs are recorded from torch's operations, and hold no other kernel's.
    small["attention_backend"] = "torch"
    return MoebiusConfig.model_validate(
        {
            "model": {"model": str(directory), "dtype": "float32"},
            "gpu": small | {"device": "cpu", "gpu_threads": 1, "max_num_batched_tokens": 32} | gpu,
            "experts": {"expert_transport": "local"},
            "placement": placement,
        }
    )


def requests(namespace: str = "") -> list[Request]:
    """Returns greedy and sampled ones of different lengths; those of a namespace share prefixes."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.8}
    return [
        Request(
            f"{namespace}{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 11 * i)],
            SamplingParams(seed=i, max_tokens=8 + 2 * i, ignore_eos=True, **(sampled if i % 2 else {})),  # type: ignore[arg-type]
            cache_namespace=namespace,
        )
        for i in range(5)
    ]


def tokens(directory: Path, gpu: dict[str, Any], placement: dict[str, Any] | None = None) -> list[list[int]]:
    """Returns those of all requests at once."""
    with running_engine(config_for(directory, gpu, placement or {})) as engine:
        return engine.run(requests())


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """Returns the CPU's engine with its in-process expert client."""
    return tokens(directory, {})


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("gpu", [{}, {"cuda_graphs": False}, {"overlap_scheduling": False}], ids=str)
def test_an_assembled_device_says_what_a_cpu_says(
    directory: Path, expected: list[list[int]], gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens agree with graphs, without, and without overlap; graphs are used exactly where they are asked
    for.
    """
    replays, original = [0], DecodeGraphs.replay

    def replay(*arguments: Any) -> Any:
        replays[0] += 1
        return original(*arguments)

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    assert tokens(directory, gpu) == expected
    assert (replays[0] > 0) == (gpu != {"cuda_graphs": False})


@pytest.mark.usefixtures("device")
def test_graphs_of_prompts_are_assembled_too(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are wanted, all steps that are no decode step's are replayed. The experts here are an expert
    client's, which only a recording can hold: what a GPU's graphs need is another test's.
    """
    replayed, original = [0], PromptGraphs.replay

    def replay(*arguments: Any) -> Any:
        replayed[0] += 1
        return original(*arguments)

    monkeypatch.setattr(PromptGraphs, "replay", replay)
    monkeypatch.setattr(step_assembly, "prompt_sizes", lambda *_: [20, 32])
    assert tokens(directory, {}) == expected
    assert replayed[0] > 0


@contextmanager
def woken(directory: Path, placement: dict[str, Any]) -> Iterator[tuple[RunningEngine, Callable[[], bool]]]:
    """Runs an engine that has slept; also returns what says whether its graphs of prompts are captured."""
    config = config_for(directory, {}, placement)
    ahead = AheadOfWake(config)
    ahead.wake()
    with capture_logs() as logs, running_engine(config, ahead=ahead) as engine:
        yield engine, lambda: any(line["event"] == "graphs of prompts are captured" for line in logs)


@pytest.mark.usefixtures("device")
def test_an_engine_that_wakes_captures_them_late(
    directory: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps with prompts are the eager ones until it serves and is idle."""
    replayed = noted_replays(monkeypatch)
    monkeypatch.setattr(step_assembly, "prompt_sizes", lambda *_: [20, 32])
    with woken(directory, {}) as (engine, are_captured):
        assert engine.run(requests("before")) == expected
        assert not are_captured()
        assert not replayed
        engine.built.serves()
        wait_until(are_captured)
        assert engine.run(requests("after")) == expected
        assert replayed


@pytest.mark.usefixtures("device")
def test_graphs_that_record_are_captured_before(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts' choices are recorded from the start, all graphs have that in them."""
    monkeypatch.setattr(step_assembly, "prompt_sizes", lambda *_: [20, 32])
    with woken(directory, {"expert_recorder": "stat"}) as (_, are_captured):
        assert are_captured()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("placement", [{"gpu_experts_ratio": 1.0}, {"gpu_layers": "1"}], ids=str)
def test_resident_experts_are_assembled_too(
    directory: Path, expected: list[list[int]], placement: dict[str, Any]
) -> None:
    """The engine runs without any expert server when all experts are on the device, else next to one."""
    assert tokens(directory, {}, placement) == expected


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("placement", [{"gpu_experts_ratio": 1.0}, {"gpu_layers": "1"}], ids=str)
def test_decode_steps_do_not_count_residents(
    directory: Path, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of each expert of each layer in every step, it took as long as the GPU took for the step."""
    counted, original = [0], ResidentExperts.experts

    def experts(resident: ResidentExperts, layer: int) -> tuple[int, ...]:
        counted[0] += 1
        return original(resident, layer)

    monkeypatch.setattr(ResidentExperts, "experts", experts)
    with running_engine(config_for(directory, {}, placement)) as engine:
        before, counted[0] = counted[0], 0
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        engine.run([Request("r", [5, 9, 31], params)])
        assert before > 0
        assert counted[0] == 0


@pytest.mark.usefixtures("device")
def test_a_recorder_sees_steps_that_graphs_would_hide(directory: Path) -> None:
    """Started after the capture, it makes steps run eagerly until it is stopped."""
    with running_engine(config_for(directory, {}, {})) as engine:
        recorder = engine.built.recorder
        assert recorder is not None
        recorder.start("stat")
        params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
        engine.run([Request("r", [5, 9, 31], params)])
        recorder.stop()
        assert recorder.dump().steps >= 7


@pytest.mark.usefixtures("device")
def test_a_process_on_a_gpu_is_loaded_whole(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `moebius serve` loads where memory is planned: every part's metrics are exported and can be read.

    Two of them had one name, and no model was served on any GPU.
    """
    for module in (kv_memory, rank_plan):
        monkeypatch.setattr(module, "make_device_memory", lambda _: FakeMemory(8 * GIB))
    registry = CollectorRegistry(auto_describe=True)
    for name in ("register", "unregister", "collect"):
        monkeypatch.setattr(REGISTRY, name, getattr(registry, name))
    config = config_for(directory, {"kv_cache_gib": 0.01, "num_pages": None}, {"gpu_experts_ratio": 1.0})
    built, telemetry, _ = service._load(config)
    try:
        assert built.memory.ledger is not None
        assert telemetry.enabled
        names = {metric.name for metric in registry.collect()}
        assert {
            "moebius:gpu_memory_bytes",
            "moebius:gpu_pool_bytes",
            "moebius:step_predicted_seconds",
        } <= names
    finally:
        built.close()
        backends.uninstall("cpu")
