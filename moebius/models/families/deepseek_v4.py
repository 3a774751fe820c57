"""DeepSeek-V4 (Flash, Pro): attention to a window and to compressed tokens, hyper-connections, experts chosen
by a token's id in the first layers.

Sources: DeepSeek-V4's report, sections 2.1 to 2.3, and the configuration class of transformers 5.23. Files as
published name attention by `compress_ratios`, those that transformers writes by `layer_types`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import DEEPSEEK_KEYS, Config, GgufFamily
from moebius.checkpoint.gguf.names import HYPER_RULES, GgufRule, gguf_layer, gguf_linear
from moebius.models.common import Common, read_common, read_mtp_layers, refuse_bias
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.compressed import CompressedAttention, EntryIndexer
from moebius.models.layers.ffn import Experts, FeedForward, MoE
from moebius.models.layers.residual import HyperConnections
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig, ScoreFunction
from moebius.models.names import MTP, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_SLIDING, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_KINDS = (_SLIDING, _SPARSE, _HEAVY)
_RATES = {_SPARSE: 4, _HEAVY: 128}
_OLD_RATES = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
# In `compress_ratios`.
_RATIOS = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}
_HASH_LAYERS = 3
_SCORES: dict[str, ScoreFunction] = {
    "sqrtsoftplus": "sqrt_softplus",
    "softmax": "softmax",
    "sigmoid": "sigmoid",
}
# Of drafts.
DSPARK_KEYS = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)
# Of training, and of formats of experts, which `quantisation.py` reads.
_HARMLESS = (
    *DSPARK_KEYS,
    "expert_dtype",
    "intermediate_size",
    "router_jitter_noise",
)

# Of DeepSeek-V4.1, another architecture, which some engines read as this family with more keys.
_OF_V41 = (
    "candidate_topk_blocks",
    "engram_layer_ids",
    "hc_post_alpha",
    "index_source_layer_ids",
    "index_source_layers",
    "kv_source_layer_ids",
    "kv_source_layers",
)


def _kinds(hf: HfKeys, num_layers: int) -> tuple[str, ...]:
    """Returns each layer's kind of attention; numbers beyond the last one are of multi-token prediction."""
    kinds = hf.strings("layer_types")
    ratios = hf.integers("compress_ratios")
    if not kinds and ratios:
        unknown = [ratio for ratio in ratios if ratio not in _RATIOS]
        if unknown or len(ratios) < num_layers:
            raise hf.error("compress_ratios", list(ratios), f"{num_layers} of {', '.join(map(str, _RATIOS))}")
        kinds = tuple(_RATIOS[ratio] for ratio in ratios[:num_layers])
    first = (_HEAVY,) * min(num_layers, 2)
    kinds = kinds or (*first, *(_SPARSE if layer % 2 else _HEAVY for layer in range(num_layers - len(first))))
    if len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {', '.join(_KINDS)}")
    return kinds


def _rates(hf: HfKeys) -> dict[str, int]:
    """Returns the tokens of an entry, by the kind of attention."""
    section = hf.section("compress_rates")
    found = {}
    for kind, default in _RATES.items():
        rate = default if section is None else section.integer(kind, default=default, minimum=2)
        found[kind] = hf.integer(_OLD_RATES[kind], default=rate, minimum=2)
    if section is not None and section.unread:
        raise section.error(section.unread[0], "...", ", ".join(_RATES))
    return found


def read_ropes(hf: HfKeys, head_dim: int) -> dict[bool, RopeConfig]:
    """Returns rotations by whether a layer compresses, which alone scales, and only frequencies."""
    by_kind = hf.section("rope_parameters")
    theta = hf.number("rope_theta", default=10000.0)
    compressed_theta = hf.number("compress_rope_theta", default=160000.0)
    default = {"rope_theta": theta}
    if by_kind is not None and by_kind.has("main") and by_kind.has("compress"):
        parts = by_kind.value("main"), by_kind.value("compress")
    else:
        scaling = hf.value("rope_parameters") or hf.value("rope_scaling") or {}
        parts = default, {**scaling, "rope_theta": compressed_theta}
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            parts[1].setdefault("attention_factor", 1.0)
    factor = 64 / 512
    if hf.has("qk_rope_head_dim"):
        factor = hf.integer("qk_rope_head_dim", minimum=2) / head_dim
    ropes = [
        read_rope(
            hf.with_values(rope_parameters=part), head_dim, default_partial_factor=factor, interleaved=True
        )
        for part in parts
    ]
    if ropes[0].rotary_dim != ropes[1].rotary_dim:
        raise hf.error("rope_parameters", ropes[1].rotary_dim, f"as many rotated: {ropes[0].rotary_dim}")
    return {False: ropes[0], True: ropes[1]}


