"""Guards what `speculative_method` auto becomes: layers that draft never cost what requests would notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.planning import fill
from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.dense import DenseChoice
from app.planning.drafts import Room, decided_drafts, why_not
from app.planning.gpu_use import plan_capacity
from app.planning.hardware import Hardware
from moebius.config import MoebiusConfig
from tests.helpers.mtp_models import write_mtp_model
from tests.helpers.plan_models import hardware, settings

PLAIN = Room(experts_outside=1000, kv_tokens=140_000, num_seqs=64, has_cold_experts=False)
WISHED = 32768


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"experts_outside": 1020}, ""),
        ({"experts_outside": 1021}, "outside of GPUs"),
        ({"kv_tokens": 131_072}, ""),
        ({"kv_tokens": 131_071}, "KV cache"),
        ({"num_seqs": 48}, "outputs"),
        ({"has_cold_experts": True}, "from disk"),
    ],
)
def test_what_the_layer_may_take(changes: dict[str, int], reason: str) -> None:
    """At most 2 % more experts outside of GPUs, no kind of request, no outputs of a step, nothing on disk."""
    found = why_not(PLAIN, replace(PLAIN, **changes), WISHED)
    assert (reason in found) if reason else not found


def test_gpus_that_hold_every_expert_still_do() -> None:
    """One expert left to a server is a hand-off in a step that had none."""
    resident = replace(PLAIN, experts_outside=0)
    assert why_not(resident, resident, WISHED) == ""
    assert "outside of GPUs" in why_not(resident, replace(resident, experts_outside=1), WISHED)


rooms = st.builds(Room, st.integers(0, 4000), st.integers(0, 200_000), st.integers(1, 256), st.booleans())


@given(rooms, rooms, st.integers(1, 65536))
def test_less_room_never_speaks_for_the_layer(plain: Room, drafting: Room, wished: int) -> None:
    """The rule is monotone: what is refused stays refused where the layer leaves even less."""
    if why_not(plain, drafting, wished):
        assert why_not(plain, replace(drafting, experts_outside=drafting.experts_outside + 1), wished)
        assert why_not(plain, replace(drafting, kv_tokens=max(0, drafting.kv_tokens - 1)), wished)
        assert why_not(plain, replace(drafting, has_cold_experts=True), wished)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint with a layer of multi-token prediction."""
    directory = tmp_path_factory.mktemp("mtp")
    write_mtp_model("glm4_moe", directory)
    return directory


def decided(config: MoebiusConfig, host: Hardware) -> tuple[str, str]:
    """Returns the method and the reason."""
    found, reason = decided_drafts(
        config, lambda each: plan_capacity(each, host, Wish(), fill=True, explain=False), Wish()
    )
    return found.gpu.speculative_method, reason


@pytest.mark.parametrize("gpu", ["none", "4090"])
def test_memory_decides_where_the_checkpoint_has_a_layer(model: Path, gpu: str) -> None:
    """With room it drafts; where even the model does not fit it is off, and no error."""
    config = settings(model, speculative_method="auto")
    host = hardware(ram_gib=64) if gpu == "none" else hardware(gpu, ram_gib=64)
    assert decided(config, host) == ("mtp", "")
    method, reason = decided(config, replace(host, ram_bytes=2**20))
    assert method == "off"
    assert reason


def test_a_layer_that_does_not_fit_is_off(model: Path) -> None:
    """What the plan with the layer refuses is the reason, in its words."""
    config = settings(model, speculative_method="auto")
    host = hardware(ram_gib=64)

    def planned(each: MoebiusConfig) -> object:
        if each.gpu.mtp_heads:
            raise DoesNotFit("no room for it")
        return plan_capacity(each, host, Wish(), fill=True, explain=False)

    found, reason = decided_drafts(config, planned, Wish())  # type: ignore[arg-type]
    assert found.gpu.speculative_method == "off"
    assert "no room for it" in reason


def test_the_layer_is_no_reason_to_keep_dense_weights(model: Path) -> None:
    """It may not make many rows slower: it is planned with the form that the model has without it."""
    forms = []

    def planned(each: MoebiusConfig) -> CapacityPlan:
        forms.append((each.gpu.mtp_heads > 0, each.model.dense_weights))
        found = plan_capacity(each, hardware("4090", ram_gib=64), Wish(), fill=True, explain=False)
        return replace(found, dense=DenseChoice("dequantise", "everything fits", 1, 2))

    found, _ = decided_drafts(settings(model, speculative_method="auto"), planned, Wish())
    assert forms == [(False, "auto"), (True, "dequantise")]
    assert found.model.dense_weights == "auto", "the plan with the layer decides the same"


def test_serve_decides_as_the_plan_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher leaves no auto to its processes, on a CPU as on a GPU."""
    config = settings(model, speculative_method="auto")
    monkeypatch.setattr(fill, "available_memory", lambda: 64 * 2**30)
    for memory in (None, (fill.DeviceUse(24 * 2**30, 24 * 2**30),)):
        found, reason = fill.drafts_here(config, memory)
        assert (found.gpu.speculative_method, reason) == ("mtp", "")
    monkeypatch.setattr(fill, "available_memory", lambda: 2**20)
    assert fill.drafts_here(config, None)[0].gpu.speculative_method == "off"
