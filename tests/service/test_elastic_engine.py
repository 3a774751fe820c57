"""Invariant: an engine whose KV pages and experts lend each other memory says what one with fixed parts says.

On a CPU memory is really mapped and unmapped: a step that touched what is not mapped would end the process.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpu_service.assembly import elastic as assembly
from gpu_service.device.virtual_memory import VirtualMemoryUnavailable
from moebius.config import PlacementConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.elastic import (
    ELASTIC,
    FIXED,
    check_memory,
    make_restless,
    request,
    run_with_long_prompt,
    settings,
)
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

KEPT = PlacementConfig(drop_resident="keep")
SMALL = ELASTIC | {"kv_cache_gib": 60_000 / 2**30}
LONG = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("elastic")
    make_tiny_model("qwen3_moe", found)
    return found


@pytest.fixture(autouse=True)
def _restless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_restless(monkeypatch, str(tmp_path / "cache"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefill_experts", ["cpu", "stream"])
def test_a_long_prompt_takes_memory_from_experts_and_gives_it_back(
    prefill_experts: str, overlap: bool, model: Path, tmp_path: Path
) -> None:
    """While others decode, the prompt has more pages than there are at first and fewer experts; then these
    come back, but for what the pages keep so that memory does not go to and fro.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    options = {"overlap_scheduling": overlap, "prefill_experts": prefill_experts, "prefix_caching": False}
    servers = running_cluster(
        model, tmp_path / "servers", dtype="float32", placement=KEPT, expert_weights_dir=str(memory)
    )
    with servers as cluster:
        with running_engine(settings(cluster, 3, **FIXED, **options)) as engine:
            assert engine.built.elastic is None
            wanted = [engine.run([request(f"s{n}", 9, 120, n)])[0] for n in range(2)]
            wanted += engine.run([request("long", LONG, 4, 9)])
        with running_engine(settings(cluster, 6, **SMALL, **options)) as engine:
            resident, pool = engine.built.resident, engine.built.engine.scheduler.cache.pool
            assert resident is not None
            before, at_first = resident.nbytes, pool.usable
            back = before - next(iter(resident.slots.values())).kind.expert_bytes
            streams, long = [request(f"s{n}", 9, 120, n) for n in range(2)], request("long", LONG, 4, 9)
            most, least = run_with_long_prompt(engine, streams, long)
            assert [each.output_token_ids for each in (*streams, long)] == wanted
            assert most > at_first
            assert least < before
            for number in range(20):
                engine.run([request(f"a{number}", 9, 40, number)])
                if resident.nbytes >= back:
                    break
            assert resident.nbytes >= back
            check_memory(engine)


# Latents, indexed latents, compressed entries, windows, and states beside attention; bytes of pages at first.
KINDS = {
    "deepseek_v3": 60_000,
    "deepseek_v32": 60_000,
    "deepseek_v4": 20_000,
    "gpt_oss": 60_000,
    "qwen3_next": 60_000,
    "nemotron_h": 60_000,
}


@pytest.mark.parametrize(("model_type", "page_bytes"), KINDS.items())
def test_every_kind_of_cache_lends_memory(model_type: str, page_bytes: int, tmp_path: Path) -> None:
    """Caches with other rows than keys and values: nothing reads a page that experts have."""
    make_tiny_model(model_type, tmp_path / "model")
    memory = tmp_path / "memory"
    memory.mkdir()
    options = {"prefill_experts": "stream", "prefix_caching": False}
    servers = running_cluster(
        tmp_path / "model",
        tmp_path / "servers",
        dtype="float32",
        placement=KEPT,
        expert_weights_dir=str(memory),
    )
    with servers as cluster:
        with running_engine(settings(cluster, 3, **FIXED, **options)) as engine:
            wanted = [engine.run([request(f"s{n}", 9, 60, n)])[0] for n in range(2)]
            wanted += engine.run([request("long", LONG, 4, 9)])
        small = ELASTIC | {"kv_cache_gib": page_bytes / 2**30}
        with running_engine(settings(cluster, 4, **small, **options)) as engine:
            at_first = engine.built.engine.scheduler.cache.pool.usable
            streams, long = [request(f"s{n}", 9, 60, n) for n in range(2)], request("long", LONG, 4, 9)
            most, _ = run_with_long_prompt(engine, streams, long)
            assert [each.output_token_ids for each in (*streams, long)] == wanted
            assert most > at_first
            engine.run([request("after", 9, 8)])
            check_memory(engine)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_random_requests_find_their_memory(seed: int, model: Path, tmp_path: Path) -> None:
    """Many lengths, aborts in between, prefixes that are found again: outputs are those of an engine with
    fixed parts, and no chunk is lost or shared.
    """
    rng = random.Random(seed)
    wishes = [(rng.choice((5, 30, 90, 250, 450)), rng.randrange(1, 40), rng.randrange(4)) for _ in range(24)]
    with running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT) as cluster:
        with running_engine(settings(cluster, 0, **FIXED)) as engine:
            wanted = [engine.run([request(f"r{n}", *wish)])[0] for n, wish in enumerate(wishes)]
        with running_engine(settings(cluster, 6, **SMALL)) as engine:
            for begin in range(0, len(wishes), 6):
                part = [request(f"r{n}", *wishes[n]) for n in range(begin, begin + 6)]
                given_up = rng.choice(part)
                for each in part:
                    engine.built.engine.submit([each])
                engine.built.engine.abort(given_up.request_id)
                engine.wait_tokens(part)
                for number, each in enumerate(part, begin):
                    outputs = each.output_token_ids
                    assert outputs == wanted[number][: len(outputs)]
                    assert each is given_up or len(outputs) == len(wanted[number]), each.error_message
                check_memory(engine)
            elastic = engine.built.elastic
            assert elastic is not None
            # A layer's last slot need not end where its last chunk does.
            chunks = len(engine.built.resident.slots) * elastic.pool.chunk_bytes

            def rest() -> int:
                shares = engine.built.memory_shares()
                assert shares.is_shared
                return elastic.pool.nbytes - shares.kv - shares.experts - shares.free

            # The engine's thread may move memory between one of these figures and the next.
            wait_until(lambda: 0 <= rest() < chunks, rest)
            assert elastic.taken_bytes > 0
            assert elastic.given_bytes > 0


def test_a_device_that_cannot_map_memory_keeps_fixed_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and requests are served."""

    def refuse() -> None:
        raise VirtualMemoryUnavailable("not here")

    monkeypatch.setattr(assembly, "HostVirtualMemory", refuse)
    servers = running_cluster(model, tmp_path / "servers", dtype="float32", placement=KEPT)
    with (
        capture_logs() as lines,
        servers as cluster,
        running_engine(settings(cluster, 3, **SMALL)) as engine,
    ):
        assert engine.built.elastic is None
        engine.run([request("r", 9, 4)])
    assert [line["because"] for line in lines if "cannot map" in line["event"]] == [
        "VirtualMemoryUnavailable: not here"
    ]
