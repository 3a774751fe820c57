"""Resident experts on a GPU: kernels against the float32 reference, in graphs, and in any placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.device.stream import device_stream, stream_of
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.resident.experts import LayerSlots, TorchResidentKernels
from gpu_service.experts.resident.kept import KeptExperts, keep_residents
from gpu_service.experts.resident.make import make_kernels, make_resident_experts
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.experts.streaming.ring import transfer_device
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests import tolerances
from tests.equality.test_resident_experts import configuration, hybrid
from tests.equality.test_resident_experts import routed as routed_layer
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, QuantisedMoe
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, resident_layer, routed
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.gpu
REAL = Shape(hidden=2048, intermediate=768, experts=64, top_k=8)
ROWS = (1, 2, 7, 8, 9, 33, 300, 700)


def kernels(shape: Shape) -> Any:
    """Triton's."""
    found = make_kernels(shape.geometry, torch.device("cuda"))
    assert found.captures
    return found


def error(shape: Shape, slots: LayerSlots, rows: int, dtype: torch.dtype) -> float:
    """Root mean square of the difference from the float32 reference, over that of the reference."""
    hidden_states, ids, weights = routed(shape, rows, device="cuda", dtype=dtype)
    ours, reference = kernels(shape), TorchResidentKernels(shape.geometry)
    assert torch.equal(ours.cpu_ids(slots, ids), reference.cpu_ids(slots, ids))
    partial = torch.randn(rows, shape.hidden, device="cuda")
    expected = reference.forward(slots, hidden_states, ids, weights, None)
    found = ours.forward(slots, hidden_states, ids, weights, partial.clone()) - partial
    scale = expected.square().mean().sqrt().clamp(min=1e-30)
    return float((found - expected).square().mean().sqrt() / scale)


@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
@pytest.mark.parametrize("shape", [Shape(), REAL], ids=["odd", "real"])
def test_bfloat16_rows(shape: Shape, weight_format: str) -> None:
    """Both ways of computing agree in every format; weights are decoded exactly, intermediate channels
    rounded once.
    """
    slots = resident_layer(shape, weight_format, (4, 1, 2, 3), "cuda")
    for rows in ROWS:
        assert error(shape, slots, rows, torch.bfloat16) < tolerances.RESIDENT_BFLOAT16, rows


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "fp8_block", "int4_g32"])
def test_float32_rows(weight_format: str) -> None:
    """A float32 model is computed in float32, not in the tensor cores' shorter one."""
    slots = resident_layer(REAL, weight_format, (4, 1, 2, 3), "cuda")
    for rows in (1, 40):
        assert error(REAL, slots, rows, torch.float32) < tolerances.RESIDENT_GPU_FLOAT32


@pytest.mark.parametrize("activation", ["silu_clamped", "gpt_oss", "clamped_silu", "relu2"])
def test_other_activations(activation: str) -> None:
    """Activations with biases give the reference's sums."""
    shape = Shape(hidden=256, intermediate=96, activation=activation, has_bias=True)
    slots = resident_layer(shape, "mxfp4", (0, 2, 4), "cuda")
    for rows in (3, 50):
        assert error(shape, slots, rows, torch.bfloat16) < tolerances.RESIDENT_BFLOAT16


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_replay_equals_eager_and_sees_replaced_slots(rows: int) -> None:
    """A captured call gives eager's bits, with new inputs and after a slot was given to another expert."""
    slots = resident_layer(REAL, "int4_g32", tuple(range(32)), "cuda")
    other = resident_layer(REAL, "int4_g32", (50,), "cuda")
    ours, stream = kernels(REAL), device_stream(torch.device("cuda"))
    hidden_states, ids, weights = routed(REAL, rows, device="cuda", dtype=torch.bfloat16)

    def compute() -> torch.Tensor:
        assert ours.cpu_ids(slots, ids).shape == ids.shape
        found: torch.Tensor = ours.forward(slots, hidden_states, ids, weights, None)
        return found

    graph = torch.cuda.CUDAGraph()
    with stream.active():
        compute()
        with torch.cuda.graph(graph):
            captured = compute()
    for step in range(3):
        fresh = routed(REAL, rows, seed=step + 1, device="cuda", dtype=torch.bfloat16)
        for target, source in zip((hidden_states, ids, weights), fresh, strict=True):
            target.copy_(source)
        if step == 2:
            slots.put(3, 50, other.weights[0])
            ids[0, 0] = 50
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        replayed = captured.clone()
        assert torch.equal(replayed, compute())


def test_results_do_not_change_from_run_to_run() -> None:
    """No sum depends on which program is faster."""
    slots = resident_layer(REAL, "int4_g32", tuple(range(60)), "cuda")
    ours = kernels(REAL)
    for rows in (4, 200):
        inputs = routed(REAL, rows, device="cuda", dtype=torch.bfloat16)
        first = ours.forward(slots, *inputs, None)
        for _ in range(5):
            assert torch.equal(ours.forward(slots, *inputs, None), first)


