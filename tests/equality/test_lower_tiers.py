"""Guards prefixes that come back from RAM and disk: outputs are those of an engine that computes them.

Each kind of cache and of state has a family here. The pool is too small for all prompts, so that each one's
pages and states are given up before its next turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_service.cache.tiers import prefix_tiers
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.core.request import Request, SamplingParams
from gpu_service.engine.step_check import StepCheck
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.errors import UserError
from tests.helpers.built_engine import RunningEngine, running_engine
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, LENGTH, PAGE_SIZE = 6, 40, 4
# All whole pages of a prompt that leave a token to compute.
CACHED = (LENGTH - 1) // PAGE_SIZE * PAGE_SIZE
FAMILIES = {
    "heads": "qwen3_moe",
    "latents": "deepseek_v3",
    "sliding windows": "step3p5",
    "sinks": "gpt_oss",
    "latents and index keys": "glm_moe_dsa",
    "blocks and index keys": "minimax_m3_vl",
    "compressed entries": "deepseek_v4",
    "gated delta net": "qwen3_next",
    "Kimi delta": "kimi_linear",
    "lightning attention": "minimax",
    "selective state space": "jamba",
    "state space": "granitemoehybrid",
    "short convolution": "lfm2_moe",
    "n-grams": "qwen4_exp",
}
# One of each kind of memory; the others run with all tests.
QUICK = ("heads", "latents and index keys", "compressed entries", "gated delta net")


@pytest.fixture(autouse=True)
def _every_fetch_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing these few tokens may well be faster than a copy, on a machine that does other things."""
    monkeypatch.setattr(StepCheck, "prompt_token_seconds", None)


def config_for(directory: Path, **gpu: Any) -> MoebiusConfig:
    """A pool for two of the prompts, and states for four requests."""
    sizes = {"num_pages": 32, "page_size": PAGE_SIZE, "max_num_seqs": 4, "gpu_threads": 1}
    return MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32", language_model_only=True),
        gpu=GpuConfig(**(sizes | gpu)),
        experts=ExpertConfig(expert_transport="local"),
    )


def requests(turn: str, salt: str = "") -> list[Request]:
    """Six prompts that begin differently."""
    params = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4)
    return [
        Request(
            f"{turn}{i}",
            [(i * 37 + k * k * 5 + k) % 150 + 3 for k in range(LENGTH)],
            params,
            cache_namespace=salt,
        )
        for i in range(PROMPTS)
    ]


def answers(engine: RunningEngine, turn: list[Request]) -> list[list[int]]:
    """One after another."""
    return [engine.run([request])[0] for request in turn]


def tiers_of(engine: RunningEngine) -> PrefixTiers:
    """Those that the settings asked for."""
    assert engine.built.tiers is not None
    return engine.built.tiers


def wait_until_copied(engine: RunningEngine) -> None:
    """Until nothing of the tree is left to copy down."""
    wait_until(lambda: tiers_of(engine).is_copied)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full, id=kind) for kind in FAMILIES],
)
def test_answers_are_equal_through_each_tier(kind: str, tmp_path: Path) -> None:
    """Computed, from RAM, and, by another engine, from disk alone."""
    make_tiny_model(FAMILIES[kind], tmp_path / "model")
    disk = {"kv_disk_gib": 0.1, "kv_disk_dir": str(tmp_path / "disk")}
    with running_engine(config_for(tmp_path / "model", kv_offload_gib=0.05, **disk)) as engine:
        expected = []
        for request in requests("computed"):
            expected += engine.run([request])
            wait_until_copied(engine)
            assert request.cached_len == 0
        again = requests("ram")
        assert answers(engine, again) == expected
        assert [request.cached_len for request in again] == [CACHED] * PROMPTS
        hits = tiers_of(engine).hit_tokens
        assert hits["ram"] >= (PROMPTS - 2) * CACHED
        assert hits["disk"] == 0
    with running_engine(config_for(tmp_path / "model", **disk)) as engine:
        again = requests("disk")
        assert answers(engine, again) == expected
        assert [request.cached_len for request in again] == [CACHED] * PROMPTS
        assert tiers_of(engine).hit_tokens == {"ram": 0, "disk": PROMPTS * CACHED}
        assert tiers_of(engine).num_failed == 0


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    directory = tmp_path_factory.mktemp("heads")
    make_tiny_model("qwen3_moe", directory)
    return directory


@pytest.mark.parametrize("values", [{"kv_cache_dtype": "fp8_e4m3"}, {"overlap_scheduling": False}], ids=str)
def test_other_values_and_loops_are_equal_too(values: dict[str, Any], heads: Path) -> None:
    """8-bit pages come back as they were; a loop without overlap waits for blocks as the other does."""
    with running_engine(config_for(heads, kv_offload_gib=0.05, **values)) as engine:
        expected = answers(engine, requests("computed"))
        wait_until_copied(engine)
        again = requests("ram")
        assert answers(engine, again) == expected
        assert [request.cached_len for request in again] == [CACHED] * PROMPTS


def test_many_requests_at_once_wait_for_their_prefixes(heads: Path) -> None:
    """All prompts are submitted together, twice each, to a pool for two of them: each gets its answer."""
    with running_engine(config_for(heads, kv_offload_gib=0.05)) as engine:
        expected = answers(engine, requests("computed"))
        wait_until_copied(engine)
        together = [*requests("a"), *requests("b")]
        assert engine.run(together) == expected + expected
        # Of two requests with one prompt the second may find it on the device.
        assert tiers_of(engine).hit_tokens["ram"] >= CACHED


