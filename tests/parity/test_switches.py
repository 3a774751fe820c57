"""Invariant: switches agree with transformers in company, too; `tests.tools.fuzz_families` found these."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from gpu_service.device import TORCH_DTYPES
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.models.config import DTypeName, ModelConfigError, ModelOverrides
from moebius.models.layers.gqa import GQA
from moebius.models.read import read_model_config
from tests.helpers.gguf_models import reference_logits
from tests.helpers.layer_values import first
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


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gemmas_scale_follows_the_type_it_is_computed_in(dtype: DTypeName, tmp_path: Path) -> None:
    """A checkpoint in bfloat16, whose root of 72 is 8.5, is scaled by the root in another type."""
    tiny = TINY_MODELS["gemma4_text"]
    tiny = replace(tiny, changes=tiny.changes | {"hidden_size": 72})
    reference = write_tiny_model(tiny, tmp_path, seed=3).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=TORCH_DTYPES[dtype]).eval()
    model = build_model(read_model_config(tmp_path, ModelOverrides(dtype=dtype)))
    load_weights(model, tmp_path)
    tokens = torch.tensor(PROMPT)
    with torch.inference_mode():
        ours, theirs = model.model._embedded(tokens), reference.model.embed_tokens(tokens)
    assert torch.equal(ours, theirs)
    if dtype == "float32":
        _, logits = load_runner(tmp_path, overrides=ModelOverrides(dtype=dtype)).prefill(PROMPT)
        expected = reference_logits(reference, PROMPT)
        torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.parametrize("where", ["rope_parameters", "config"])
def test_minimax_rotates_as_transformers_whatever_a_factor_says(where: str, tmp_path: Path) -> None:
    """The log names what is left aside; `rotary_dim`, which published files have, decides."""
    reference = write_tiny_model(TINY_MODELS["minimax"], tmp_path, seed=3)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    (config["rope_parameters"] if where == "rope_parameters" else config)["partial_rotary_factor"] = 0.5
    path.write_text(json.dumps(config))
    with capture_logs() as logs:
        _, logits = load_runner(tmp_path).prefill(PROMPT)
    assert any("partial_rotary_factor" in entry["event"] for entry in logs)
    expected = reference_logits(reference, PROMPT)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
    path.write_text(json.dumps(config | {"rotary_dim": 8}))
    rope = first(read_model_config(tmp_path), GQA).rope
    assert rope is not None
    assert rope.rotary_dim == 8
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    path.write_text(json.dumps(config))
    with pytest.raises(ModelConfigError, match="partial_rotary_factor"):
        read_model_config(tmp_path)


def test_minimax_uses_stored_decays_of_other_layers(tmp_path: Path) -> None:
    """Stored decays are used as transformers uses the buffers that it has saved; rounded ones are computed
    again.
    """
    reference = write_tiny_model(TINY_MODELS["minimax"], tmp_path, seed=3)
    exact = reference_logits(reference, PROMPT)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    rates = [name for name in tensors if name.endswith(".slope_rate")]
    assert rates, "transformers saves what it computes"
    rounded = {name: tensors[name].bfloat16() for name in rates}
    save_file(tensors | rounded, path, {"format": "pt"})
    with capture_logs() as logs:
        _, logits = load_runner(tmp_path).prefill(PROMPT)
    assert any("slope_rate" in entry["event"] for entry in logs)
    torch.testing.assert_close(logits, exact, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)

    buffers = dict(reference.named_buffers())
    for name in rates:
        stem = name.removesuffix("slope_rate")
        layer = reference.get_submodule(stem.removesuffix("."))
        buffers[name].mul_(1.7)
        decays = layer.decay_factors(buffers[name])
        for part, values in zip(("query_decay", "key_decay", "diagonal_decay"), decays, strict=True):
            buffers[stem + part].copy_(values)
    reference.save_pretrained(tmp_path)
    _, logits = load_runner(tmp_path).prefill(PROMPT)
    expected = reference_logits(reference, PROMPT)
    assert (expected - exact).abs().max() > 1e-2
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_nemotrons_steps_have_no_least_as_its_published_code(tmp_path: Path) -> None:
    """Transformers limits steps below by `time_step_min`, a number of the initialisation; rows with shorter
    ones differ from it, and no others. With the published limits, `time_step_limit`, all are equal.
    """
    reference = write_tiny_model(TINY_MODELS["nemotron_h"], tmp_path, seed=2)
    tokens = torch.randint(3, 200, (340,), generator=torch.Generator().manual_seed(2)).tolist()
    limited = reference_logits(reference, tokens)
    _, logits = load_runner(tmp_path).prefill(tokens, chunk=128)
    mixers = [module for module in reference.modules() if hasattr(module, "time_step_limit")]
    assert mixers
    for mixer in mixers:
        mixer.time_step_limit = tuple(reference.config.time_step_limit)
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
    # Not what this version of transformers computes: if it is one day, docs/checkpoints.md has to follow.
    assert (limited - expected).abs().max() > 3 * LOGITS_FLOAT32_VS_TRANSFORMERS
