"""The rename-rule table of all families: what each checkpoint name is called here.

Canonical names are those of the text-only Hugging Face models (`model.layers.0.self_attn.q_proj.weight`,
`...mlp.gate.weight`, `...mlp.shared_experts.up_proj.weight`). A family is one row: rules, tried in order
(the first whose pattern matches the whole name applies), and the layouts its experts may have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import (
    LAYER_PREFIXES,
    LAYOUTS,
    ExpertSources,
    LocatedLayout,
    is_routed_expert,
)
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.moe_config import read_config

__all__ = ["FAMILY_RULES", "FamilyRules", "RenameRule", "expert_tensors", "find_layout", "is_routed_expert"]


@dataclass(frozen=True, slots=True)
class RenameRule:
    """One row of the table."""

    # Matched against the whole name.
    pattern: str
    # `re` replacement template; None: the name is nobody's (left out on purpose).
    replacement: str | None
    # A published name that the rule applies to, and what becomes of it.
    example: tuple[str, str | None]

    def apply(self, name: str) -> tuple[bool, str | None]:
        """Whether the rule matches, and the new name."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return False, None
        return True, None if self.replacement is None else match.expand(self.replacement)


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """How one `model_type` names its tensors."""

    renames: tuple[RenameRule, ...]
    # Keys of `LAYOUTS`, most likely first. Quantisers take fused experts apart.
    layouts: tuple[str, ...] = ("per_expert",)
    # Layers numbered behind the last decoder layer are multi-token prediction, not the model.
    prediction_layers: bool = False

    def canonical_name(self, name: str, num_layers: int) -> str | None:
        """The name here, or None for a name that is left out on purpose."""
        for rule in self.renames:
            matches, renamed = rule.apply(name)
            if matches:
                if renamed is None:
                    return None
                name = renamed
                break
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if self.prediction_layers and layer is not None and int(layer[1]) >= num_layers:
            return None
        return name


def _drop(pattern: str, example: str) -> RenameRule:
    return RenameRule(pattern, None, (example, None))


def _rename(pattern: str, replacement: str, before: str, after: str) -> RenameRule:
    return RenameRule(pattern, replacement, (before, after))


