"""Guards `moebius verify --long`: what is served right passes, faults that come late in an output do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from app import cli
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.context import ForwardContext
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from lab.verify import teacher_forcing
from lab.verify.long import PROMPT_TOKENS, LongOptions, verify_long
from lab.verify.long_output import SAMPLINGS, LongOutput, make_long_output
from lab.verify.long_report import LongResult
from lab.verify.staged_model import StagedModel
from moebius.config import MoebiusConfig
from moebius.models.config import ModelOverrides
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.demo import demo_checkpoint
from tests.helpers.engine_harness import Knobs, make_request, running_engine
from tests.helpers.tiny_models import cached_tiny_models

TOKENS = 320
# Position of a fault: the first third of the output is right.
LATE = PROMPT_TOKENS + TOKENS // 3

# Changes a model that is about to serve.
Fault = Callable[[CausalLM], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Checkpoints of float32, and transformers' own models of them."""
    return cached_tiny_models(tmp_path_factory.mktemp("long"))


def healthy(model: CausalLM) -> None:
    """Changes nothing."""


def rotates_wrongly(model: CausalLM) -> None:
    """Positions from `LATE` on are rotated by half of what exceeds it."""
    for rotary in model.model._rotaries:
        right = rotary.table
        rotary.table = lambda positions, right=right: right(  # type: ignore[method-assign]
            torch.where(positions > LATE, LATE + (positions - LATE) // 2, positions)
        )


def loses_pages(model: CausalLM) -> None:
    """The keys and values of a layer's pages lie in another order, once the output is long enough."""

    forward = model.forward

    def faulty(context: ForwardContext) -> torch.Tensor:
        if context.inputs.seq_lens[0] == LATE:
            pages = context.kv_cache.pages(1)  # type: ignore[union-attr]
            pages.copy_(pages.roll(1, dims=0))
        return forward(context)

    model.forward = faulty  # type: ignore[method-assign]


@dataclass(frozen=True)
class InProcess:
    """An engine in this process in place of a server; `fault` changes its model."""

    directory: Path
    fault: Fault

    def __call__(self, prompt: Sequence[int], tokens: int) -> list[LongOutput]:
        """Generates all outputs side by side, with 20 log-probabilities as the API has."""
        config = read_model_config(self.directory, ModelOverrides(dtype="float32"))
        model = build_model(config)
        load_weights(model, self.directory)
        self.fault(model)
        experts = LocalExpertClient(str(self.directory), read_geometry(self.directory), torch.float32)
        length = len(prompt) + tokens
        knobs = Knobs(num_pages=4 + 2 * length // 16, page_size=16, context_limit=length)
        with running_engine(knobs, model=model, experts=experts) as engine:
            requests = [
                make_request(
                    name, list(prompt), max_tokens=tokens, logprobs=20, temperature=sampling["temperature"]
                )
                for name, sampling in SAMPLINGS.items()
            ]
            engine.run(requests, together=True)
        return [
            make_long_output(
                request.request_id,
                prompt,
                request.output_token_ids,
                [
                    dict(zip(record.top_ids, record.top_logprobs, strict=True))
                    for record in request.output_logprobs
                ],
            )
            for request in requests
        ]


def run(directory: Path, fault: Fault = healthy, tokens: int = TOKENS) -> LongResult:
    """On the CPU, one thread."""
    config = MoebiusConfig.model_validate(
        {
            "model": {"model": str(directory), "dtype": "float32"},
            "gpu": {"device": "cpu", "gpu_threads": 1},
            "experts": {"calibrate_kernels": False, "expert_threads": 1},
        }
    )
    return verify_long(config, LongOptions(tokens=tokens), generate=InProcess(directory, fault))


def test_what_is_served_right_passes(models: Callable[[str], tuple[Path, Any]]) -> None:
    """No divergence at any place, the reference's own most probable tokens, and the same repetition."""
    result = run(models("qwen3_moe")[0])
    assert result.passed, [check for check in result.checks() if not check.passed]
    assert [output.name for output in result.outputs] == ["greedy", "sampled"]
    for output in result.outputs:
        assert output.tokens == TOKENS
        assert len(output.windows) == 8
        assert output.max_kl < 1e-5
        assert output.top1_agreement == 1.0
        assert output.rep_128 == output.reference_rep_128


@pytest.mark.parametrize("fault", [rotates_wrongly, loses_pages])
def test_a_late_fault_fails(models: Callable[[str], tuple[Path, Any]], fault: Fault) -> None:
    """A fault from the second third of the outputs on: those before are right, the last quarter is not."""
    result = run(models("qwen3_moe")[0], fault)
    assert not result.passed
    failed = [check.what for check in result.checks() if not check.passed]
    assert "sampled: mean KL of the last quarter" in failed
    for output in result.outputs:
        assert max(window.max_kl for window in output.windows[:2]) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "gpt_oss", "glm_moe_dsa"])
