"""ERNIE 4.5 VL: ERNIE 4.5 whose images have experts of their own, narrower ones, with a router of their own.

As `ernie4_5_vl_moe` in transformers' spelling, and as `ernie4_5_moe_vl` as Baidu released it. Source of what
one becomes in the other: the configuration's conversion in transformers.
"""

from __future__ import annotations

from dataclasses import replace

from moebius.models.common import read_common, refuse_bias
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import ExpertKindsConfig, RouterConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import SectionDefaults, read_rope

_SECTIONS = SectionDefaults((22, 22, 20), interleaved=False)
# Placeholders of images and videos, and what begins and ends them; what the released configuration leaves to
# the tokenizer.
_TOKENS = {
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
    "video_token_id": 103367,
}
_IMAGE_TOKEN = 100295
# Of the released configuration: training, videos, and what is one way only in the published code.
_RELEASED = (
    "compression_ratio",
    "disable_ffn_model_parallel",
    "fuse_ln",
    "fuse_rms_norm",
    "fuse_rope",
    "hidden_dropout_prob",
    "max_sequence_length",
    "max_text_id",
    "modality_detach",
    "moe_aux_loss_lambda",
    "moe_capacity",
    "moe_dense_experts_token_type_id",
    "moe_dropout_prob",
    "moe_gate",
    "moe_gate_act",
    "moe_group",
    "moe_group_experts",
    "moe_group_orthogonal_loss",
    "moe_layer_feed_fake_token",
    "moe_orthogonal_loss_lambda",
    "moe_reverse_token_drop",
    "moe_use_hard_gate",
    "moe_use_token_type_bias",
    "moe_with_send_router_loss",
    "moe_z_loss_lambda",
    "multi_token_pred_lambda",
    "multimodel_experts",
    "pixel_hidden_size",
    "pp_seg_method",
    "sinkhorn_2gate",
    "sinkhorn_temp",
    # Which the tower's reader reads where there is one.
    "spatial_conv_size",
    "temporal_conv_size",
    "token_balance_loss",
    "token_balance_seqlen",
    "use_flash_attention",
    "use_mem_eff_attn",
    "use_recompute_loss_fn",
    "use_recompute_moe",
    "use_rmsnorm",
    "use_sparse_head_and_loss_fn",
    "vision_feature_layer",
    "weight_share_add_bias",
)


def _one_of(hf: HfKeys, name: str, default: int) -> int:
    """Returns a number, or the same for both kinds of experts."""
    found = set(hf.integers(name)) or {default}
    if len(found) != 1 or min(found) < 1:
        raise hf.error(name, sorted(found), "one integer >= 1, for both kinds of experts")
    return found.pop()


