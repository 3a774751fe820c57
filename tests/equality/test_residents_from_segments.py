"""Invariant: resident experts are the same bytes from the expert servers' memory and from the checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from structlog.testing import capture_logs

from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.experts.resident.content import SlotContent, content_of
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.load import PackedMemory
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.streaming.opening import open_packed
from gpu_service.experts.streaming.segments import ExpertSegments
from moebius.config import ExpertConfig, ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.experts.slices import SliceRequest
from moebius.kernels.weight_segment import WeightSegment, segment_path
from moebius.models.identity import CHECKPOINT, identity_part
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.gguf_models import CASES
from tests.helpers.quantised_checkpoints import GptOssMoe, QuantisedMoe
from tests.helpers.tiny_models import TinyModel, write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory on tmpfs, where servers keep their experts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def configuration(model: Path, memory: Path, servers: int = 1, **changes: Any) -> MoebiusConfig:
    """Returns settings with all experts resident, unless `changes` of the placement say else."""
    dtype = changes.pop("expert_dtype", "keep")
    settings = {"split_count": servers, "expert_split": "expert", "expert_weights_dir": str(memory)}
    return MoebiusConfig(
        model=ModelConfigSection(model=str(model)),
        experts=ExpertConfig(expert_dtype=dtype, **settings),
        placement=PlacementConfig(**{"gpu_experts_ratio": 1.0, "drop_resident": "keep", **changes}),
    )


def serve(config: MoebiusConfig) -> None:
    """Loads the experts of all servers, as processes that are killed afterwards: their memory stays."""
    for index in range(config.experts.split_count):
        settings = LoadSettings(calibrate_kernels=False, expert_weights_dir=config.experts.expert_weights_dir)
        host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, settings)
        experts = config.experts.model_copy(update={"split_index": index})
        host.load(SliceRequest.from_config(config.model_copy(update={"experts": experts})))
        host.drain(60)


def fingerprint(memory: Path) -> str:
    """Returns what the servers say their checkpoint is."""
    with closing(WeightSegment.open(segment_path(str(memory), 0))) as segment:
        return identity_part(segment.identity, CHECKPOINT)


def opened(config: MoebiusConfig, parallel: ParallelContext = SOLO) -> ExpertSegments | None:
    """Returns the servers' memory if residents can be copied from it."""
    geometry = read_geometry(config.model.model)
    found = fingerprint(Path(config.experts.expert_weights_dir))
    return open_packed(config.experts, geometry.moe_layers, found, parallel)


def load(
    config: MoebiusConfig, packed: PackedMemory | None = None, parallel: ParallelContext = SOLO
) -> tuple[ResidentExperts, int]:
    """Returns the residents, and how many of them were packed already."""
    geometry = read_geometry(config.model.model)
    with capture_logs() as logs:
        resident = make_resident_experts(config, geometry, CPU, torch.float32, parallel, packed=packed)
    assert resident is not None
    resident.check_integrity()
    (line,) = [line for line in logs if line["event"] == "resident experts loaded"]
    return resident, line["packed_already"]


def assert_same(found: ResidentExperts, wanted: ResidentExperts) -> None:
    """Slots have the same bytes, which are what their checksums say."""
    for layer, slots in wanted.slots.items():
        others = found.slots[layer]
        assert others.expert_of_slot == slots.expert_of_slot
        assert torch.equal(others.weights, slots.weights)
        for slot, content in enumerate(others.contents):
            assert content is not None
            assert content.expert == slots.expert_of_slot[slot]
            assert content.matches(others.weights[slot])


def assert_copied(config: MoebiusConfig) -> None:
    """All residents come from the servers' memory, and are what the checkpoint gives."""
    serve(config)
    wanted, packed_already = load(config)
    assert packed_already == 0
    segments = opened(config)
    assert segments is not None
    found, copied = load(config, segments)
    assert copied == found.num_experts > 0
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "encoder",
    ["float32", "bfloat16", "fp8_block", "fp8_tensor", "int8_g128", "compressed_int4_g32",
     "awq_int4_g32", "gptq_int4_g64_symmetric", "nvfp4"],
)  # fmt: skip
def test_stored_formats(encoder: str, tmp_path: Path, memory: Path) -> None:
    """Floats, fp8 of two kinds, int8, int4 of three checkpoint layouts, nvfp4: kept as they are."""
    assert_copied(configuration(QuantisedMoe(encoder).write(tmp_path), memory))


@pytest.mark.parametrize("up", ["", "Q6_K"])
def test_gguf(up: str, tmp_path: Path, memory: Path) -> None:
    """Q4_K; and gate, up and down of three types."""
    case = CASES["qwen3_moe"]
    reference = write_tiny_model(TinyModel(case.model_type, case.changes), tmp_path / "plain", seed=1)
    types = GgufTypes(gate_up="Q4_K", down="Q5_K" if up else "Q4_K", up=up)
    write_gguf(reference, tmp_path / "model.gguf", types)
    assert_copied(configuration(tmp_path / "model.gguf", memory))


def test_biases(tmp_path: Path, memory: Path) -> None:
    """gpt-oss: mxfp4, interleaved gate and up, biases."""
    assert_copied(configuration(GptOssMoe().write(tmp_path), memory))


@pytest.mark.parametrize("expert_dtype", ["bfloat16", "int8", "int4"])
def test_requantised(expert_dtype: str, tmp_path: Path, memory: Path) -> None:
    """What servers requantise is what the engine would."""
    model = TinyMoe(dtype="BF16").write(tmp_path)
    assert_copied(configuration(model, memory, expert_dtype=expert_dtype))


