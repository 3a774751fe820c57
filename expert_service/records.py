"""Between the records of `Compute` and numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moebius.kernels import FloatArray
from moebius.mailbox_plan import MOST_GRPC_ROWS
from protos import expert_pb2

HIDDEN_DTYPES: dict[int, type[np.generic]] = {
    expert_pb2.DTYPE_FLOAT32: np.float32,
    expert_pb2.DTYPE_BFLOAT16: np.uint16,
}


def decode_request(
    request: expert_pb2.ComputeRequest, hidden_size: int, top_k: int
) -> tuple[FloatArray, npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """hidden_states `[rows, hidden_size]`, topk_ids and topk_weights `[rows, top_k]`, without a copy.

    Raises ValueError naming the field whose length does not fit.
    """
    dtype = HIDDEN_DTYPES.get(request.dtype)
    if dtype is None:
        raise ValueError(f"dtype is {request.dtype}; allowed: DTYPE_FLOAT32, DTYPE_BFLOAT16")
    if request.rows < 1:
        raise ValueError("rows is 0; at least 1 is allowed")
    rows = request.rows
    if rows > MOST_GRPC_ROWS:
        raise ValueError(f"rows is {rows}; at most {MOST_GRPC_ROWS} are allowed in one record")
    hidden_states: Any = _array("hidden_states", request.hidden_states, dtype, rows, hidden_size)
    topk_ids: Any = _array("topk_ids", request.topk_ids, np.int32, rows, top_k)
    topk_weights: Any = _array("topk_weights", request.topk_weights, np.float32, rows, top_k)
    return hidden_states, topk_ids, topk_weights


def _array(name: str, data: bytes, dtype: type[np.generic], rows: int, width: int) -> npt.NDArray[Any]:
    expected = rows * width * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(
            f"{name} has {len(data)} bytes; [{rows}, {width}] {np.dtype(dtype)} needs {expected}"
        )
    return np.frombuffer(data, dtype).reshape(rows, width)
