"""config.json of published models, with every key that says what tensors there are and what they compute.

What each was checked against is in `tests/data/checkpoints/README.md`. Left out are names of classes,
versions of libraries, lists of modules that were left unquantised, and most settings of generation.
"""

from __future__ import annotations

from typing import Any

from tests.tools.checkpoint_names.configs_gqa import GQA
from tests.tools.checkpoint_names.configs_latent import LATENT
from tests.tools.checkpoint_names.configs_qwen import QWEN

CONFIGS: dict[str, dict[str, Any]] = QWEN | GQA | LATENT