def test_salts_and_other_weights_share_nothing(heads: Path, tmp_path: Path) -> None:
    """Blocks of one `cache_salt` are no other's, and another model skips files of this one."""
    disk = {"kv_disk_gib": 0.1, "kv_disk_dir": str(tmp_path / "disk"), "kv_offload_gib": 0.05}
    with running_engine(config_for(heads, **disk)) as engine:
        answers(engine, requests("mine", "my salt"))
        other = requests("other", "another salt")
        answers(engine, other)
        assert [request.cached_len for request in other] == [0] * PROMPTS
        wait_until_copied(engine)
    make_tiny_model("glm4_moe", tmp_path / "other")
    with running_engine(config_for(tmp_path / "other", **disk)) as engine:
        other = requests("other model", "my salt")
        answers(engine, other)
        assert tiers_of(engine).hit_tokens == {"ram": 0, "disk": 0}


def test_engines_that_run_at_once_share_a_directory(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds what the other one stores meanwhile, with equal answers; both write files of their own."""
    monkeypatch.setattr(prefix_tiers, "_LEAST_PATIENCE_S", 60.0)
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("0f" * 32)
    disk = {"kv_disk_gib": 0.1, "kv_disk_dir": str(tmp_path / "disk"), "kv_disk_key_file": str(key)}
    config = config_for(heads, **disk)
    with running_engine(config) as first, running_engine(config) as second:
        expected, turn = [], requests("computed")
        for number, request in enumerate(turn):
            engine = (first, second)[number % 2]
            expected += engine.run([request])
            wait_until_copied(engine)
        assert [request.cached_len for request in turn] == [0] * PROMPTS
        assert len(list((tmp_path / "disk").glob("*.kv"))) == 2
        for engine, others in ((first, 1), (second, 0)):
            tiers_of(engine)._refreshed_at = -1e9  # what the other has written is looked up at once
            again = requests("shared")[others::2]
            assert answers(engine, again) == expected[others::2]
            assert [request.cached_len for request in again] == [CACHED] * (PROMPTS // 2)
            assert tiers_of(engine).hit_tokens["disk"] == CACHED * (PROMPTS // 2)


def test_a_flush_goes_through_all_tiers(heads: Path, tmp_path: Path) -> None:
    """What an operator has forgotten does not come back, in this engine or the next."""
    disk = {"kv_disk_gib": 0.1, "kv_disk_dir": str(tmp_path / "disk"), "kv_offload_gib": 0.05}
    for _ in range(2):
        with running_engine(config_for(heads, **disk)) as engine:
            turn = requests("turn")
            answers(engine, turn)
            assert [request.cached_len for request in turn] == [0] * PROMPTS
            wait_until_copied(engine)
            engine.built.engine.flush().result(60)
            assert not tiers_of(engine).figures()[0].value["ram"]  # type: ignore[index]


def test_a_damaged_file_is_computed_again(heads: Path, tmp_path: Path) -> None:
    """Each block is compared with its checksum; one that differs costs time and no answer."""
    disk = {"kv_disk_gib": 0.1, "kv_disk_dir": str(tmp_path / "disk")}
    with running_engine(config_for(heads, **disk)) as engine:
        expected = []
        for request in requests("computed"):
            expected += engine.run([request])
            wait_until_copied(engine)
    (file,) = (tmp_path / "disk").glob("*.kv")
    data = bytearray(file.read_bytes())
    for place in range(5000, len(data), 7000):
        data[place] ^= 0xFF
    file.write_bytes(data)
    with running_engine(config_for(heads, **disk)) as engine:
        again = requests("damaged")
        assert answers(engine, again) == expected
        assert any(request.cached_len < CACHED for request in again)
        assert tiers_of(engine).num_failed > 0


KILLED = """
import sys
from pathlib import Path
from tests.equality.test_lower_tiers import answers, config_for, requests, running_engine, wait_until_copied
with running_engine(config_for(Path(sys.argv[1]), kv_offload_gib=0.05, kv_offload_dir=sys.argv[2])) as engine:
    expected = answers(engine, requests("computed"))
    wait_until_copied(engine)
    print("ANSWERS", expected, flush=True)
    while True:
        answers(engine, requests("again", "a salt"))
"""


def test_what_a_killed_engine_had_in_ram_is_found(heads: Path, tmp_path: Path) -> None:
    """The next engine has the segment's whole blocks, and answers from them as the killed one did."""
    command = [sys.executable, "-c", KILLED, str(heads), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ANSWERS"))
        process.kill()
    expected = json.loads(line.removeprefix("ANSWERS"))
    with running_engine(config_for(heads, kv_offload_gib=0.05, kv_offload_dir=str(tmp_path))) as engine:
        again = requests("ram")
        assert answers(engine, again) == expected
        assert [request.cached_len for request in again] == [CACHED] * PROMPTS
        assert tiers_of(engine).hit_tokens == {"ram": PROMPTS * CACHED, "disk": 0}


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ({"kv_disk_gib": 1.0}, "needs kv_disk_dir"),
        ({"kv_events_config": "{"}, "kv_events_config: no JSON object"),
        ({"kv_disk_key_file": "/there/is/none"}, "kv_disk_key_file: /there/is/none cannot be read"),
        ({"kv_offload_gib": 1e6}, "GiB of RAM are free"),
        ({"kv_offload_gib": 1e-6}, "less than a page"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(gpu: dict[str, Any], message: str, heads: Path) -> None:
    with pytest.raises(UserError, match=message), running_engine(config_for(heads, **gpu)):
        raise AssertionError("an engine started")
