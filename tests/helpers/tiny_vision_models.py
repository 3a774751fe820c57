"""Tiny random checkpoints that see: a language model of `tiny_multimodal_text` and a tower of 2 or 3 layers.

The reference's inputs are made by transformers' own image processors.
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

from tests.helpers.tables import read_table
from tests.helpers.tiny_models import _COMMON, TINY_MODELS, add_image_outputs, randomize
from tests.helpers.tiny_multimodal_text import TEXT_TOWERS
from tests.helpers.tiny_tokenizer import write_tokenizer

IMAGE_TOKEN = 200
# What begins and ends the images of `tests/parity/test_vision.py`, which choose experts as images do.
ERNIE_TOKENS = {"image_start_token_id": 66, "image_end_token_id": 39}


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


VISION_MODELS = {name: TinyVision(**fields) for name, fields in read_table("tiny_vision_models.yaml").items()}


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
