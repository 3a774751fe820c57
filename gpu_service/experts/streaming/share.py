"""How much of each layer's experts a step streams: by settings, and by what experts cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from gpu_service.experts.costs import ExpertCosts, LayerCosts
from gpu_service.experts.streaming.plan import SHARES

_log = structlog.get_logger(__name__)
# Rows from which streaming everything is taken to be faster where nothing was measured.
_UNMEASURED_BREAK_EVEN = 256
# Decode batches below this are left to captured graphs and expert servers.
_LEAST_DECODE_ROWS = 65
# A step of this many rows that would stream nothing streams so little of each layer (of SHARES) that it takes
# no longer, where the link's speed was not seen for long.
_LEAST_PROBED_ROWS, _PROBE = 256, 2


@dataclass
class ShareChooser:
    """By the settings `prefill_experts` and `stream_min_rows`, and by what was measured. Thread safe."""

    mode: Literal["auto", "stream"]
    min_rows: int | None
    # MoE layers of this rank: a step's seconds are divided by them.
    num_layers: int
    costs: ExpertCosts

    def measured(self, layer: LayerCosts, layer_bytes: float) -> None:
        """Takes what a layer costs, `layer_bytes` of which are copied where all of it is streamed."""
        self.costs.measured(layer, layer_bytes)
        _log.info("experts are streamed by what was measured", **describe(layer))

    def may_stream(self, rows: int, is_decode: bool) -> bool:
        """Returns whether a step may stream, by the settings alone, so that all ranks agree."""
        if self.min_rows is not None:
            return rows >= self.min_rows
        if is_decode:
            return self.mode == "auto" and rows >= _LEAST_DECODE_ROWS
        return True

    def share(self, rows: int) -> int:
        """Returns the share in SHARES of a step that may stream."""
        if self.mode == "stream":
            return SHARES
        layer = self.costs.layer
        if layer is None:
            return 0 if self.min_rows is None else SHARES
        share = layer.best_share(rows, 0 if self.min_rows is None else 1)
        is_probe = share == 0 and rows >= _LEAST_PROBED_ROWS and self.costs.link_is_unseen
        return _PROBE if is_probe else share

    def predict(self, rows: int, share: int) -> float | None:
        """Returns the seconds of all layers of such a step, attention included; None: nothing was
        measured.
        """
        layer = self.costs.layer
        return None if layer is None else self.num_layers * layer.seconds(rows, share)

    def step_tokens(self, most: int, wait_s: float | None) -> int:
        """Returns what `LayerCosts.step_tokens` does; `most` while too little is known."""
        layer = self.costs.layer
        return most if layer is None or wait_s is None else layer.step_tokens(most, wait_s)

    @property
    def asks_servers(self) -> bool:
        """Returns whether steps leave to expert servers what is not worth a copy."""
        return self.mode == "auto"

    @property
    def break_even_rows(self) -> int:
        """Token rows from which streaming everything takes less time than streaming nothing."""
        layer = self.costs.layer
        if layer is None:
            return self.min_rows or _UNMEASURED_BREAK_EVEN
        return next((n for n in _STEPS if layer.seconds(n, SHARES) < layer.seconds(n, 0)), _STEPS[-1])

    def routed(self, left: Sequence[float]) -> None:
        """How earlier steps' pairs would have been divided, by share; see `LayerCosts.left`."""
        self.costs.routed(left)

    def observe(self, rows: int, share: int, seconds: float, copying: float, nbytes: int) -> None:
        """A step took `seconds`, in `copying` of which the link copied `nbytes`; 0: not known."""
        layers = max(1, self.num_layers)
        self.costs.observe(rows, share, seconds / layers, copying / layers, nbytes / layers)


def describe(costs: LayerCosts) -> dict[str, object]:
    """Returns milliseconds a layer for the log, and what follows from them."""
    break_even = next((rows for rows in _STEPS if costs.best_share(rows) > 0), None)
    return {
        "copy_ms": round(costs.copy * 1e3, 3),
        "server_ms": {rows: round(seconds * 1e3, 3) for rows, seconds in costs.cpu.points},
        "gpu_ms": {rows: round(seconds * 1e3, 3) for rows, seconds in costs.gpu.points},
        "server_scale": round(costs.cpu_scale, 3),
        "streams_from_rows": break_even,
        "share_at_512": round(costs.best_share(512) / SHARES, 2),
        # Of a step's pairs, with the other half of the experts streamed.
        "left_by_half": round(costs.left[SHARES // 2], 3) if costs.left else 0.5,
    }


_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
