"""Streaming on a GPU: the same sums as expert servers, copies under other work, engines that agree."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_service.device.pinned import CudaRegistrar, Registrar
from gpu_service.experts.resident.experts import TorchResidentKernels
from gpu_service.experts.resident.make import make_kernels
from gpu_service.experts.streaming.plan import SHARES
from gpu_service.experts.streaming.ring import CudaTransfers
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.source import SegmentSource
from gpu_service.layers.asked_experts import ask_experts
from tests import tolerances
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import Cluster
from tests.helpers.mapped_experts import gpu_settings, mapped_cluster
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, resident_layer, routed
from tests.helpers.stored_experts import (
    MadeExperts,
    MadeServer,
    Streaming,
    expert_split,
    streaming,
    tensor_split,
)
from tests.service.test_streaming_engine import requests, wait_until_streaming

pytestmark = pytest.mark.gpu
# torch leaves its streams and events untyped.
_cuda: Any = torch.cuda
SHAPE, LAYERS = Shape(hidden=512, intermediate=256, experts=8, top_k=2), 3
# A layer of Qwen3-30B-A3B with some of its experts.
REAL = Shape(hidden=2048, intermediate=768, experts=16, top_k=8)


class Refusing(Registrar):
    """A driver that locks no memory."""

    def register(self, address: int, nbytes: int) -> str:
        return "out of memory"

    def unregister(self, address: int) -> None:
        raise AssertionError("nothing was registered")


def on_gpu(
    shape: Shape, weight_format: str, split: Any, registrar: Registrar | None = None, **options: Any
) -> tuple[Streaming, SegmentSource]:
    """Returns a streamer whose segments are registered as the servers' are."""
    device = torch.device("cuda", torch.cuda.current_device())
    servers = [MadeServer(shape, weight_format, part, LAYERS, n) for n, part in enumerate(split(shape, 2))]
    transfers = CudaTransfers(device)
    kernels = make_kernels(MadeExperts(servers).geometry, device)
    found = streaming(servers, device=transfers, kernels=kernels, **options)
    layers = found.client.geometry.moe_layers
    made = found.source.made
    source = SegmentSource(
        lambda: ExpertSegments(made, layers), transfers, registrar or CudaRegistrar(device)
    )
    found.streamer.open(source)
    assert source.wait_ready(30.0)
    return found, source


def assert_served(found: Streaming, shape: Shape, rows: int, dtype: torch.dtype, allowed: float) -> None:
    """Every layer's sum is what the servers alone give."""
    reference = MadeExperts(found.client.servers)
    streamed = found.streamer.begin(rows)
    assert streamed is not None
    inputs = [routed(shape, rows, seed=layer, device="cuda", dtype=dtype) for layer in range(LAYERS)]
    answers = []
    for layer, (hidden_states, ids, weights) in enumerate(inputs):
        asked = ask_experts(layer, hidden_states, ids, weights, found.client, None, streamed)
        answers.append(asked.collect(None).to("cuda"))
    torch.cuda.synchronize()
    streamed.check()
    for layer, (hidden_states, ids, weights) in enumerate(inputs):
        wanted = reference.collect(reference.submit(layer, hidden_states, ids, weights)).to("cuda")
        scale = wanted.square().mean().sqrt()
        assert (answers[layer] - wanted).square().mean().sqrt() / scale < allowed


@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
@pytest.mark.parametrize("split", [tensor_split, expert_split])
def test_every_format(weight_format: str, split: Any) -> None:
    """Few, some and many rows agree, with whole layers and half of each, over several steps, so that the ring
    wraps.
    """
    for share in (SHARES, SHARES // 2):
        found, source = on_gpu(SHAPE, weight_format, split, share=share)
        for rows in (5, 40, 700, 41):
            assert_served(found, SHAPE, rows, torch.bfloat16, tolerances.RESIDENT_BFLOAT16)
        assert_served(found, SHAPE, 60, torch.float32, tolerances.RESIDENT_GPU_FLOAT32)
        found.streamer.close()
        # Registered again by the next one: it was given back.
        del source


def test_what_can_not_be_registered_is_staged() -> None:
    """Experts are staged through page-locked memory, which is slower and gives the same."""
    found, _ = on_gpu(SHAPE, "int4_g32", tensor_split, Refusing())
    for rows in (5, 700):
        assert_served(found, SHAPE, rows, torch.bfloat16, tolerances.RESIDENT_BFLOAT16)
    found.streamer.close()


@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
@pytest.mark.parametrize("rows", [520, 2100])
def test_weights_unpacked_once(weight_format: str, rows: int) -> None:
    """Rows by hundreds an expert at a published size, some experts not there; bounded as in bfloat16."""
    slots = resident_layer(REAL, weight_format, (4, 1, 2, 3, 9, 15), "cuda")
    hidden_states, ids, weights = routed(REAL, rows, device="cuda", dtype=torch.bfloat16)
    partial = torch.randn(rows, REAL.hidden, device="cuda")
    expected = TorchResidentKernels(REAL.geometry).forward(slots, hidden_states, ids, weights, None)
    kernels = make_kernels(REAL.geometry, torch.device("cuda"))
    found = kernels.forward(slots, hidden_states, ids, weights, partial.clone()) - partial
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < tolerances.RESIDENT_BFLOAT16


def test_copies_run_under_other_work() -> None:
    """With the compute stream held, the first buffers are filled; the host waits for neither."""
    found, _ = on_gpu(REAL, "bfloat16", tensor_split, num_buffers=4, experts_per_buffer=8)
    device = found.streamer.device
    inputs = routed(REAL, 64, device="cuda", dtype=torch.bfloat16)
    assert_served(found, REAL, 64, torch.bfloat16, tolerances.RESIDENT_BFLOAT16)
    begin = time.monotonic()
    _cuda._sleep(2_000_000_000)
    held = _cuda.Event()
    held.record()
    streamed = found.streamer.begin(64)
    assert streamed is not None
    copied = device.record_copied()
    copied.synchronize()
    assert not held.query(), "the copies waited for the compute stream"
    for layer in range(LAYERS):
        streamed.forward(layer, inputs[0], [inputs[1]], inputs[2], [None])
    assert not held.query(), "launching waited for the device"
    launched = time.monotonic() - begin
    torch.cuda.synchronize()
    assert launched < time.monotonic() - begin
    found.streamer.close()


@pytest.fixture(scope="module", params=["tensor", "expert"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers whose experts others can map."""
    with mapped_cluster(tmp_path_factory.mktemp("streamed"), request.param) as running:
        yield running


@pytest.mark.parametrize("mode", ["stream", "auto"])
def test_engines_agree(cluster: Cluster, mode: str) -> None:
    """Prompts whose experts are streamed, decode graphs as before; auto measures, and streams what pays."""
    with running_engine(gpu_settings(cluster, prefill_experts="cpu")) as engine:
        wanted = engine.run(requests())
    with running_engine(gpu_settings(cluster, prefill_experts=mode)) as engine:
        wait_until_streaming(engine)
        assert engine.run(requests()) == wanted
        assert streamed_steps(engine) > 0 or mode == "auto"


def streamed_steps(engine: RunningEngine) -> int:
    """So far."""
    assert engine.built.streamer is not None
    return engine.built.streamer.streamed_steps
