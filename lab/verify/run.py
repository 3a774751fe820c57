"""Runs the reference and the served model over the same text, a few layers at a time."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from gpu_service.assembly.process import prepare_process, resolve_device
from gpu_service.device import TORCH_DTYPES
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.layers.deferral import DeferralRule, deferral_rule
from gpu_service.ops import backends
from gpu_service.ops.example_sizes import sizes_of
from gpu_service.verify.errors import (
    MEAN_KL,
    TokenScores,
    allowed_against_other,
    allowed_error,
    coarsest_bits,
    perplexity,
    relative_error,
    rows_dtype,
    score,
)
from lab.verify.experts import (
    LayerExperts,
    PackedExperts,
    ReferenceExperts,
    compare_experts,
    routing_agreement,
)
from lab.verify.report import DeferralResult, LayerResult, OutputResult, Thresholds, VerifyResult
from lab.verify.staged_model import LoadedStage, Routed, StagedModel, check_same_shape, watching
from lab.verify.trend import spread
from moebius.checkpoint.gguf.files import companion_directory, gguf_files, is_gguf
from moebius.checkpoint.gguf.header import read_header
from moebius.checkpoint.gguf.tokenizer import read_tokenizer
from moebius.checkpoint.tiktoken_vocabulary import has_vocabulary, read_vocabulary
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.experts.placement import parse_layers
from moebius.experts.slices import REQUANTISED
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry

BUNDLED_TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True)
class Tokens:
    """Filled by `read_tokens`."""

    ids: torch.Tensor  # int64 [T]
    source: str  # "tokenizer", or "bytes": the checkpoint has none, and its perplexity means nothing.


def read_tokens(model: Path, text_file: Path | None, limit: int, vocab_size: int) -> Tokens:
    """The text's first `limit` tokens by the checkpoint's own tokenizer.

    Without one, its UTF-8 bytes modulo the vocabulary stand for tokens: enough to compare formats. Raises
    UserError naming a file that cannot be read or gives fewer than two tokens, CheckpointError as
    `read_tokenizer` and `read_vocabulary`.
    """
    path = text_file or BUNDLED_TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--text {path}: cannot be read as UTF-8 text: {error}") from None
    tokenizer = _tokenizer(model)
    if tokenizer is not None:
        ids, source = tokenizer.encode(text).ids, "tokenizer"
    else:
        ids, source = [byte % vocab_size for byte in text.encode()], "bytes"
    ids = ids[:limit]
    if len(ids) < 2:
        raise UserError(f"--text {path}: {len(ids)} tokens; allowed: 2 or more")
    if max(ids) >= vocab_size:
        raise UserError(
            f"the tokenizer of {model} gives token {max(ids)}, but the vocabulary has {vocab_size} tokens"
        )
    return Tokens(torch.tensor(ids, dtype=torch.int64), source)


def _tokenizer(model: Path) -> Tokenizer | None:
    """Returns the tokenizer that the gateway would use: next to the weights, else in a GGUF file; None: there
    is none.
    """
    path = companion_directory(model) / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UserError(f"{path} is not a readable tokenizer: {error}") from None
    if not is_gguf(model):
        return read_vocabulary(model) if has_vocabulary(model) else None
    if "tokenizer.ggml.model" not in read_header(gguf_files(model)[0]).metadata:
        return None
    return read_tokenizer(model).backend


# Rows whose logits are in memory at once.
_LOGITS_ROWS = 32


class Comparison:
    """Runs once. Layers outside of `layers` are computed by the reference's experts on both sides."""

    def __init__(
        self,
        config: MoebiusConfig,
        ours: StagedModel,
        reference: StagedModel,
        geometry: MoeGeometry,
        layers: Collection[int],
        thresholds: Thresholds,
        expert_checkpoint: str = "",
        rule: DeferralRule | None = None,
    ) -> None:
        """`geometry`: of the model's experts; `expert_checkpoint`: where the reference's lie, if apart.

        With a `rule` the model is also computed with late experts.

        Raises what an expert server refuses.
        """
        self._config = config
        self._ours, self._reference = ours, reference
        self._geometry = geometry
        self._layers = layers
        self._thresholds = thresholds
        self._same = ours.directory == reference.directory
        self._wanted = ReferenceExperts(
            str(reference.directory),
            read_geometry(reference.directory, config.model.experts_per_token),
            TORCH_DTYPES[reference.config.dtype],
            expert_checkpoint,
        )
        dtype = TORCH_DTYPES[ours.config.dtype]
        self.rows_dtype = rows_dtype(dtype)
        self.packed = PackedExperts(config, geometry, dtype, layers, self._wanted)
        self._resident: ResidentExperts | None = None
        # Of the stage under way, by layer.
        self._routed: dict[int, Routed] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self.results: dict[int, LayerResult] = {}
        self._rule = rule
        self._deferral = None if rule is None else rule.begin()
        self._late_states: torch.Tensor | None = None
        self._late_logits: torch.Tensor | None = None
        # Filled by `run` where there is a rule and all layers were computed.
        self.deferral: DeferralResult | None = None

    def run(
        self, token_ids: torch.Tensor, last_layer: int, on_stage: Callable[[int], None]
    ) -> TokenScores | None:
        """Runs all layers up to `last_layer`; token ids int64 `[T]`. None: the model has more layers.

        `on_stage` is called with the number of layers done.
        """
        wanted: torch.Tensor | None = None
        found: torch.Tensor | None = None
        for stage in range(self._ours.num_stages):
            layers = self._ours.layers(stage)
            loaded = self._reference.load(stage)
            wanted, reference_logits = self._run_reference(loaded, token_ids, wanted)
            if not self._same:
                del loaded
                loaded = self._ours.load(stage)
            found, logits = self._run_ours(loaded, token_ids, found)
            del loaded
            self.packed.close()
            on_stage(layers.stop)
            if logits is not None and self._rule is not None and self._late_logits is not None:
                self.deferral = _deferred(self._rule.count, self._late_logits, logits, token_ids)
            if logits is not None and reference_logits is not None:
                return _scores(logits, reference_logits, token_ids)
            if last_layer < layers.stop:
                return None
        return None

    @torch.inference_mode()
    def _run_reference(
        self, stage: LoadedStage, token_ids: torch.Tensor, hidden_states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._wanted.recording(), watching(stage, self._routed.__setitem__, self._sums.__setitem__):
            answer = stage.forward(token_ids, hidden_states, self._wanted)
        return answer, _head(stage, answer)

    def _run_ours(
        self, stage: LoadedStage, token_ids: torch.Tensor, hidden_states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        compared = [layer for layer in stage.layers if layer in self._layers]
        self._resident = None
        if compared and self._geometry.moe_layers:
            device, dtype = resolve_device(self._config.gpu), TORCH_DTYPES[self._ours.config.dtype]
            self._resident = make_resident_experts(
                self._config, self._geometry, device, dtype, layers=compared
            )
        with torch.inference_mode(), watching(stage, self._on_routed, self._on_layer):
            answer = stage.forward(token_ids, hidden_states, self.packed, self._resident)
        resident, self._resident = self._resident, None
        if self._deferral is not None:
            given = self.packed, resident, self._deferral
            with torch.inference_mode():
                self._late_states = stage.forward(token_ids, self._late_states, *given)
                self._late_logits = _head(stage, self._late_states)
        with torch.inference_mode():
            return answer, _head(stage, answer)

    def _on_routed(self, layer: int, routed: Routed) -> None:
        """Our router has chosen: the layer's experts are about to be asked, and to be in memory."""
        reference = self._routed.pop(layer)
        wanted = self._wanted.take(layer)
        agreement = routing_agreement(routed.topk_ids, reference.topk_ids)
        if layer not in self._layers:
            self.results[layer] = LayerResult(layer, routing_agreement=agreement)
            return
        experts = LayerExperts(layer, self._geometry.num_experts, self._wanted, self.packed, self._resident)
        errors = compare_experts(experts, reference, wanted)
        formats = self.packed.formats(layer)
        self.results[layer] = LayerResult(
            layer,
            tuple(dict.fromkeys(formats)),
            self.packed.weight_errors.get(layer),
            errors.cpu_error,
            errors.gpu_error,
            self._allowed(layer),
            errors.experts,
            agreement,
        )

    def _on_layer(self, layer: int, hidden_states: torch.Tensor) -> None:
        """Called when our side has computed a layer."""
        error = relative_error(hidden_states, self._sums.pop(layer))
        self.results[layer] = replace(self.results.get(layer, LayerResult(layer)), hidden_error=error)

    def _allowed(self, layer: int) -> float:
        if self._thresholds.max_expert_error is not None:
            return self._thresholds.max_expert_error
        formats = self.packed.formats(layer)
        if not self._same:
            return allowed_against_other(self.rows_dtype, formats)
        kind = self.packed.rounded_to(layer)
        return allowed_error(self.rows_dtype, kind, formats, self._config.experts.max_requantise_error)


def _head(stage: LoadedStage, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Returns float32 `[T, V]` on the CPU after the last stage, else None."""
    if not stage.model.parallel.is_last_stage:
        return None
    parts = torch.split(hidden_states, _LOGITS_ROWS)
    return torch.cat([stage.model.compute_logits(rows).cpu() for rows in parts])


def _scores(logits: torch.Tensor, reference: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
    targets = torch.cat([token_ids[1:], token_ids.new_tensor([-1])])
    parts = zip(*(torch.split(part, _LOGITS_ROWS) for part in (logits, reference, targets)), strict=True)
    return TokenScores.join([score(*part) for part in parts])


def _deferred(
    count: int, late: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor
) -> DeferralResult:
    scores = _scores(late, logits, token_ids)
    return DeferralResult(
        count,
        relative_error(late, logits),
        *spread(scores.kl),
        float(scores.same_top.double().mean()),
        perplexity(scores.loss),
    )


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
    reference = open_reference(config, options.against, ours)
    backends.install(
        device,
        config.gpu.attention_backend,
        TORCH_DTYPES[ours.config.dtype],
        sizes_of(ours.config, ours.config.layers),
    )
    geometry = read_geometry(ours.directory, config.model.experts_per_token)
    if not geometry.moe_layers:
        raise UserError(f"{ours.directory} has no mixture-of-experts layers: there is nothing to verify")
    chosen = parse_layers(options.layers, geometry.moe_layers, geometry.num_layers, "--layers")
    layers = chosen or geometry.moe_layers
    limit = min(options.tokens, ours.config.max_model_len)
    tokens = read_tokens(ours.directory, options.text_file, limit, ours.config.vocab_size)
    # Another checkpoint has experts of its own, also where it is the model that ours were taken out of.
    experts = config.model.expert_checkpoint if options.against == BF16 else ""
    rule = deferral_rule(config, ours.config)
    comparison = Comparison(config, ours, reference, geometry, layers, options.thresholds, experts, rule)
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
        deferral=comparison.deferral,
    )


def open_reference(config: MoebiusConfig, against: str, ours: StagedModel) -> StagedModel:
    """Returns the model that `--against` names. Raises UserError for what is not the same model."""
    if against == BF16:
        return ours
    directory = Path(against).expanduser().absolute()
    if not is_gguf(directory) and not (directory / "config.json").is_file():
        raise UserError(
            f"--against {against!r}: allowed are {BF16}, a directory that holds a config.json, and GGUF files"
        )
    reference = StagedModel.open(config, directory, ours.device)
    check_same_shape(ours, reference, config.model.experts_per_token)
    return reference


def _allowed_kl(options: VerifyOptions, comparison: Comparison, layers: Sequence[int]) -> float:
    """What rounds most decides: the weights, or, where they are exact, the rows."""
    if options.thresholds.max_kl is not None:
        return options.thresholds.max_kl
    bits = 32 if comparison.rows_dtype == "float32" else 16
    return MEAN_KL[min(bits, coarsest_experts(comparison.packed, layers, options.against))]


def coarsest_experts(packed: PackedExperts, layers: Sequence[int], against: str) -> int:
    """Returns the bits of the coarsest weight that is served for the reference's; 32: all are exact."""
    bits = 32
    for layer in layers:
        if against != BF16:
            bits = min(bits, coarsest_bits(packed.formats(layer)))
        elif (kind := packed.rounded_to(layer)) != "keep":
            bits = min(bits, coarsest_bits([REQUANTISED[kind]]))
    return bits


def _summarise(scores: TokenScores, allowed_kl: float) -> OutputResult:
    mean_kl, p99_kl, max_kl = spread(scores.kl)
    return OutputResult(
        mean_kl=mean_kl,
        p99_kl=p99_kl,
        max_kl=max_kl,
        allowed_kl=allowed_kl,
        top1_agreement=float(scores.same_top.double().mean()),
        reference_perplexity=perplexity(scores.reference_loss),
        perplexity=perplexity(scores.loss),
    )
