"""Guards plans without files of weights: what config.json says is quantised is what the files would have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.planning.report import quiet
from gpu_service.assembly.forecast import Forecast
from tests.helpers.plan_models import settings, write_config, write_published

# Whole or in part quantised, and whether GPTQ's int4 replaces the published form. Part of the largest
# difference, of those whose configuration does not say all: DeepSeek-V4 spells its modules otherwise.
MODELS = {
    ("deepseek-v3", False): 0.0,
    ("deepseek-v3.2", False): 0.0,
    ("deepseek-v4-flash", False): 0.05,
    ("glm-4.7", True): 0.0,
    ("glm-5.3-flash", False): 0.0,
    ("gpt-oss-20b", False): 0.0,
    ("kimi-k2", False): 0.0,
    ("kimi-k2.5", False): 0.0,
    ("minimax-m2", False): 0.0,
    ("minimax-m3-mxfp8", False): 0.0,
    ("qwen3-30b-a3b-fp8", False): 0.0,
    ("qwen3-next-80b-a3b", True): 0.01,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "int4"), MODELS, ids=lambda value: str(value))
def test_a_configuration_says_what_headers_do(name: str, int4: bool, ranks: int, tmp_path: Path) -> None:
    """Dense bytes of a rank are those that headers give, dequantised or kept."""
    whole = write_published(tmp_path, name, int4)
    bare = write_config(tmp_path / "bare", json.loads((whole / "config.json").read_text()))
    for form in ("keep", "dequantise"):
        flags = {"dense_weights": form, "language_model_only": "true", "tensor_parallel_size": ranks}
        with quiet():
            stored, declared = (
                Forecast(settings(path, **flags), on_gpu=True).ranks[0].dense_bytes for path in (whole, bare)
            )
        assert declared == pytest.approx(stored, rel=max(MODELS[name, int4], 1e-9))
