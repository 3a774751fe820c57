"""Invariant: decode attention in one launch gives what norm, rotation, storing and attention give apart.

The kernel runs in Triton's interpreter here; tests/gpu repeats this on a device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.fused_decode import MAX_REQUESTS, MIN_SPLIT, can_decode
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.ops.triton.counters import stream_counters
from tests.helpers.attention_cases import LAYER, Case, Geometry, make_case
from tests.helpers.fused_decode import Options, as_decode_rows, attend, unrotated
from tests.tolerances import ATTENTION_FLOAT16, LOGITS_FLOAT32_SELF

SMALL = Geometry(num_heads=6, num_kv_heads=2, head_dim=16)
LONG = 5 * MIN_SPLIT


def check(case: Case, options: Options = Options()) -> None:
    """Outputs and the cache, after two steps in a row."""
    tolerance = LOGITS_FLOAT32_SELF if case.geometry.dtype == torch.float32 else ATTENTION_FLOAT16
    found, wanted = case.fresh_cache(), case.fresh_cache()
    layers = case.geometry.config().layers
    for _ in range(2):
        output = attend(TritonAttention(layers, found), case, options)
        expected = attend(TorchReferenceAttention(layers, wanted), case, options)
        torch.testing.assert_close(output, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(found.slots(LAYER), wanted.slots(LAYER), rtol=0, atol=tolerance)
    counters = stream_counters(torch.device("cpu"))
    assert counters is not None
    assert not counters.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_short_and_long_requests(dtype: torch.dtype) -> None:
    """A first token, less than a tile of keys, a whole split, and several splits that are merged."""
    lengths = [0, 1, 63, MIN_SPLIT, MIN_SPLIT + 1, LONG]
    check(make_case(replace(SMALL, dtype=dtype), [(length, 1) for length in lengths]))


@pytest.mark.parametrize(
    "options",
    [Options(norms=False), Options(rotary_dim=8), Options(interleaved=True), Options(False, 4, True)],
    ids=["no norms", "half rotates", "interleaved", "neither"],
)
def test_what_is_rotated(options: Options) -> None:
    check(make_case(SMALL, [(LONG, 1), (3, 1)]), options)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (20, 1, 16), (8, 2, 32)])
def test_groups(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """One query head, more of them than a tile's rows, and a power of two."""
    check(make_case(Geometry(num_heads, num_kv_heads, head_dim, page_size=16), [(LONG, 1), (9, 1)]))


def test_rows_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens and short prompts are rows that see the rows before them, in whatever order programs run:
    here the later rows' store their keys first. Some in a tile, more than a tile, after one split and more.
    """
    case = make_case(SMALL, [(30, 4), (3, 1), (MIN_SPLIT, 3), (LONG - 2, 3), (0, 18)])
    expected_cache, cache = case.fresh_cache(), case.fresh_cache()
    layers = case.geometry.config().layers
    expected = attend(TorchReferenceAttention(layers, expected_cache), case, Options())
    set_place = interpreter_builder.set_grid_idx
    rows = as_decode_rows(case)
    last = len(rows.inputs.seq_lens) - 1
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_place(x, y, last - z))
    output = attend(TritonAttention(layers, cache), rows, Options())
    torch.testing.assert_close(output, expected, rtol=0, atol=LOGITS_FLOAT32_SELF)
    torch.testing.assert_close(cache.slots(LAYER), expected_cache.slots(LAYER), rtol=0, atol=1e-6)


def test_what_it_leaves_to_others() -> None:
    """Other steps, cached types and layers than those it knows."""
    case = make_case(SMALL, [(3, 1)] * 2)
    heads, slots = unrotated(case, Options()), case.cache.slots(LAYER)
    assert can_decode(heads, case.value, slots)
    assert not can_decode(heads, case.value, slots.to(torch.float8_e4m3fn))
    assert not can_decode(heads, case.value.half(), slots)
    many = heads._replace(heads=heads.heads[:1].expand(MAX_REQUESTS + 1, -1, -1))
    assert not can_decode(many, case.value[:1].expand(MAX_REQUESTS + 1, -1, -1), slots)
    odd = make_case(replace(SMALL, head_dim=24), [(3, 1)])
    assert not can_decode(unrotated(odd, Options()), odd.value, odd.cache.slots(LAYER))
    for geometry in (replace(SMALL, window=2), replace(SMALL, sinks=True), replace(SMALL, chunk=2)):
        check(make_case(geometry, [(30, 1), (3, 1)]))
    check(make_case(SMALL, [(30, 1), (3, 4)]))
