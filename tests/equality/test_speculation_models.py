"""Guards that on real (tiny) models a verified position is a decode row: every kind of cache, as it is built
from the configuration, says with drafts what it says without; and that what can not speculate is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gpu_service.assembly import speculation as assembly
from gpu_service.core.request import Request, SamplingParams
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfigError
from tests.helpers.built_engine import running_engine
from tests.helpers.drafters import AnswerDrafter, ScatteredDrafter
from tests.helpers.tiny_models import make_tiny_model

# Keys and values; windows and sinks; latents; latents that an indexer chooses; entries for several tokens, of
# each layer and shared.
CACHES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"]
# States: Gated DeltaNet, KDA, lightning attention, Mamba-2, Mamba, a short convolution; n-grams of tokens.
STATES = ["qwen3_next", "kimi_linear", "minimax", "nemotron_h", "jamba", "lfm2_moe"]
FAMILIES = [*CACHES, *STATES, "qwen4_exp_text_three_streams_bias_tied"]
LENGTHS = (5, 33, 18, 50)
ROOMY: dict[str, Any] = {"page_size": 4, "num_pages": 128, "max_num_batched_tokens": 64}
TIGHT: dict[str, Any] = {"page_size": 4, "num_pages": 36, "max_num_batched_tokens": 16}
DRAFTS: dict[str, Any] = {"speculative_method": "ngram", "num_draft_tokens": 3, "adaptive_drafts": False}
Truth = tuple[Path, list[Request]]


def wanted() -> list[Request]:
    """Returns greedy and random ones; fresh objects in every call."""
    return [
        Request(
            f"r{i}",
            [(i * 37 + k * k * 5 + k) % 200 + 3 for k in range(n)],
            SamplingParams(
                temperature=0.8 * (i % 2),
                seed=i,
                max_tokens=30,
                ignore_eos=True,
                logprobs=1 if i == 1 else None,
            ),
        )
        for i, n in enumerate(LENGTHS)
    ]


def run(directory: Path, gpu: Mapping[str, Any]) -> tuple[list[Request], CollectorRegistry]:
    """Returns all at once in an engine built from the configuration; the requests after their end, and
    metrics.
    """
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32", language_model_only=True),
        gpu=GpuConfig(gpu_threads=1, **gpu),
        experts=ExpertConfig(expert_transport="local"),
    )
    registry = CollectorRegistry()
    telemetry = EngineTelemetry(EngineMetrics("tiny", registry))
    requests = wanted()
    with running_engine(config, telemetry) as engine:
        telemetry.enabled = True
        engine.run(requests)
    return requests, registry


@pytest.fixture(scope="module", params=FAMILIES)
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Returns a checkpoint, and what it says without speculation."""
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, directory)
    return directory, run(directory, ROOMY)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("is_right", "gpu"), [(True, TIGHT), (False, ROOMY)], ids=["right-tight", "mixed-roomy"]
)
def test_drafts_do_not_show(
    truth: Truth, is_right: bool, gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, chunks and preemptions with drafts that are right, or wrong from any place on: the tokens
    without any. Metrics count."""
    directory, expected = truth
    answers = {request.request_id: request.output_token_ids for request in expected}
    vocab_size = 200
    drafter = AnswerDrafter(answers, vocab_size) if is_right else ScatteredDrafter(answers, vocab_size)
    monkeypatch.setattr(assembly, "NGramDrafter", lambda *sizes: drafter)
    requests, registry = run(directory, gpu | DRAFTS)
    assert {request.request_id: request.output_token_ids for request in requests} == answers
    for request, before in zip(requests, expected, strict=True):
        for new, old in zip(request.output_logprobs, before.output_logprobs, strict=True):
            assert new.token_id == old.token_id
            assert new.logprob == pytest.approx(old.logprob, abs=1e-4)
    drafted, accepted = (
        registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", {"model_name": "tiny", "engine": "0"})
        for name in ("draft_tokens", "accepted_tokens")
    )
    assert drafted is not None
    assert accepted is not None
    assert drafted > 20
    assert accepted == drafted if is_right else 0 < accepted < drafted
    assert not isinstance(drafter, ScatteredDrafter) or drafter.wrong_places >= {0, 1, 2}
    if gpu is TIGHT:
        assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "qwen3_moe",
            "mtp",
            "of model_type 'qwen3_moe' is not supported; allowed: speculative_method off or ngram",
        ),
    ],
)
def test_what_can_not_speculate_is_refused_at_start(
    name: str, method: Any, message: str, tmp_path: Path
) -> None:
    """The refusal comes before anything is loaded, with the reason."""
    make_tiny_model(name, tmp_path)
    with pytest.raises((UserError, ModelConfigError), match=message):
        run(tmp_path, ROOMY | {"speculative_method": method})
