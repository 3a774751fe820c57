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
        """Returns whether the rule matches, and the new name."""
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


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_MTP_HEAD = re.compile(r"mtp\.(\d+)\.(.*)")
# Checkpoints repeat the model's embedding and head in layers of multi-token prediction, which share them.
_SHARED_BY_HEADS = ("embed_tokens.", "shared_head.head.")


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How one `model_type` names its tensors: rules, tried in order (the first that matches applies)."""

    renames: tuple[RenameRule, ...] = ()
    # Keys of `expert_layouts.EXPERT_TENSOR_LAYOUTS`, most likely first. Quantisers take fused experts apart.
    layouts: tuple[str, ...] = ("per_expert",)
    # Layers numbered after the last decoder layer are multi-token prediction, not the model.
    mtp_layers: bool = False
    # Where multi-token prediction is named otherwise: rules to `mtp.<head>.` and the name below its layer,
    # which come first where it is served.
    mtp_renames: tuple[RenameRule, ...] = ()

    def canonical_name(self, name: str, num_layers: int, mtp_heads: int = 0) -> str | None:
        """The name here, or None for a name that is left out on purpose.

        `num_layers`: of the model as it is served, whose last `mtp_heads` are multi-token prediction.
        """
        for rule in (*(self.mtp_renames if mtp_heads else ()), *self.renames):
            matches, renamed = rule.apply(name)
            if matches:
                if renamed is None:
                    return None
                name = renamed
                break
        head = _MTP_HEAD.match(name)
        if head is not None and mtp_heads:
            name = f"model.layers.{num_layers - mtp_heads + int(head[1])}.{head[2]}"
        layer = _LAYER.match(name)
        if layer is None or int(layer[1]) < num_layers - mtp_heads:
            return name
        if int(layer[1]) >= num_layers:
            return None if self.mtp_layers or head is not None else name
        return None if layer[2].startswith(_SHARED_BY_HEADS) else name


def drop(stored: str) -> RenameRule:
    """Marks names that belong to nothing we load."""
    return RenameRule(stored, None)


def rename(stored: str, canonical: str) -> RenameRule:
    """Returns a rule, as `rename("model.layers.*.mlp.a.**", "model.layers.*.mlp.b.**")`; see the class."""
    return RenameRule(stored, canonical)


# Some checkpoints carry rotary frequencies. Everybody computes them from config.json, as transformers does,
# and leaves the stored ones aside: they need not even be of the right number (Kimi-K2's are of another head).
ROTARY = drop("**.rotary_emb.inv_freq")
# Multi-token prediction proposes tokens and changes none of the model's own: left out unless it is served.
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
