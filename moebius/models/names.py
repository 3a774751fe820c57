"""How families name their tensors: rules, and those that several families share.

Canonical names are those of the text-only Hugging Face models (`model.layers.0.self_attn.q_proj.weight`,
`...mlp.gate.weight`, `...mlp.shared_experts.up_proj.weight`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RenameRule:
    """What some names of a family become; made by `rename` and `drop`."""

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
class TensorNames:
    """How one `model_type` names its tensors: rules, tried in order (the first that matches applies)."""

    renames: tuple[RenameRule, ...] = ()
    # Keys of `expert_layouts.LAYOUTS`, most likely first. Quantisers take fused experts apart.
    layouts: tuple[str, ...] = ("per_expert",)
    # Layers numbered after the last decoder layer are multi-token prediction, not the model.
    mtp_layers: bool = False

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
        if self.mtp_layers and layer is not None and int(layer[1]) >= num_layers:
            return None
        return name


def drop(pattern: str, example: str) -> RenameRule:
    """Names that are nobody's."""
    return RenameRule(pattern, None, (example, None))


def rename(pattern: str, replacement: str, before: str, after: str) -> RenameRule:
    """`before` and `after` are the example."""
    return RenameRule(pattern, replacement, (before, after))


# Some checkpoints carry rotary frequencies. Everybody computes them from config.json, as transformers does,
# and leaves the stored ones aside: they need not even be of the right number (Kimi-K2's are of another head).
ROTARY = drop(r".*\.rotary_emb\.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
# Multi-token prediction proposes tokens and changes none of the model's own: not served, here or in
# transformers.
MTP = drop(r"mtp\..*", "mtp.layers.0.self_attn.q_proj.weight")
SHARED = rename(
    r"(model\.layers\.\d+\.mlp\.)shared_expert\.(.*)",
    r"\1shared_experts.\2",
    "model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
)
# Of multimodal models, whose towers are loaded by rules of their own.
VISION = drop(r"model\.visual\..*", "model.visual.patch_embed.proj.weight")
TEXT_SHARED = rename(
    r"model\.language_model\.(layers\.\d+\.mlp\.)shared_expert\.(.*)",
    r"model.\1shared_experts.\2",
    "model.language_model.layers.0.mlp.shared_expert.up_proj.weight",
    "model.layers.0.mlp.shared_experts.up_proj.weight",
)
TEXT = rename(
    r"model\.language_model\.(.*)",
    r"model.\1",
    "model.language_model.norm.weight",
    "model.norm.weight",
)
# Mixtral's and MiniMax-M2's.
MINIMAX_GATE = rename(
    r"(model\.layers\.\d+\.)block_sparse_moe\.gate\.weight",
    r"\1mlp.gate.weight",
    "model.layers.0.block_sparse_moe.gate.weight",
    "model.layers.0.mlp.gate.weight",
)
# Of towers whose module is called `visual`.
VISUAL = rename(
    r"model\.(visual\..*)",
    r"\1",
    "model.visual.patch_embed.proj.weight",
    "visual.patch_embed.proj.weight",
)