@pytest.mark.parametrize(
    "placement", [{"gpu_experts": 3, "gpu_experts_ratio": None}, {"gpu_experts_ratio": 0.6}]
)
def test_some_of_two_servers(placement: dict[str, Any], tmp_path: Path, memory: Path) -> None:
    """Residents that do not lie side by side, in the memory of two servers with whole experts."""
    assert_copied(configuration(TinyMoe().write(tmp_path), memory, servers=2, **placement))


def test_ranks_with_whole_experts(tmp_path: Path, memory: Path) -> None:
    """Each of two ranks copies its own; one with channels of each expert finds none, and packs them."""
    config = configuration(TinyMoe().write(tmp_path), memory)
    serve(config)
    whole = [ParallelContext(rank, 2, holds_whole_experts=True) for rank in range(2)]
    for place in whole:
        segments = opened(config, place)
        assert segments is not None
        found, copied = load(config, segments, place)
        assert copied == found.num_experts
        assert_same(found, load(config, parallel=place)[0])
    assert opened(config, ParallelContext(0, 2)) is None


def test_an_altered_byte_is_found(tmp_path: Path, memory: Path) -> None:
    """An expert that differs from its checksum in the servers' memory comes from the checkpoint."""
    config = configuration(QuantisedMoe("compressed_int4_g32").write(tmp_path), memory)
    serve(config)
    segments = opened(config)
    assert segments is not None
    (stored,) = segments.stored[1]
    segments.data[0][stored.offset + 2 * stored.kind.expert_bytes + 77] ^= 4
    with capture_logs() as logs:
        geometry = read_geometry(config.model.model)
        found = make_resident_experts(config, geometry, CPU, torch.float32, packed=segments)
    assert found is not None
    noticed = [line for line in logs if "differs from its checksum" in line["event"]]
    assert [(line["layer"], line["expert"]) for line in noticed] == [(1, 2)]
    assert_same(found, load(config)[0])


class LostSegments:
    """Servers' memory that is given to other experts after some of it was read."""

    def __init__(self, segments: ExpertSegments, after: int) -> None:
        self._segments, self._left = segments, after

    def packed(
        self, layer: int, expert: int, kind: LayerFormat
    ) -> tuple[NDArray[np.uint8], SlotContent] | None:
        """Returns wrong bytes with a checksum that fits them, once the number of reads is used up."""
        self._left -= 1
        found = self._segments.packed(layer, expert, kind)
        if found is None or self._left >= 0:
            return found
        wrong = torch.zeros(kind.expert_bytes, dtype=torch.uint8)
        return wrong.numpy(), content_of(expert, wrong)

    def problem(self) -> str:
        """Returns why, from then on."""
        return "expert server 0 has reloaded its experts" if self._left < 0 else ""


@pytest.mark.parametrize("after", [0, 4])
def test_servers_that_reload_meanwhile(after: int, tmp_path: Path, memory: Path) -> None:
    """Nothing that was read since is kept, whatever its checksum says; what was read before stays."""
    config = configuration(TinyMoe().write(tmp_path), memory)
    serve(config)
    segments = opened(config)
    assert segments is not None
    found, _ = load(config, LostSegments(segments, after))
    assert_same(found, load(config)[0])


def without_memory(config: MoebiusConfig) -> MoebiusConfig:
    """Servers of another host, or with memory of their own."""
    return config.model_copy(update={"experts": config.experts.model_copy(update={"expert_weights_dir": ""})})


def incomplete(config: MoebiusConfig) -> MoebiusConfig:
    """A server that has not loaded everything: as it would say of a damaged expert."""
    with closing(WeightSegment.open(segment_path(config.experts.expert_weights_dir, 0))) as segment:
        segment._header["complete"] = 0
    return config


def other_dtype(config: MoebiusConfig) -> MoebiusConfig:
    """Servers that requantise."""
    return config.model_copy(update={"experts": config.experts.model_copy(update={"expert_dtype": "int8"})})


def missing(config: MoebiusConfig) -> MoebiusConfig:
    """One of the servers never came."""
    return config.model_copy(update={"experts": config.experts.model_copy(update={"split_count": 2})})


@pytest.mark.parametrize("change", [without_memory, incomplete, other_dtype, missing])
def test_memory_that_is_not_used(
    change: Callable[[MoebiusConfig], MoebiusConfig], tmp_path: Path, memory: Path
) -> None:
    """Without servers that have everything loaded, and as the engine wants it, the checkpoint is read."""
    config = configuration(TinyMoe().write(tmp_path), memory)
    serve(config)
    found, changed = fingerprint(memory), change(config)
    layers = read_geometry(config.model.model).moe_layers
    assert open_packed(changed.experts, layers, found, SOLO) is None
    assert open_packed(config.experts, layers, "another checkpoint's", SOLO) is None


def test_other_formats_are_not_used(tmp_path: Path, memory: Path) -> None:
    """A bfloat16 engine holds float32 experts in bfloat16, as no server does: they are packed."""
    config = configuration(TinyMoe().write(tmp_path), memory)
    serve(config)
    geometry = read_geometry(config.model.model)
    with capture_logs() as logs:
        make_resident_experts(config, geometry, CPU, torch.bfloat16, packed=opened(config))
    assert [line["packed_already"] for line in logs if "packed_already" in line] == [0]
