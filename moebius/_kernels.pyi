"""Types of the C++ module; its faces are `moebius.kernels`, `moebius.topology` and `moebius.mailbox`."""

from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

# --- experts (kernels/bindings/bind_moe.cc) ---------------------------------------------------------------

class EngineCounters(TypedDict):
    calls: int
    rows: int
    busy_seconds: float
    nonfinite_outputs: int
    layer_calls: NDArray[np.uint64]
    layer_rows: NDArray[np.uint64]
    expert_rows: NDArray[np.uint64]

def isa_level() -> str: ...
def supported_isas() -> list[str]: ...

class ExpertBackend:
    @property
    def hidden_size(self) -> int: ...

class ExpertEngine(ExpertBackend):
    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_layers: int,
        expert_begin: int,
        weight_dtype: str,
        activation: str,
        num_threads: int,
        cpus: list[int],
        numa_node: int,
        isa: str,
    ) -> None: ...
    def load_expert(
        self, layer: int, expert: int, gate: NDArray[Any], up: NDArray[Any], down: NDArray[Any]
    ) -> None: ...
    def forward(
        self,
        layer: int,
        hidden_states: NDArray[Any],
        topk_ids: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
    ) -> NDArray[np.float32]: ...
    def stats(self) -> EngineCounters: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def numa_bound(self) -> bool: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
