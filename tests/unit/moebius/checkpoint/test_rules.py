"""Guards the table of names: every rule is reached and keeps numbers and endings, and all layouts yield
the same experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import EXPERT_TENSOR_LAYOUTS, is_routed_expert
from moebius.checkpoint.reader import SliceReader
from moebius.models.checkpoint import find_layout, open_index
from moebius.models.registry import FAMILIES
from tests.helpers.checkpoints import write_safetensors

EXPERTS, INNER, HIDDEN = 3, 5, 4
Array = npt.NDArray[np.float32]


def test_every_rule_is_reached() -> None:
    """In each family no earlier rule takes away what a rule is for; stars keep what they stand for."""

    def example(pattern: str) -> str:
        return pattern.replace("**", "proj.weight").replace("*", "41")

    for family in FAMILIES.values():
        for rule in family.names.renames:
            after = None if rule.canonical is None else example(rule.canonical)
            assert rule.apply(example(rule.stored)) == (True, after)
            assert family.names.canonical_name(example(rule.stored), num_layers=100) == after


def test_ordinary_names_stay() -> None:
    """What has no rule keeps its name, in every family of text-only checkpoints."""
    for family in FAMILIES.values():
        for name in ("model.embed_tokens.weight", "model.layers.7.self_attn.q_proj.weight", "lm_head.weight"):
            assert family.names.canonical_name(name, num_layers=8) == name


def test_layers_after_the_last_are_left_out_where_families_have_them() -> None:
    """Multi-token prediction of GLM is layer `num_layers`; Qwen3-MoE has none, so there it stays an error."""
    name = "model.layers.46.eh_proj.weight"
    assert FAMILIES["glm4_moe"].names.canonical_name(name, num_layers=46) is None
    assert FAMILIES["glm4_moe"].names.canonical_name(name, num_layers=47) == name
    assert FAMILIES["qwen3_moe"].names.canonical_name(name, num_layers=46) == name


def test_routed_experts_are_distinguished_from_everything_else() -> None:
    """All layouts' names and quantisation side tensors are experts'; routers and shared experts are not."""
    for layout in EXPERT_TENSOR_LAYOUTS.values():
        assert is_routed_expert(layout.example)
        assert is_routed_expert(layout.example.removesuffix(".weight") + ".weight_scale_inv") or (
            "gate_up" in layout.example
        )
    for name in (
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.moe.gate.weight",
    ):
        assert not is_routed_expert(name)


def per_expert(prefix: str, names: tuple[str, str, str], experts: list[dict[str, Array]]) -> dict[str, Array]:
    """Returns one tensor per expert and matrix."""
    return {
        f"{prefix}.{number}.{name}.weight": expert[matrix]
        for number, expert in enumerate(experts)
        for matrix, name in zip(("gate", "up", "down"), names, strict=True)
    }


def stored(layout: str, experts: list[dict[str, Array]]) -> tuple[str, dict[str, Array]]:
    """Returns a family that uses the layout, and the experts stored in it."""
    stacks = {matrix: np.stack([expert[matrix] for expert in experts]) for matrix in ("gate", "up", "down")}
    fused = np.concatenate([stacks["gate"], stacks["up"]], axis=1)
    mixed = np.stack([stacks["gate"], stacks["up"]], axis=2).reshape(EXPERTS, 2 * INNER, HIDDEN)
    text, base = "model.language_model.layers.1.mlp.experts", "model.layers.1"
    turned = {"down_proj": stacks["down"].swapaxes(1, 2)}

    def below(prefix: str, tensors: dict[str, Array]) -> dict[str, Array]:
        return {f"{prefix}.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}

    names = ("gate_proj", "up_proj", "down_proj")
    makers: dict[str, tuple[str, dict[str, Array]]] = {
        "per_expert": ("glm4_moe", per_expert(f"{base}.mlp.experts", names, experts)),
        "per_expert_w123": (
            "minimax_m2",
            per_expert(f"{base}.block_sparse_moe.experts", ("w1", "w3", "w2"), experts),
        ),
        "fused": ("qwen3_5_moe", below(text, {"gate_up_proj": fused, "down_proj": stacks["down"]})),
        "fused_transposed": ("qwen3_vl_moe", below(text, {"gate_up_proj": fused.swapaxes(1, 2), **turned})),
        "fused_interleaved": (
            "gpt_oss",
            below(f"{base}.mlp.experts", {"gate_up_proj": mixed.swapaxes(1, 2), **turned}),
        ),
        "fused_in_layer": (
            "gemma4",
            below(
                "model.language_model.layers.1.experts", {"gate_up_proj": fused, "down_proj": stacks["down"]}
            ),
        ),
        "per_expert_beside": ("gemma4", per_expert("model.language_model.layers.1.experts", names, experts)),
        "fused_feed_forward": (
            "llama4",
            below(
                "language_model.model.layers.1.feed_forward.experts",
                {"gate_up_proj": fused.swapaxes(1, 2), **turned},
            ),
        ),
        "per_expert_in_layer": (
            "mistral_large4",
            per_expert("layers.1.experts", ("w1", "w3", "w2"), experts),
        ),
        "per_expert_ffn": ("deepseek_v4", per_expert("layers.1.ffn.experts", ("w1", "w3", "w2"), experts)),
        "stacked_linears": (
            "granitemoehybrid",
            below(
                f"{base}.block_sparse_moe",
                {"input_linear.weight": fused, "output_linear.weight": stacks["down"]},
            ),
        ),
        "fused_block_sparse": (
            "granitemoe_swa",
            below(f"{base}.block_sparse_moe.experts", {"gate_up_proj": fused, "down_proj": stacks["down"]}),
        ),
        "per_expert_feed_forward": (
            "jamba",
            per_expert(f"{base}.feed_forward.experts", names, experts),
        ),
        "per_expert_w123_feed_forward": (
            "lfm2_moe",
            per_expert(f"{base}.feed_forward.experts", ("w1", "w3", "w2"), experts),
        ),
        "per_expert_mixer": ("nemotron_h", per_expert("backbone.layers.1.mixer.experts", names, experts)),
        "per_expert_step": ("step3p5", per_expert(f"{base}.moe.experts", names, experts)),
        "per_expert_step_old": ("step3p5", per_expert(f"{base}.moe", names, experts)),
        "stacked": ("step3p5", {f"{base}.moe.{name}_proj.weight": array for name, array in stacks.items()}),
    }
    return makers[layout]


# The one of GGUF files is tried with such files.
FAMILY_LAYOUTS = sorted({layout for family in FAMILIES.values() for layout in family.names.layouts})


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS)
def test_every_layout_yields_the_same_experts(tmp_path: Path, layout: str) -> None:
    """Whole matrices and slices of intermediate channels, whatever the storage; so all layouts are tried."""
    random = np.random.default_rng(1)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    experts: list[dict[str, Array]] = [
        {matrix: random.standard_normal(shape).astype(np.float32) for matrix, shape in shapes.items()}
        for _ in range(EXPERTS)
    ]
    family, tensors = stored(layout, experts)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    index = open_index(tmp_path)
    found = find_layout(index, family)
    assert found.layout.name == layout
    with SliceReader() as reader:
        for number, expected in enumerate(experts):
            sources = found.tensors(1, number)
            for matrix in ("gate", "up", "down"):
                source: Any = getattr(sources, matrix)
                assert source.shape == shapes[matrix]
                np.testing.assert_array_equal(source.read(reader), expected[matrix])
            channels = slice(1, 4)
            np.testing.assert_array_equal(sources.up.read(reader, rows=channels), expected["up"][channels])
            columns = sources.down.read(reader, cols=channels)
            np.testing.assert_array_equal(columns, expected["down"][:, channels])


@pytest.mark.parametrize(("hidden", "inner"), [(6, 3), (4, 4), (5, 3)])
@pytest.mark.parametrize("layout", ["fused", "fused_transposed"])
def test_shapes_tell_how_stacked_experts_lie(layout: str, hidden: int, inner: int, tmp_path: Path) -> None:
    """Released `[E, in, out]` or as transformers 5 writes them `[E, out, in]`, under the same names.

    Also where one of the two tensors looks the same both ways round: with 2I = H, and with I = H.
    """
    shapes = {"gate_up_proj": (EXPERTS, 2 * inner, hidden), "down_proj": (EXPERTS, hidden, inner)}
    turned = layout == "fused_transposed"
    tensors = {
        f"model.language_model.layers.0.mlp.experts.{name}": np.ones(
            (count, cols, rows) if turned else (count, rows, cols), np.float32
        )
        for name, (count, rows, cols) in shapes.items()
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert find_layout(open_index(tmp_path), "qwen3_vl_moe").layout.name == layout


def test_errors_name_what_was_looked_for(tmp_path: Path) -> None:
    """No experts at all, one expert too many, and an unknown family."""
    write_safetensors(tmp_path / "model.safetensors", {"model.norm.weight": np.ones(4, np.float32)})
    index = open_index(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.7\.gate_proj\.weight"):
        find_layout(index, "qwen3_moe")
    with pytest.raises(CheckpointError, match=r"'bert' is not supported; known: .*glm4_moe"):
        find_layout(index, "bert")
    stack = {
        f"model.layers.0.moe.{name}_proj.weight": np.ones((2, 3, 3), np.float32) for name in ("gate", "up")
    }
    write_safetensors(tmp_path / "model.safetensors", stack)
    layout = find_layout(open_index(tmp_path), "step3p5")
    with pytest.raises(CheckpointError, match=r"has 2 experts; expert 2 is missing"):
        layout.source(0, 2, "gate")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight' is missing"):
        layout.source(0, 1, "down")
