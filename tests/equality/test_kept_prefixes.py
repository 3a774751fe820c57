"""Guards that requests can keep their prefixes in the cache longer than others, and only the cache, also in
the tiers below the device and on the way back from them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams
from gpu_service.engine.step_check import StepCheck
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

PROMPTS, LENGTH, PAGE_SIZE = 6, 40, 4
CACHED = (LENGTH - 1) // PAGE_SIZE * PAGE_SIZE


def request(name: str, number: int, keep_s: float = 0.0, arrived_s: float = 0.0) -> Request:
    """One of six prompts that begin differently."""
    tokens = [(number * 37 + k * k * 5 + k) % 150 + 3 for k in range(LENGTH)]
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    return Request(name, tokens, params, keep_prefix_s=keep_s, arrived_s=arrived_s)


def config_for(directory: Path, **gpu: Any) -> MoebiusConfig:
    """A pool for two of the prompts."""
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32"),
        gpu=GpuConfig(num_pages=32, page_size=PAGE_SIZE, max_num_seqs=4, gpu_threads=1, **gpu),
        experts=ExpertConfig(expert_transport="local"),
    )


# The last family keeps states beside pages.
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_kept_prefix_survives_the_others_for_its_time(family: str, tmp_path: Path) -> None:
    """Prompts that fill the cache twice over leave it alone until its time is over; answers are equal."""
    make_tiny_model(family, tmp_path)
    with running_engine(config_for(tmp_path)) as engine:
        expected = engine.run([request("kept", 0, keep_s=60.0, arrived_s=10.0)])
        engine.run([request("unkept", 1)])
        for number in range(2, PROMPTS):
            engine.run([request(f"fill {number}", number, arrived_s=20.0)])
        again, other = request("kept again", 0, arrived_s=69.0), request("unkept again", 1, arrived_s=69.0)
        assert engine.run([again]) == expected
        engine.run([other])
        assert (again.cached_len, other.cached_len) == (CACHED, 0)
        for number in range(2, PROMPTS):
            engine.run([request(f"fill again {number}", number, arrived_s=71.0)])
        late = request("late", 0, arrived_s=72.0)
        assert engine.run([late]) == expected
        assert late.cached_len == 0


def test_a_prefix_that_came_from_disk_is_still_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine finds it on disk with its time, so that others do not drive it from the device again."""
    monkeypatch.setattr(StepCheck, "prompt_token_seconds", None)  # every fetch is worth it
    make_tiny_model("qwen3_next", tmp_path / "model")
    config = config_for(tmp_path / "model", kv_disk_gib=0.1, kv_disk_dir=str(tmp_path / "disk"))
    with running_engine(config) as engine:
        tiers = engine.built.tiers
        assert tiers is not None
        expected = []
        for number, keep_s in enumerate((3600.0, 0.0)):
            expected += engine.run([request(f"first {number}", number, keep_s, time.monotonic())])
            wait_until(lambda: tiers.is_copied)
    with running_engine(config) as engine:
        tiers = engine.built.tiers
        assert tiers is not None
        hits = []
        for turn in range(2):
            for number in (0, 1):
                again = request(f"turn {turn}, {number}", number, arrived_s=time.monotonic())
                before = tiers.hit_tokens["disk"]
                assert engine.run([again]) == [expected[number]]
                assert again.cached_len == CACHED
                hits.append(tiers.hit_tokens["disk"] - before)
            for number in range(2, PROMPTS):
                engine.run([request(f"fill {turn} {number}", number, arrived_s=time.monotonic())])
        assert hits == [CACHED, CACHED, 0, CACHED], "the kept one did not leave the device"
