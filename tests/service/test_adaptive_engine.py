"""Invariant: an engine whose resident experts change while it serves says what one without residents says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.adaptive.metrics import export
from gpu_service.experts.adaptive.record import RoutingRecord
from gpu_service.request import Request, SamplingParams
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.model_identity import checkpoint_fingerprint
from moebius.models.checkpoint import open_index
from moebius.models.read import read_geometry
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.service.test_streaming_engine import settings as streaming_settings
from tests.service.test_streaming_engine import wait_until_streaming

KEPT = PlacementConfig(drop_resident="keep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    found = tmp_path_factory.mktemp("adaptive")
    make_tiny_model("qwen3_moe", found)
    return found


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counts are read in every step, and any gain is worth an exchange; records are this test's."""
    monkeypatch.setattr(placement_module, "COPY_COST", 0.0)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(cluster: Cluster, gpu_experts: int, **gpu: Any) -> MoebiusConfig:
    """An engine of the cluster's model and servers, some experts of each layer on its device."""
    config = streaming_settings(cluster, num_pages=256, prefix_caching=True, **gpu)
    placement = config.placement.model_copy(update={"gpu_experts": gpu_experts})
    return config.model_copy(update={"placement": placement})


def requests() -> list[Request]:
    """Prompts of several steps, and outputs on many topics."""
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 9 * i)],
            SamplingParams(max_tokens=40 + i, temperature=0.0, ignore_eos=True),
        )
        for i in range(5)
    ]


def exchanges(engine: RunningEngine) -> int:
    """So many were begun."""
    found = engine.built.placement
    assert found is not None
    return found.figures().exchanges


@pytest.mark.parametrize("split_count", [1, 2])
@pytest.mark.parametrize("prefill_experts", ["cpu", "stream"])
@pytest.mark.usefixtures("restless")
def test_answers_do_not_depend_on_exchanges(
    prefill_experts: str, split_count: int, model: Path, tmp_path: Path
) -> None:
    """Copied from segments and packed from the checkpoint, between steps of both kinds, 1 server or 2."""
    memory = tmp_path / "memory"
    memory.mkdir()
    experts = {"split_count": split_count, "expert_weights_dir": str(memory)}
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT, **experts)
    with servers as cluster:
        with running_engine(settings(cluster, 0, prefill_experts="cpu")) as engine:
            assert engine.built.placement is None
            wanted = engine.run(requests())
        with running_engine(settings(cluster, 3, prefill_experts=prefill_experts)) as engine:
            if prefill_experts == "stream":
                wait_until_streaming(engine)
            resident = engine.built.resident
            assert resident is not None
            for _ in range(3):
                assert engine.run(requests()) == wanted
            assert exchanges(engine) > 0
            figures = engine.built.placement.figures()  # type: ignore[union-attr]
            assert 0 < figures.hits < figures.chosen
            registry = CollectorRegistry()
            export(engine.built.placement, "tiny", registry)  # type: ignore[arg-type]
            scraped = generate_latest(registry).decode()
            labels = '{engine="0",model_name="tiny"}'
            assert f"moebius:expert_exchanges_total{labels} {float(figures.exchanges)}" in scraped
            learnt = {layer: set(resident.experts(layer)) for layer in resident.slots}
        resident.check_integrity()
        record = RoutingRecord(read_geometry(model), checkpoint_fingerprint(open_index(str(model))))
        assert set(record.read()) == set(learnt)
        with running_engine(settings(cluster, 3, prefill_experts=prefill_experts)) as engine:
            assert engine.run(requests()) == wanted


@pytest.mark.usefixtures("restless")
def test_a_start_begins_with_what_the_last_one_learnt(model: Path, tmp_path: Path) -> None:
    """The most chosen experts of the last run are in the slots before the first request."""
    with running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT) as cluster:
        config = settings(cluster, 2)
        with running_engine(config) as engine:
            engine.run(requests())
        record = RoutingRecord(read_geometry(model), checkpoint_fingerprint(open_index(str(model)))).read()
        with running_engine(config) as engine:
            resident = engine.built.resident
            assert resident is not None
            # The warm-up's requests may have moved others already; the most chosen one stays.
            for layer, counts in record.items():
                assert int(counts.argmax()) in resident.experts(layer)
        with running_engine(settings(cluster, 2).model_copy(deep=True)) as engine:
            assert engine.built.placement is not None


@pytest.mark.parametrize(
    "placement", [{"placement_strategy": "uniform", "drop_resident": "keep"}, {"drop_resident": "drop"}]
)
def test_a_fixed_placement_stays(placement: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Where the settings say which experts are resident, or servers leave them out, nothing is exchanged."""
    chosen = PlacementConfig(gpu_experts=2, **placement)
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=chosen)
    with servers as cluster, running_engine(settings(cluster, 2)) as engine:
        assert engine.built.placement is None
        assert engine.built.resident is not None
        assert engine.built.resident.counts is None
