"""Which pieces the published models of each family have in which layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tests.tools.checkpoint_names.parts import (
    BF16,
    F32,
    Config,
    Entry,
    ends,
    gqa,
    indexer,
    int4_mlp,
    linear,
    linear_attention,
    mla,
    mlp,
    norms,
    numbers,
    plain,
    prediction,
)
from tests.tools.checkpoint_names.towers import glm_tower, kimi_tower, qwen_tower

BIAS = "e_score_correction_bias"


def _choice(layers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, layers)) + "}"


def _layer(config: Config, stem: str = "model.") -> str:
    """The stem of all layers."""
    return f"{stem}layers.{numbers(0, config['num_hidden_layers'] - 1)}."


def _experts(layer: str, config: Config, count: int, *, fp8: bool = False, scales: str = F32) -> list[Entry]:
    stem = f"{layer}mlp.experts.{numbers(0, count - 1)}."
    return mlp(stem, config["hidden_size"], config["moe_intermediate_size"], fp8, scales)


def qwen_moe(config: Config) -> list[Entry]:
    """Qwen2-MoE and Qwen3-MoE, whose scales have 16 bits where it is in fp8."""
    layer, hidden, experts = _layer(config), config["hidden_size"], config["num_experts"]
    old, fp8 = config["model_type"] == "qwen2_moe", "quantization_config" in config
    biases, qk_norm = ("qkv", "") if old else ("", "head")
    entries = ends(config) + norms(layer, hidden)
    entries += gqa(layer, config, bias=biases, qk_norm=qk_norm, fp8=fp8, scales=BF16)
    entries += linear(layer, {"mlp.gate": [experts, hidden]})
    entries += _experts(layer, config, experts, fp8=fp8, scales=BF16)
    return entries + (_shared_gated(layer, config) if old else [])


def _shared_gated(layer: str, config: Config) -> list[Entry]:
    hidden = config["hidden_size"]
    shared = mlp(f"{layer}mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
    return [*shared, *linear(layer, {"mlp.shared_expert_gate": [1, hidden]})]


def qwen3_next(config: Config) -> list[Entry]:
    """Three layers of linear attention, then one that attends; prediction under a name of its own."""
    count, hidden, experts = config["num_hidden_layers"], config["hidden_size"], config["num_experts"]
    every, layer = config["full_attention_interval"], _layer(config)
    full = f"model.layers.{_choice(range(every - 1, count, every))}."
    recurrent = f"model.layers.{_choice(i for i in range(count) if (i + 1) % every)}."
    entries = ends(config) + norms(layer, hidden) + linear(layer, {"mlp.gate": [experts, hidden]})
    entries += _experts(layer, config, experts) + _shared_gated(layer, config)
    entries += gqa(full, config, qk_norm="head", query_factor=2) + _qwen_prediction(config)
    return entries + linear_attention(recurrent, config, fused=True)


def _qwen_prediction(config: Config) -> list[Entry]:
    """A layer that attends, with experts apart also where those of the model are fused."""
    hidden, experts, stem = config["hidden_size"], config["num_experts"], "mtp.layers.0."
    entries = norms(stem, hidden) + linear(stem, {"mlp.gate": [experts, hidden]})
    entries += _experts(stem, config, experts) + _shared_gated(stem, config)
    entries += gqa(stem, config, qk_norm="head", query_factor=2)
    sizes = {f"{name}.weight": [hidden] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return entries + plain("mtp.", {"fc.weight": [hidden, 2 * hidden], **sizes})


def qwen3_5(outer: Config) -> list[Entry]:
    """The same with projections apart, all experts of a layer in two tensors, and a vision tower."""
    config = outer["text_config"]
    hidden, experts, stem = config["hidden_size"], config["num_experts"], "model.language_model."
    kinds, inner = config["layer_types"], config["moe_intermediate_size"]
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    recurrent = [index for index, kind in enumerate(kinds) if kind != "full_attention"]
    layer = _layer(config, stem)
    entries = ends(config, stem) + norms(layer, hidden) + linear(layer, {"mlp.gate": [experts, hidden]})
    entries += _shared_gated(layer, config) + _fused(
        layer, [experts, 2 * inner, hidden], [experts, hidden, inner]
    )
    entries += gqa(f"{stem}layers.{_choice(full)}.", config, qk_norm="head", query_factor=2)
    entries += linear_attention(f"{stem}layers.{_choice(recurrent)}.", config, fused=False)
    return entries + _qwen_prediction(config) + qwen_tower(outer)


def _fused(layer: str, gate_up: list[int], down: list[int]) -> list[Entry]:
    return plain(layer + "mlp.experts.", {"gate_up_proj": gate_up, "down_proj": down})


def qwen3_vl(outer: Config) -> list[Entry]:
    """Qwen3-MoE with all experts of a layer in two tensors, transposed; a vision tower."""
    config, stem = outer["text_config"], "model.language_model."
    hidden, experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    layer = _layer(config, stem)
    entries = ends(config, stem) + norms(layer, hidden) + gqa(layer, config, qk_norm="head")
    entries += linear(layer, {"mlp.gate": [experts, hidden]})
    entries += _fused(layer, [experts, hidden, 2 * inner], [experts, inner, hidden])
    return entries + qwen_tower(outer)


def glm4(config: Config, stem: str = "model.", count: int = 1) -> list[Entry]:
    """GLM-4.5 to 4.7: `count` prediction layers behind the last one."""
    layers, first, hidden = (
        config["num_hidden_layers"],
        config["first_k_dense_replace"],
        config["hidden_size"],
    )
    every, dense = _layer(config, stem), f"{stem}layers.{numbers(0, first - 1)}."
    sparse, behind = f"{stem}layers.{numbers(first, layers - 1)}.", f"{stem}layers.{layers}."

    def attention(layer: str) -> list[Entry]:
        return norms(layer, hidden) + gqa(
            layer, config, bias="qkv", qk_norm="head" if config.get("use_qk_norm") else ""
        )

    entries = ends(config, stem) + attention(every) + mlp(f"{dense}mlp.", hidden, config["intermediate_size"])
    entries += _shared_moe(sparse, config)
    return entries + (
        prediction(behind, config, attention(behind) + _shared_moe(behind, config)) if count else []
    )


def _shared_moe(
    layer: str, config: Config, fp8: bool = False, experts: list[Entry] | None = None
) -> list[Entry]:
    """DeepSeek's experts: a router with a correction bias, some of them for every token."""
    hidden, count = config["hidden_size"], config["n_routed_experts"]
    shared = config["n_shared_experts"] * config["moe_intermediate_size"]
    entries = linear(layer, {"mlp.gate": [count, hidden]}) + plain(layer, {f"mlp.gate.{BIAS}": [count]}, F32)
    entries += mlp(f"{layer}mlp.shared_experts.", hidden, shared, fp8)
    return entries + (_experts(layer, config, count, fp8=fp8) if experts is None else experts)


