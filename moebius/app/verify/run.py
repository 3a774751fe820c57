"""The command: opens both models, compares, summarises."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gpu_service.assembly.process import prepare_process
from gpu_service.ops import backends
from gpu_service.ops.examples import sizes_of
from gpu_service.verify.errors import MEAN_KL, TokenScores, coarsest_bits, perplexity
from moebius.app.verify.comparison import Comparison
from moebius.app.verify.result import OutputResult, Thresholds, VerifyResult
from moebius.app.verify.same_shape import check_same_shape
from moebius.app.verify.staged_model import StagedModel
from moebius.app.verify.tokens import read_tokens
from moebius.checkpoint.gguf.files import is_gguf
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.expert_dtype import REQUANTISED
from moebius.placement.layer_ranges import parse_layers

# The value of --against that means the checkpoint itself, its experts dequantised.
BF16 = "bf16"


@dataclass(frozen=True)
class VerifyOptions:
    """Filled by the command line."""

    # BF16, or another checkpoint's directory.
    against: str = BF16
    tokens: int = 512
    # MoE layers that are compared, as in 0-3,9; empty: all.
    layers: str = ""
    text_file: Path | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)


def verify_model(
    config: MoebiusConfig,
    options: VerifyOptions,
    on_layers: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyResult:
    """`on_layers` is called with the layers done and their number.

    Raises UserError, CheckpointError or ModelConfigError naming what is wrong.
    """
    begin = time.monotonic()
    device = prepare_process(config)
    ours = StagedModel.open(config, Path(config.model.model), device)
    reference = _reference(config, options.against, ours)
    backends.install(device, config.gpu.attention_backend, ours.config.torch_dtype, sizes_of(ours.config))
    geometry = MoeGeometry.from_config(ours.directory, config.model.top_k)
    if not geometry.moe_layers:
        raise UserError(f"{ours.directory} has no mixture-of-experts layers: there is nothing to verify")
    chosen = parse_layers(options.layers, geometry.moe_layers, geometry.num_layers, "--layers")
    layers = chosen or geometry.moe_layers
    limit = min(options.tokens, ours.config.max_model_len)
    tokens = read_tokens(ours.directory, options.text_file, limit, ours.config.vocab_size)
    comparison = Comparison(config, ours, reference, geometry, layers, options.thresholds)
    total = max(layers) + 1 if chosen else geometry.num_layers
    is_whole = max(layers) == max(geometry.moe_layers)
    scores = comparison.run(
        tokens.ids, geometry.num_layers - 1 if is_whole else max(layers), lambda done: on_layers(done, total)
    )
    return VerifyResult(
        model=str(ours.directory),
        reference=options.against,
        expert_dtype=config.experts.expert_dtype,
        rows_dtype=comparison.rows_dtype,
        device=str(device),
        tokens_from=tokens.source,
        tokens=tokens.ids.shape[0],
        layers=tuple(comparison.results[layer] for layer in sorted(comparison.results)),
        output=None if scores is None else _summarise(scores, _allowed_kl(options, comparison, layers)),
        thresholds=options.thresholds,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=time.monotonic() - begin,
    )


def _reference(config: MoebiusConfig, against: str, ours: StagedModel) -> StagedModel:
    if against == BF16:
        return ours
    directory = Path(against).expanduser().absolute()
    if not is_gguf(directory) and not (directory / "config.json").is_file():
        raise UserError(
            f"--against {against!r}: allowed are {BF16}, a directory that holds a config.json, and GGUF files"
        )
    reference = StagedModel.open(config, directory, ours.device)
    check_same_shape(ours, reference, config.model.top_k)
    return reference


def _allowed_kl(options: VerifyOptions, comparison: Comparison, layers: Sequence[int]) -> float:
    """What rounds most decides: the weights, or, where they are exact, the rows."""
    if options.thresholds.max_kl is not None:
        return options.thresholds.max_kl
    bits = 32 if comparison.rows_dtype == "float32" else 16
    packed = comparison.packed
    for layer in layers:
        if options.against != BF16:
            bits = min(bits, coarsest_bits(packed.formats(layer)))
        elif (kind := packed.rounded_to(layer)) != "keep":
            bits = min(bits, coarsest_bits([REQUANTISED[kind]]))
    return MEAN_KL[bits]


def _summarise(scores: TokenScores, allowed_kl: float) -> OutputResult:
    kl = scores.kl.nan_to_num(nan=torch.inf)
    return OutputResult(
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.quantile(0.99, interpolation="higher")),
        max_kl=float(kl.max()),
        allowed_kl=allowed_kl,
        top1_agreement=float(scores.same_top.double().mean()),
        reference_perplexity=perplexity(scores.reference_loss),
        perplexity=perplexity(scores.loss),
    )
