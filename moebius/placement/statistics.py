"""What was recorded of routing: how often each expert was chosen; kept in safetensors or JSON files.

Both forms hold the same: `counts` int64 [layers, experts] and `distinct` int64 [layers], where recorded
`pass_counts` int32 [steps, layers, experts] and `token_ids` int16 [tokens, layers, top_k], and as metadata
the other fields of `ExpertStatistics`. Rows are the model's MoE layers in ascending order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from moebius.checkpoint.moe_config import MoeGeometry
from moebius.errors import UserError

KIND = "moebius.expert_statistics"
VERSION = 1
FileFormat = Literal["safetensors", "json"]
_ARRAYS = {"counts": np.int64, "distinct": np.int64, "pass_counts": np.int32, "token_ids": np.int16}


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """Filled by `ExpertRecorder.dump` or `read`."""

    model_type: str
    num_experts: int
    top_k: int
    # MoE layers, ascending; the rows of all arrays.
    layers: tuple[int, ...]
    mode: str
    # Forward passes, and token rows in them, that were recorded; those without room for details included.
    steps: int
    tokens: int
    # int64 [layers, experts]: rows that chose the expert.
    counts: NDArray[np.int64]
    # int64 [layers]: summed over steps, how many different experts the step's rows chose.
    distinct: NDArray[np.int64]
    # Mode per_pass: int32 [steps, layers, experts]. Mode per_token: int16 [tokens, layers, top_k].
    pass_counts: NDArray[np.int32] | None = None
    token_ids: NDArray[np.int16] | None = None

    def counts_by_layer(self) -> Mapping[int, NDArray[np.int64]]:
        """Layer -> counts of its experts."""
        return dict(zip(self.layers, self.counts, strict=True))

    def distinct_per_step(self) -> dict[int, float]:
        """Layer -> mean number of different experts in a step; what a step's weight traffic follows from."""
        return {
            layer: float(total) / max(1, self.steps)
            for layer, total in zip(self.layers, self.distinct, strict=True)
        }

    def check_model(self, geometry: MoeGeometry, path: str) -> None:
        """Raises UserError naming what differs when these are another model's."""
        ours = (geometry.model_type, geometry.num_experts, geometry.moe_layers)
        for name, found, wanted in zip(
            ("model_type", "num_experts", "layers"),
            (self.model_type, self.num_experts, self.layers),
            ours,
            strict=True,
        ):
            if found != wanted:
                raise UserError(
                    f"expert_statistics: {path} was recorded of another model: {name} is {found}, "
                    f"this model's {wanted}"
                )

    def encode(self, file_format: FileFormat) -> bytes:
        """The file's content."""
        if file_format == "json":
            document = self._metadata() | {name: array.tolist() for name, array in self._arrays().items()}
            return json.dumps(document).encode()
        content: bytes = save(self._arrays(), {KIND: json.dumps(self._metadata())})
        return content

    @staticmethod
    def read(path: str) -> ExpertStatistics:
        """Reads either form. Raises UserError naming the file and what is wrong with it."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"expert_statistics: {path} can not be read: {error.strerror}") from error
        try:
            return _decode(content)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(
                f"expert_statistics: {path} is no file of recorded expert statistics: {error}"
            ) from error
        except Exception as error:  # the safetensors library's own error type has no stable import path
            if type(error).__module__.startswith("safetensors"):
                raise UserError(f"expert_statistics: {path} is damaged: {error}") from error
            raise

    def _metadata(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": VERSION,
            "model_type": self.model_type,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "layers": list(self.layers),
            "mode": self.mode,
            "steps": self.steps,
            "tokens": self.tokens,
        }

    def _arrays(self) -> dict[str, NDArray[Any]]:
        found = {name: getattr(self, name) for name in _ARRAYS}
        return {name: np.ascontiguousarray(array) for name, array in found.items() if array is not None}


def _decode(content: bytes) -> ExpertStatistics:
    arrays: dict[str, Any]
    if content.lstrip()[:1] == b"{":
        document = json.loads(content)
        arrays = {name: np.array(document[name], kind) for name, kind in _ARRAYS.items() if name in document}
    else:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        document = json.loads(header["__metadata__"][KIND])
        arrays = {name: array.astype(_ARRAYS[name]) for name, array in load(content).items()}
    if document.get("kind") != KIND or document.get("version") != VERSION:
        raise ValueError(f"its kind is {document.get('kind')!r}, its version {document.get('version')!r}")
    layers = tuple(int(layer) for layer in document["layers"])
    num_experts = int(document["num_experts"])
    if arrays["counts"].shape != (len(layers), num_experts):
        raise ValueError(f"counts have shape {list(arrays['counts'].shape)}")
    return ExpertStatistics(
        str(document["model_type"]),
        num_experts,
        int(document["top_k"]),
        layers,
        str(document["mode"]),
        int(document["steps"]),
        int(document["tokens"]),
        **arrays,
    )
