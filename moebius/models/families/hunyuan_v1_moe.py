"""HunYuan-MoE-V1 (Hunyuan-A13B): queries and keys normed after rotation, a shared MLP in every layer.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(HunYuanMoEV1Config).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily, rotated
from moebius.models.common import read_common
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Of training, of multimodal relatives' tokens and towers, of task heads, and sizes of attention that these
# models do not use.
_HARMLESS = (
    "add_classification_head",
    "anyres_pooling_size",
    "anyres_vit_max_image_size",
    "anyres_vit_two_views",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "image_token_id",
    "mask_init_id",
    "moe_drop_tokens",
    "moe_random_routing_dropped_token",
    "num_media_embeds",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "pretraining_tp",
    "skip_cls_token",
    "text_end_id",
    "text_start_id",
    "video_end_id",
    "video_start_id",
    "vit_add_patchemb_bias",
    "vit_input_resolution",
    "vit_mapping_type",
    "vit_norm_type",
    "vit_patch",
    "vit_path",
    "vit_remove_prenorm",
    "vit_token",
    "vit_type",
    "vit_used_rms_norm",
)
# What would change the function; absent, null or false in every published model.
_REFUSED = (
    "group_limited_greedy",
    "kv_lora_rank",
    "mlp_bias",
    "n_group",
    "position_embedding_xdrope",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "topk_group",
    "use_cla",
    "use_mla",
    "v_head_dim",
    "xdrope_section",
)
_ALWAYS = ("norm_topk_prob", "use_mixed_mlp_moe", "use_qk_norm", "use_rotary_pos_emb")


def _same_in_all(hf: HfKeys, num_layers: int, *names: str, default: int | None = None) -> int:
    """Returns a number, or a list of it for each layer. Raises ModelConfigError where layers differ."""
    values = hf.integers(*names) or (() if default is None else (default,))
    if len(values) not in (1, num_layers) or len(set(values)) != 1 or values[0] < 1:
        raise hf.error(names[0], list(values), f"one integer >= 1, or the same one for {num_layers} layers")
    return values[0]


def _read_rope(hf: HfKeys, head_dim: int) -> RopeConfig:
    """With a fixed `alpha`, "dynamic" scaling is a larger base, whatever the length; nothing else counts."""
    name = "rope_parameters" if hf.has("rope_parameters") else "rope_scaling"
    scaling = hf.section(name)
    if scaling is None or not scaling.has("alpha"):
        return read_rope(hf, head_dim)
    kind = scaling.string("rope_type", "type")
    if kind != "dynamic":
        raise scaling.error("rope_type", kind, "dynamic, with alpha")
    scaling.skip("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    theta = scaling.number("rope_theta", default=hf.number("rope_theta", default=10000.0))
    theta *= scaling.number("alpha") ** (head_dim / (head_dim - 2))
    if scaling.unread:
        raise scaling.error(scaling.unread[0], "...", "keys of dynamic scaling with alpha")
    plain = {"rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
    return read_rope(hf.with_values(**plain), head_dim)


def read_hunyuan_v1_moe(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE, and `intermediate_size` is an expert's and the shared MLP's."""
    hf.skip(*_HARMLESS)
    for name in _REFUSED:
        hf.refuse(name)
    for name in _ALWAYS:
        if not hf.boolean(name, default=True):
            raise hf.error(name, False, "true")
    hf.refuse("moe_layer_num_skipped", 0)
    hf.refuse("norm_type", "rms")
    hf.refuse("routed_scaling_factor", 1.0)
    common = read_common(
        hf.with_values(head_dim=hf.integer("head_dim", "attention_head_dim"))
        if hf.has("attention_head_dim")
        else hf
    )
    num_layers, size = common.num_layers, common.intermediate_size
    if _same_in_all(hf, num_layers, "moe_intermediate_size", default=size) != size:
        raise hf.error("moe_intermediate_size", hf.value("moe_intermediate_size"), f"{size} in all layers")
    if _same_in_all(hf, num_layers, "num_shared_expert", default=1) != 1:
        raise hf.error("num_shared_expert", hf.value("num_shared_expert"), "1 in all layers")
    router = RouterConfig(
        num_experts=_same_in_all(hf, num_layers, "num_experts", "num_local_experts"),
        top_k=_same_in_all(hf, num_layers, "moe_topk", "num_experts_per_tok"),
        score="softmax",
        post="renormalize",
        float32_gate=True,
    )
    attention = common.gqa(
        _read_rope(hf, common.head_dim),
        qk_norm=QkNorm(common.norm, after_rope=True),
        output_bias=common.attention_bias,
    )
    return common.model(attention, common.moe(router, size, size))


def _hunyuan(keys: MetadataKeys, config: Config) -> Config:
    """The shared MLP and all experts are of one width, which files give twice or more."""
    size = keys.integer("expert_feed_forward_length", config.get("intermediate_size", 0))
    shared = keys.integer("expert_shared_feed_forward_length", size)
    if shared != size:
        raise keys.error("expert_shared_feed_forward_length", shared, f"expert_feed_forward_length ({size})")
    return rotated(keys, config) | {"intermediate_size": size}


FAMILIES = (
    Family(
        "hunyuan_v1_moe",
        read_hunyuan_v1_moe,
        TensorNames(
            (
                ROTARY,
                rename("model.layers.*.self_attn.query_layernorm.**", "model.layers.*.self_attn.q_norm.**"),
                rename("model.layers.*.self_attn.key_layernorm.**", "model.layers.*.self_attn.k_norm.**"),
                rename("model.layers.*.mlp.gate.wg.**", "model.layers.*.mlp.gate.**"),
                rename("model.layers.*.mlp.shared_mlp.**", "model.layers.*.mlp.shared_experts.**"),
            )
        ),
        # The base in files has the scaling's alpha in it.
        gguf=(GgufFamily("hunyuan-moe", {"expert_count": "num_experts"}, 1, derive=_hunyuan),),
    ),
)
