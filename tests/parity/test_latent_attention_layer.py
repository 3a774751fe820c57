"""Invariant: the layer of latent attention gives the same by ranks that divide its heads, and by Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.mla.base import MlaAttentionBackend
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.registry import make_attention, mla_dimensions
from gpu_service.cache.kv_cache import MlaCache, make_cache, page_bytes
from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.models.layers.latent import MLA
from moebius.models.read import read_model_config
from tests.helpers.attention_cases import make_inputs
from tests.helpers.layer_values import first
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import make_tiny_model
from tests.tolerances import LOGITS_FLOAT32_SELF, MLA_FLOAT32

LAYER, PAGE_SIZE = 1, 4
TABLE = torch.tensor([[1, 2, 0]], dtype=torch.int32)


@torch.inference_mode()
def _attend(directory: Path, parallel: ParallelContext) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Returns five tokens, then two more, of one request; the rank's addend, the cache, and which wrote keys
    out.
    """
    model = build_model(read_model_config(directory), parallel=parallel)
    load_weights(model, directory)
    config, own = model.config, model.rank_layers
    cache = make_cache(own, 3, PAGE_SIZE, torch.float32)
    assert isinstance(cache, MlaCache)
    assert cache.nbytes == 3 * page_bytes(own, PAGE_SIZE, torch.float32, TORCH_DTYPES[config.dtype])
    attention = make_attention(own, cache, "cpu")
    assert isinstance(attention, MlaAttentionBackend)
    hidden_states = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(5))
    device = torch.device("cpu")
    rope = first(config, MLA).rope
    assert rope is not None
    rotary = RotaryEmbedding(rope, config.max_model_len, dtype=torch.float32, device=device)
    outputs, expanded = [], []
    for old, new in ((0, 5), (5, 2)):
        positions = torch.arange(old, old + new)
        inputs = make_inputs([(old, new)], TABLE, positions + PAGE_SIZE)
        attention.plan(inputs)
        expanded.append(attention.non_absorbed)
        context = ForwardContext(inputs, cache, attention, None)
        layer = model.model.layers[LAYER].self_attn
        outputs.append(layer(hidden_states[old : old + new], rotary.table(positions), context))  # type: ignore[operator]
    pages = [cache.pages(LAYER)] + ([] if cache.index_keys is None else [cache.index_keys.pages(LAYER)])
    assert attention.selects == (len(pages) == 2)
    return torch.cat(outputs), torch.cat(pages, dim=-1), expanded


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "deepseek_v3_direct_query_half_split_tied",
        # Five of seven tokens are attended to.
        "deepseek_v32_listed_layers_biased_tied",
    ],
)
def test_ranks_add_up_and_hold_the_same_latents(name: str, tmp_path: Path) -> None:
    """Written out and absorbed, each rank has its heads' rows of every projection, and all latents.

    Every rank chooses the tokens alike, by keys of its own.
    """
    make_tiny_model(name, tmp_path)
    whole, latents, expanded = _attend(tmp_path, SOLO)
    assert expanded == [True, False], "both ways must have been taken"
    for size in (2, 3):
        ranks = [_attend(tmp_path, ParallelContext(rank, size)) for rank in range(size)]
        total = torch.stack([output for output, _, _ in ranks]).sum(0)
        torch.testing.assert_close(total, whole, rtol=0, atol=MLA_FLOAT32)
        assert all(torch.equal(pages, latents) for _, pages, _ in ranks)


def test_a_model_does_not_see_that_triton_attends(tmp_path: Path) -> None:
    """A first chunk and a second one after it; in float32 by Triton's interpreter."""
    make_tiny_model("deepseek_v3", tmp_path)
    expected, ours = load_runner(tmp_path), load_runner(tmp_path)
    assert isinstance(ours.kv_cache, MlaCache)
    ours.attention = TritonMlaAttention(mla_dimensions(ours.model.config.layers), ours.kv_cache, min_split=16)
    tokens = [3, 17, 100, 5, 99, 42, 42, 8]
    wanted, logits = (runner.prefill(tokens, chunk=4)[1] for runner in (expected, ours))
    torch.testing.assert_close(logits, wanted, rtol=0, atol=LOGITS_FLOAT32_SELF)
