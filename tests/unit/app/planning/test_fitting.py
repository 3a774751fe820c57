"""Guards what is said of published models on common cards: what is chosen, and that what is proposed fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_models import GPU_MODELS
from app.planning.gpu_use import plan_capacity
from app.planning.smallest_change import smallest_change
from tests.helpers.plan_models import GIB, hardware, published_once, settings, write_published

SIZES = (24, 32, 48, 80, 96)
Plan = Callable[..., CapacityPlan]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Returns a plan of a published model's headers on one card of `gib` GiB, nothing placed on it."""
    directory = published_once(tmp_path_factory)

    def make(name: str, gib: int, **flags: Any) -> CapacityPlan:
        card = replace(GPU_MODELS["RTX 4090"], memory_bytes=gib * GIB)
        host = replace(hardware("4090", ram_gib=4096), gpu=card)
        return plan_capacity(settings(directory(name), **flags), host, Wish(), fill=False)

    return make


def proposed(plan: Plan, name: str, gib: int, flags: dict[str, Any]) -> dict[str, str]:
    """The options that the refusal says would do; none where it fits as it is."""
    try:
        plan(name, gib, **flags)
    except DoesNotFit as error:
        found = re.search(r"GiB are missing: it fits with ((?:--\S+ \S+ ?)+); as it is set", str(error))
        if found is None:
            raise
        pairs = re.findall(r"--([a-z-]+) ([^ ;]+)", found[1])
        return {option.replace("-", "_"): value for option, value in pairs}
    return {}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qwen3-next-80b-a3b", {"max_num_seqs": 24}),
        ("deepseek-v3", {"dense_weights": 32}),
        ("gpt-oss-120b", {}),
        ("qwen3-30b-a3b", {}),
    ],
)
def test_a_refusal_names_settings_that_fit(plan: Plan, name: str, wanted: dict[str, int]) -> None:
    """The refusal, with 64 outputs per step and on every common size, names settings that make a plan with
    room for requests.

    `wanted`: an option that has to be among the proposals on cards of up to that many GiB.
    """
    everything: dict[str, Any] = {"max_num_seqs": 64, "dense_weights": "dequantise"}
    for gib in SIZES:
        needed = {option for option, most in wanted.items() if gib <= most}
        change = proposed(plan, name, gib, everything)
        assert needed <= set(change)
        made = plan(name, gib, **everything | change)
        assert made.kv.tokens >= 2048
        for option in change if len(change) > 1 else ():
            rest = {key: value for key, value in change.items() if key != option}
            assert proposed(plan, name, gib, everything | rest), f"{option} is not needed"


def test_the_number_of_outputs_scales_with_the_card(plan: Plan) -> None:
    """Unset, states of linear attention leave room for requests; where all fit it is the default."""
    chosen = {}
    for gib in SIZES:
        found = plan("qwen3-next-80b-a3b", gib)
        chosen[gib] = int(found.settings["max_num_seqs"])
        assert found.kv.tokens >= 4 * 8192
    assert 8 <= chosen[24] < 64
    assert [chosen[gib] for gib in SIZES[2:]] == [64] * 3
    assert list(chosen.values()) == sorted(chosen.values())


def test_what_is_set_is_not_changed(plan: Plan) -> None:
    """A number that somebody chose is planned with or refused, never replaced."""
    assert plan("qwen3-next-80b-a3b", 24, max_num_seqs=3).settings["max_num_seqs"] == "3"


def test_where_no_setting_helps_a_larger_card_is_named(plan: Plan) -> None:
    """By how much it is short, how large a card would have to be, and how many of these would do."""
    with pytest.raises(DoesNotFit, match=r"GiB are missing: no setting") as caught:
        plan("deepseek-v3", 8)
    assert re.search(r"tensor_parallel_size above 1 or a GPU of [\d.]+ GiB", str(caught.value))


# On one RTX 4090, as `moebius plan` has it in its table: whether all matrices are in GPTQ's int4, and the
# settings that a cache of 32768 tokens needs.
ON_24_GB: dict[str, tuple[bool, dict[str, Any]]] = {
    "glm-4.7": (True, {"kv_cache_dtype": "fp8_e4m3", "prefill_experts": "cpu"}),
    "deepseek-v3": (False, {"kv_cache_dtype": "fp8_e4m3", "gpu_memory_utilization": 0.95}),
    "qwen3-next-80b-a3b": (True, {}),
    "gpt-oss-120b": (False, {}),
}


@pytest.mark.parametrize("name", ON_24_GB)
def test_large_models_have_long_contexts_on_24_gb(name: str, tmp_path: Path) -> None:
    """The ledger has room for 32768 tokens and more, by what `dense_weights: auto` becomes."""
    int4, flags = ON_24_GB[name]
    config = settings(write_published(tmp_path, name, int4), **flags)
    found = plan_capacity(config, hardware("4090"), Wish(32768, 1), fill=True, explain=False)
    assert found.kv.tokens >= 32768
    assert found.total_of("GPU 0") <= found.budgets["GPU 0"] < 24 * GIB
    assert (found.dense is None) == (name == "gpt-oss-120b"), "whose dense layers are in 16 bits"
    assert found.dense is None or found.dense.setting == "keep"


def test_a_wished_context_is_not_given_up(tmp_path: Path) -> None:
    """What is proposed has the context that was asked for, not a shorter one."""
    config = settings(write_published(tmp_path, "glm-4.7", int4=True))
    change = smallest_change(config, hardware("4090"), Wish(32768, 1), fill=True)
    assert change is not None
    assert change.plan.kv.tokens >= 32768
    assert "max_model_len" not in change.settings
