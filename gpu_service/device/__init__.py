"""Kinds of device: streams, transfers through page-locked memory, captured graphs; types by their names."""

from collections.abc import Mapping

import torch

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name as configurations spell it."""
    return str(dtype).removeprefix("torch.")
