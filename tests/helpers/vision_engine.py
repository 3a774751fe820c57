"""A whole engine on a tiny checkpoint with vision: prompts with image files in, tokens out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from gpu_service.assembly.build import Built, build_engine
from gpu_service.core.interface import OutputDelta
from gpu_service.core.request import Request
from gpu_service.server.validation import Bounds, make_requests
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.config import (
    ExpertConfig,
    GpuConfig,
    ImageConfig,
    ModelConfigSection,
    MoebiusConfig,
    PlacementConfig,
)
from protos import engine_pb2 as pb
from tests.helpers.tiny_vision_models import IMAGE_TOKEN

NUM_TOKENS = 24
# Tokens with a placeholder for each file, and the files.
Prompt = tuple[list[int], list[bytes]]


class SeeingEngine:
    """A running engine on a checkpoint with vision."""

    def __init__(self, built: Built, ended: threading.Semaphore) -> None:
        self.built = built
        self._ended = ended
        self._count = 0

    def run(self, prompts: Sequence[Prompt], *, may_fail: bool = False) -> list[Request]:
        """Returns all at once; the requests after their end, which has to be a good one unless they
        `may_fail`.
        """
        requests = [self._request(*prompt) for prompt in prompts]
        for request in requests:
            self.built.engine.submit([request])
        assert all(self._ended.acquire(timeout=60) for _ in requests)
        if not may_fail:
            assert [request.error_message for request in requests] == [""] * len(requests)
        return requests

    def _request(self, prompt: list[int], files: list[bytes]) -> Request:
        self._count += 1
        message = pb.GenerateRequest(
            request_id=f"r{self._count}",
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(
                temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={IMAGE_TOKEN: -100.0}
            ),
            images=[pb.ImageInput(data=data) for data in files],
        )
        assert self.built.vision is not None
        bounds = Bounds(self.built.model_config.vocab_size, self.built.context_limit)
        return make_requests(message, bounds, self.built.vision.preparer)[0]


@contextmanager
def vision_engine(
    directory: Path,
    gpu: GpuConfig,
    cache_mib: int = 16,
    dtype: Literal["auto", "float16"] = "auto",
    **placement: Any,
) -> Iterator[SeeingEngine]:
    """Built and running; `placement` says which experts are on the device."""
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype=dtype),
        gpu=gpu,
        images=ImageConfig(image_cache_mib=cache_mib),
        experts=ExpertConfig(expert_transport="local"),
        placement=PlacementConfig(**placement),
    )
    ended = threading.Semaphore(0)

    def on_output(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                ended.release()

    telemetry = EngineTelemetry(EngineMetrics("tiny", CollectorRegistry()))
    built = build_engine(config, telemetry, on_output)
    built.engine.start()
    try:
        yield SeeingEngine(built, ended)
    finally:
        built.close()
    built.engine.scheduler.check_integrity()