# Some checkpoints carry rotary frequencies. Everybody computes them from config.json, as transformers does,
# and leaves the stored ones aside: they need not even be of the right number (Kimi-K2's are of another head).
_ROTARY = _drop(r".*\.rotary_emb\.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
# Multi-token prediction proposes tokens and changes none of the model's own: not served, here or in
# transformers.
_MTP = _drop(r"mtp\..*", "mtp.layers.0.self_attn.q_proj.weight")
_SHARED = _rename(
    r"(model\.layers\.\d+\.mlp\.)shared_expert\.(.*)",
    r"\1shared_experts.\2",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
)
_VISION = _drop(r"model\.visual\..*", "model.visual.patch_embed.proj.weight")
_TEXT_SHARED = _rename(
    r"model\.language_model\.(layers\.\d+\.mlp\.)shared_expert\.(.*)",
    r"model.\1shared_experts.\2",
    "model.language_model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
)
_TEXT = _rename(
    r"model\.language_model\.(.*)",
    r"model.\1",
    "model.language_model.norm.weight",
    "model.norm.weight",
)
_KIMI_TEXT = _rename(
    r"language_model\.(.*)",
    r"\1",
    "language_model.model.norm.weight",
    "model.norm.weight",
)
# Transformers 5 calls decoder layers blocks when it writes them, and puts one norm elsewhere.
_KIMI_BLOCKS = _rename(
    r"language_model\.model\.blocks\.(.*)",
    r"model.layers.\1",
    "language_model.model.blocks.0.input_layernorm.weight",
    "model.layers.0.input_layernorm.weight",
)
_KIMI_VISION = _drop(
    r"(?:vision_tower|(?:model\.)?mm_projector)\..*", "vision_tower.encoder.blocks.0.norm0.weight"
)
_MINIMAX_GATE = _rename(
    r"(model\.layers\.\d+\.)block_sparse_moe\.gate\.weight",
    r"\1mlp.gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.mlp.gate.weight",
)
_MINIMAX_BIAS = _rename(
    r"(model\.layers\.\d+\.)block_sparse_moe\.(e_score_correction_bias)",
    r"\1mlp.gate.\2",
    "model.layers.0.block_sparse_moe.e_score_correction_bias",
    "model.layers.0.mlp.gate.e_score_correction_bias",
)
_ERNIE_MTP = _drop(r"model\.mtp_.*", "model.mtp_emb_norm.0.weight")
_ERNIE_BIAS = _rename(
    r"(model\.layers\.\d+\.mlp\.)moe_statics\.(e_score_correction_bias)",
    r"\1gate.\2",
    "model.layers.3.mlp.moe_statics.e_score_correction_bias",
    "model.layers.3.mlp.gate.e_score_correction_bias",
)
_GPT_OSS_ROUTER = _rename(
    r"(model\.layers\.\d+\.mlp\.)router\.(weight|bias)",
    r"\1gate.\2",
    "model.layers.0.mlp.router.bias",
    "model.layers.0.mlp.gate.bias",
)
_STEP_GATE = _rename(
    r"(model\.layers\.\d+\.)moe\.gate\.weight",
    r"\1mlp.gate.weight",
    "model.layers.4.moe.gate.weight",
    "model.layers.4.mlp.gate.weight",
)
_STEP_BIAS = _rename(
    r"(model\.layers\.\d+\.)moe\.router_bias",
    r"\1mlp.gate.e_score_correction_bias",
    "model.layers.4.moe.router_bias",
    "model.layers.4.mlp.gate.e_score_correction_bias",
)
_STEP_SHARED = _rename(
    r"(model\.layers\.\d+\.)share_expert\.(.*)",
    r"\1mlp.shared_experts.\2",
    "model.layers.4.share_expert.up_proj.weight",
    "model.layers.4.mlp.shared_experts.up_proj.weight",
)

_DEEPSEEK = FamilyRules((_ROTARY,), prediction_layers=True)
FAMILY_RULES: Mapping[str, FamilyRules] = {
    "qwen2_moe": FamilyRules((_ROTARY, _SHARED)),
    "qwen3_moe": FamilyRules((_ROTARY,)),
    # In GGUF files of these, prediction follows as one more layer.
    "qwen3_next": FamilyRules((_ROTARY, _MTP, _SHARED), prediction_layers=True),
    "qwen3_5_moe": FamilyRules((_MTP, _VISION, _TEXT_SHARED, _TEXT), ("fused", "per_expert")),
    "qwen3_5_moe_text": FamilyRules(
        (_MTP, _VISION, _TEXT_SHARED, _TEXT, _SHARED), ("fused", "per_expert"), prediction_layers=True
    ),
    # As published, and as transformers 5 writes it: `_is_shaped` tells.
    "qwen3_vl_moe": FamilyRules((_VISION, _TEXT), ("fused_transposed", "fused", "per_expert")),
    "glm4_moe": FamilyRules((_ROTARY,), prediction_layers=True),
    "glm4_moe_lite": FamilyRules((_ROTARY,), prediction_layers=True),
    "glm4v_moe": FamilyRules((_VISION, _TEXT), prediction_layers=True),
    "glm_moe_dsa": FamilyRules((_ROTARY,), prediction_layers=True),
    "mixtral": FamilyRules((_ROTARY, _MINIMAX_GATE), ("per_expert_w123",)),
    "olmoe": FamilyRules((_ROTARY,)),
    "dots1": FamilyRules((_ROTARY,)),
    "ernie4_5_moe": FamilyRules((_ROTARY, _ERNIE_MTP, _ERNIE_BIAS)),
    "minimax_m2": FamilyRules((_ROTARY, _MINIMAX_GATE, _MINIMAX_BIAS), ("per_expert_w123",), True),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "kimi_k25": FamilyRules((_KIMI_VISION, _KIMI_BLOCKS, _KIMI_TEXT)),
    "gpt_oss": FamilyRules((_ROTARY, _GPT_OSS_ROUTER), ("fused_interleaved",)),
    "step3p5": FamilyRules(
        (_ROTARY, _STEP_GATE, _STEP_BIAS, _STEP_SHARED),
        ("stacked", "per_expert_step", "per_expert_step_old"),
        prediction_layers=True,
    ),
}


# What layers of multi-token prediction have besides those of a decoder layer.
_PREDICTION = re.compile(
    r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head|embed_tokens|transformer)\."
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_prediction_layers(index: CheckpointIndex, model_type: str, num_layers: int) -> None:
    """Layers behind the last are left out only where they are multi-token prediction.

    Raises CheckpointError naming a tensor of another: config.json has fewer layers than the checkpoint.
    """
    # A GGUF file itself says how many of its blocks predict, and names what they have besides otherwise.
    if not FAMILY_RULES[model_type].prediction_layers or index.layouts:
        return
    first_of: dict[int, str] = {}
    predicting: set[int] = set()
    for name in index.tensors:
        canonical = FAMILY_RULES[model_type].canonical_name(name, sys.maxsize) or ""
        layer = _LAYER.match(canonical)
        if layer is not None and int(layer[1]) >= num_layers:
            first_of.setdefault(int(layer[1]), name)
            if _PREDICTION.match(canonical):
                predicting.add(int(layer[1]))
    for number, name in sorted(first_of.items()):
        if number not in predicting:
            raise CheckpointError(
                f"{index.directory}: tensor {name!r} is of layer {number}, but config.json has "
                f"num_hidden_layers {num_layers}, and nothing says that the layer is one of multi-token "
                "prediction: it would be left unused"
            )


def find_layout(index: CheckpointIndex, model_type: str) -> LocatedLayout:
    """The family's layout that the checkpoint uses. Raises CheckpointError naming what was looked for.

    Of layouts that have the same names, the one whose shapes fit; where none fits, the first.
    """
    family = FAMILY_RULES.get(model_type)
    if family is None:
        raise CheckpointError(f"model_type is {model_type!r}; known: {', '.join(sorted(FAMILY_RULES))}")
    layouts = index.layouts or family.layouts
    first: LocatedLayout | None = None
    for found, gate in _named_layouts(index, layouts):
        if _is_shaped(found, gate):
            return found
        first = first or found
    if first is not None:
        return first
    examples = ", ".join(LAYOUTS[name].example for name in layouts)
    raise CheckpointError(
        f"{index.directory} has no routed experts of {model_type}; expected names like {examples}"
    )


def _named_layouts(
    index: CheckpointIndex, layouts: tuple[str, ...]
) -> Iterator[tuple[LocatedLayout, TensorInfo]]:
    """Those of which there is a gate, with one."""
    for layout in (LAYOUTS[name] for name in layouts):
        below = _gate_pattern(layout.gate.name)
        for prefix in LAYER_PREFIXES:
            pattern = re.compile(re.escape(prefix) + r"\d+\." + below)
            gate = next((info for name, info in index.tensors.items() if pattern.fullmatch(name)), None)
            if gate is not None:
                yield LocatedLayout(index, layout, prefix), gate


def _is_shaped(found: LocatedLayout, gate: TensorInfo) -> bool:
    """Whether fused gate and up beside down have the sizes that the layout calls for.

    Shapes of one tensor alone may fit both ways round, those of the two never do: gate and up have twice as
    many outputs as down has inputs, and as many inputs as it has outputs.
    """
    layout = found.layout
    if layout.gate.parts == 1:
        return True
    down = found.index.tensors.get(gate.name.replace("gate_up_proj", "down_proj"))
    if down is None or len(gate.shape) != 3 or len(down.shape) != 3:
        return False
    (outputs, hidden), (rows, inner) = (
        shape[::-1] if layout.gate.transposed else shape for shape in (gate.shape[1:], down.shape[1:])
    )
    return outputs == layout.gate.parts * inner and hidden == rows


def _gate_pattern(name: str) -> str:
    """The tensor that holds gate, or its codes where it is quantised."""
    stem = re.escape(name.removesuffix(".weight")).replace(r"\{expert\}", r"\d+")
    if name.endswith(".weight"):
        return stem + r"\.(?:weight|weight_packed|qweight|\w+_codes)"
    return stem + r"(?:_blocks|_packed)?"


def expert_tensors(index: CheckpointIndex, layer: int, expert: int) -> ExpertSources:
    """One expert's matrices; `find_layout(...).tensors(...)` when many are read. Raises CheckpointError."""
    model_type = str(read_config(index.directory).get("model_type"))
    return find_layout(index, model_type).tensors(layer, expert)
