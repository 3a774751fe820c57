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
#   centered     a norm's weight, here less 1
#   decay        -exp(A_log) of linear attention, here A_log
#   taps         a convolution's weights, here with an axis of one input channel
#   mixed_part   queries, keys and values of linear attention, which here lie by key head
#   gate_part    the gates beside them
#   tiled_...    value heads alternate between the key heads they belong to; here those of one follow each
#                other: rows, rows behind queries and keys, decay, taps, columns
Change = Literal[
    "same",
    "row",
    "query_pairs",
    "key_pairs",
    "key_part",
    "value_part",
    "centered",
    "decay",
    "taps",
    "mixed_part",
    "gate_part",
    "tiled_rows",
    "tiled_mixed",
    "tiled_decay",
    "tiled_taps",
    "tiled_columns",
]


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


def _top(name: str, canonical: str, change: Change = "same") -> GgufRule:
    return GgufRule(re.escape(name), canonical, (name, canonical), change)


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

# Of families whose norms, but for that inside linear attention, hold their weight less 1: the files add it.
_CENTERED = (
    _top("output_norm.weight", "model.norm.weight", "centered"),
    _layer("attn_norm.weight", "input_layernorm.weight", "centered"),
    _layer("post_attention_norm.weight", "post_attention_layernorm.weight", "centered"),
    _layer("attn_q_norm.weight", "self_attn.q_norm.weight", "centered"),
    _layer("attn_k_norm.weight", "self_attn.k_norm.weight", "centered"),
    _layer("ssm_norm.weight", "linear_attn.norm.weight"),
)

# What an architecture has otherwise, tried first.
ARCHITECTURE_RULES: Mapping[str, tuple[GgufRule, ...]] = {
    "llama": (
        _layer("attn_q.weight", "self_attn.q_proj.weight", "query_pairs"),
        _layer("attn_k.weight", "self_attn.k_proj.weight", "key_pairs"),
    ),
    "ernie4_5-moe": (_layer("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "row"),),
    "glm-dsa": (
        *_linear("indexer.attn_q_b", "self_attn.indexer.wq_b"),
        *_linear("indexer.attn_k", "self_attn.indexer.wk"),
        *_linear("indexer.k_norm", "self_attn.indexer.k_norm", *_BOTH),
        *_linear("indexer.proj", "self_attn.indexer.weights_proj"),
    ),
    "qwen35moe": (
        *_CENTERED,
        _layer("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "tiled_mixed"),
        _layer("attn_gate.weight", "linear_attn.in_proj_z.weight", "tiled_rows"),
        _layer("ssm_beta.weight", "linear_attn.in_proj_b.weight", "tiled_rows"),
        _layer("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "tiled_rows"),
        _layer("ssm_a", "linear_attn.A_log", "tiled_decay"),
        _layer("ssm_dt.bias", "linear_attn.dt_bias", "tiled_rows"),
        _layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "tiled_taps"),
        _layer("ssm_out.weight", "linear_attn.out_proj.weight", "tiled_columns"),
    ),
    "qwen3next": (
        *_CENTERED,
        _layer("attn_qkv.weight", "linear_attn.in_proj_qkvz.weight", "mixed_part"),
        _layer("attn_gate.weight", "linear_attn.in_proj_qkvz.weight", "gate_part"),
        # Early files have both in one, as published.
        *_linear("ssm_in", "linear_attn.in_proj_qkvz"),
        *_linear("ssm_ba", "linear_attn.in_proj_ba"),
        _layer("ssm_a", "linear_attn.A_log", "decay"),
        _layer("ssm_dt.bias", "linear_attn.dt_bias"),
        _layer("ssm_conv1d.weight", "linear_attn.conv1d.weight", "taps"),
        *_linear("ssm_out", "linear_attn.out_proj"),
    ),
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