def read_attention(hf: HfKeys, common: Common, rope: RopeConfig) -> dict[str, Any]:
    """Returns the fields of `EntryAttention` that all layers have, but for their rotation."""
    heads, groups = common.num_heads, hf.integer("o_groups", default=8)
    if heads % groups:
        raise hf.error("o_groups", groups, f"a divisor of num_attention_heads ({heads})")
    return {
        "num_heads": heads,
        "head_dim": common.head_dim,
        "q_lora_rank": hf.integer("q_lora_rank"),
        "rope_dim": rope.rotary_dim,
        "window": hf.integer("sliding_window", default=128),
        "output_groups": groups,
        "output_rank": hf.integer("o_lora_rank", default=1024),
        "scale": common.head_dim**-0.5,
        "eps": common.eps,
    }


def read_indexer(hf: HfKeys, rope: RopeConfig) -> EntryIndexer:
    """Returns the indexer of layers that have one."""
    index_head_dim = hf.integer("index_head_dim", default=128)
    if index_head_dim < rope.rotary_dim:
        raise hf.error("index_head_dim", index_head_dim, f"at least qk_rope_head_dim ({rope.rotary_dim})")
    heads, top_k = hf.integer("index_n_heads", default=64), hf.integer("index_topk", default=512)
    return EntryIndexer(heads, index_head_dim, top_k)


def _read_mixers(hf: HfKeys, common: Common) -> list[CompressedAttention]:
    """Returns the attention of each layer."""
    ropes = read_ropes(hf, common.head_dim)
    kinds, rates = _kinds(hf, common.num_layers), _rates(hf)
    indexer = read_indexer(hf, ropes[True])
    plain = CompressedAttention(rope=ropes[False], rate=0, **read_attention(hf, common, ropes[True]))
    compressed = replace(plain, rope=ropes[True])
    by_kind = {
        _SLIDING: plain,
        _SPARSE: replace(compressed, rate=rates[_SPARSE], indexer=indexer),
        _HEAVY: replace(compressed, rate=rates[_HEAVY]),
    }
    return [by_kind[kind] for kind in kinds]


def _hash_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    kinds = hf.strings("mlp_layer_types")
    first = hf.integer("num_hash_layers", default=_HASH_LAYERS, minimum=0)
    if not kinds:
        return frozenset(range(min(num_layers, first)))
    if len(kinds) != num_layers or not set(kinds) <= {"hash_moe", "moe"}:
        raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'hash_moe' and 'moe'")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe")


def read_moe(hf: HfKeys, common: Common) -> MoE:
    """Returns the experts of every layer."""
    hf.refuse("topk_method", "noaux_tc")
    hf.refuse("n_group", 1)
    hf.refuse("topk_group", 1)
    hf.refuse("n_shared_experts", 1)
    score = hf.string("scoring_func", default="sqrtsoftplus")
    if score not in _SCORES:
        raise hf.error("scoring_func", score, ", ".join(_SCORES))
    if not hf.boolean("norm_topk_prob", default=True):
        raise hf.error("norm_topk_prob", False, "true")
    size = hf.integer("moe_intermediate_size")
    router = RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score=_SCORES[score],
        correction_bias=True,
        post="renormalize",
        renormalize_epsilon=1e-20,
        scale=hf.number("routed_scaling_factor", default=1.5),
        float32_gate=True,
    )
    return common.moe(router, Experts(size, "clamped_silu", limit=common.limit), size)


def _read_ffns(hf: HfKeys, common: Common) -> list[FeedForward]:
    """Returns the experts in every layer; in the first, a token's id chooses them."""
    moe = read_moe(hf, common)
    hashed = _hash_layers(hf, common.num_layers)
    by_id = replace(moe, hashed_tokens=common.vocab_size)
    return [by_id if layer in hashed else moe for layer in range(common.num_layers)]


def read_clamped(hf: HfKeys) -> Common:
    """Returns what all models of this kind have in common: clamped experts and one head of keys."""
    hf.refuse("mlp_bias")
    common = read_common(hf, dense_size=0)
    refuse_bias(hf, common)
    limit = hf.number("swiglu_limit", default=10.0)
    if common.num_kv_heads != 1:
        raise hf.error("num_key_value_heads", common.num_kv_heads, "1")
    return replace(common, activation="clamped_silu", limit=limit)


def read_streams(hf: HfKeys) -> HyperConnections:
    """Returns the residual streams."""
    return HyperConnections(
        num_streams=hf.integer("hc_mult", default=4, minimum=2),
        iterations=hf.integer("hc_sinkhorn_iters", default=20),
        eps=hf.number("hc_eps", default=1e-6),
    )


