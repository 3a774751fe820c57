"""Guards which modules a configuration leaves unquantised, in every spelling that quantisers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebius.checkpoint.excluded_modules import ExcludedModules, read_excluded
from tests.helpers.plan_models import write_config

QUERY, GATE = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.gate"


@pytest.mark.parametrize(
    ("entry", "left", "taken"),
    [
        (QUERY, {QUERY}, {GATE, "model.layers.30.self_attn.q_proj"}),
        ("model.layers.3.self_attn", {QUERY}, {GATE, "model.layers.33.self_attn.q_proj"}),
        ("model.language_model.layers.3.self_attn", {QUERY}, {GATE}),
        ("self_attn", {QUERY}, {GATE}),
        ("mlp.gate", {GATE}, {QUERY, "model.layers.3.mlp.gate_proj"}),
        ("model.layers.*.self_attn", {QUERY}, {GATE}),
        ("*.mlp.gate", {GATE}, {QUERY, "model.layers.3.mlp.gate_proj"}),
        ("re:.*self_attn.*", {QUERY}, {GATE}),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", {"model.layers.0.mlp.up_proj"}, {QUERY, GATE}),
        ("lm_head", {"lm_head"}, {QUERY, GATE}),
    ],
)
def test_an_entry_names_modules(entry: str, left: set[str], taken: set[str]) -> None:
    """Names of whole modules, of what contains them, and patterns; a layer's number is never half of one."""
    excluded = ExcludedModules((entry,))
    assert {module for module in left | taken if excluded.has(module)} == left


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
        {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
        {"quant_method": "modelopt", "exclude_modules": ["lm_head"]},
        {"quant_method": "quark", "exclude": ["lm_head"], "modules_to_not_convert": None},
    ],
)
def test_every_key_is_read(quantised: dict[str, Any], tmp_path: Path) -> None:
    """Each quantiser has a key of its own for the list."""
    directory = write_config(tmp_path / "model", {"quantization_config": quantised})
    assert read_excluded(directory) == ExcludedModules(("lm_head",))


def test_without_a_quantisation_nothing_is_excluded(tmp_path: Path) -> None:
    """A plain checkpoint has no such list."""
    assert read_excluded(write_config(tmp_path / "model", {"model_type": "olmoe"})) == ExcludedModules(())
