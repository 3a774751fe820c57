"""Guards that memory is measured in every form that a step of latent attention may take in service."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import make_cache
from gpu_service.core.step import ForwardInputs
from gpu_service.loader.load import load_weights
from gpu_service.memory.plan import StepSize
from gpu_service.memory.profile import profile_activations
from gpu_service.models.compose import build_model
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.fake_memory import GIB, FakeMemory
from tests.helpers.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("deepseek_v3", [(True, False), (False, False)]),
        ("glm_moe_dsa", [(True, False), (False, True)]),
    ],
)
def test_both_forms_of_a_step_are_measured(name: str, seen: list[tuple[bool, bool]], tmp_path: Path) -> None:
    """Keys written out; then after earlier tokens in the latent space, and as many as make it choose.

    In a small step that is not measured, for what libraries keep, and in the largest.
    """
    make_tiny_model(name, tmp_path)
    config = read_model_config(tmp_path)
    model, memory, found = build_model(config), FakeMemory(10 * GIB), []
    load_weights(model, tmp_path)

    def watched(cache: object) -> MlaAttentionBackend:
        attention = make_attention(config.layers, cache, "cpu")  # type: ignore[arg-type]
        assert isinstance(attention, MlaAttentionBackend)
        plan = attention.plan

        def watch(inputs: ForwardInputs) -> None:
            plan(inputs)
            found.append((attention.non_absorbed, attention.selects))
            nbytes = 1000 * len(found) if inputs.query_start_loc[-1] == 6 else 50_000
            memory.allocate(nbytes)
            memory.free(nbytes)

        attention.plan = watch  # type: ignore[method-assign]
        return attention

    peak = profile_activations(
        model,
        lambda pages: make_cache(config.layers, pages, 4, torch.float32),
        watched,
        read_geometry(tmp_path),
        StepSize(6, 2),
        4,
        memory,
        vocab_size=config.vocab_size,
    )
    assert found == 2 * seen
    assert peak == 4000
