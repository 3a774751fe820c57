"""Invariant: an engine whose decode steps fetch experts says what one says whose servers compute them.

The host is the device here, and asked to fetch as a GPU would; tests/gpu has the same on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.streaming.segments import ExpertSegments
from moebius.config import PlacementConfig
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.service.test_streaming_engine import requests, settings, wait_until_streaming


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("fetched")
    make_tiny_model("qwen3_moe", found)
    return found


def copied(engine: RunningEngine) -> int:
    """Returns the number of experts that steps have fetched so far."""
    assert engine.built.fetcher is not None
    return int(engine.built.fetcher.state.counters[:, 0].sum())


def cheap_copies(fetcher: ExpertFetcher, segments: ExpertSegments | None) -> None:
    """In place of what was measured: an expert's copy takes half as long as a server."""
    fetcher.state.prices.copy_(torch.tensor([16e-6, 8e-6]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("split", ["tensor", "expert"])
@pytest.mark.parametrize("residents", [0, 2])
def test_fetched_decode_steps(
    split: str, residents: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens agree beside residents and without; a server that is replaced meanwhile does not show, and is
    copied from again.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    experts = {"split_count": 2, "expert_split": split, "expert_weights_dir": str(memory)}
    placement = PlacementConfig(gpu_experts=residents, drop_resident="keep")
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=placement, **experts)
    with servers as cluster:
        with running_engine(settings(cluster, prefill_experts="cpu")) as engine:
            assert engine.built.fetcher is None
            wanted = engine.run(requests())
        # What tiny experts cost differs from run to run.
        monkeypatch.setattr(ExpertFetcher, "_set_prices", cheap_copies)
        monkeypatch.setattr("gpu_service.experts.fetching.make._TOKENS_KEPT", 2)
        monkeypatch.setattr(
            "gpu_service.experts.fetching.make.fetches", lambda config, _: config.gpu.fetch_experts == "auto"
        )
        with running_engine(settings(cluster, prefill_experts="stream", fetch_experts="off")) as engine:
            assert engine.built.fetcher is None
        fetching = settings(cluster, prefill_experts="stream", stream_min_rows=1000, fetch_experts="auto")
        with running_engine(fetching) as engine:
            wait_until_streaming(engine)
            assert engine.run(requests()) == wanted
            fetcher = engine.built.fetcher
            assert fetcher is not None
            first = copied(engine)
            assert first > 0
            cluster.processes[1].kill()
            cluster.processes[1].wait()
            (memory / "expert-1.weights").unlink()
            cluster.start(1)
            assert engine.run(requests()) == wanted
            wait_until_streaming(engine)
            assert engine.run(requests()) == wanted
            assert copied(engine) > first
