"""Invariant: every family on a GPU, under CUDA graphs, is its own float32 model on the CPU.

Float32: the same greedy tokens. Bfloat16 and float16: log-probabilities no further from the reference's than
those of the CPU's own path in that type on the same tokens. Tests are independent of one another and mostly
wait for compilers, so several workers may share a GPU (`--numprocesses 8 --dist load`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius.config import MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.family_answers import (
    LONGEST,
    check_float32,
    check_half,
    expert_dtype_of,
    family_config,
    watched_replays,
)
from tests.helpers.gguf_models import make_gguf
from tests.helpers.overflowing import check_overflows, make_overflowing
from tests.helpers.tiny_models import TINY_MODELS, attending_to_all, make_tiny_model, write_tiny_model

pytestmark = pytest.mark.gpu
CHECKS: dict[str, Callable[[Path, MoebiusConfig], None]] = {
    "float32": check_float32,
    "bfloat16": check_half,
    "float16": check_half,
}
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
# A kind each of heads, latents, windows with sinks, delta rule, Mamba, hyper-connections and gated streams.
IN_FLOAT16 = [
    "deepseek_v3",
    "deepseek_v4",
    "glm4_moe",
    "gpt_oss",
    "kimi_linear",
    "nemotron_h",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp",
]
# What decodes alone, in pairs, and three rows padded to four must have been replayed.
REPLAYED = {(1, 1), (2, 2), (3, 4), (4, 4)}


@pytest.fixture(autouse=True)
def no_reduced_precision() -> None:
    """float32 GEMMs are float32 here, as torch's default is."""
    assert not torch.backends.cuda.matmul.allow_tf32


def check_under_graphs(directory: Path, dtype: str, config: MoebiusConfig) -> None:
    """The check of that type, and that decode steps were graphs."""
    with watched_replays() as replayed:
        CHECKS[dtype](directory, config)
    assert replayed >= REPLAYED, f"not all of {REPLAYED} were replayed, only {replayed}"


@DTYPES
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_all_on_the_device(name: str, dtype: str, tmp_path: Path) -> None:
    """Resident experts and no server. In bfloat16 sparse attention sees all tokens: no choice can turn."""
    if dtype == "bfloat16":
        write_tiny_model(attending_to_all(name, LONGEST), tmp_path, seed=sum(name.encode()))
    else:
        make_tiny_model(name, tmp_path)
    check_under_graphs(tmp_path, dtype, family_config(tmp_path, "cuda", dtype))


@pytest.mark.parametrize("name", IN_FLOAT16)
def test_all_on_the_device_in_float16(name: str, tmp_path: Path) -> None:
    """Every op, attention and the kernels of resident experts in the type that holds at most 65504."""
    write_tiny_model(attending_to_all(name, LONGEST), tmp_path, seed=sum(name.encode()))
    check_under_graphs(tmp_path, "float16", family_config(tmp_path, "cuda", "float16"))


@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
def test_a_float16_overflow_ends_one_request(in_graphs: bool, tmp_path: Path) -> None:
    """The request ends by an overflow in its prompt or output; the layer is named, and the others go on as
    without it.
    """
    make_overflowing(tmp_path)
    config = family_config(tmp_path, "cuda", "float16", cuda_graphs=in_graphs)
    with running_engine(config) as engine:
        check_overflows(engine.built.engine.submit, engine.ended)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_next", "step3p5"])
def test_experts_over_doorbells(name: str, dtype: str, tmp_path: Path) -> None:
    """All routed experts by one server on the CPU: plain, biased and clamped ones."""
    make_tiny_model(name, tmp_path / name)
    experts_in = expert_dtype_of(dtype)
    with running_cluster(tmp_path / name, tmp_path, dtype=dtype, expert_dtype=experts_in) as cluster:
        experts: dict[str, Any] = cluster.config.experts.model_dump() | {"expert_transport": "mailbox"}
        check_under_graphs(tmp_path / name, dtype, family_config(tmp_path / name, "cuda", dtype, experts))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_8_bit_kv_pages(name: str, tmp_path: Path) -> None:
    """Latents, and keys and values of heads, next to the CPU's own 8-bit pages."""
    make_tiny_model(name, tmp_path)
    config = family_config(tmp_path, "cuda", "bfloat16", kv_cache_dtype="fp8_e4m3")
    check_under_graphs(tmp_path, "bfloat16", config)


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "qwen3_moe"])
def test_gguf_experts_resident_as_packed(name: str, tmp_path: Path) -> None:
    """Codes, scales and mins of K types and of blocks of 32, as servers keep them, on the device."""
    path = make_gguf(name, tmp_path).path
    config = family_config(path, "cuda", "bfloat16")
    kept = config.experts.model_copy(update={"expert_dtype": "keep"})
    check_under_graphs(path, "bfloat16", config.model_copy(update={"experts": kept}))
