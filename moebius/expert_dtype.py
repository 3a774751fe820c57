"""What `expert_dtype` means: the packed format that experts are brought into while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

ExpertDtype = Literal["keep", "float32", "bfloat16", "int8", "int4"]
# Packed formats of `expert_dtype`; "keep" takes each layer's own. Widest first.
REQUANTISED: Mapping[str, str] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4_g32",
}


def parse_expert_dtype(text: str) -> ExpertDtype:
    """Raises ValueError naming what is allowed."""
    for allowed in get_args(ExpertDtype):
        if text == allowed:
            dtype: ExpertDtype = allowed
            return dtype
    raise ValueError(f"expert_dtype is {text!r}; allowed: {', '.join(get_args(ExpertDtype))}")
