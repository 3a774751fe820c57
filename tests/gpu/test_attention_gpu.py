"""Invariant: on a GPU, FlashInfer = Triton = torch = attention, eagerly and replayed, however steps overlap.

At the sizes of Qwen3-30B-A3B (group 8), of a model with few heads (group 2, CUDA-core decode), of one that
FlashInfer has no kernel for, and of gpt-oss' layers with windows and sinks; lengths from one token to several
pages of splits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.fused_decode import can_decode
from gpu_service.attention.registry import ATTENTION_BACKENDS, make_attention
from gpu_service.attention.torch_reference import TorchReferenceAttention
from gpu_service.attention.triton_backend import TritonAttention
from gpu_service.attention.warm_up import warm_up_attention
from gpu_service.cache.fp8 import E4M3, E4M3_MAX, quantise_e4m3
from gpu_service.ops.backends import install, uninstall
from tests.helpers.attention_cases import (
    LAYER,
    Case,
    Geometry,
    Shape,
    as_capturable,
    make_case,
    naive,
    refill,
    run,
)
from tests.helpers.fused_decode import Options, as_decode_rows, attend, unrotated
from tests.helpers.gpu_capture import capture, hold_device
from tests.tolerances import ATTENTION_BFLOAT16, ATTENTION_FLOAT16, LOGITS_FLOAT32_SELF

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

QWEN = Geometry(32, 4, 128, 16, BF16, None, "cuda")
QWEN_FP8 = Geometry(32, 4, 128, 16, BF16, E4M3, "cuda")
FEW_HEADS = Geometry(8, 4, 64, 16, FP16, None, "cuda")
ODD = Geometry(12, 2, 80, 32, BF16, None, "cuda")
WIDE = Geometry(6, 2, 40, 16, FP32, E4M3, "cuda")
WINDOW = Geometry(64, 8, 64, 16, BF16, None, "cuda", window=128, sinks=True)
# Longer than what one program serves: splits share a window, and only one of them has the sinks.
WIDE_WINDOW = Geometry(64, 8, 64, 16, BF16, None, "cuda", window=600, sinks=True)
GEOMETRIES = {
    "qwen": QWEN,
    "qwen fp8": QWEN_FP8,
    "few heads": FEW_HEADS,
    "odd": ODD,
    "float32": WIDE,
    "window and sinks": WINDOW,
    "wide window and sinks": WIDE_WINDOW,
}
TOLERANCES = {BF16: ATTENTION_BFLOAT16, FP16: ATTENTION_FLOAT16, FP32: LOGITS_FLOAT32_SELF}

SHAPES: dict[str, Shape] = {
    "one long decode": [(3000, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (700, 1), (2500, 1), (255, 1), (256, 1)],
    "many decodes": [(7 * row, 1) for row in range(64)],
    "first chunks": [(0, 300), (0, 2), (0, 129)],
    "later chunk": [(1000, 200)],
    "mixture": [(900, 1), (0, 70), (33, 65), (3, 1), (2000, 1), (64, 128)],
}


def backend_for(case: Case, name: str, **options: Any) -> AttentionBackend:
    """Returns the backend by name; skips where it cannot serve the case, and says why."""
    layers = case.geometry.config().layers
    entry = ATTENTION_BACKENDS[name]
    reason = entry.missing(case.cache.device) or entry.load().unsupported(layers, case.cache)
    if reason:
        pytest.skip(reason)
    backend: AttentionBackend = entry.load()(layers, case.cache, **options)
    return backend


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """FlashInfer's modules, side by side: one after another they take minutes."""
    if ATTENTION_BACKENDS["flashinfer"].missing(torch.device("cuda")):
        return
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    from gpu_service.ops.flashinfer import compile_modules

    flags = (0, False, False)  # no rotary embedding, no window, no cap of logits
    compile_modules(
        [
            gen_batch_prefill_module("fa2", BF16, BF16, BF16, torch.int32, 128, 128, *flags, False),
            gen_batch_prefill_module("fa2", BF16, E4M3, BF16, torch.int32, 128, 128, *flags, False),
            gen_batch_prefill_module("fa2", FP16, FP16, FP16, torch.int32, 64, 64, *flags, False),
            gen_batch_decode_module(FP16, FP16, FP16, torch.int32, 64, 64, *flags),
        ]
    )


