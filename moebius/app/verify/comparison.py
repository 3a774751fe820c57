"""The two models side by side, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from gpu_service.assembly.process import resolve_device
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.verify.errors import (
    RowsDtype,
    TokenScores,
    allowed_against_other,
    allowed_error,
    relative_error,
    score,
)
from moebius.app.verify.layer_errors import LayerExperts, compare_experts, routing_agreement
from moebius.app.verify.packed_experts import PackedExperts
from moebius.app.verify.references import ReferenceExperts
from moebius.app.verify.result import LayerResult, Thresholds
from moebius.app.verify.staged_model import LoadedStage, StagedModel
from moebius.app.verify.watch import Routed, watching
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig

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
    ) -> None:
        """`geometry`: of the model's experts. Raises what an expert server refuses."""
        self._config = config
        self._ours, self._reference = ours, reference
        self._geometry = geometry
        self._layers = layers
        self._thresholds = thresholds
        self._same = ours.directory == reference.directory
        self._wanted = ReferenceExperts(
            str(reference.directory),
            MoeGeometry.from_config(reference.directory, config.model.top_k),
            reference.config.torch_dtype,
        )
        dtype = ours.config.torch_dtype
        self.rows_dtype: RowsDtype = "float32" if dtype == torch.float32 else "bfloat16"
        self.packed = PackedExperts(config, geometry, dtype, layers, self._wanted)
        self._resident: ResidentExperts | None = None
        # Of the stage under way, by layer.
        self._routed: dict[int, Routed] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self.results: dict[int, LayerResult] = {}

    def run(
        self, token_ids: torch.Tensor, last_layer: int, on_stage: Callable[[int], None]
    ) -> TokenScores | None:
        """All layers up to `last_layer`; token ids int64 `[T]`. None: the model goes on behind it.

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
            device, dtype = resolve_device(self._config.gpu), self._ours.config.torch_dtype
            self._resident = make_resident_experts(
                self._config, self._geometry, device, dtype, layers=compared
            )
        with torch.inference_mode(), watching(stage, self._on_routed, self._on_layer):
            answer = stage.forward(token_ids, hidden_states, self.packed, self._resident)
            self._resident = None
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
        """Our layer is done."""
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
    """float32 `[T, V]` on the CPU behind the last stage, else None."""
    if not stage.model.parallel.is_last_stage:
        return None
    parts = torch.split(hidden_states, _LOGITS_ROWS)
    return torch.cat([stage.model.compute_logits(rows).cpu() for rows in parts])


def _scores(logits: torch.Tensor, reference: torch.Tensor, token_ids: torch.Tensor) -> TokenScores:
    targets = torch.cat([token_ids[1:], token_ids.new_tensor([-1])])
    parts = zip(*(torch.split(part, _LOGITS_ROWS) for part in (logits, reference, targets)), strict=True)
    return TokenScores.join([score(*part) for part in parts])