def read_deepseek_v4(hf: HfKeys) -> ModelConfig:
    """Reads DeepSeek-V4-Flash and -Pro."""
    hf.skip(*_HARMLESS)
    for name in _OF_V41:
        hf.refuse(name, [])
    common = read_clamped(hf)
    mixers = _read_mixers(hf, common)
    streams = replace(read_streams(hf), weighs_last=True)
    ffns = _read_ffns(hf, common)
    return common.model(mixers, ffns, residuals=streams, num_mtp_layers=read_mtp_layers(hf))


# Modules of a layer, as published and as here; compressor and indexer keep their names.
_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    # What transformers writes instead.
    "attn.norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor": "self_attn.compressor",
    "attn.indexer": "self_attn.indexer",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "ffn.experts": "mlp.experts",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
}
_TENSORS = {
    "attn.attn_sink": "self_attn.sinks",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
} | {f"hc_{half}_{part}": f"{half}_hc.{part}" for half in ("attn", "ffn") for part in ("fn", "base", "scale")}
_TOP = {
    "embed.**": "model.embed_tokens.**",
    "norm.**": "model.norm.**",
    "head.**": "lm_head.**",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
}
# Published without a prefix; transformers writes one before layers.
LAYER_RULES = tuple(
    rename(f"{prefix}layers.*.{stored}{rest}", f"model.layers.*.{canonical}{rest}")
    for prefix in ("", "model.")
    for rest, names in ((".**", _MODULES), ("", _TENSORS))
    for stored, canonical in names.items()
)
TOP_RULES = tuple(rename(stored, canonical) for stored, canonical in _TOP.items())

GGUF_KEYS = DEEPSEEK_KEYS | {
    "attention.compress_rope_freq_base": "compress_rope_theta",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_weights_norm": "norm_topk_prob",
    "hash_layer_count": "num_hash_layers",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "rope.dimension_count": "qk_rope_head_dim",
    "swiglu_clamp_exp": "swiglu_limit",
}


def gguf_rates(keys: MetadataKeys, config: Config) -> Config:
    """Rates of layers are listed as published, those of multi-token prediction may follow."""
    # The width of all streams; and a factor of rotation that llama.cpp takes out again.
    keys.skip("embedding_length_out", "rope.scaling.yarn_attn_factor")
    limit, shared = config.get("swiglu_limit"), keys.get("swiglu_clamp_shexp")
    if shared not in (None, limit):
        raise keys.error("swiglu_clamp_shexp", shared, f"what swiglu_clamp_exp is, {limit}")
    ratios = keys.listed("attention.compress_ratios", config["num_hidden_layers"])
    return {"compress_ratios": ratios}


_GGUF_COMPRESSOR = {"kv": "wkv", "gate": "wgate", "norm": "norm"}
GGUF_RULES = (
    *HYPER_RULES,
    *gguf_linear("attn_q_a_norm", "self_attn.q_a_norm"),
    *gguf_linear("attn_kv", "self_attn.kv_proj"),
    *gguf_linear("attn_kv_a_norm", "self_attn.kv_norm"),
    *gguf_linear("attn_output_a", "self_attn.o_a_proj"),
    *gguf_linear("attn_output_b", "self_attn.o_b_proj"),
    *(
        rule
        for prefix, module in (("attn", "self_attn"), ("indexer", "self_attn.indexer"))
        for rule in (
            *(
                one
                for stored, canonical in _GGUF_COMPRESSOR.items()
                for one in gguf_linear(f"{prefix}_compressor_{stored}", f"{module}.compressor.{canonical}")
            ),
            gguf_layer(f"{prefix}_compressor_ape.weight", f"{module}.compressor.ape"),
        )
    ),
    *gguf_linear("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    *gguf_linear("indexer.proj", "self_attn.indexer.weights_proj"),
    gguf_layer("ffn_gate_tid2eid.weight", "mlp.gate.tid2eid", "table"),
    # Corrects the choice for tokens of images, which are not served.
    GgufRule(r"blk\.\d+\.exp_probs_b_vl\.bias", None, ("blk.3.exp_probs_b_vl.bias", None)),
)

FAMILIES = (
    Family(
        "deepseek_v4",
        read_deepseek_v4,
        TensorNames(
            (MTP, *LAYER_RULES, *TOP_RULES),
            layouts=("per_expert_ffn",),
        ),
        gguf=(GgufFamily("deepseek4", GGUF_KEYS, 4, derive=gguf_rates, rules=GGUF_RULES),),
    ),
)
