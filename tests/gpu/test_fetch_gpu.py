"""Fetching on a GPU: what kernels copy out of registered memory in replayed graphs, engines that agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.device.pinned import CudaRegistrar
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.fetching.kernels import FetchKernels
from gpu_service.experts.fetching.slots import COPIED, FetchState
from gpu_service.experts.fetching.step import FetchedExperts
from gpu_service.experts.fetching.triton_kernels import TritonFetchKernels
from gpu_service.experts.resident.make import make_kernels
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.source import SegmentSource
from tests import tolerances
from tests.gpu.test_streaming_gpu import on_gpu
from tests.helpers.built_engine import running_engine
from tests.helpers.expert_cluster import Cluster
from tests.helpers.fetching_layers import check_layer, fetch_state
from tests.helpers.mapped_experts import gpu_settings, mapped_cluster
from tests.helpers.resident_layers import EXPERT_FORMATS, Shape, routed
from tests.helpers.stored_experts import MadeExperts, MadeServer, expert_split, tensor_split
from tests.service.test_streaming_engine import requests, wait_until_streaming

pytestmark = pytest.mark.gpu
SHAPE, LAYERS = Shape(hidden=512, intermediate=256, experts=16, top_k=4), 3


def slots_on_gpu(
    split: Any, weight_format: str, num_slots: int
) -> tuple[FetchState, ExpertSegments, list[MadeServer], SegmentSource]:
    """Fetch slots whose addresses are those of registered memory; the source has to be closed."""
    found, source = on_gpu(SHAPE, weight_format, split)
    segments = source.segments()
    assert segments is not None
    servers = list(found.client.servers)
    state, _ = fetch_state(servers, num_slots, found.streamer.device.device, segments)
    return state, segments, servers, source


def layer_sum(
    layers_side: FetchedExperts, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer's fetch slots add, and the choices that they leave to servers."""
    served = layers_side.cpu_ids(0, ids)
    return layers_side.forward(0, rows, [ids], weights, [None])[0], served


@pytest.mark.parametrize("weight_format", EXPERT_FORMATS)
@pytest.mark.parametrize("split", [tensor_split, expert_split])
def test_replayed_graphs_fetch_what_their_rows_choose(weight_format: str, split: Any) -> None:
    """One row and eight, over steps that follow one another: bytes, maps and sums are right in each."""
    state, segments, servers, source = slots_on_gpu(split, weight_format, 6)
    kernels: FetchKernels = TritonFetchKernels(torch.device("cuda"))
    products = make_kernels(MadeExperts(servers).geometry, torch.device("cuda"))
    side, reference = FetchedExperts(state.layers, kernels, products), MadeExperts(servers)
    for count in (1, 8):
        held = routed(SHAPE, count, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer_sum(side, *held)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ours, served = layer_sum(side, *held)
        for seed in range(6):
            for kept, given in zip(held, routed(SHAPE, count, seed=seed, dtype=torch.bfloat16), strict=True):
                kept.copy_(given)
            graph.replay()
            torch.cuda.synchronize()
            check_layer(state.layers[0], 0, segments)
            rows, ids, weights = held
            assert ((served == ids) | (served == -1)).all()
            fetched = torch.where(served >= 0, -1, ids)
            wanted = reference.collect(reference.submit(0, rows, fetched, weights)).cuda()
            scale = wanted.square().mean().sqrt().clamp(min=1e-6)
            assert (ours - wanted).square().mean().sqrt() / scale < tolerances.RESIDENT_BFLOAT16
        assert state.layers[0].counters[COPIED] > 0
        graph.reset()
    source.close()


def test_memory_is_registered_until_no_step_reads_it() -> None:
    """Segments are replaced while steps fetch: nothing faults, and what is copied is what they hold."""
    found, first = on_gpu(SHAPE, "int4_g32", tensor_split)
    first.close()
    servers, device = list(found.client.servers), found.streamer.device
    layers = found.client.geometry.moe_layers
    state, _ = fetch_state(servers, 6, device.device, ExpertSegments(found.source.made, layers))
    state.addresses.zero_()
    costs = ExpertCosts(SHAPE.experts, SHAPE.top_k)
    costs.served(1.0, 1.0, 1.0)
    fetcher = ExpertFetcher(state, TritonFetchKernels(device.device), found.streamer, costs)
    made = found.source.made
    source = SegmentSource(
        lambda: ExpertSegments(made, layers),
        device,
        CudaRegistrar(device.device),
        on_release=fetcher.withdraw,
    )
    found.streamer.open(source)
    assert source.wait_ready(30.0)
    for step in range(60):
        fetched = fetcher.begin()
        for layer in range(LAYERS):
            rows, ids, weights = routed(SHAPE, 4, seed=step, device="cuda", dtype=torch.bfloat16)
            fetched.cpu_ids(layer, ids)
            fetched.forward(layer, rows, [ids], weights, [None])
        fetched.launched()
        if step % 20 == 19:
            for segment in made:
                segment.generation += 1
            fetcher.begin().launched()
            assert source.wait_ready(30.0)
    torch.cuda.synchronize()
    assert int(state.counters[:, COPIED].sum()) > 0
    fetcher.close()
    found.streamer.close()


@pytest.fixture(scope="module", params=["tensor", "expert"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers whose experts others can map."""
    directory = tmp_path_factory.mktemp("fetched")
    with mapped_cluster(directory, request.param, mailbox_deadline_ms=5000) as running:
        yield running


def cheap_copies(fetcher: ExpertFetcher, segments: ExpertSegments | None) -> None:
    """In place of what was measured: an expert's copy takes half as long as a server."""
    fetcher.state.prices.copy_(torch.tensor([16e-6, 8e-6]))


@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}, {"overlap_scheduling": False}], ids=str)
def test_engines_agree(cluster: Cluster, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured and eager engines agree; a server that is killed and replaced in the middle does not show."""
    with running_engine(gpu_settings(cluster, fetch_experts="off")) as engine:
        assert engine.built.fetcher is None
        wanted = engine.run(requests())
    monkeypatch.setattr(ExpertFetcher, "_set_prices", cheap_copies)
    with running_engine(gpu_settings(cluster, fetch_experts="auto", **changes)) as engine:
        wait_until_streaming(engine)
        fetcher, client = engine.built.fetcher, engine.built.experts
        assert fetcher is not None
        assert client is not None
        assert engine.run(requests()) == wanted
        first = int(fetcher.state.counters[:, COPIED].sum())
        assert first > 0
        Path(cluster.config.experts.expert_weights_dir, "expert-1.weights").unlink()
        cluster.replace_at_step(6, 1, client)
        assert engine.run(requests()) == wanted
        wait_until_streaming(engine)
        assert engine.run(requests()) == wanted
        assert int(fetcher.state.counters[:, COPIED].sum()) > first
