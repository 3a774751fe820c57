"""What GGUF calls the tensors of each family, and what becomes of them here.

Names are llama.cpp's, the same in all architectures but for the exceptions in `GgufFamily.rules`. Rules are
tried in order; the first whose pattern matches the whole name applies. Canonical names are those of
`moebius.models.names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# How stored values become the canonical tensor:
#   same         as they are
#   row          a vector is a matrix of one row
#   query_pairs  rows of a head alternate between the halves of rotary pairs; here one half follows the other
#   key_pairs    the same for keys
#   key_part     [heads, rank, nope], the part of kv_b_proj that makes keys, transposed per head
#   value_part   [heads, value, rank], the part of kv_b_proj that makes values
#   one_plus_weight  a norm's weight, here less 1
#   decay        -exp(A_log) of linear attention, here A_log
#   flat         a matrix whose rows here follow one another
#   flat_decay   such a matrix of decays
#   axes_decay   decays that here have the shape [1, 1, heads, 1]
#   taps         a convolution's weights, here with an axis of one input channel
#   channel_taps the same of a convolution over another number of channels
#   flat_log     numbers of decays whose logarithm is here
#   table        whole numbers, as they are
#   gate_half    the gate matrix of what here is one matrix of gates, then ups
#   up_half      the other one
#   first_rows   what comes first of a matrix whose rows are in two
#   later_rows   the rest of it
#   mixed_part   queries, keys and values of linear attention, which here lie by key head
#   gate_part    the gates next to them
#   tiled_...    value heads alternate between the key heads they belong to; here those of one follow each
#                other: rows, rows after queries and keys, decay, taps, columns
Change = Literal[
    "same",
    "row",
    "query_pairs",
    "key_pairs",
    "key_part",
    "value_part",
    "one_plus_weight",
    "decay",
    "flat",
    "flat_decay",
    "axes_decay",
    "flat_log",
    "table",
    "taps",
    "channel_taps",
    "gate_half",
    "up_half",
    "first_rows",
    "later_rows",
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

    pattern: str  # Matched against the whole name.
    # `re` replacement template, in which `<key>` is the number, or the only one of a list, that the metadata
    # has under this key; None: the tensor is left out on purpose.
    replacement: str | None
    # A published name that the rule applies to, and what becomes of it.
    example: tuple[str, str | None]
    change: Change = "same"


def gguf_top(name: str, canonical: str, change: Change = "same") -> GgufRule:
    """Returns the GGUF name of a tensor outside of layers."""
    return GgufRule(re.escape(name), canonical, (name, canonical), change)


def gguf_layer(name: str, canonical: str, change: Change = "same") -> GgufRule:
    """`name` and `canonical` below the layer, both with their suffix."""
    example = f"blk.0.{name}", f"model.layers.0.{canonical}"
    return GgufRule(rf"blk\.(\d+)\.{re.escape(name)}", rf"model.layers.\1.{canonical}", example, change)


def gguf_linear(name: str, canonical: str, *suffixes: str) -> Iterator[GgufRule]:
    """Yields the rules of a module in each layer; without `suffixes`, of its weight."""
    for suffix in suffixes or ("weight",):
        yield gguf_layer(f"{name}.{suffix}", f"{canonical}.{suffix}")


BOTH = ("weight", "bias")
COMMON_RULES: tuple[GgufRule, ...] = (
    gguf_top("token_embd.weight", "model.embed_tokens.weight"),
    gguf_top("output_norm.weight", "model.norm.weight"),
    gguf_top("output.weight", "lm_head.weight"),
    *gguf_linear("attn_norm", "input_layernorm"),
    *gguf_linear("ffn_norm", "post_attention_layernorm"),
    *gguf_linear("post_attention_norm", "post_attention_layernorm"),
    *gguf_linear("attn_q", "self_attn.q_proj", *BOTH),
    *gguf_linear("attn_k", "self_attn.k_proj", *BOTH),
    *gguf_linear("attn_v", "self_attn.v_proj", *BOTH),
    *gguf_linear("attn_output", "self_attn.o_proj", *BOTH),
    *gguf_linear("attn_q_norm", "self_attn.q_norm"),
    *gguf_linear("attn_k_norm", "self_attn.k_norm"),
    gguf_layer("attn_sinks.weight", "self_attn.sinks"),
    *gguf_linear("attn_q_a", "self_attn.q_a_proj", *BOTH),
    *gguf_linear("attn_q_a_norm", "self_attn.q_a_layernorm"),
    *gguf_linear("attn_q_b", "self_attn.q_b_proj"),
    *gguf_linear("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", *BOTH),
    *gguf_linear("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    *gguf_linear("attn_kv_b", "self_attn.kv_b_proj"),
    gguf_layer("attn_k_b.weight", "self_attn.kv_b_proj.weight", "key_part"),
    gguf_layer("attn_v_b.weight", "self_attn.kv_b_proj.weight", "value_part"),
    *gguf_linear("ffn_gate", "mlp.gate_proj"),
    *gguf_linear("ffn_up", "mlp.up_proj"),
    *gguf_linear("ffn_down", "mlp.down_proj"),
    *gguf_linear("ffn_gate_inp", "mlp.gate", *BOTH),
    gguf_layer("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    # Early files have it without a suffix.
    gguf_layer("exp_probs_b", "mlp.gate.e_score_correction_bias"),
    *gguf_linear("ffn_gate_exps", "mlp.experts.gate_proj", *BOTH),
    *gguf_linear("ffn_gate_up_exps", "mlp.experts.gate_up_proj", *BOTH),
    *gguf_linear("ffn_up_exps", "mlp.experts.up_proj", *BOTH),
    *gguf_linear("ffn_down_exps", "mlp.experts.down_proj", *BOTH),
    *gguf_linear("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    *gguf_linear("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    *gguf_linear("ffn_down_shexp", "mlp.shared_experts.down_proj"),
    gguf_layer("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", "row"),
    # Multi-token prediction, whose embedding and head are the model's.
    *gguf_linear("nextn.eh_proj", "eh_proj"),
    *gguf_linear("nextn.enorm", "enorm"),
    *gguf_linear("nextn.hnorm", "hnorm"),
    *gguf_linear("nextn.shared_head_norm", "shared_head.norm"),
    GgufRule(r"blk\.\d+\.nextn\..*", None, ("blk.46.nextn.embed_tokens.weight", None)),
)

# Of families whose norms, but for that inside linear attention, hold their weight less 1: the files add it.
ONE_PLUS_WEIGHT_NORM_RULES = (
    gguf_top("output_norm.weight", "model.norm.weight", "one_plus_weight"),
    gguf_layer("attn_norm.weight", "input_layernorm.weight", "one_plus_weight"),
    gguf_layer("post_attention_norm.weight", "post_attention_layernorm.weight", "one_plus_weight"),
    gguf_layer("attn_q_norm.weight", "self_attn.q_norm.weight", "one_plus_weight"),
    gguf_layer("attn_k_norm.weight", "self_attn.k_norm.weight", "one_plus_weight"),
    gguf_layer("ssm_norm.weight", "linear_attn.norm.weight"),
    gguf_layer("nextn.enorm.weight", "enorm.weight", "one_plus_weight"),
    gguf_layer("nextn.hnorm.weight", "hnorm.weight", "one_plus_weight"),
    gguf_layer("nextn.shared_head_norm.weight", "shared_head.norm.weight", "one_plus_weight"),
)

# Of files of llama: heads of queries and keys lie with both elements of a rotary pair side by side.
PAIRED_RULES = (
    gguf_layer("attn_q.weight", "self_attn.q_proj.weight", "query_pairs"),
    gguf_layer("attn_k.weight", "self_attn.k_proj.weight", "key_pairs"),
)

# Of families that choose tokens as DeepSeek-V3.2 does.
INDEXER_RULES = (
    *gguf_linear("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    *gguf_linear("indexer.attn_k", "self_attn.indexer.wk"),
    *gguf_linear("indexer.k_norm", "self_attn.indexer.k_norm", *BOTH),
    *gguf_linear("indexer.proj", "self_attn.indexer.weights_proj"),
)
# Of Kimi Delta Attention, but for its decays, whose shapes and signs differ from family to family.
KDA_RULES = (
    *(
        gguf_layer(f"ssm_conv1d_{part}.weight", f"self_attn.{part}_conv1d.weight", "channel_taps")
        for part in ("q", "k", "v")
    ),
    *gguf_linear("ssm_beta", "self_attn.b_proj"),
    gguf_layer("ssm_dt.bias", "self_attn.dt_bias"),
    *gguf_linear("ssm_norm", "self_attn.o_norm"),
)
# Of its decays and gates that come through a bottleneck.
KDA_BOTTLENECK_RULES = (
    *gguf_linear("ssm_f_a", "self_attn.f_a_proj"),
    *gguf_linear("ssm_f_b", "self_attn.f_b_proj"),
    *gguf_linear("ssm_g_a", "self_attn.g_a_proj"),
    *gguf_linear("ssm_g_b", "self_attn.g_b_proj"),
)
_HYPER_PARTS = ("fn", "base", "scale")
# Of hyper-connections: within layers, and what is mixed last.
HYPER_RULES = (
    *(
        gguf_layer(f"hc_{half}_{part}.weight", f"{half}_hc.{part}")
        for half in ("attn", "ffn")
        for part in _HYPER_PARTS
    ),
    *(gguf_top(f"output_hc_{part}.weight", f"model.hc_head.hc_{part}") for part in _HYPER_PARTS),
)


def gguf_mamba2(module: str) -> tuple[GgufRule, ...]:
    """Returns the rules of the layers' modules of this name; per-head numbers are columns, and the norm has a
    row per group.
    """
    return (
        *gguf_linear("ssm_in", f"{module}.in_proj"),
        gguf_layer("ssm_conv1d.weight", f"{module}.conv1d.weight", "taps"),
        gguf_layer("ssm_conv1d.bias", f"{module}.conv1d.bias"),
        gguf_layer("ssm_dt.bias", f"{module}.dt_bias"),
        gguf_layer("ssm_a", f"{module}.A_log", "flat_decay"),
        gguf_layer("ssm_d", f"{module}.D", "flat"),
        gguf_layer("ssm_norm.weight", f"{module}.norm.weight", "flat"),
        *gguf_linear("ssm_out", f"{module}.out_proj"),
    )


@dataclass(frozen=True, slots=True)
class Renamed:
    """Filled by `canonical_name`."""

    # None: left out on purpose.
    name: str | None
    change: Change


def canonical_name(own_rules: tuple[GgufRule, ...], name: str) -> Renamed | None:
    """Returns what a GGUF tensor is here, by its architecture's rules, then by the common ones; None:
    unknown.
    """
    for rule in (*own_rules, *COMMON_RULES):
        match = re.fullmatch(rule.pattern, name)
        if match is not None:
            renamed = None if rule.replacement is None else match.expand(rule.replacement)
            return Renamed(renamed, rule.change)
    return None
