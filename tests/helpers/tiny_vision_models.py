"""Tiny random checkpoints that see: a language model of `tiny_multimodal_text` and a tower of 2 or 3 layers.

The reference's inputs are made by transformers' own image processors. Patches are 4 pixels wide and four of
them make a token, so that an image of 24 x 16 pixels is 6 tokens.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from gpu_service.vision.own_processors import FrameImageProcessor, PooledImageProcessor, TileImageProcessor
from tests.helpers.tiny_models import _COMMON, TINY_MODELS, _randomize
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
_ERNIE_TOKENS = {"image_start_token_id": 66, "image_end_token_id": 39}
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
}


def write_vision_model(name: str, directory: Path, *, publish: bool = True) -> Any:
    """Write the checkpoint as it would be published, and return transformers' float32 model of it.

    Not `publish`: as transformers writes it.
    """
    tiny = VISION_MODELS[name]
    text = TINY_MODELS[tiny.text]
    tower = dataclasses.replace(TEXT_TOWERS[tiny.family or text.model_type], vision=tiny.vision)
    config = tower.config(_COMMON | text.changes | tiny.changes)
    config.image_token_id = tiny.image_token
    if name.startswith("ernie"):
        for key, token in _ERNIE_TOKENS.items():
            setattr(config, key, token)
    if tiny.family == "gemma4":
        config.boi_token_id, config.eoi_token_id = 201, 202
    if text.model_type == "kimi_k25":
        config.projection_hidden_size = tiny.vision["hidden_size"]
    model = tower.model(config).eval()
    _randomize(model, seed=sum(name.encode()) + 1)
    model.save_pretrained(directory)
    if publish:
        tower.publish(directory, text.changes)
    if publish and text.model_type == "kimi_k25":
        _put_patches_right(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(tiny.processor))
    if tiny.tokens:
        write_tokenizer(directory, word_tokenizer(tiny.tokens), None)
    return model


def word_tokenizer(tokens: dict[str, int], vocab_size: int = 211) -> Tokenizer:
    """Words `w0`, `w1`, ... and special tokens by name."""
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
    """A PNG of random coarse blocks, different for every seed."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((width, height), Image.Resampling.BILINEAR)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def reference_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """What transformers' model is given for a prompt with one placeholder for each file."""
    if name.startswith("llama4"):
        return _llama4_inputs(name, prompt, files)
    if name.startswith("gemma4"):
        return _gemma4_inputs(name, prompt, files)
    made = [_processed(name, file) for file in files]
    grids = torch.cat([grid for _, grid in made])
    counts = iter((grids.prod(-1) // 4).tolist())
    around = VISION_MODELS[name].tokens
    before = [around["]<]start of image[>["]] if around else []
    after = [around["]<]end of image[>["]] if around else []
    ids = []
    for item in prompt:
        ids += [*before, *[item] * next(counts), *after] if item == IMAGE_TOKEN else [item]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "pixel_values": torch.cat([pixels for pixels, _ in made]),
        "image_grid_thw": grids,
    }
    if name.startswith("ernie"):
        kinds = torch.tensor([IMAGE_TOKEN, *_ERNIE_TOKENS.values()])
        inputs["moe_mm_token_type_ids"] = torch.isin(inputs["input_ids"], kinds).int()
    if name.startswith(("ernie", "qwen", "glm4")):
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).int()
    return inputs


def _processed(name: str, file: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    image = Image.open(io.BytesIO(file)).convert("RGB")
    settings = VISION_MODELS[name].processor
    if name.startswith("kimi"):
        return _kimi_processed(image, settings)
    if name.startswith("minimax"):
        # What transformers' own makes of images is in `tests/data/image_pixels.json`.
        return _as_tensors(FrameImageProcessor.from_settings(settings).preprocess([image], "np"))
    if name.startswith("glm5"):
        from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

        own = {key: value for key, value in settings.items() if key != "image_processor_type"}
        return _as_tensors(Glm5NextImageProcessorPil(**own).preprocess([image], return_tensors="np"))
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kinds: dict[str, Any] = {
        "Ernie4_5_VLMoeImageProcessor": Ernie4_5_VLMoeImageProcessorPil,
        "Glm4vImageProcessor": Glm4vImageProcessorPil,
        "Glm46VImageProcessor": Glm46VImageProcessorPil,
        "Qwen2VLImageProcessorFast": Qwen2VLImageProcessorPil,
    }
    made = kinds[settings["image_processor_type"]](**settings)(image, return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def _as_tensors(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.array(made["pixel_values"])), torch.from_numpy(
        np.array(made["image_grid_thw"])
    )


def _gemma4_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """Padded to one length, as transformers' processor does it."""
    processor = PooledImageProcessor.from_settings(VISION_MODELS[name].processor)
    size = processor.max_patches
    pixels, places, ids, left = [], [], list[int](), iter(files)
    for item in prompt:
        if item != IMAGE_TOKEN:
            ids.append(item)
            continue
        made = processor.preprocess([Image.open(io.BytesIO(next(left))).convert("RGB")], "np")
        _, rows, columns = made["image_grid_thw"][0].tolist()
        count = rows * columns
        pixels.append(np.pad(made["pixel_values"], ((0, size - count), (0, 0))))
        place = np.stack((np.arange(count) % columns, np.arange(count) // columns), axis=-1)
        places.append(np.pad(place, ((0, size - count), (0, 0)), constant_values=-1))
        ids += [201, *[IMAGE_TOKEN] * (count // processor.merge_size**2), 202]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens,
        "pixel_values": torch.from_numpy(np.stack(pixels)),
        "image_position_ids": torch.from_numpy(np.stack(places)),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
    }


def _llama4_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """The text in an image's place is transformers'."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    tiny = VISION_MODELS[name]
    side, patch = tiny.vision["image_size"], tiny.vision["patch_size"]
    processor = TileImageProcessor.from_settings(tiny.processor, patch, 2, side)
    made = [processor.preprocess([Image.open(io.BytesIO(file)).convert("RGB")], "np") for file in files]
    tiles = iter(np.maximum(item["tiles"], 1).tolist() for item in made)
    ids: list[int] = []
    for item in prompt:
        if item == IMAGE_TOKEN:
            split: Any = Llama4Processor._prompt_split_image
            text = split(None, next(tiles), (side // patch // 2) ** 2)
            ids += [tiny.tokens[token] for token in re.findall(r"<\|\w+\|>", text)]
        else:
            ids.append(item)
    pixels = np.concatenate([item["pixel_values"] for item in made])
    return {"input_ids": torch.tensor([ids]), "pixel_values": torch.from_numpy(pixels)}


@functools.cache
def kimi_sizes() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """The rule of transformers, taken out of its module, which can not be imported without torchvision."""
    import transformers

    file = Path(transformers.__file__).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize")
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    found: Callable[..., Any] = names["navit_resize"]
    return found


def _kimi_processed(image: Image.Image, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The steps of transformers' processor, which itself needs torchvision, by torch's own functions."""
    sizes = {"max_patches": settings["max_patches"], "max_size_per_side": settings["size"]["max_height"]}
    (height, width), (full_height, full_width) = kimi_sizes()(
        image.height, image.width, patch_size=4, merge_kernel_size=2, **sizes
    )
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    padded = torch.nn.functional.pad(pixels, (0, full_width - width, 0, full_height - height))
    normal = (padded.float() / 255 - 0.5) / 0.5
    patches = normal.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).flatten(0, 1)
    return patches.contiguous(), torch.tensor([[1, full_height // 4, full_width // 4]])
