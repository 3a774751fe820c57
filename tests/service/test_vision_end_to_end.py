"""Invariant: a chat request with images over HTTP is answered as transformers answers it.

Gateway, gRPC and engine are real, the model is tiny and random, its words are `w0` to `w210`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry

from gpu_service.assembly.build import build_engine, model_info
from gpu_service.main import make_server
from gpu_service.server.responses import OutputRouter
from gpu_service.server.servicer import EngineServicer, Service
from gpu_service.server.validation import Bounds
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import write_tokenizer
from tests.helpers.tiny_vision_models import (
    IMAGE_TOKEN,
    VISION_MODELS,
    noise,
    word_tokenizer,
    write_vision_model,
)
from tests.helpers.vision_reference import reference_inputs
from tests.service.test_gateway_images import PLACEHOLDER, TEMPLATE, data_url

NUM_TOKENS = 24
PROMPT = [11, 48, 190, 3, IMAGE_TOKEN, 66, IMAGE_TOKEN, 71, 28]
FILES = [noise(1, 40, 16), noise(2, 16, 32)]


@dataclass
class Expected:
    """A checkpoint on disk, and what transformers answers to the prompt."""

    directory: Path
    answer: str
    num_prompt_tokens: int


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl_moe",
        "llama4",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gemma4", "glm5_next", "minimax_m3_vl", "mistral3", "mistral_large4", "step3p7")
        ),
    ],
)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Returns one family whose images are their placeholder repeated, and one whose are tiles with tokens
    between.
    """
    name, directory = str(request.param), tmp_path_factory.mktemp("seeing")
    model = write_vision_model(name, directory)
    tokens = VISION_MODELS[name].tokens or {PLACEHOLDER: IMAGE_TOKEN}
    written = next(text for text, number in tokens.items() if number == IMAGE_TOKEN)
    tokenizer = word_tokenizer(tokens)
    write_tokenizer(directory, tokenizer, TEMPLATE.replace(PLACEHOLDER, written))
    inputs = reference_inputs(name, PROMPT, FILES)
    with torch.inference_mode():
        tokens = model.generate(
            **inputs,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=[IMAGE_TOKEN],
        )
    length = inputs["input_ids"].shape[1]
    return Expected(directory, tokenizer.decode(tokens[0, length:].tolist()), length)


@dataclass
class Seeing:
    """A gateway and its engine, with the model's tower or without."""

    url: str
    model: str
    has_tower: bool

    def post(self, **body: object) -> httpx.Response:
        """Returns a chat completion."""
        return httpx.post(f"{self.url}/v1/chat/completions", json={"model": self.model, **body}, timeout=60)


@pytest.fixture(scope="module", params=[False, True], ids=["vision", "language_model_only"])
def seeing(request: pytest.FixtureRequest, expected: Expected) -> Iterator[Seeing]:
    """A gateway before an engine whose event loop has a thread of its own."""
    directory = expected.directory
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(directory), language_model_only=request.param),
        gpu=GpuConfig(page_size=4, num_pages=64, max_num_batched_tokens=16, gpu_threads=1),
        experts=ExpertConfig(expert_transport="local"),
    )
    telemetry = EngineTelemetry(EngineMetrics("tiny", CollectorRegistry()))
    router = OutputRouter(loop)
    built = build_engine(config, telemetry, router.on_output)
    assert (built.vision is None) == request.param
    built.engine.start()
    servicer = EngineServicer()
    bounds = Bounds(built.model_config.vocab_size, built.context_limit)
    preparer = None if built.vision is None else built.vision.preparer
    servicer.service = Service(
        built.engine, router, telemetry, bounds, model_info(config, built), 4, preparer=preparer
    )

    async def start() -> tuple[object, int]:
        server, report, port = make_server(servicer, "127.0.0.1:0")
        await report.set(True)
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        with running_gateway(gateway_config(f"127.0.0.1:{port}")) as address:
            yield Seeing(address, directory.name, built.vision is not None)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(30)  # type: ignore[attr-defined]
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        built.close()


def ask(seeing: Seeing, *files: bytes, max_tokens: int = NUM_TOKENS) -> httpx.Response:
    """Returns the prompt as words and images."""
    left = iter(files)
    parts: list[dict[str, object]] = []
    for token in PROMPT:
        if token == IMAGE_TOKEN:
            parts.append({"type": "image_url", "image_url": {"url": data_url(next(left))}})
        else:
            parts.append({"type": "text", "text": f" w{token} "})
    return seeing.post(
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logit_bias={str(IMAGE_TOKEN): -100},
    )


def test_the_answer_is_transformers(seeing: Seeing, expected: Expected) -> None:
    """Or a 400 where the tower was left out, and text is answered all the same."""
    answer = ask(seeing, *FILES)
    if not seeing.has_tower:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_image")
        text = seeing.post(messages=[{"role": "user", "content": "w11 w48"}], max_tokens=2)
        assert text.status_code == 200
        return
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].split() == expected.answer.split()
    assert answer.json()["usage"]["prompt_tokens"] == expected.num_prompt_tokens


def test_what_only_the_engine_can_tell_is_a_400_too(seeing: Seeing) -> None:
    """A damaged file, and a prompt that images make longer than the pool."""
    damaged = ask(seeing, FILES[0][: len(FILES[0]) // 2], FILES[1])
    too_long = ask(seeing, *FILES, max_tokens=240)
    for answer in (damaged, too_long):
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    if seeing.has_tower:
        assert "images[0]" in damaged.json()["error"]["message"]
        assert "max_tokens" in too_long.json()["error"]["message"]
