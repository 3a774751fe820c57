"""The pieces that published checkpoints are made of, as patterns of names with types and shapes.

`{3..60}` in a name stands for the numbers from 3 to 60. Nothing here is the project's own code: these are the
naming rules of the published models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]
# Name pattern, type as safetensors spells it, shape.
Entry = tuple[str, str, list[int]]
BF16, F32, FP8 = "BF16", "F32", "F8_E4M3"


def numbers(first: int, last: int) -> str:
    """A pattern of consecutive numbers."""
    return f"{{{first}..{last}}}"


def plain(stem: str, shapes: Mapping[str, list[int]], dtype: str = BF16) -> list[Entry]:
    """Tensors below a stem."""
    return [(f"{stem}{name}", dtype, shape) for name, shape in shapes.items()]


def linear(stem: str, shapes: Mapping[str, list[int]], fp8: bool = False, scales: str = F32) -> list[Entry]:
    """Matrices `stem + name + .weight`, in blocks of 128 x 128 with scales where they are fp8."""
    entries: list[Entry] = []
    for name, (rows, cols) in shapes.items():
        entries.append((f"{stem}{name}.weight", FP8 if fp8 else BF16, [rows, cols]))
        if fp8:
            entries.append((f"{stem}{name}.weight_scale_inv", scales, [-(-rows // 128), -(-cols // 128)]))
    return entries


def mlp(stem: str, hidden: int, inner: int, fp8: bool = False, scales: str = F32) -> list[Entry]:
    """A gated MLP."""
    shapes = {"gate_proj": [inner, hidden], "up_proj": [inner, hidden], "down_proj": [hidden, inner]}
    return linear(stem, shapes, fp8, scales)


def int4_mlp(stem: str, hidden: int, inner: int) -> list[Entry]:
    """The same as compressed-tensors pack integers of 4 bits: eight in a word, groups of 32."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    entries: list[Entry] = []
    for name, (rows, cols) in shapes.items():
        entries += [
            (f"{stem}{name}.weight_packed", "I32", [rows, cols // 8]),
            (f"{stem}{name}.weight_scale", BF16, [rows, cols // 32]),
            (f"{stem}{name}.weight_shape", "I32", [2]),
        ]
    return entries


def norms(layer: str, hidden: int, dtype: str = BF16) -> list[Entry]:
    """Before attention, and before the MLP."""
    shapes = {"input_layernorm.weight": [hidden], "post_attention_layernorm.weight": [hidden]}
    return plain(layer, shapes, dtype)


def ends(config: Config, stem: str = "model.", head: str = "lm_head.weight", norm: str = BF16) -> list[Entry]:
    """Embedding, final norm, and the head where it is not the embedding; `norm`: its type."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    entries = plain(stem, {"embed_tokens.weight": [vocab, hidden]})
    entries += plain(stem, {"norm.weight": [hidden]}, norm)
    return entries if config.get("tie_word_embeddings") else [*entries, (head, BF16, [vocab, hidden])]


def gqa(
    layer: str,
    config: Config,
    *,
    bias: str = "",
    qk_norm: str = "",
    heads: int | None = None,
    kv_heads: int | None = None,
    query_factor: int = 1,
    fp8: bool = False,
    scales: str = F32,
) -> list[Entry]:
    """Grouped-query attention. `bias`: letters of projections that have one; `qk_norm`: "head" or "full"."""
    hidden, dim = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    q = (heads or config["num_attention_heads"]) * dim
    kv = (kv_heads or config["num_key_value_heads"]) * dim
    stem = layer + "self_attn."
    rows = {"q": q * query_factor, "k": kv, "v": kv, "o": hidden}
    shapes = {f"{name}_proj": [count, q if name == "o" else hidden] for name, count in rows.items()}
    entries = linear(stem, shapes, fp8, scales)
    entries += plain(stem, {f"{name}_proj.bias": [rows[name]] for name in bias})
    if qk_norm:
        whole = qk_norm == "full"
        entries += plain(
            stem, {"q_norm.weight": [q if whole else dim], "k_norm.weight": [kv if whole else dim]}
        )
    return entries


def mla(layer: str, config: Config, fp8: bool = False, norm: str = BF16) -> list[Entry]:
    """Multi-head latent attention; `norm`: the type of the latents' norms."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, q_rank, stem = config["kv_lora_rank"], config.get("q_lora_rank"), layer + "self_attn."
    shapes = {
        "kv_a_proj_with_mqa": [rank + rope, hidden],
        "kv_b_proj": [heads * (nope + value), rank],
        "o_proj": [hidden, heads * value],
    }
    if q_rank:
        shapes |= {"q_a_proj": [q_rank, hidden], "q_b_proj": [heads * (nope + rope), q_rank]}
    else:
        shapes |= {"q_proj": [heads * (nope + rope), hidden]}
    entries = linear(stem, shapes, fp8) + plain(stem, {"kv_a_layernorm.weight": [rank]}, norm)
    return entries + (plain(stem, {"q_a_layernorm.weight": [q_rank]}, norm) if q_rank else [])


def indexer(layer: str, config: Config, fp8: bool = False, norm: str = BF16) -> list[Entry]:
    """The part of sparse attention that chooses; `norm`: the type of its keys' norm."""
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    stem = layer + "self_attn.indexer."
    shapes = {"wq_b": [heads * dim, config["q_lora_rank"]], "wk": [dim, config["hidden_size"]]}
    entries = linear(stem, shapes, fp8) + linear(stem, {"weights_proj": [heads, config["hidden_size"]]})
    return entries + plain(stem, {"k_norm.weight": [dim], "k_norm.bias": [dim]}, norm)


def linear_attention(layer: str, config: Config, fused: bool) -> list[Entry]:
    """Gated DeltaNet; `fused` and all in 16 bits as in Qwen3-Next."""
    hidden, stem = config["hidden_size"], layer + "linear_attn."
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    if fused:
        shapes = {"in_proj_qkvz": [2 * keys + 2 * values, hidden], "in_proj_ba": [2 * heads, hidden]}
    else:
        shapes = {"in_proj_qkv": [2 * keys + values, hidden], "in_proj_z": [values, hidden]}
        shapes |= {"in_proj_b": [heads, hidden], "in_proj_a": [heads, hidden]}
    others = {"conv1d.weight": [2 * keys + values, 1, config["linear_conv_kernel_dim"]], "dt_bias": [heads]}
    kept = {"A_log": [heads], "norm.weight": [config["linear_value_head_dim"]]}
    entries = linear(stem, shapes | {"out_proj": [hidden, values]}) + plain(stem, others)
    return entries + plain(stem, kept, BF16 if fused else F32)


def prediction(
    layer: str, config: Config, block: Iterable[Entry], *, norm: str = BF16, own_ends: bool = True
) -> list[Entry]:
    """A multi-token prediction layer of DeepSeek's kind, behind the last decoder layer.

    `norm`: the type of its norms; `own_ends`: whether the embedding and the head are there again.
    """
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    sizes = {name: [hidden] for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    shapes = {"eh_proj.weight": [hidden, 2 * hidden]}
    if own_ends:
        shapes |= {"embed_tokens.weight": [vocab, hidden], "shared_head.head.weight": [vocab, hidden]}
    return [*plain(layer, sizes, norm), *plain(layer, shapes), *block]
