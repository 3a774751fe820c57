"""`moebius verify --long`: a served model's long outputs, token by token beside the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from app.bench.start import serving
from app.client import ApiClient
from gpu_service.assembly.process import prepare_process
from gpu_service.device import TORCH_DTYPES
from gpu_service.ops import backends
from gpu_service.ops.example_sizes import sizes_of
from gpu_service.verify.errors import MEAN_KL
from lab.verify.experts import PackedExperts, ReferenceExperts
from lab.verify.long_output import SAMPLINGS, LongOutput, ask_long_output
from lab.verify.long_report import LongResult, OutputReport, report_output
from lab.verify.report import Thresholds
from lab.verify.run import BF16, coarsest_experts, open_reference, read_tokens
from lab.verify.staged_model import StagedModel
from lab.verify.teacher_forcing import float32_of, score_outputs
from lab.verify.trend import FEWEST_WINDOWS
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.read import read_geometry

# Tokens of the text that outputs go on from.
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class LongOptions:
    """Filled by the command line."""

    tokens: int = 16_384
    against: str = "bf16"
    # A running server of the same checkpoint; None: one is started, and stopped before the reference runs.
    client: ApiClient | None = None
    text_file: Path | None = None
    seed: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)


# Returns outputs that go on from a prompt, given how many tokens each shall have.
Generate = Callable[[Sequence[int], int], list[LongOutput]]


def verify_long(
    config: MoebiusConfig,
    options: LongOptions,
    on_step: Callable[[str, int, int], None] = lambda what, done, total: None,
    generate: Generate | None = None,
) -> LongResult:
    """`on_step` is called with what is done, how much of it, and of how much.

    `generate` stands for a server where one is at hand in another way. Raises UserError, CheckpointError or
    ModelConfigError naming what is wrong.
    """
    begin = time.monotonic()
    device = prepare_process(config)
    ours = StagedModel.open(config, Path(config.model.model), device)
    original = open_reference(config, options.against, ours)
    text = read_tokens(ours.directory, options.text_file, 1 << 20, ours.config.vocab_size)
    prompt = text.ids[:PROMPT_TOKENS].tolist()
    tokens = min(options.tokens, ours.config.max_model_len - len(prompt))
    if tokens < 2 * FEWEST_WINDOWS:
        raise UserError(
            f"--tokens {options.tokens}: after a prompt of {len(prompt)} tokens the model's context of "
            f"{ours.config.max_model_len} leaves {tokens}; needed: {2 * FEWEST_WINDOWS} or more"
        )
    allowed = _allowed_kl(config, options, ours)
    if generate is not None:
        outputs = generate(prompt, tokens)
    else:
        with _server(config, options) as client:
            outputs = _ask(client, prompt, tokens, options.seed, on_step)
    generated = time.monotonic()
    reference = float32_of(config, original)
    backends.install(device, "torch", TORCH_DTYPES["float32"], sizes_of(ours.config, ours.config.layers))
    total = reference.config.num_layers
    scores = score_outputs(config, reference, outputs, lambda done: on_step("reference", done, total))
    reports: list[OutputReport] = [
        report_output(output, score, allowed, options.thresholds.min_top1, text.ids.tolist())
        for output, score in zip(outputs, scores, strict=True)
    ]
    return LongResult(
        model=str(ours.directory),
        reference=options.against,
        tokens=tokens,
        wanted_tokens=options.tokens,
        max_model_len=ours.config.max_model_len,
        outputs=tuple(reports),
        generating_seconds=generated - begin,
        reference_seconds=time.monotonic() - generated,
    )


@contextmanager
def _server(config: MoebiusConfig, options: LongOptions) -> Iterator[ApiClient]:
    if options.client is not None:
        yield options.client
        return
    with serving(config, config.gpu.jit_cache_dir) as system:
        yield system.client


def _ask(
    client: ApiClient,
    prompt: list[int],
    tokens: int,
    seed: int,
    on_step: Callable[[str, int, int], None],
) -> list[LongOutput]:
    """Returns all outputs, generated side by side, as a server's requests are."""
    model = client.first_model().name

    def ask(name: str) -> LongOutput:
        return ask_long_output(
            client, model, name, prompt, tokens, seed, lambda done: on_step(name, done, tokens)
        )

    with ThreadPoolExecutor(len(SAMPLINGS)) as pool:
        return list(pool.map(ask, SAMPLINGS))


def _allowed_kl(config: MoebiusConfig, options: LongOptions, ours: StagedModel) -> float:
    """What rounds most decides: experts, the other layers' type, or keys and values."""
    if options.thresholds.max_kl is not None:
        return options.thresholds.max_kl
    geometry = read_geometry(ours.directory, config.model.experts_per_token)
    dtype = TORCH_DTYPES[ours.config.dtype]
    layers = geometry.passed_layers
    experts = config.model.expert_checkpoint if options.against == BF16 else ""
    others = ReferenceExperts(str(ours.directory), geometry, dtype, experts)
    packed = PackedExperts(config, geometry, dtype, layers, others)
    rows = 32 if ours.config.dtype == "float32" else 16
    cache = 32 if config.gpu.kv_cache_dtype == "auto" else 8
    return MEAN_KL[min(rows, cache, coarsest_experts(packed, layers, options.against))]