def _moe_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Returns the layers listed, or every n-th of the range from the smallest start to the largest end."""
    kinds = hf.strings("mlp_layer_types")
    starts, ends = hf.integers("moe_layer_start_index"), hf.integers("moe_layer_end_index")
    step = hf.integer("moe_layer_interval", default=1)
    if kinds:
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'dense' and 'sparse'")
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    last = max(ends, default=-1)
    layers = range(min(starts, default=1), (num_layers if last == -1 else min(last + 1, num_layers)))
    return frozenset(layer for layer in layers if (layer + 1) % step == 0)


def _read_rope(hf: HfKeys, head_dim: int) -> RopeConfig:
    """Sections are of height, width and time: pairs of the first two alternate, those of time follow."""
    # The published code has sections whose last is as long as this says.
    time = hf.integer("freq_allocation", default=_SECTIONS.sections[2])
    other = head_dim // 2 - time
    if other < 0 or other % 2:
        time, other = head_dim // 2, 0
    defaults = replace(_SECTIONS, sections=(other // 2, other // 2, time))
    rope = read_rope(hf, head_dim, default_theta=500000.0, interleaved=True, mrope=defaults)
    height, width, time = rope.mrope_sections
    if height != width:
        raise hf.error("mrope_section", [height, width, time], "as many pairs of height as of width")
    return replace(rope, mrope_sections=(time, height, width), mrope_time_last=True)


def read_ernie4_5_vl_moe(hf: HfKeys) -> ModelConfig:
    """Reads either spelling; how wide experts are, and what weighs them, is that of ERNIE 4.5."""
    hf.skip(*_RELEASED)
    common = read_common(hf, tied=True)
    refuse_bias(hf, common)
    hf.refuse("use_bias")
    hf.refuse("sliding_window")
    if not hf.boolean("rope_3d", default=True):
        raise hf.error("rope_3d", False, "true")
    if not hf.boolean("moe_use_aux_free", default=True):
        raise hf.error("moe_use_aux_free", False, "true")
    widths = hf.integers("moe_intermediate_size") or (1536, 512)
    if len(widths) != 2 or min(widths) < 1:
        raise hf.error("moe_intermediate_size", list(widths), "two integers >= 1: of text and of images")
    image = hf.integer("image_token_id", "im_patch_id", default=_IMAGE_TOKEN, minimum=0)
    others = [hf.integer(name, default=default, minimum=0) for name, default in _TOKENS.items()]
    kinds = ExpertKindsConfig(
        _one_of(hf, "moe_num_experts", 64),
        _one_of(hf, "moe_k", 6),
        (widths[0], widths[1]),
        tuple(sorted({image, *others})),
    )
    if kinds.top_k > kinds.num_experts:
        raise hf.error("moe_k", kinds.top_k, f"1 to {kinds.num_experts}")
    router = RouterConfig(
        num_experts=kinds.total_parts,
        top_k=kinds.most_parts,
        score="softmax",
        correction_bias=True,
        post="renormalize",
        # As for ERNIE 4.5's text models.
        renormalize_epsilon=hf.number("moe_norm_min", default=1e-12),
        float32_gate=True,
    )
    # The released configuration says null where there are none.
    shared = (
        0
        if hf.is_null("moe_num_shared_experts")
        else hf.integer("moe_num_shared_experts", default=2, minimum=0)
    )
    layers = _moe_layers(hf, common.num_layers)
    moe = common.moe(router, kinds.part_size, shared * widths[0], kinds=kinds)
    return common.model(common.gqa(_read_rope(hf, common.head_dim)), common.ffns(moe, layers))


def _read_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    """The released one has the MLPs' width as a ratio, and merges of time and space outside."""
    hf.refuse("temporal_conv_size", 2)
    hidden_size = vision.integer("hidden_size")
    ratio = vision.number("mlp_ratio", default=4)
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", "im_patch_id", default=_IMAGE_TOKEN, minimum=0),
        merge_size=hf.integer("spatial_conv_size", default=vision.integer("spatial_merge_size", default=2)),
        patch_size=vision.integer("patch_size", default=14),
        hidden_size=hidden_size,
        intermediate_size=vision.integer("intermediate_size", default=int(ratio * hidden_size)),
    )


_RESAMPLER = "model.resampler_model."
_NAMES = TensorNames(
    (
        ROTARY,
        drop("model.mtp_**"),
        drop("vision_model.**"),
        drop("model.vision_model.**"),
        drop(_RESAMPLER + "**"),
        rename(
            "model.layers.*.mlp.moe_statics.e_score_correction_bias",
            "model.layers.*.mlp.gate.e_score_correction_bias",
        ),
    )
)
_TOWER = VisionFamily(
    _read_vision,
    (
        *(
            rename(f"{_RESAMPLER}{which}_linear.{number}.**", f"resampler_model.{which}_linear.{name}.**")
            for which in ("spatial", "temporal")
            for number, name in (("0", "fc1"), ("2", "fc2"), ("3", "ln"))
        ),
        rename(_RESAMPLER + "**", "resampler_model.**"),
        rename("vision_model.**", "vision_tower.**"),
        # As transformers writes it.
        rename("model.vision_model.**", "vision_tower.**"),
    ),
    tower="Ernie4_5_VLMoe",
    processor="ernie",
)
FAMILIES = (
    Family("ernie4_5_vl_moe", read_ernie4_5_vl_moe, _NAMES, _TOWER),
    Family("ernie4_5_moe_vl", read_ernie4_5_vl_moe, _NAMES, _TOWER),
)
