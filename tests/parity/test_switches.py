"""Invariant: switches agree with transformers in company, too; `tests.tools.fuzz_families` found these."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.gguf_models import reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31, 9, 180, 12, 13, 14, 15]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Layer 2 has latents of its own between those of layer 0 and a layer that attends to them.
    "latents of an earlier layer but one": (
        "mistral_large4",
        {"no_rope_layers": [1, 1, 1, 1], "kv_source_layers": [0, 0, 2, 0]},
    ),
    # Transformers writes what layers differ in: nothing.
    "one size of heads": ("gemma4_text_own_values_untied", {"head_dim": 12}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Whole and in chunks."""
    name, changes = CASES[case]
    tiny = TINY_MODELS[name]
    reference = write_tiny_model(replace(tiny, changes=tiny.changes | changes), tmp_path, seed=3)
    expected = reference_logits(reference, PROMPT)
    runner = load_runner(tmp_path)
    for chunk in (None, 4):
        _, logits = runner.prefill(PROMPT, chunk=chunk)
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.parametrize("model_type", ["minimax_text_01", "minimax_m1"])
@pytest.mark.parametrize("saved_by_transformers", [False, True])
def test_minimaxs_published_keys(model_type: str, saved_by_transformers: bool, tmp_path: Path) -> None:
    """They mean what transformers' do, and count where transformers has written its defaults next to them."""
    reference = write_tiny_model(TINY_MODELS["minimax"], tmp_path, seed=3)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    kinds = config.pop("layer_types")
    published: dict[str, Any] = {"model_type": model_type}
    published["attn_type_list"] = [int(kind == "full_attention") for kind in kinds]
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    for theirs, ours in names.items():
        for value in ("alpha", "beta"):
            published[f"layernorm_{ours}_{value}"] = config.pop(f"{theirs}_{value}_factor")
    if saved_by_transformers:
        class_defaults = type(reference.config)(num_hidden_layers=len(kinds)).to_dict()
        written = ("layer_types", *(key for key in class_defaults if key.endswith("_factor")))
        config |= {key: class_defaults[key] for key in written}
    path.write_text(json.dumps(config | published))
    expected = reference_logits(reference, PROMPT)
    _, logits = load_runner(tmp_path).prefill(PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
