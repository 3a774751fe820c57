"""Where libraries keep the GPU kernels they compile at run time.

Both libraries know one way to be told: a variable of the process's environment, which Triton reads at every
compilation (`triton.knobs.cache.dir`) and FlashInfer once, when it is imported (`flashinfer.jit.env`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import structlog

from moebius.errors import UserError

_log = structlog.get_logger(__name__)


def use_jit_cache(directory: str) -> None:
    """Keeps compiled kernels under `directory`, which is made; empty: the libraries' own places.

    Must be called before FlashInfer is imported. Raises UserError when nothing can be written there.
    """
    if not directory:
        return
    root = Path(directory).expanduser().resolve()
    try:
        for part in ("triton", "flashinfer"):
            (root / part).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"jit_cache_dir: can not write to {directory!r}: {error}") from error
    if not os.access(root / "triton", os.W_OK):
        raise UserError(f"jit_cache_dir: can not write to {directory!r}; a writable directory is needed")
    if "flashinfer" in sys.modules:
        _log.warning("FlashInfer is imported already, its kernels stay where they were", directory=directory)
    os.environ["TRITON_CACHE_DIR"] = str(root / "triton")
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(root / "flashinfer")
