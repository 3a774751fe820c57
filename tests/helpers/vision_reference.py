"""What transformers' models are given for prompts with images, by its own code where that runs here."""

from __future__ import annotations

import ast
import functools
import io
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from gpu_service.vision.own_processors import (
    FrameImageProcessor,
    PooledImageProcessor,
    StepImageProcessor,
    TileImageProcessor,
)
from tests.helpers.tiny_vision_models import ERNIE_TOKENS, IMAGE_TOKEN, VISION_MODELS


def reference_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """Returns what transformers' model is given for a prompt with one placeholder for each file."""
    if name.startswith("llama4"):
        return _llama4_inputs(name, prompt, files)
    if name.startswith("gemma4"):
        return _gemma4_inputs(name, prompt, files)
    if name.startswith("mistral"):
        return _pixtral_inputs(name, prompt, files)
    if name.startswith("step"):
        return _step_inputs(name, prompt, files)
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
        kinds = torch.tensor([IMAGE_TOKEN, *ERNIE_TOKENS.values()])
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


def _pixtral_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """Images padded to one size; the text in an image's place is transformers'."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    tiny = VISION_MODELS[name]
    processor = PixtralImageProcessorPil(size=tiny.processor["size"], patch_size={"height": 8, "width": 8})
    images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    made = processor.preprocess(images, return_tensors="pt")
    own = SimpleNamespace(
        patch_size=4,
        spatial_merge_size=2,
        image_token="[IMG]",
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )
    expand = _taken_out("pixtral/processing_pixtral.py", "replace_image_token")
    texts = iter([expand(own, made, index) for index in range(len(files))])
    return {
        "input_ids": _with_texts(name, prompt, texts),
        "pixel_values": made["pixel_values"],
        "image_sizes": made["image_sizes"],
    }


def _with_texts(name: str, prompt: list[int], texts: Iterator[str]) -> torch.Tensor:
    """`[1, P]` with one of `texts` for each placeholder, whose tokens have names in brackets."""
    tokens, ids = VISION_MODELS[name].tokens, list[int]()
    for item in prompt:
        names = re.findall(r"<[^>]+>|\[[^]]+]", next(texts)) if item == IMAGE_TOKEN else []
        ids += [tokens[token] for token in names] or [item]
    return torch.tensor([ids])


def _step_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, Any]:
    """Returns the crops of all images together.

    What transformers' own makes of images is in `image_pixels.json`.
    """
    from transformers.models.step3p7.processing_step3p7 import Step3p7Processor

    tiny = VISION_MODELS[name]
    side = tiny.vision["image_size"]
    processor = StepImageProcessor.from_settings(tiny.processor, 4, 4, side)
    made = [processor.preprocess([Image.open(io.BytesIO(file)).convert("RGB")], "np") for file in files]
    wholes, crops, counts, texts = [], [], [], []
    expand: Any = Step3p7Processor.replace_image_token
    for item in made:
        rows, columns = item["tiles"]
        count = rows * columns
        patches = torch.from_numpy(item["pixel_values"])
        split = count * (processor.crop_size // 4) ** 2
        wholes.append(_unpatched(patches[split:], side))
        crops.append(_unpatched(patches[:split], processor.crop_size))
        counts.append(count)
        own = SimpleNamespace(
            patch_feature_placeholder="<im_patch>" * (processor.crop_size // 16) ** 2,
            image_feature_placeholder="<im_patch>" * (side // 16) ** 2,
        )
        ends = [(index + 1) % columns == 0 and index + 1 < count for index in range(count)]
        texts.append(expand(own, {"num_local_patches": [count], "patch_newline_masks": [ends]}, 0))
    return {
        "input_ids": _with_texts(name, prompt, iter(texts)),
        "pixel_values": torch.cat(wholes),
        "pixel_values_local": torch.cat(crops),
        "num_local_patches": counts,
    }


def _unpatched(patches: torch.Tensor, side: int) -> torch.Tensor:
    """Returns `[N, 3, side, side]` of patches `[P, 3, 4, 4]`, row by row."""
    count = side // 4
    grid = patches.view(-1, count, count, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(-1, 3, side, side)


def _gemma4_inputs(name: str, prompt: list[int], files: list[bytes]) -> dict[str, torch.Tensor]:
    """Returns the padded to one length, as transformers' processor does it."""
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
def _taken_out(module: str, name: str) -> Callable[..., Any]:
    """Returns a function of a module of transformers that cannot be imported without torchvision."""
    import transformers

    file = Path(transformers.__file__).parent / "models" / module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


def kimi_sizes() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Returns the rule of transformers."""
    return _taken_out("kimi_k25/image_processing_kimi_k25.py", "navit_resize")


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
