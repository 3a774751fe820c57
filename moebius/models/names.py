"""How families name their tensors: rules, and those that several families share.

Canonical names are those of the text-only Hugging Face models (`model.layers.0.self_attn.q_proj.weight`,
`...mlp.gate.weight`, `...mlp.shared_experts.up_proj.weight`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class RenameRule:
    """What some names of a family become; made by `rename` and `drop`."""

    stored: str  # Published names; `*` is a layer's number, `**` whatever else belongs to them.
    canonical: str | None  # The same names here, with as many stars; None: left out on purpose.

    def apply(self, name: str) -> tuple[bool, str | None]:
        """Whether the rule matches, and the new name."""
        match = re.fullmatch(_pattern(self.stored), name)
        if match is None or self.canonical is None:
            return match is not None, None
        found = iter(match.groups())
        return True, _STARS.sub(lambda _: next(found), self.canonical)


_STARS = re.compile(r"\*\*|\*")


@cache
def _pattern(stored: str) -> re.Pattern[str]:
    """Stars are the groups."""
    escaped = re.escape(stored)
    return re.compile(escaped.replace(r"\*\*", "(.*)").replace(r"\*", r"(\d+)"))


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one `model_type` names its tensors: rules, tried in order (the first that matches applies)."""

    renames: tuple[RenameRule, ...] = ()
    # Keys of `expert_layouts.EXPERT_TENSOR_LAYOUTS`, most likely first. Quantisers take fused experts apart.
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


def drop(stored: str) -> RenameRule:
    """Marks names that belong to nothing we load."""
    return RenameRule(stored, None)


def rename(stored: str, canonical: str) -> RenameRule:
    """`rename("model.layers.*.mlp.shared_mlp.**", "model.layers.*.mlp.shared_experts.**")`; see the class."""
    return RenameRule(stored, canonical)


# Some checkpoints carry rotary frequencies. Everybody computes them from config.json, as transformers does,
# and leaves the stored ones aside: they need not even be of the right number (Kimi-K2's are of another head).
ROTARY = drop("**.rotary_emb.inv_freq")
# Multi-token prediction proposes tokens and changes none of the model's own: not served, here or in
# transformers.
MTP = drop("mtp.**")
SHARED = rename("model.layers.*.mlp.shared_expert.**", "model.layers.*.mlp.shared_experts.**")
# Of multimodal models, whose towers are loaded by rules of their own.
VISION = drop("model.visual.**")
TEXT_SHARED = rename(
    "model.language_model.layers.*.mlp.shared_expert.**", "model.layers.*.mlp.shared_experts.**"
)
TEXT = rename("model.language_model.**", "model.**")
# Mixtral's and MiniMax-M2's.
MINIMAX_GATE = rename("model.layers.*.block_sparse_moe.gate.weight", "model.layers.*.mlp.gate.weight")
# Of towers whose module is called `visual`.
VISUAL = rename("model.visual.**", "visual.**")
