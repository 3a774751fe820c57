"""The provenance notice written beside the built weights."""

from __future__ import annotations

from pathlib import Path

from moebius.app.demo_model import recipe

NOTICE = f"""\
Moebius demo model ({recipe.MODEL_NAME})

Licence: Apache License, Version 2.0 (http://www.apache.org/licenses/LICENSE-2.0)

Derived from SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, as distributed in the
Python package {recipe.SOURCE_PACKAGE} {recipe.SOURCE_VERSION} (file {recipe.SOURCE_GGUF},
SHA-256 {recipe.SOURCE_GGUF_SHA256}).

Changes made: the 4-bit weights were dequantised and rounded to bfloat16; the neurons of every MLP were
re-ordered into shared and routed experts; a fitted router was added; the file format was changed to
Hugging Face glm4_moe. No weight was trained further.

A demonstration of mixture-of-experts serving, not a useful assistant: its facts are often wrong.

Unless required by applicable law or agreed to in writing, this model is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""


def write_notice(directory: Path) -> None:
    """Write the licence and provenance notice as LICENSE.txt into `directory`."""
    (directory / "LICENSE.txt").write_text(NOTICE)