def check(case: Case, output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[case.geometry.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_backend_is_attention(geometry: str, shape: str, backend: str) -> None:
    case = make_case(GEOMETRIES[geometry], SHAPES[shape])
    if case.cache.is_quantised:
        case.cache.key_scales[LAYER], case.cache.value_scales[LAYER] = 0.5, 2.0
    attention = backend_for(case, backend)
    expected = naive(case)
    check(case, run(case, attention), expected)


def test_8_bit_pages_saturate_and_keep_nan() -> None:
    """With the cache write that a service uses: what is too large is clipped, what is broken stays seen."""
    case = make_case(QWEN_FP8, [(3, 4)])
    case.key[0], case.key[1], case.value[2], case.value[1] = 1e4, float("nan"), 1e4, float("inf")
    install(case.cache.device, "auto", BF16)
    try:
        case.cache.append(LAYER, case.key, case.value, case.inputs.slot_mapping)
    finally:
        uninstall("cuda")
    slots = case.inputs.slot_mapping
    keys, values = (part(LAYER).float().flatten(0, 1)[slots] for part in (case.cache.keys, case.cache.values))
    assert (keys[0] == E4M3_MAX).all()
    assert keys[1].isnan().all()
    assert (values[2] == E4M3_MAX).all()
    assert values[1].isnan().all()
    assert torch.equal(keys[3], quantise_e4m3(case.key[3], 1.0).float())


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_equal_steps_give_equal_bits(backend: str) -> None:
    """Results do not depend on which program ends first."""
    case = make_case(QWEN, SHAPES["mixture"])
    attention = backend_for(case, backend)
    first = run(case, attention)
    assert all(torch.equal(run(case, attention), first) for _ in range(3))


def test_flashinfer_with_keys_in_one_piece() -> None:
    case = make_case(QWEN, SHAPES["decodes"])
    expected = naive(case)
    check(case, run(case, backend_for(case, "flashinfer", deterministic=True)), expected)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize(
    "geometry", ["qwen", "qwen fp8", "few heads", "window and sinks", "wide window and sinks"]
)
def test_replays_are_eager_steps(geometry: str, backend: str) -> None:
    """Two captured sizes, replayed in turn with growing lengths and padding, equal to the torch backend."""
    sizes = (8, 1)
    empty = {size: make_case(GEOMETRIES[geometry], [(0, 1)] * size) for size in sizes}
    cases = [
        make_case(GEOMETRIES[geometry], shape)
        for shape in (
            [(5, 1), (2500, 1), (0, 1), (16, 1), (255, 1), (256, 1), (1000, 1), (31, 1)],
            [(3000, 1)],
            [(1, 1), (2, 1), (3, 1), (4, 1), (2999, 1), (0, 1), (0, 1), (0, 1)],
            [(0, 1)],
        )
    ]
    # All steps share one cache in a service, so their pages do here: the largest case's.
    largest = max(cases, key=lambda case: case.cache.num_pages)
    attention, layer = backend_for(largest, backend), largest.layer
    graphs: dict[int, Any] = {}
    for size in sizes:
        static = as_capturable(empty[size].inputs)
        static = replace(static, block_table=torch.zeros(size, 200, dtype=torch.int32, device="cuda"))
        attention.plan_capture(static)
        rows = [tensor.clone() for tensor in (empty[size].query, empty[size].key, empty[size].value)]
        graphs[size] = static, rows, capture(lambda rows=rows: attention.forward(*rows, LAYER, layer))
    for case in cases:
        # The recorded kernels read this layer's sinks.
        case.layer = layer
        size = len(case.inputs.seq_lens)
        expected = naive(case)
        largest.cache.pages(LAYER)[: case.cache.num_pages].view(torch.uint8).copy_(
            case.fresh_cache().pages(LAYER).view(torch.uint8)
        )
        static, rows, (graph, output) = graphs[size]
        for target, source in zip(rows, (case.query, case.key, case.value), strict=True):
            target.copy_(source)
        attention.plan_replay(refill(static, case.inputs))
        graph.replay()
        check(case, output, expected)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_planning_ahead_of_the_device_changes_nothing(backend: str) -> None:
    """The device is held while the host plans and launches many steps: no plan may overwrite another."""
    shapes = [*SHAPES.values(), *SHAPES.values()]
    cases = [make_case(QWEN, shape, seed) for seed, shape in enumerate(shapes)]
    expected = [naive(case) for case in cases]
    attention = backend_for(cases[0], backend)
    run(cases[0], attention)
    for case in cases:
        attention.kv_cache = case.cache
        run(case, attention)  # compiled and loaded before the device is held
    torch.cuda.synchronize()
    outputs = []
    for first in range(0, len(cases), 2):
        # Two steps in flight, as the engine has.
        hold_device()
        for case in cases[first : first + 2]:
            attention.kv_cache = case.cache
            outputs.append(run(case, attention))
    torch.cuda.synchronize()
    for case, output, wanted in zip(cases, outputs, expected, strict=True):
        check(case, output, wanted)


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_step_never_waits_for_the_device(backend: str) -> None:
    case = make_case(QWEN, SHAPES["mixture"])
    decodes = make_case(QWEN, SHAPES["decodes"])
    attention = backend_for(case, backend)
    attention.plan_capture(decodes.inputs)
    run(case, attention)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, attention)
        attention.plan_replay(decodes.inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("geometry", [QWEN, WINDOW], ids=["qwen", "window and sinks"])
def test_nothing_is_compiled_after_the_warm_up(
    geometry: Geometry, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two and sixteen requests, odd and even tables, short and long: all of it was compiled before."""
    import triton

    shapes = [*SHAPES.values(), [(40, 1)] * 16, [(0, 1)] * 2, [(0, 33)] * 16]
    steps = [make_case(geometry, shape) for shape in shapes]
    attention = backend_for(steps[0], backend)
    warm_up_attention(attention, 4200)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]) and None
    )
    for case in steps:
        attention.kv_cache = case.cache
        run(case, attention)
    # The cache write belongs to the ops, which have a warm-up of their own.
    assert [name for name in compiled if "append" not in name] == []


def test_auto_takes_the_first_that_can() -> None:
    installed = not ATTENTION_BACKENDS["flashinfer"].missing(torch.device("cuda"))
    for geometry, name in ((QWEN, "FlashInferAttention"), (ODD, "TritonAttention")):
        case = make_case(geometry, [(3, 1)])
        chosen = type(make_attention(case.geometry.config().layers, case.cache, "cuda")).__name__
        assert chosen == (name if installed else "TritonAttention")


@pytest.mark.parametrize(
    "shape",
    [[(0, 1)], [(63, 1)], [(5000, 1), (1, 1), (129, 1)], [(700, 1)] * 32, [(700, 5), (1, 1), (0, 20)]],
)
def test_decode_in_one_launch(shape: Shape) -> None:
    """Norm, rotation, storing and attention by one kernel, replayed, against the same apart in float32.

    Several tokens of a request are rows, as draft tokens are.
    """
    case = make_case(Geometry(32, 4, 128, 16, torch.bfloat16, device="cuda"), shape)
    layers, cache = case.geometry.config().layers, case.fresh_cache()
    expected = attend(TorchReferenceAttention(layers, cache), case, Options())
    found, case = case.fresh_cache(), as_decode_rows(case)
    attention = TritonAttention(layers, found)
    given = unrotated(case, Options())
    attention.plan_capture(case.inputs)
    assert can_decode(given, case.value, found.slots(LAYER))

    def step() -> torch.Tensor:
        return attention.forward_unrotated(given, case.value, LAYER)

    graph, output = capture(step)
    for _ in range(3):
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output.float(), expected.float(), rtol=0, atol=ATTENTION_BFLOAT16)
    # A key whose float32 lies between two of bfloat16 may be rounded to either.
    spacing = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.slots(LAYER), cache.slots(LAYER), rtol=spacing, atol=ATTENTION_BFLOAT16)
