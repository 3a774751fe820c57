"""Typed face of the CPU expert kernels (`kernels/moe`): packed experts of one server and their forward pass.

numpy in, numpy out; no torch. bfloat16 travels as uint16 holding its bits. The GIL is released while experts
are packed and computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels

Isa = Literal["auto", "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
FloatArray = NDArray[np.float32] | NDArray[np.uint16]


def isa_level() -> str:
    """Instruction-set level in use: MOEBIUS_ISA if set, else the highest one supported.

    Raises:
        ValueError: MOEBIUS_ISA names a level that is unknown or that this machine can not run.
    """
    return _kernels.isa_level()


def supported_isas() -> tuple[str, ...]:
    """Levels this machine and its operating system can run, lowest first; always begins with "scalar"."""
    return tuple(_kernels.supported_isas())


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine's counters since its creation; filled by `ExpertEngine.stats`."""

    calls: int
    """forward calls"""
    rows: int
    """token rows of all calls, also those that chose no expert held here"""
    busy_seconds: float
    """wall time inside forward, waiting for another caller excluded"""
    nonfinite_outputs: int
    """output values that were NaN or infinite; they are handed on as they are"""
    layer_calls: NDArray[np.uint64]
    """[num_layers]"""
    layer_rows: NDArray[np.uint64]
    """[num_layers]"""
    expert_rows: NDArray[np.uint64]
    """[num_layers, num_experts], rows computed by each expert held here"""


class ExpertEngine:
    """Experts [expert_begin, expert_begin + num_experts) of every MoE layer, or a slice of each.

    Computes, for each row, `sum over chosen experts e held here of
    weight[e] * (silu(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T` with float32 accumulation. A row's result
    has the same bits whatever other rows are in the call and however many threads compute it; it may differ
    between instruction sets.

    Args:
        hidden_size: width of a row.
        intermediate_size: rows of gate and up held here (the local slice).
        num_experts: experts held here.
        num_layers: layers of the model; memory is only taken for layers that are loaded.
        expert_begin: global id of the first expert held here.
        weight_dtype: type of the packed weights.
        activation: only "silu".
        num_threads: 0 takes one per cpu in `cpus`, else per cpu this thread may use. The thread that calls
            `forward` is one of them.
        cpus: cpu of each thread; the first is left to the caller, whose thread is not pinned here.
        numa_node: node that packed weights are bound to; -1 for none. See `numa_bound`.
        isa: forces an instruction-set level, for tests; "auto" is `isa_level()`.

    Raises:
        ValueError: an argument is out of range, named with its value and what is allowed.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_layers: int,
        *,
        expert_begin: int = 0,
        weight_dtype: Literal["float32", "bfloat16"],
        activation: str = "silu",
        num_threads: int = 0,
        cpus: Sequence[int] = (),
        numa_node: int = -1,
        isa: Isa = "auto",
    ) -> None:
        self._engine = _kernels.ExpertEngine(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            num_layers=num_layers,
            expert_begin=expert_begin,
            weight_dtype=weight_dtype,
            activation=activation,
            num_threads=num_threads,
            cpus=list(cpus),
            numa_node=numa_node,
            isa=isa,
        )

    def load_expert(
        self, layer: int, expert: int, gate: NDArray[Any], up: NDArray[Any], down: NDArray[Any]
    ) -> None:
        """Pack one expert; the arrays may be freed afterwards. Callable from several threads.

        Args:
            layer: model layer.
            expert: global expert id.
            gate: [intermediate_size, hidden_size], float32 or uint16 (bfloat16 bits).
            up: like gate.
            down: [hidden_size, intermediate_size], same dtype.

        Raises:
            ValueError: wrong shape or dtype, layer or expert not held here, or loaded before.
        """
        self._engine.load_expert(layer, expert, gate, up, down)

    def forward(
        self,
        layer: int,
        hidden_states: FloatArray,
        topk_ids: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Weighted sum of the chosen experts held here; rows that chose none are zero.

        Args:
            layer: model layer.
            hidden_states: [rows, hidden_size], float32 or uint16 (bfloat16 bits); rows may be 0.
            topk_ids: [rows, top_k] global expert ids; ids not held here, also -1, are skipped.
            topk_weights: [rows, top_k] router weights.

        Returns:
            [rows, hidden_size] float32.

        Raises:
            ValueError: wrong shape or dtype, unknown layer, or a chosen expert that is not loaded.
        """
        return self._engine.forward(layer, hidden_states, topk_ids, topk_weights)

    def stats(self) -> EngineStats:
        """Counters since creation; may be called while forward runs."""
        return EngineStats(**self._engine.stats())

    @property
    def backend(self) -> _kernels.ExpertBackend:
        """The C++ object, for `MailboxServer`; it lives as long as either holds it."""
        return self._engine

    @property
    def packed_bytes(self) -> int:
        """Memory mapped for packed weights so far, bytes."""
        return self._engine.packed_bytes

    @property
    def numa_bound(self) -> bool:
        """False when the kernel refused to bind packed weights to `numa_node` (they work, but elsewhere)."""
        return self._engine.numa_bound

    @property
    def isa(self) -> str:
        """Instruction-set level in use."""
        return self._engine.isa

    @property
    def num_threads(self) -> int:
        """Threads that compute, the caller's included."""
        return self._engine.num_threads
