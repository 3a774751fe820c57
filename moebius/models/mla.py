"""What the config.json of families with multi-head latent attention have in common.

Sources: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), and the configuration classes of
transformers 5.23. Kimi-K2 is DeepSeek-V3 under a name of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moebius.models.common import Common, read_biased_router, read_common
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import MoE
from moebius.models.layers.latent import MLA, TokenIndexer
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.rope import QueryGrowth, read_rope, yarn_mscale

# Of training, of other engines' parallelism, and what follows from other keys.
_HARMLESS = ("aux_loss_alpha", "ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux")


def read_mla_common(
    hf: HfKeys,
    growth: QueryGrowth = (0.0, 1.0),
    *,
    dense_size: int | None = None,
    num_layers: int | None = None,
) -> tuple[Common, MLA]:
    """`read_common`, and what is common to latent attention.

    `growth` as in `read_rope`, the others as in `read_common`.
    """
    hf.skip(*_HARMLESS)
    common = read_common(hf, dense_size=dense_size, num_layers=num_layers)
    heads = common.num_heads
    if common.num_kv_heads != heads:
        raise hf.error("num_key_value_heads", common.num_kv_heads, f"num_attention_heads ({heads})")
    rope_dim = hf.integer("qk_rope_head_dim", minimum=2)
    rope = read_rope(hf, rope_dim, interleaved=hf.boolean("rope_interleave", default=True), growth=growth)
    if rope.rotary_dim != rope_dim:
        raise hf.error("partial_rotary_factor", rope.rotary_dim / rope_dim, "1.0 with latent attention")
    return common, read_mla(hf, common, rope)


def read_mla(hf: HfKeys, common: Common, rope: RopeConfig | None) -> MLA:
    """Returns latent attention to all tokens; `rope` None: the part that others rotate is as it is."""
    rope_dim, nope_dim = hf.integer("qk_rope_head_dim", minimum=0), hf.integer("qk_nope_head_dim")
    # YaRN's temperature, which these families apply to the scores, to the extent that mscale_all_dim says.
    numbers = {} if rope is None else dict(rope.scaling)
    all_dim = numbers.get("mscale_all_dim")
    temperature = 1.0 if all_dim is None else yarn_mscale(numbers["factor"], all_dim)
    return MLA(
        num_heads=common.num_heads,
        q_lora_rank=hf.integer("q_lora_rank") if hf.has("q_lora_rank") else None,
        kv_lora_rank=hf.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=hf.integer("v_head_dim"),
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * temperature**2,
        rope=rope,
        bias=common.attention_bias,
    )


def sparse(attention: MLA, indexer: TokenIndexer, chooses: Sequence[bool]) -> list[MLA]:
    """The attention of each layer, to tokens that it chooses itself or that the nearest earlier one chose."""
    return [replace(attention, is_sparse=True, indexer=indexer if own else None) for own in chooses]


def read_moe(hf: HfKeys, common: Common, router: RouterConfig, *, default_shared: int = 0) -> MoE:
    """Shared experts are as wide as routed ones; `default_shared`: how many, where a checkpoint is silent."""
    hf.refuse("moe_layer_freq", 1)
    size = hf.integer("moe_intermediate_size")
    shared = hf.integer("num_shared_experts", "n_shared_experts", default=default_shared, minimum=0)
    return common.moe(router, size, shared * size)


def read_v3_router(hf: HfKeys) -> RouterConfig:
    """Returns the one kind that DeepSeek-V3's keys can name here."""
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("topk_method", "noaux_tc")
    return read_biased_router(hf)