@pytest.mark.parametrize("encoder", QUANTIZATION_CONFIGS)
def test_placements_are_equal(encoder: str, tmp_path: Path) -> None:
    """Experts loaded from a checkpoint of each stored format, part on the GPU and part in process."""
    geometry = read_geometry(QuantisedMoe(encoder).write(tmp_path))
    local = LocalExpertClient(str(tmp_path), geometry, torch.float32)
    device = torch.device("cuda")
    for ratio in (0.4, 1.0):
        config = configuration(tmp_path, gpu_experts_ratio=ratio)
        resident = make_resident_experts(config, geometry, device, torch.float32)
        for layer in geometry.moe_layers:
            inputs = routed_layer(geometry, layer)
            expected = hybrid(local, None, layer, inputs)
            found = hybrid(local, resident, layer, tuple(t.to(device) for t in inputs)).cpu()
            assert (found - expected).abs().max() / expected.abs().max() < tolerances.RESIDENT_GPU_FLOAT32


def test_loading_is_complete_when_it_returns(tmp_path: Path) -> None:
    """Threads fill slots on the caller's stream: what follows on it sees all of them."""
    geometry = read_geometry(TinyMoe(num_experts=40, dtype="BF16").write(tmp_path))
    stream = device_stream(torch.device("cuda"))
    with stream.active():
        resident = make_resident_experts(
            configuration(tmp_path, gpu_experts=30), geometry, stream.device, torch.bfloat16
        )
        assert resident is not None
        resident.check_integrity()


def test_residents_return_from_memory(tmp_path: Path) -> None:
    """What is kept of slots over a sleep fills them again, on the engine's stream, with the same bytes."""
    geometry = read_geometry(TinyMoe(num_experts=40, dtype="BF16").write(tmp_path))
    config, stream = configuration(tmp_path, gpu_experts_ratio=0.8), device_stream(torch.device("cuda"))
    with stream.active():
        resident = make_resident_experts(config, geometry, stream.device, torch.bfloat16)
        assert resident is not None
        descriptor = keep_residents(resident, "a model")
        assert descriptor is not None
        kept = KeptExperts.open(descriptor, "a model")
        assert kept is not None
        again = make_resident_experts(config, geometry, stream.device, torch.bfloat16, packed=kept)
        assert again is not None
        kept.close().join()
        again.check_integrity()
        for layer, slots in resident.slots.items():
            assert torch.equal(again.slots[layer].weights, slots.weights)
            for content, row in zip(again.slots[layer].contents, slots.weights.cpu(), strict=True):
                assert content is not None
                assert content.matches(row)


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_flipped_bits_are_found_and_repaired(ratio: float, tmp_path: Path) -> None:
    """By copies on the watch's own stream, each once, and nothing else."""
    geometry = read_geometry(TinyMoe(num_experts=40, dtype="BF16").write(tmp_path))
    stream = device_stream(torch.device("cuda"))
    with stream.active():
        resident = make_resident_experts(
            configuration(tmp_path, gpu_experts_ratio=ratio), geometry, stream.device, torch.bfloat16
        )
        assert resident is not None
        watch = ResidentWatch(resident, transfer_device(stream.device), 0.2, active=stream_of(stream.device))
        watch.start()
        layer = geometry.moe_layers[-1]
        for count in (1, 2, 3):
            weights = resident.slots[layer].weights[count]
            before = weights.clone()
            weights[17] ^= 4
            stream.synchronize()
            wait_until(lambda count=count: watch.damages >= count)  # type: ignore[misc]
            with torch.inference_mode():
                watch.begin_step()
            assert torch.equal(weights, before)
        assert (watch.damages, watch.repairs) == (3, 3)
        watch.close()


def test_recording_is_captured() -> None:
    """Replays count when the mode was on during capture, and are known to be missed when it was not."""
    geometry = MoeGeometry("qwen3_moe", 64, 2, (0, 1), 16, 4, 32, "silu", "bfloat16")
    stream = device_stream(torch.device("cuda"))
    recorder = ExpertRecorder(geometry, stream, 8)
    ids = torch.zeros((4, 4), dtype=torch.int32, device="cuda")
    with stream.active(), torch.inference_mode():
        recorder.start("stat")
        recorder.record(0, ids)
        recorder.record(1, ids)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorder.record(0, ids)
            recorder.record(1, ids)
        recorder.start("stat")
        assert not recorder.needs_eager_steps
        for step in range(3):
            ids.copy_(torch.arange(16, dtype=torch.int32).view(4, 4) // (step + 1))
            graph.replay()
        found = recorder.dump()
        assert (found.steps, found.tokens) == (3, 12)
        assert found.counts.sum() == 2 * 3 * 16
        assert found.distinct.tolist() == [16 + 8 + 6] * 2
        recorder.stop()
        graph.replay()
        assert recorder.dump().steps == 3
        recorder.start("per_pass")
        assert recorder.needs_eager_steps
