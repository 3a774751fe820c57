"""Invariant: a model whose ops all run as Triton kernels gives the logits of the references.

Here in Triton's interpreter, on a prefill and a batch of decodes: the layers call the ops
with their own strides, and what an op may overwrite is not used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.ops.backends import install_tables, load_tables, uninstall
from tests.helpers.paged_runner import Decoding, load_runner
from tests.helpers.tiny_models import cached_tiny_models
from tests.tolerances import LOGITS_FLOAT32_SELF

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where a GPU is")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    return cached_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _references_afterwards() -> Iterator[None]:
    yield
    uninstall("cpu")


def _logits(directory: Path) -> list[torch.Tensor]:
    runner = load_runner(directory)
    # Each row of each head is a program, and the interpreter takes its time.
    first, second = Decoding([3, 17, 200]), Decoding([10, 210])
    prefilled = runner.step([(first, 2), (second, 1)])
    return [prefilled, runner.step([(first, 1), (second, 1)])]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        *(
            pytest.param(n, marks=pytest.mark.full)
            for n in ("ernie4_5_moe", "glm4_moe", "minimax_m2", "qwen3_moe", "qwen4_exp")
        ),
    ],
)
def test_triton_ops_give_the_references_logits(name: str, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    directory = tiny(name)[0]
    expected = _logits(directory)
    chosen = install_tables(torch.device("cpu"), load_tables(["triton"]), torch.float32)
    in_use = {op for op, libraries in chosen.items() if libraries.startswith("triton")}
    assert {"rms_norm", "fused_add_rms_norm", "qk_norm_rope", "apply_rope", "route", "append_kv"} <= in_use
    assert {"causal_conv_extend", "gated_delta_extend", "gated_delta_update"} <= in_use
    torch.testing.assert_close(_logits(directory), expected, rtol=0, atol=5 * LOGITS_FLOAT32_SELF)