def glm4v(outer: Config) -> list[Entry]:
    """GLM-4.5V and 4.6V."""
    return glm4(outer["text_config"], "model.language_model.", 0) + glm_tower(outer)


def deepseek(config: Config) -> list[Entry]:
    """All families with latent attention but Kimi-K2.5; in fp8 where the configuration says so."""
    layers, first, hidden = (
        config["num_hidden_layers"],
        config["first_k_dense_replace"],
        config["hidden_size"],
    )
    family, fp8 = config["model_type"], "quantization_config" in config
    # DeepSeek-V3.2 alone has norms in 32 bits.
    norm = F32 if family == "deepseek_v32" else BF16
    every, sparse = _layer(config), f"model.layers.{numbers(first, layers - 1)}."
    entries = ends(config, norm=norm) + norms(every, hidden, norm) + mla(every, config, fp8, norm)
    if "index_n_heads" in config:
        entries += indexer(f"model.layers.{_choosing(config)}.", config, fp8, norm)
    entries += mlp(f"model.layers.{numbers(0, first - 1)}.mlp.", hidden, config["intermediate_size"], fp8)
    moe = _shared_moe(sparse, config, fp8)
    entries += [entry for entry in moe if not (family == "deepseek_v2" and entry[0].endswith(BIAS))]
    if family == "kimi_k2":
        # Frequencies that nobody reads, in a shape that is not that of any.
        entries += plain(every, {"self_attn.rotary_emb.inv_freq": [56]})
    if not config.get("num_nextn_predict_layers"):
        return entries
    behind = f"model.layers.{layers}."
    block = norms(behind, hidden, norm) + mla(behind, config, fp8, norm) + _shared_moe(behind, config, fp8)
    if "index_n_heads" in config:
        block += indexer(behind, config, fp8, norm)
    own = family != "glm_moe_dsa"
    return entries + prediction(behind, config, block, norm=norm, own_ends=own)


