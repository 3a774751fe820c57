"""Invariant: an engine whose KV pages and experts lend each other memory says what one with fixed parts says.

On a CPU memory is really mapped and unmapped: a step that touched what is not mapped would end the process.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.costs import ExpertCosts
from gpu_service.memory import elastic as elastic_module
from gpu_service.request import Request, SamplingParams
from moebius.config import MoebiusConfig, PlacementConfig
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.service.test_streaming_engine import settings as streaming_settings

KEPT = PlacementConfig(drop_resident="keep")
PAGE, LONG = 4, 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    found = tmp_path_factory.mktemp("elastic")
    make_tiny_model("qwen3_moe", found)
    return found


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Counts are read in every step, any gain is worth an exchange, and memory goes back at once."""
    monkeypatch.setattr(ExpertCosts, "copy_price", lambda costs, nbytes: 0.0)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(elastic_module, "_HELD_S", 0.01)
    monkeypatch.setattr(elastic_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(elastic_module, "_HEADROOM_TOKENS", 8)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(cluster: Cluster, gpu_experts: int, **gpu: Any) -> MoebiusConfig:
    """An engine of the cluster's model and servers, most experts of each layer on its device."""
    sizes = {"num_pages": None, "kv_cache_gib": 60_000 / 2**30, "elastic_memory": "on"}
    config = streaming_settings(cluster, **(sizes | {"prefix_caching": True, "prefill_experts": "cpu"} | gpu))
    placement = config.placement.model_copy(update={"gpu_experts": gpu_experts})
    return config.model_copy(update={"placement": placement})


def request(name: str, length: int, outputs: int, topic: int = 0) -> Request:
    """A prompt of its own."""
    tokens = [3 + (k * k * 5 + k * 7 + topic * 11) % 200 for k in range(length)]
    return Request(name, tokens, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True))


def check(engine: RunningEngine) -> None:
    """Every chunk has one owner, and every page and slot in use has memory. With nothing in flight."""
    built = engine.built
    elastic, resident = built.elastic, built.resident
    assert elastic is not None
    assert resident is not None
    assert built.placement is not None
    assert built.placement.supply is not None
    elastic.check_integrity()
    built.placement.supply.check_integrity()
    resident.check_integrity()
    slots = [slots.memory.holders() for slots in resident.slots.values() if slots.memory is not None]
    holders = Counter(handle for held in [elastic._pages.holders(), *slots] for handle in held)
    assert max(holders.values()) == 1, "a chunk has two owners"
    assert len(holders) + elastic.pool.free == elastic.pool.size, "a chunk is lost"


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_takes_memory_from_experts_and_gives_it_back(
    overlap: bool, model: Path, tmp_path: Path
) -> None:
    """While others decode: more pages than there are at first, then as many experts as before."""
    with running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT) as cluster:
        fixed = settings(cluster, 3, num_pages=1024, elastic_memory="off", overlap_scheduling=overlap)
        with running_engine(fixed) as engine:
            assert engine.built.elastic is None
            wanted = [engine.run([request(f"s{n}", 9, 120, n)])[0] for n in range(2)]
            wanted += engine.run([request("long", LONG, 4, 9)])
        with running_engine(settings(cluster, 6, overlap_scheduling=overlap)) as engine:
            elastic, resident = engine.built.elastic, engine.built.resident
            assert elastic is not None
            assert resident is not None
            pool, before = engine.built.engine.scheduler.cache.pool, resident.nbytes
            at_first, least = pool.usable, before
            assert at_first < pool.num_pages - 1
            assert PAGE * at_first < LONG, "the long prompt fits what there is at first"
            streams = [request(f"s{n}", 9, 120, n) for n in range(2)]
            long = request("long", LONG, 4, 9)
            for each in (*streams, long):
                engine.built.engine.submit([each])
            most = 0
            for _ in range(3):
                while not engine.ended.acquire(timeout=0.0005):
                    most, least = max(most, pool.usable), min(least, resident.nbytes)
            assert [each.error_message for each in (*streams, long)] == [""] * 3
            assert [each.output_token_ids for each in (*streams, long)] == wanted
            again = [request(f"a{n}", 9, 100, n) for n in range(2)]
            engine.run(again)
            print(at_first, most, before, least, resident.nbytes, pool.usable)
            assert (most > at_first, least < before) == (True, True)
            assert resident.nbytes > least
            check(engine)
