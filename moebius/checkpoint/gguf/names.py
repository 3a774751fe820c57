"""What GGUF calls the tensors of each family, and what becomes of them here.

Names are llama.cpp's, the same in all architectures but for the exceptions in `ARCHITECTURE_RULES`. Rules are
tried in order; the first whose pattern matches the whole name applies. Canonical names are those of
`moebius.checkpoint.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

# How stored values become the canonical tensor:
#   same         as they are
#   row          a vector is a matrix of one row
#   query_pairs  rows of a head alternate between the halves of rotary pairs; here one half follows the other
#   key_pairs    the same for keys
#   key_part     [heads, rank, nope], the part of kv_b_proj that makes keys, transposed per head
#   value_part   [heads, value, rank], the part of kv_b_proj that makes values
Change = Literal["same", "row", "query_pairs", "key_pairs", "key_part", "value_part"]


@dataclass(frozen=True, slots=True)
class GgufRule:
    """One row of the table."""

    # Matched against the whole name.
    pattern: str
    # `re` replacement template; None: the tensor is nobody's (left out on purpose).
    replacement: str | None
    # A published name that the rule applies to, and what becomes of it.
    example: tuple[str, str | None]
    change: Change = "same"


def _top(name: str, canonical: str) -> GgufRule:
    return GgufRule(re.escape(name), canonical, (name, canonical))


def _layer(name: str, canonical: str, change: Change = "same") -> GgufRule:
    """`name` and `canonical` below the layer, both with their suffix."""
    example = f"blk.0.{name}", f"model.layers.0.{canonical}"
    return GgufRule(rf"blk\.(\d+)\.{re.escape(name)}", rf"model.layers.\1.{canonical}", example, change)


def _linear(name: str, canonical: str, *suffixes: str) -> Iterator[GgufRule]:
    for suffix in suffixes or ("weight",):
        yield _layer(f"{name}.{suffix}", f"{canonical}.{suffix}")


_BOTH = ("weight", "bias")
COMMON_RULES: tuple[GgufRule, ...] = (
    _top("token_embd.weight", "model.embed_tokens.weight"),
    _top("output_norm.weight", "model.norm.weight"),
    _top("output.weight", "lm_head.weight"),
    *_linear("attn_norm", "input_layernorm"),
    *_linear("ffn_norm", "post_attention_layernorm"),
    *_linear("post_attention_norm", "post_attention_layernorm"),
    *_linear("attn_q", "self_attn.q_proj", *_BOTH),
    *_linear("attn_k", "self_attn.k_proj", *_BOTH),
    *_linear("attn_v", "self_attn.v_proj", *_BOTH),
    *_linear("attn_output", "self_attn.o_proj", *_BOTH),
    *_linear("attn_q_norm", "self_attn.q_norm"),
    *_linear("attn_k_norm", "self_attn.k_norm"),
    _layer("attn_sinks.weight", "self_attn.sinks"),
    *_linear("attn_q_a", "self_attn.q_a_proj", *_BOTH),
    *_linear("attn_q_a_norm", "self_attn.q_a_layernorm"),
    *_linear("attn_q_b", "self_attn.q_b_proj"),
    *_linear("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", *_BOTH),
    *_linear("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    *_linear("attn_kv_b", "self_attn.kv_b_proj"),
    _layer("attn_k_b.weight", "self_attn.kv_b_proj.weight", "key_part"),
    _layer("attn_v_b.weight", "self_attn.kv_b_proj.weight", "value_part"),
    *_linear("ffn_gate", "mlp.gate_proj"),
    *_linear("ffn_up", "mlp.up_proj"),
    *_linear("ffn_down", "mlp.down_proj"),
    *_linear("ffn_gate_inp", "mlp.gate", *_BOTH),
    _layer("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    # Early files have it without a suffix.
    _layer("exp_probs_b", "mlp.gate.e_score_correction_bias"),
    *_linear("ffn_gate_exps", "mlp.experts.gate_proj", *_BOTH),
    *_linear("ffn_gate_up_exps", "mlp.experts.gate_up_proj", *_BOTH),
    *_linear("ffn_up_exps", "mlp.experts.up_proj", *_BOTH),
    *_linear("ffn_down_exps", "mlp.experts.down_proj", *_BOTH),
    *_linear("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    *_linear("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    *_linear("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    _layer("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "row"),
    # Multi-token prediction, which is not served.
    GgufRule(r"blk\.\d+\.nextn\..*", None, ("blk.46.nextn.eh_proj.weight", None)),
)

# What an architecture has otherwise, tried first.
ARCHITECTURE_RULES: Mapping[str, tuple[GgufRule, ...]] = {
    "llama": (
        _layer("attn_q.weight", "self_attn.q_proj.weight", "query_pairs"),
        _layer("attn_k.weight", "self_attn.k_proj.weight", "key_pairs"),
    ),
    "ernie4_5-moe": (_layer("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "row"),),
}


@dataclass(frozen=True, slots=True)
class Renamed:
    """Filled by `canonical_name`."""

    # None: left out on purpose.
    name: str | None
    change: Change


def canonical_name(architecture: str, name: str) -> Renamed | None:
    """What a GGUF tensor is here; None where no rule knows it."""
    for rule in (*ARCHITECTURE_RULES.get(architecture, ()), *COMMON_RULES):
        match = re.fullmatch(rule.pattern, name)
        if match is not None:
            renamed = None if rule.replacement is None else match.expand(rule.replacement)
            return Renamed(renamed, rule.change)
    return None