def _choosing(config: Config) -> str:
    """The layers that have an indexer of their own."""
    kinds = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
    return _choice(layer for layer, kind in enumerate(kinds) if kind == "full")


def kimi_k25(outer: Config) -> list[Entry]:
    """DeepSeek-V3 behind a prefix; routed experts in integers of 4 bits, nothing else quantised."""
    config, stem = outer["text_config"], "language_model.model."
    layers, first, hidden = (
        config["num_hidden_layers"],
        config["first_k_dense_replace"],
        config["hidden_size"],
    )
    sparse = f"{stem}layers.{numbers(first, layers - 1)}."
    experts = f"{sparse}mlp.experts.{numbers(0, config['n_routed_experts'] - 1)}."
    entries = ends(config, stem, "language_model.lm_head.weight") + norms(_layer(config, stem), hidden)
    entries += mla(_layer(config, stem), config)
    entries += mlp(f"{stem}layers.{numbers(0, first - 1)}.mlp.", hidden, config["intermediate_size"])
    entries += _shared_moe(sparse, config, experts=int4_mlp(experts, hidden, config["moe_intermediate_size"]))
    return entries + kimi_tower(outer)


def w123(config: Config) -> list[Entry]:
    """Mixtral, and MiniMax-M2 in fp8 with a correction bias."""
    layer, hidden, experts = _layer(config), config["hidden_size"], config["num_local_experts"]
    fp8, inner = config["model_type"] == "minimax_m2", config["intermediate_size"]
    stem = f"{layer}block_sparse_moe."
    shapes = {"w1": [inner, hidden], "w2": [hidden, inner], "w3": [inner, hidden]}
    entries = ends(config) + norms(layer, hidden) + gqa(layer, config, qk_norm="full" if fp8 else "", fp8=fp8)
    entries += plain(stem, {"gate.weight": [experts, hidden]}, F32 if fp8 else BF16)
    entries += plain(stem, {BIAS: [experts]}, F32) if fp8 else []
    return entries + linear(f"{stem}experts.{numbers(0, experts - 1)}.", shapes, fp8)


def olmoe(config: Config) -> list[Entry]:
    """OLMoE: norms over all heads."""
    layer, hidden, experts = _layer(config), config["hidden_size"], config["num_experts"]
    stem = f"{layer}mlp.experts.{numbers(0, experts - 1)}."
    entries = ends(config) + norms(layer, hidden) + gqa(layer, config, qk_norm="full")
    entries += linear(layer, {"mlp.gate": [experts, hidden]})
    return entries + mlp(stem, hidden, config["intermediate_size"])


def dots1(config: Config) -> list[Entry]:
    """dots.llm1: attention of Qwen3, experts of DeepSeek."""
    layers, first, hidden = (
        config["num_hidden_layers"],
        config["first_k_dense_replace"],
        config["hidden_size"],
    )
    entries = ends(config) + norms(_layer(config), hidden) + gqa(_layer(config), config, qk_norm="head")
    entries += mlp(f"model.layers.{numbers(0, first - 1)}.mlp.", hidden, config["intermediate_size"])
    return entries + _shared_moe(f"model.layers.{numbers(first, layers - 1)}.", config)


def ernie(config: Config) -> list[Entry]:
    """ERNIE 4.5: the correction bias is a row of a matrix; prediction under names of its own."""
    layers, first, hidden = (
        config["num_hidden_layers"],
        config["moe_layer_start_index"],
        config["hidden_size"],
    )
    sparse, experts = f"model.layers.{numbers(first, layers - 1)}.", config["moe_num_experts"]
    shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    entries = ends(config) + norms(_layer(config), hidden) + gqa(_layer(config), config)
    entries += mlp(f"model.layers.{numbers(0, first - 1)}.mlp.", hidden, config["intermediate_size"])
    entries += plain(sparse, {"mlp.gate.weight": [experts, hidden]}, F32)
    entries += plain(sparse, {f"mlp.moe_statics.{BIAS}": [1, experts]}, F32)
    entries += mlp(f"{sparse}mlp.shared_experts.", hidden, shared) + _experts(sparse, config, experts)
    return entries + plain(
        "model.", {"mtp_emb_norm.0.weight": [hidden], "mtp_linear_proj.0.weight": [hidden, 2 * hidden]}
    )