def test_chunks_of_the_reference_are_transformers_model(
    models: Callable[[str], tuple[Path, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States, latent attention, windows and chosen positions, computed in chunks of 16 after a prompt: the
    log-probabilities that transformers gives for the whole sequence at once."""
    monkeypatch.setattr(teacher_forcing, "CHUNK", 16)
    directory, reference = models(name)
    config = MoebiusConfig.model_validate({"model": {"model": str(directory)}, "gpu": {"device": "cpu"}})
    torch.manual_seed(5)
    ids = torch.randint(8, 200, (75,))
    output = make_long_output("sampled", ids[:21].tolist(), ids[21:].tolist(), [{1: -1.0}] * 54)
    exact = teacher_forcing.float32_of(config, StagedModel.open(config, directory, torch.device("cpu")))
    scores = teacher_forcing.score_outputs(config, exact, [output])[0]
    with torch.inference_mode():
        logits = reference(ids[None]).logits[0, 20:-1].double()
    loss = torch.nn.functional.cross_entropy(logits, ids[21:], reduction="none")
    torch.testing.assert_close(scores.reference_loss, loss, rtol=1e-4, atol=1e-4)
    assert (scores.reference_top == logits.argmax(-1)).double().mean() > 0.95


@pytest.fixture
def logging() -> Iterator[None]:
    """The command sets up logging for its process."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging")
def test_options_that_belong_to_the_other_comparison_are_refused(
    models: Callable[[str], tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names them, and what the context leaves no room for."""
    directory = str(models("qwen3_moe")[0])
    for more, message in (
        (["--long", "--layers", "1"], "--layers: cannot be used with --long"),
        (["--url", "http://127.0.0.1:1"], "--url: can only be used with --long"),
        (["--long", "--max-model-len", "70"], "leaves 6; needed: 16 or more"),
        (["--long", "--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", directory, "--device", "cpu", "--gpu-threads", "1", *more])
        assert ended.value.code == 2
        shown = capsys.readouterr().err.strip().splitlines()
        assert len(shown) == 1
        assert message in shown[0]


@pytest.mark.full
@pytest.mark.demo
@pytest.mark.timeout(6 * 3600)
@pytest.mark.usefixtures("logging")
def test_the_demo_model_over_its_whole_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16 384 tokens are asked for, and as many generated as the context of 8192 leaves: by the whole served
    system in bfloat16, greedy and sampled; KL is flat, and nothing is repeated that the reference would not.
    """
    target = tmp_path / "long.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(demo_checkpoint()), "--long", "--json", str(target)])
    assert ended.value.code == 0, capsys.readouterr().out
    document = json.loads(target.read_text())
    assert document["tokens"] == 8192 - PROMPT_TOKENS
    for output in document["outputs"]:
        assert len(output["windows"]) == 8
        assert 0 < output["mean_kl"] < 0.01
    assert "verdict: passed" in capsys.readouterr().out
