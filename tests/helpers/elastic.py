"""Engines whose KV pages and experts share memory: settings, requests, and a check of who owns what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams
from gpu_service.experts.adaptive import placement as placement_module
from gpu_service.experts.costs import ExpertCosts
from gpu_service.memory import elastic as elastic_module
from moebius.config import MoebiusConfig
from tests.helpers.built_engine import RunningEngine
from tests.helpers.expert_cluster import Cluster
from tests.service.test_streaming_engine import settings as streaming_settings

ELASTIC = {"num_pages": None, "elastic_memory": "on"}
FIXED = {"num_pages": 2048, "kv_cache_gib": None, "elastic_memory": "off"}


def make_restless(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Counts are read in every step, any gain is worth an exchange, and memory goes back at once."""
    monkeypatch.setattr(ExpertCosts, "copy_price", lambda costs, nbytes: 0.0)
    monkeypatch.setattr(placement_module, "READ_EVERY_S", 0.0)
    monkeypatch.setattr(elastic_module, "_HELD_S", 0.01)
    monkeypatch.setattr(elastic_module, "_LOOK_S", 0.0)
    monkeypatch.setattr(elastic_module, "_HEADROOM_TOKENS", 8)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)


def settings(cluster: Cluster, gpu_experts: int, **gpu: Any) -> MoebiusConfig:
    """Returns an engine of the cluster's model and servers, `gpu_experts` of each layer on its device."""
    config = streaming_settings(cluster, **({"prefix_caching": True, "prefill_experts": "cpu"} | gpu))
    placement = config.placement.model_copy(update={"gpu_experts": gpu_experts})
    return config.model_copy(update={"placement": placement})


def request(name: str, length: int, outputs: int, topic: int = 0) -> Request:
    """Returns a prompt of its own, and greedy output."""
    tokens = [3 + (k * k * 5 + k * 7 + topic * 11) % 200 for k in range(length)]
    return Request(name, tokens, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True))


def check_memory(engine: RunningEngine) -> None:
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
    holders = Counter(str(handle) for held in [elastic.holders(), *slots] for handle in held)
    assert max(holders.values()) == 1, "a chunk has two owners"
    assert len(holders) + elastic.pool.free == elastic.pool.size, "a chunk is lost"


def run_with_long_prompt(engine: RunningEngine, streams: list[Request], long: Request) -> tuple[int, int]:
    """Returns streams and a prompt that needs more room than there is at first; the most pages meanwhile, and
    the fewest bytes of experts.
    """
    resident, pool = engine.built.resident, engine.built.engine.scheduler.cache.pool
    assert resident is not None
    assert engine.built.engine.scheduler.cache.pages_for(long.prompt_len) > pool.usable
    most, least = pool.usable, resident.nbytes
    for each in (*streams, long):
        engine.built.engine.submit([each])
    for _ in (*streams, long):
        while not engine.ended.acquire(timeout=0.0005):
            most, least = max(most, pool.usable), min(least, resident.nbytes)
    assert [each.error_message for each in (*streams, long)] == [""] * (len(streams) + 1)
    return most, least
