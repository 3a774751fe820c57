"""What was learnt of a model's routing, kept for its next start beside the times of packed kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from moebius.errors import UserError, brief
from moebius.experts.placement import ExpertStatistics
from moebius.host.kernel_times import cache_directory
from moebius.models.geometry import MoeGeometry

_log = structlog.get_logger(__name__)


class RoutingRecord:
    """A file of one checkpoint's statistics in the user's cache; every failure is a log line and no more."""

    def __init__(self, geometry: MoeGeometry, fingerprint: str, directory: Path | None = None) -> None:
        """`fingerprint`: `checkpoint_fingerprint`. `directory`: instead of the user's cache."""
        self._geometry = geometry
        self._path: Path | None = None
        try:
            place = directory or cache_directory() / "routing"
            self._path = place / f"{geometry.model_type}-{fingerprint[:16]}.safetensors"
        except FileNotFoundError as error:
            _log.info("routing is not kept for the next start", because=brief(error))

    def read(self) -> Mapping[int, NDArray[np.int64]]:
        """Counts int64 `[num_experts]` by MoE layer; empty where nothing was kept."""
        if self._path is None or not self._path.exists():
            return {}
        try:
            statistics = ExpertStatistics.read(str(self._path))
            statistics.check_model(self._geometry, str(self._path))
        except UserError as error:
            _log.warning("what was learnt of routing cannot be read", error=brief(error))
            return {}
        return statistics.counts_by_layer()

    def write(self, layers: Sequence[int], counts: NDArray[np.int64]) -> None:
        """`counts` int64 `[len(layers), num_experts]`; other layers keep what the file has of them."""
        if self._path is None or not counts.any():
            return
        geometry, known = self._geometry, dict(self.read())
        known.update(zip(layers, counts, strict=True))
        nothing = np.zeros(geometry.num_experts, np.int64)
        rows = np.stack([known.get(layer, nothing) for layer in geometry.moe_layers])
        tokens = int(rows.sum(axis=1).max()) // max(1, geometry.top_k)
        statistics = ExpertStatistics(
            geometry.model_type,
            geometry.num_experts,
            geometry.top_k,
            tuple(geometry.moe_layers),
            "stat",
            tokens,
            tokens,
            rows,
            (rows > 0).sum(axis=1),
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(statistics.encode("safetensors"))
            os.replace(file.name, self._path)
        except OSError as error:
            _log.warning("what was learnt of routing cannot be kept", error=brief(error))