def gpt_oss(config: Config) -> list[Entry]:
    """Blocks of 32 four-bit floats, two in a byte, with a scale each."""
    layer, hidden, experts = _layer(config), config["hidden_size"], config["num_local_experts"]
    inner, stem = config["intermediate_size"], f"{layer}mlp.experts."
    entries = ends(config) + norms(layer, hidden) + gqa(layer, config, bias="qkvo")
    entries += plain(layer, {"self_attn.sinks": [config["num_attention_heads"]]})
    entries += plain(layer, {"mlp.router.weight": [experts, hidden], "mlp.router.bias": [experts]})
    for name, rows, cols in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        entries += plain(stem, {f"{name}_bias": [experts, rows]})
        entries += plain(stem, {f"{name}_blocks": [experts, rows, cols // 32, 16]}, "U8")
        entries += plain(stem, {f"{name}_scales": [experts, rows, cols // 32]}, "U8")
    return entries


def step3p5(config: Config) -> list[Entry]:
    """Other numbers of heads where layers slide; three prediction layers, dense ones."""
    layers, hidden, experts = config["num_hidden_layers"], config["hidden_size"], config["moe_num_experts"]
    inner, extra = config["moe_intermediate_size"], config["num_nextn_predict_layers"]
    sparse = [int(item) for item in config["moe_layers_enum"].split(",")]
    wide, kinds = config["attention_other_setting"]["num_attention_heads"], config["layer_types"]
    every = f"model.layers.{numbers(0, layers + extra - 1)}."
    moe, behind = f"model.layers.{_choice(sparse)}.", f"model.layers.{numbers(layers, layers + extra - 1)}."
    dense = f"model.layers.{_choice(i for i in range(layers + extra) if i not in sparse)}."
    entries = ends(config) + norms(every, hidden)
    for kind, heads in (("full_attention", config["num_attention_heads"]), ("sliding_attention", wide)):
        stem = f"model.layers.{_choice(i for i, name in enumerate(kinds) if name == kind)}."
        entries += gqa(stem, config, qk_norm="head", heads=heads, kv_heads=config["num_attention_groups"])
        entries += linear(stem, {"self_attn.g_proj": [heads, hidden]})
    entries += mlp(f"{dense}mlp.", hidden, config["intermediate_size"])
    entries += mlp(f"{moe}share_expert.", hidden, config["share_expert_dim"])
    entries += plain(moe, {"moe.gate.weight": [experts, hidden], "moe.router_bias": [experts]}, F32)
    shapes = {"gate_proj": [experts, inner, hidden], "up_proj": [experts, inner, hidden]}
    stacks = {
        f"moe.{name}.weight": shape
        for name, shape in (shapes | {"down_proj": [experts, hidden, inner]}).items()
    }
    prediction_parts = {
        "enorm.weight": [hidden],
        "hnorm.weight": [hidden],
        "eh_proj.weight": [hidden, 2 * hidden],
    }
    return entries + plain(moe, stacks) + plain(behind, prediction_parts)


FAMILIES: Mapping[str, Callable[[Config], list[Entry]]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), deepseek),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "kimi_k2"), deepseek),
    "dots1": dots1,
    "ernie4_5_moe": ernie,
    "glm4_moe": glm4,
    "glm4v_moe": glm4v,
    "gpt_oss": gpt_oss,
    "kimi_k25": kimi_k25,
    "minimax_m2": w123,
    "mixtral": w123,
    "olmoe": olmoe,
    "qwen2_moe": qwen_moe,
    "qwen3_5_moe": qwen3_5,
    "qwen3_moe": qwen_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl_moe": qwen3_vl,
    "step3p5": step3p5,
}
