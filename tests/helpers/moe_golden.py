"""A float64 numpy reference of the routed experts, and small random layers to compare with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius.kernels import ExpertEngine

Float32 = NDArray[np.float32]
Expert = tuple[Float32, Float32, Float32]


@dataclass(frozen=True)
class Routed:
    """Rows with their routing, as `ExpertEngine.forward` takes them; filled by `random_rows`."""

    hidden_states: Float32
    topk_ids: NDArray[np.int32]
    topk_weights: Float32


def random_expert(rng: np.random.Generator, hidden: int, intermediate: int) -> Expert:
    """gate, up [intermediate, hidden] and down [hidden, intermediate], scaled to keep results near one."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    gate, up, down = (rng.standard_normal(s, dtype=np.float32) / np.float32(np.sqrt(s[1])) for s in shapes)
    return gate, up, down


def random_rows(
    rng: np.random.Generator, rows: int, hidden: int, top_k: int, id_range: tuple[int, int]
) -> Routed:
    """Ids are drawn from [low, high), repeats within a row included."""
    return Routed(
        rng.standard_normal((rows, hidden), dtype=np.float32),
        rng.integers(*id_range, (rows, top_k), dtype=np.int32),
        rng.random((rows, top_k), dtype=np.float32),
    )


def golden(routed: Routed, experts: dict[int, Expert]) -> NDArray[np.float64]:
    """What forward must return, in float64; ids without an expert contribute nothing."""
    output = np.zeros(routed.hidden_states.shape)
    for row, x in enumerate(routed.hidden_states.astype(np.float64)):
        for expert, weight in zip(routed.topk_ids[row], routed.topk_weights[row], strict=True):
            if int(expert) in experts:
                gate, up, down = (matrix.astype(np.float64) for matrix in experts[int(expert)])
                g = gate @ x
                output[row] += weight * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
    return output


def relative_error(actual: Float32, wanted: NDArray[np.float64]) -> float:
    """Returns largest absolute error over the largest wanted magnitude; 0 for no elements."""
    if wanted.size == 0:
        return 0.0
    return float(np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def load_layer(engine: ExpertEngine, layer: int, experts: dict[int, Expert]) -> None:
    for expert, matrices in experts.items():
        engine.load_expert(layer, expert, *matrices)


def to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """Returns the bits of bfloat16, rounded to nearest even (finite values only)."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)
