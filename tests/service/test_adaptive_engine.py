"""Invariant: an engine whose resident experts change while it serves says what one without residents says."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpu_service.core.request import Request, SamplingParams
from gpu_service.experts import costs as costs_module
from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.adaptive.metrics import export
from gpu_service.experts.adaptive.record import RoutingRecord
from gpu_service.experts.costs import Estimate, ExpertCosts
from gpu_service.experts.streaming.ring import HostTransfers
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.models.checkpoint import open_index
from moebius.models.identity import checkpoint_fingerprint
from moebius.models.read import read_geometry
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.service.test_streaming_engine import settings as streaming_settings
from tests.service.test_streaming_engine import wait_until_streaming

KEPT = PlacementConfig(drop_resident="keep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("adaptive")
    make_tiny_model("qwen3_moe", found)
    return found


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counts are read in every step, and any gain is worth an exchange; records are this test's."""
    monkeypatch.setattr(ExpertCosts, "copy_price", lambda costs, nbytes: 0.0)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(cluster: Cluster, gpu_experts: int, **gpu: Any) -> MoebiusConfig:
    """Returns an engine of the cluster's model and servers, some experts of each layer on its device."""
    config = streaming_settings(cluster, num_pages=256, prefix_caching=True, **gpu)
    placement = config.placement.model_copy(update={"gpu_experts": gpu_experts})
    return config.model_copy(update={"placement": placement})


def requests(topic: int = 0) -> list[Request]:
    """Returns the prompts of several steps, and outputs on many topics."""
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k + topic * 11) % 200 for k in range(4 + 9 * i)],
            SamplingParams(max_tokens=40 + i, temperature=0.0, ignore_eos=True),
        )
        for i in range(5)
    ]


def exchanges(engine: RunningEngine) -> int:
    """Returns how many exchanges were begun."""
    found = engine.built.placement
    assert found is not None
    return found.figures().exchanges


@pytest.mark.covering(1)
@pytest.mark.parametrize("split_count", [1, 2])
@pytest.mark.parametrize("prefill_experts", ["cpu", "stream"])
@pytest.mark.usefixtures("restless")
def test_answers_do_not_depend_on_exchanges(
    prefill_experts: str, split_count: int, model: Path, tmp_path: Path
) -> None:
    """Copied from segments and packed from the checkpoint, between steps of both kinds, 1 server or 2."""
    memory = tmp_path / "memory"
    memory.mkdir()
    experts: dict[str, Any] = {"split_count": split_count, "expert_weights_dir": str(memory)}
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT, **experts)
    with servers as cluster:
        with running_engine(settings(cluster, 0, prefill_experts="cpu")) as engine:
            assert engine.built.placement is None
            wanted = engine.run(requests())
        with running_engine(settings(cluster, 3, prefill_experts=prefill_experts)) as engine:
            if prefill_experts == "stream":
                wait_until_streaming(engine)
                # Their events say when a copy has ended only if they are of the stream that copies.
                assert engine.built.placement is not None
                assert engine.built.streamer is not None
                assert engine.built.placement._exchanges._device is engine.built.streamer.device
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


def cpu_seconds(engine: RunningEngine) -> float | None:
    """Returns what it takes an expert and row to cost on expert servers."""
    assert engine.built.check is not None
    return engine.built.check.costs.figures.cpu_expert_seconds


# What the falsified engine really has: bytes per second of its link, servers' seconds per expert and row.
LINK, PAIR = 1e9, 100e-6


# Each cost is wrong in each direction; both wrong in the same direction: `make test-all`.
@pytest.mark.parametrize(
    ("link", "pair"),
    [
        *((0.2, 5.0), (5.0, 0.2), (1e-6, 1.0)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((0.2, 0.2), (5.0, 5.0))),
    ],
)
def test_falsified_costs_are_corrected_while_serving(
    link: float, pair: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Link and servers that seem five times faster or slower than they are, and a link that seems not to be
    worth any copy: within a minute of requests the engine's own copies and decode steps show what is true,
    and a copy has its right price again.
    """
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(costs_module, "_LINK_SEEN_FOR_S", 0.5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT)
    with servers as cluster, running_engine(settings(cluster, 3)) as engine:
        built = engine.built
        assert built.check is not None
        assert built.experts is not None
        assert built.resident is not None
        nbytes = next(iter(built.resident.slots.values())).kind.expert_bytes
        monkeypatch.setattr(HostTransfers, "seconds_between", lambda *_: nbytes / LINK)
        served, submit = [0.0], built.experts.submit

        def counted(layer: int, hidden: Any, ids: Any, weights: Any) -> Any:
            """Servers take as long for each of their experts and rows."""
            served[0] += PAIR * int((ids >= 0).sum())
            return submit(layer, hidden, ids, weights)

        monkeypatch.setattr(built.experts, "submit", counted)
        check, costs = built.check, built.check.costs
        check._facts = replace(check._facts, busy_seconds=lambda: served[0])
        costs._link, costs._pair = Estimate(link * LINK), Estimate(pair * PAIR)
        before, deadline = exchanges(engine), time.monotonic() + 60.0
        topics, true = itertools.count(), pytest.approx(PAIR, rel=0.2)
        # Copies of single experts say no more of a link than that it is within a factor of 1.5.
        while abs(math.log(costs.link / LINK)) > math.log(1.5) or cpu_seconds(engine) != true:
            assert time.monotonic() < deadline, costs.figures
            engine.run(requests(next(topics)))
        assert costs.copy_price(nbytes) == pytest.approx(1.5 * nbytes / LINK / PAIR, rel=0.9)
        assert exchanges(engine) > before


def test_an_engine_whose_steps_are_too_slow_measures_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learnt is forgotten and learnt again while requests run; outputs are as ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT)
    with servers as cluster, running_engine(settings(cluster, 3)) as engine:
        wanted = engine.run(requests())
        check = engine.built.check
        assert check is not None
        assert check.ratio is not None
        forgotten, forget = list[Estimate | None](), check.costs.forget

        def watched() -> None:
            forgotten.append(check.costs._pair)
            forget()

        monkeypatch.setattr(check.costs, "forget", watched)
        # As if steps of every kind had taken nothing before, however long they took.
        check._patience_s = 0.0
        check._recent = 0.0, 0.0
        check.costs._pair = Estimate(1e-12)
        for kind in check._kinds.values():
            kind.total = 0.0
        assert engine.run(requests()) == wanted
        assert check.times_measured_again >= 1
        assert forgotten
        learnt = check.costs.figures.cpu_expert_seconds
        assert learnt is not None
        assert learnt > 1e-9


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
