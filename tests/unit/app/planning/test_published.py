"""Guards plans against tensors of published checkpoints: what is composed is what their headers hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from app.planning.memory import stored_experts
from gpu_service.assembly.forecast import Forecast
from gpu_service.core.parallel import SOLO
from gpu_service.loader.names import wanted_name
from moebius.checkpoint.expert_layouts import is_routed_expert
from moebius.checkpoint.index import CheckpointIndex
from moebius.models.read import read_geometry
from tests.helpers.plan_models import settings, write_config, write_headers
from tests.helpers.published_checkpoints import Published
from tests.tolerances import PLANNED_BYTES

# Every kind of attention, router and expert format; each takes a quarter of a second.
MODELS = (
    "deepseek-v3.2",
    "glm-4.7",
    "glm-5.3-flash",
    "gpt-oss-120b",
    "hy4-preview",
    "kimi-k2",
    "kimi-k2.5",
    "kimi-linear-48b-a3b",
    "minimax-m2",
    "qwen3-next-80b-a3b",
    "qwen3.5-35b-a3b",
    "qwen3.8-flash-next",
    "step-3.5-flash",
)
# What scales and hints of quantised matrices are called.
_SIDE = ("weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "_scales")


def dense_elements(index: CheckpointIndex, forecast: Forecast) -> int:
    """Returns the number of elements of all tensors that the loader would read, but for scales."""
    return sum(
        math.prod(info.shape)
        for name, info in index.tensors.items()
        if not is_routed_expert(name)
        and not name.endswith(_SIDE)
        and wanted_name(name, forecast.model_config, SOLO) is not None
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_published_checkpoint_is_planned_as_its_headers_say(tmp_path: Path, name: str) -> None:
    """Formats of experts with and without headers, and dense weights at two bytes an element.

    Routers in float32 are what makes dense bytes more than that.
    """
    published = Published.load(name)
    index = published.index(tmp_path)
    tensors = index.tensors.values()
    write_headers(tmp_path, ((info.name, info.dtype, info.shape, info.nbytes) for info in tensors))
    geometry = read_geometry(tmp_path)
    found = stored_experts(tmp_path, geometry)
    declared = stored_experts(write_config(tmp_path / "bare", published.config), geometry)
    assert found.keys() == declared.keys()
    for layer, experts in found.items():
        assert (experts.gate_up, experts.down) == (declared[layer].gate_up, declared[layer].down)
        assert (experts.has_bias, experts.group) == (declared[layer].has_bias, declared[layer].group)
        assert experts.nbytes == pytest.approx(declared[layer].nbytes, rel=PLANNED_BYTES)
    forecast = Forecast(settings(tmp_path, language_model_only="true"), on_gpu=True)
    elements, rank = dense_elements(index, forecast), forecast.ranks[0]
    assert rank.dense_bytes + rank.host_bytes == pytest.approx(2 * elements, rel=PLANNED_BYTES)
