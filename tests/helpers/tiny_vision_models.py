"""Tiny random checkpoints that see: a language model of `tiny_multimodal_text` and a tower of 2 or 3 layers.

The reference's inputs are made by transformers' own image processors. Patches are 4 pixels wide and four of
them make a token, so that an image of 24 x 16 pixels is 6 tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.helpers.tiny_models import _COMMON, TINY_MODELS, add_image_outputs, randomize
from tests.helpers.tiny_multimodal_text import TEXT_TOWERS
from tests.helpers.tiny_tokenizer import write_tokenizer

IMAGE_TOKEN = 200
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN_3_5_VISION = {key: value for key, value in _QWEN_VISION.items() if "deepstack" not in key}
_GLM_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "image_size": 24,
}
_KIMI_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
_GLM5_VISION: dict[str, Any] = _GLM_VISION | {"projection_intermediate_size": 28, "swiglu_limit": 0.7}
_LLAMA4_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "vision_output_dim": 20,
}
_MINIMAX_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 36,
    "intermediate_size": 28,
    "num_attention_heads": 2,
    "patch_size": 4,
}
# What begins and ends the images of `tests/parity/test_vision.py`, which choose experts as images do.
ERNIE_TOKENS = {"image_start_token_id": 66, "image_end_token_id": 39}
_ERNIE_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 2,
    "patch_size": 4,
}
_ERNIE_PROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 128, "longest_edge": 4096},
    "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
}
_GEMMA4_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 32,
}
_GEMMA4_PROCESSOR: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 12}
_PIXTRAL_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 48,
}
_PIXTRAL_PROCESSOR: dict[str, Any] = {"patch_size": 4, "size": {"longest_edge": 48}}
_STEP_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "mlp_ratio": 1.5,
    "patch_size": 4,
    "image_size": 32,
    "max_position_embeddings": 64,
}
_STEP_PROCESSOR: dict[str, Any] = {"size": {"height": 32, "width": 32}, "patch_size": 16}
_GRID_PROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 128, "longest_edge": 4096},
}
_GLM5_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Glm5NextImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_image_tokens": 2,
    "max_image_tokens": 20,
}
_LLAMA4_PROCESSOR: dict[str, Any] = {"size": {"height": 16, "width": 16}, "max_patches": 4}
_KIMI_PROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "max_patches": 64,
    "size": {"max_height": 12, "max_width": 12},
}


# As the published ones are called; `IMAGE_TOKEN` is what chat templates write.
_LLAMA4_TOKENS = {
    "<|image|>": IMAGE_TOKEN,
    "<|patch|>": 201,
    "<|image_start|>": 202,
    "<|image_end|>": 203,
    "<|tile_x_separator|>": 204,
    "<|tile_y_separator|>": 205,
}
_PIXTRAL_TOKENS = {"[IMG]": IMAGE_TOKEN, "[IMG_BREAK]": 201, "[IMG_END]": 202}
_STEP_TOKENS = {
    "<im_patch>": IMAGE_TOKEN,
    "<im_start>": 201,
    "<im_end>": 202,
    "<patch_start>": 203,
    "<patch_end>": 204,
    "<patch_newline>": 205,
}
_MINIMAX_TOKENS = {
    "]<]image[>[": IMAGE_TOKEN,
    "]<]start of image[>[": 201,
    "]<]end of image[>[": 202,
}


@dataclasses.dataclass(frozen=True)
class TinyVision:
    """A tower for one of the text models of `TINY_MODELS`."""

    text: str
    vision: dict[str, Any]
    processor: dict[str, Any]
    # Where the text model is its family's name for the text alone.
    family: str | None = None
    # Tokens in an image's place, by their names; none: `IMAGE_TOKEN` alone.
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    image_token: int = IMAGE_TOKEN
    # Of the text model, besides its own.
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


VISION_MODELS: dict[str, TinyVision] = {
    "qwen3_vl_moe": TinyVision(
        "qwen3_vl_moe", _QWEN_VISION, _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    ),
    "qwen3_vl_moe_bias_dense_tied": TinyVision(
        "qwen3_vl_moe_bias_dense_tied",
        _QWEN_VISION | {"depth": 2, "num_heads": 3, "deepstack_visual_indexes": [1]},
        _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
    ),
    "glm4v_moe": TinyVision(
        "glm4v_moe", _GLM_VISION, _GRID_PROCESSOR | {"image_processor_type": "Glm4vImageProcessor"}
    ),
    "glm4v_moe_groups_tied": TinyVision(
        "glm4v_moe_groups_tied",
        _GLM_VISION | {"depth": 3, "num_heads": 3, "image_size": 32},
        _GRID_PROCESSOR | {"image_processor_type": "Glm46VImageProcessor"},
    ),
    "qwen3_5_moe": TinyVision(
        "qwen3_5_moe",
        _QWEN_3_5_VISION,
        _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
    ),
    "qwen3_5_moe_bias_tied": TinyVision(
        "qwen3_5_moe_text_bias_tied",
        _QWEN_3_5_VISION | {"depth": 2, "num_heads": 3},
        _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        family="qwen3_5_moe",
    ),
    "qwen4_exp": TinyVision(
        "qwen4_exp",
        _QWEN_3_5_VISION,
        _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
    ),
    "qwen4_exp_three_streams_bias_tied": TinyVision(
        "qwen4_exp_text_three_streams_bias_tied",
        _QWEN_3_5_VISION | {"depth": 2, "num_heads": 3},
        _GRID_PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        family="qwen4_exp",
    ),
    "ernie4_5_vl_moe": TinyVision("ernie4_5_vl_moe", _ERNIE_VISION, _ERNIE_PROCESSOR),
    "ernie4_5_moe_vl_no_shared_tied": TinyVision(
        "ernie4_5_moe_vl_no_shared_tied",
        _ERNIE_VISION | {"depth": 3, "num_heads": 3, "intermediate_size": 48},
        _ERNIE_PROCESSOR,
    ),
    "kimi_k25": TinyVision("kimi_k25", _KIMI_VISION, _KIMI_PROCESSOR),
    "kimi_k25_two_dense_tied": TinyVision(
        "kimi_k25_two_dense_tied",
        _KIMI_VISION
        | {"num_hidden_layers": 3, "num_attention_heads": 3, "pos_emb_height": 5, "pos_emb_width": 5},
        _KIMI_PROCESSOR,
    ),
    "gemma4": TinyVision(
        "gemma4_text",
        _GEMMA4_VISION | {"standardize": True},
        _GEMMA4_PROCESSOR,
        family="gemma4",
        changes={"use_bidirectional_attention": "vision"},
    ),
    "gemma4_own_values_causal": TinyVision(
        "gemma4_text_own_values_untied",
        _GEMMA4_VISION | {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2},
        _GEMMA4_PROCESSOR | {"max_soft_tokens": 10},
        family="gemma4",
    ),
    "glm5_next": TinyVision("glm5_next", _GLM5_VISION, _GLM5_PROCESSOR),
    "glm5_next_three_streams_biased_tied": TinyVision(
        "glm5_next_three_streams_biased_tied",
        _GLM5_VISION | {"depth": 3, "num_heads": 3, "attention_bias": False, "image_size": 32},
        _GLM5_PROCESSOR | {"min_image_tokens": 1, "max_image_tokens": 12},
    ),
    "llama4": TinyVision("llama4", _LLAMA4_VISION, _LLAMA4_PROCESSOR, tokens=_LLAMA4_TOKENS, image_token=201),
    "llama4_every_other_moe_bias_tied": TinyVision(
        "llama4_every_other_moe_bias_tied",
        _LLAMA4_VISION
        | {"num_hidden_layers": 3, "num_attention_heads": 3, "projector_output_dim": 28}
        | {"projector_input_dim": 28, "vision_output_dim": 28},
        _LLAMA4_PROCESSOR | {"max_patches": 2, "resize_to_max_canvas": True},
        tokens=_LLAMA4_TOKENS,
        image_token=201,
    ),
    "minimax_m3_vl": TinyVision("minimax_m3_vl", _MINIMAX_VISION, _GRID_PROCESSOR, tokens=_MINIMAX_TOKENS),
    "minimax_m3_vl_two_local_blocks_tied": TinyVision(
        "minimax_m3_vl_two_local_blocks_tied",
        _MINIMAX_VISION | {"num_hidden_layers": 3, "num_attention_heads": 3},
        _GRID_PROCESSOR | {"size": {"shortest_edge": 256, "longest_edge": 900}},
        tokens=_MINIMAX_TOKENS,
    ),
    "mistral3": TinyVision(
        "mistral3_direct_query_dense_tied", _PIXTRAL_VISION, _PIXTRAL_PROCESSOR, tokens=_PIXTRAL_TOKENS
    ),
    "mistral_large4": TinyVision(
        "mistral_large4", _PIXTRAL_VISION, _PIXTRAL_PROCESSOR, tokens=_PIXTRAL_TOKENS
    ),
    "mistral_large4_own_latents_groups_tied": TinyVision(
        "mistral_large4_own_latents_groups_tied",
        _PIXTRAL_VISION | {"num_hidden_layers": 3, "num_attention_heads": 3, "hidden_act": "silu"},
        _PIXTRAL_PROCESSOR | {"size": {"longest_edge": 28}},
        tokens=_PIXTRAL_TOKENS,
    ),
    "step3p7": TinyVision("step3p7", _STEP_VISION, _STEP_PROCESSOR, tokens=_STEP_TOKENS),
    "step3p7_fewer_heads_slide": TinyVision(
        "step3p7_fewer_heads_slide",
        _STEP_VISION
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 48,
            "max_position_embeddings": 144,
        },
        {"size": {"height": 48, "width": 48}, "patch_size": 32, "max_image_size": 36},
        tokens=_STEP_TOKENS,
    ),
}


def write_vision_model(name: str, directory: Path, *, publish: bool = True) -> Any:
    """Write the checkpoint as it would be published, and return transformers' float32 model of it.

    Not `publish`: as transformers writes it.
    """
    tiny = VISION_MODELS[name]
    text = TINY_MODELS[tiny.text]
    tower = dataclasses.replace(TEXT_TOWERS[tiny.family or text.model_type], vision=tiny.vision)
    values = _COMMON | text.changes | tiny.changes
    config = tower.config(values)
    config.image_token_id = tiny.image_token
    if name.startswith("ernie"):
        for key, token in ERNIE_TOKENS.items():
            setattr(config, key, token)
    if tiny.family == "gemma4":
        config.boi_token_id, config.eoi_token_id = 201, 202
    if text.model_type == "kimi_k25":
        config.projection_hidden_size = tiny.vision["hidden_size"]
    model = tower.model(config).eval()
    randomize(model, sum(name.encode()) + 1, model.config.model_type)
    add_image_outputs(model)
    model.save_pretrained(directory)
    if publish:
        tower.publish(directory, values)
    if publish and text.model_type == "kimi_k25":
        _put_patches_right(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(tiny.processor))
    if tiny.tokens:
        write_tokenizer(directory, word_tokenizer(tiny.tokens), None)
    return model


def word_tokenizer(tokens: dict[str, int], vocab_size: int = 211) -> Tokenizer:
    """Returns words `w0`, `w1`, ... and special tokens by name."""
    numbers = set(tokens.values())
    words = {f"w{index}": index for index in range(vocab_size) if index not in numbers} | tokens
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in tokens])
    return tokenizer


def _put_patches_right(directory: Path) -> None:
    """Kimi's patches are embedded outside of its encoder; transformers writes them inside."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    wrong = "vision_tower.encoder.patch_embed."
    tensors = load_file(file)
    save_file({name.replace(wrong, "vision_tower.patch_embed."): t for name, t in tensors.items()}, file)


@functools.cache
def noise(seed: int, width: int, height: int) -> bytes:
    """Returns a PNG of random coarse blocks, different for every seed."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((width, height), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
