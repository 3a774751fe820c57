"""Invariant: prompts with images get transformers' greedy answers, however they are cut into steps.

The whole engine on tiny random models: image files and a prompt with one placeholder each in, tokens out.
What is compared: every family's tower, its features' place in the stream, positions by axis, DeepStack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.assembly.vision import load_vision
from gpu_service.device import TORCH_DTYPES
from moebius.config import GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.models.config import DTypeName, ModelOverrides
from moebius.models.layers.recurrent import Recurrent
from moebius.models.read import read_model_config
from tests.helpers.layer_values import mixers_of
from tests.helpers.tiny_models import TINY_MODELS
from tests.helpers.tiny_vision_models import IMAGE_TOKEN, VISION_MODELS, noise, write_vision_model
from tests.helpers.vision_engine import NUM_TOKENS, Prompt, SeeingEngine, vision_engine
from tests.helpers.vision_reference import reference_inputs

WIDE, TALL, OTHER = noise(1, 40, 16), noise(2, 16, 32), noise(3, 40, 16)
PROMPTS: list[Prompt] = [
    ([11, 48, 190, 3, 66, IMAGE_TOKEN, 71, 28, 39], [WIDE]),
    ([IMAGE_TOKEN, 5, 123, IMAGE_TOKEN, 9, IMAGE_TOKEN, 8, 54, 90], [TALL, WIDE, OTHER]),
    ([11, 48, 190, 3, 66, IMAGE_TOKEN, 71, 28, 39], [OTHER]),
    ([10, 110, 4], []),
]
ROOMY = GpuConfig(page_size=4, num_pages=256, max_num_batched_tokens=64, gpu_threads=1)
# Chunks end within images, and four requests of up to 70 tokens do not fit into 32 pages.
TIGHT = GpuConfig(page_size=4, num_pages=32, max_num_batched_tokens=16, gpu_threads=1)


def text_family(name: str) -> str:
    """Returns the text family of the language model below a tower."""
    return TINY_MODELS[VISION_MODELS[name].text].model_type


def family(name: str) -> str:
    """Returns the family of the whole model: towers differ between models of one text family."""
    return VISION_MODELS[name].family or text_family(name)


@dataclass
class Answered:
    """A checkpoint, and what transformers answers to each prompt alone."""

    name: str
    directory: Path
    answers: list[list[int]]


def _cases() -> Iterator[Any]:
    """Yields one model of a family, and others of it for `make test-all`: what transformers answers takes
    long.
    """
    seen: set[str] = set()
    for name in sorted(VISION_MODELS):
        yield pytest.param(name, marks=[pytest.mark.full] if family(name) in seen else [])
        seen.add(family(name))


@pytest.fixture(scope="module", params=_cases())
def answered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    name = str(request.param)
    directory = tmp_path_factory.mktemp("vision")
    model = write_vision_model(name, directory)
    return Answered(name, directory, [_reference(name, model, *prompt) for prompt in PROMPTS])


@torch.inference_mode()
def _reference(name: str, model: Any, prompt: list[int], files: list[bytes]) -> list[int]:
    inputs = reference_inputs(name, prompt, files) if files else {"input_ids": torch.tensor([prompt])}
    # Kimi's class takes a placeholder for token 0 that the model generates itself.
    tokens = model.generate(
        **inputs,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=[IMAGE_TOKEN],
    )
    answer: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return answer


@pytest.fixture(scope="module")
def roomy(answered: Answered) -> Iterator[SeeingEngine]:
    """One engine for the tests of one model."""
    with vision_engine(answered.directory, ROOMY) as engine:
        yield engine


def test_the_engine_says_what_transformers_says(answered: Answered, roomy: SeeingEngine) -> None:
    assert answered.answers[0] != answered.answers[2], "an image that changes nothing proves nothing"
    requests = roomy.run(PROMPTS)
    assert [request.output_token_ids for request in requests] == answered.answers


@torch.inference_mode()
def test_towers_in_float16_use_its_digits(answered: Answered) -> None:
    """Next to float32's, features are three times nearer than in bfloat16 at least: eight by the digits."""
    config, features = MoebiusConfig(model=ModelConfigSection(model=str(answered.directory))), {}
    dtypes: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")
    for dtype in dtypes:
        model = read_model_config(answered.directory, ModelOverrides(dtype=dtype))
        vision = load_vision(config, model, torch.device("cpu"))
        assert vision is not None
        encoded = vision.encoder.encode(vision.preparer.prepare(WIDE))
        assert encoded.dtype == TORCH_DTYPES[dtype]
        features[dtype] = encoded.float()
    errors = {dtype: (found - features["float32"]).abs().mean() for dtype, found in features.items()}
    assert 0 < 3 * errors["float16"] < errors["bfloat16"]


@pytest.mark.covering(1, answered=text_family)
def test_pages_are_shared_by_equal_images_only(answered: Answered, roomy: SeeingEngine) -> None:
    """The two prompts are the same tokens; a page that holds part of an image belongs to that image."""
    roomy.built.engine.flush().result(60)
    assert roomy.built.vision is not None
    encoder = roomy.built.vision.encoder
    first = roomy.run([PROMPTS[0]])[0]
    encoded = encoder.num_encoded
    same = roomy.run([PROMPTS[0]])[0]
    assert encoder.num_encoded == encoded, "an image is encoded once"
    other = roomy.run([PROMPTS[2]])[0]
    # Text before the image is shared; linear attention only begins where a state was kept.
    shared = 0 if mixers_of(roomy.built.model_config, Recurrent) else 4
    assert (first.cached_len, other.cached_len) == (0, shared)
    assert same.cached_len > 4 + 8, "a page within the image is shared"
    assert same.output_token_ids == answered.answers[0]
    assert other.output_token_ids == answered.answers[2]


@pytest.mark.covering(1, answered=text_family)
def test_chunks_and_preemption_change_nothing(answered: Answered) -> None:
    """Nothing is kept of images between steps, either: they are encoded again for the next chunk."""
    with vision_engine(answered.directory, TIGHT, cache_mib=0) as engine:
        requests = engine.run(PROMPTS)
    assert [request.output_token_ids for request in requests] == answered.answers
    assert sum(request.num_preemptions for request in requests) > 0
