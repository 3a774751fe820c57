"""Guards tensor-core kernels of grouped rows: their source, on the host, against the float32 reference."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch

from gpu_service.experts.resident.experts import LayerSlots, TorchResidentKernels
from gpu_service.experts.resident.grouped import grouped_shape
from gpu_service.ops import pair_panels, warpgroup_panels
from gpu_service.ops.grouped_panels import TILES, WARPS, multiplies, program
from gpu_service.ops.warpgroup_panels import MANY_ROWS, SOME_ROWS
from gpu_service.ops.warpgroup_panels import WARPS as MANY_WARPS
from tests import tolerances
from tests.helpers.compiled_sources import compiled
from tests.helpers.resident_layers import Shape, resident_layer, routed

SHIM = Path(__file__).parents[1] / "helpers/grouped_panels_shim.h"
ENTRIES = """
extern "C" void run(int tiles, unsigned blocks, unsigned first, unsigned second, const u8* x,
                    const u8* slots, const int* pairs, const int* of_blocks, u8* between, float* outputs,
                    int count, float alpha, float limit) {
#define RUN(n)                                                                         \\
  if (tiles == n) {                                                                    \\
    run_grid(blocks, first, 32 * kWarps, [=] {                                           \\
      gate_up_##n(x, slots, pairs, of_blocks, between, count, alpha, limit);         \\
    });                                                                                \\
    run_grid(blocks, second, 32 * kWarps, [=] {                                          \\
      down_##n(between, slots, pairs, of_blocks, outputs, count);                    \\
    });                                                                                \\
  }
  RUN(1)
#ifdef ALL_TILES
  RUN(2) RUN(4)
#endif
}
"""
# Behind the entries above.
PAIR_ENTRIES = """
extern "C" void run_pairs(int columns, int panels, const u8* x, const u8* slots, const int* ids,
                          const int* slot_of_expert, u8* between, const float* weights, const u8* partial,
                          int partial_bytes, float* result, int rows, float alpha, float limit) {
  run_grid(rows * kTopK, columns, 32 * kWarps, [=] {
    gate_up_pairs(x, slots, ids, slot_of_expert, between, rows * kTopK, 1, alpha, limit);
  });
  run_grid(rows, panels, 32 * kTwos * kShares, [=] {
    if (partial_bytes == 2) {
      down_pairs_bfloat16(between, slots, ids, slot_of_expert, weights, (const Bfloat16*)partial, result);
    } else if (partial_bytes == 4) {
      down_pairs_float32(between, slots, ids, slot_of_expert, weights, (const Float32*)partial, result);
    } else {
      down_pairs(between, slots, ids, slot_of_expert, weights, (const Nothing*)partial, result);
    }
  });
}
"""
# Blocks of the warpgroups' kernels, in tiles of eight rows.
MANY, SOME = (MANY_ROWS // 8,), (SOME_ROWS // 8,)
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Each code, type of scales, length of groups, zero points and mins, scales of panels and of columns.
FORMATS = (
    "int4_g32",
    "int4_g64_zeros_f16",
    "int4_g128_zeros",
    "int4_g32_mins",
    "int4_g32_mins_products",
    "mxfp4",
    "iq4_g32_products",
    "int8",
    "int8_g32_mins",
    "int5_g32_mins_products",
    "int6_g16_products",
    "int4_g16_mins",
    "nvfp4",
    "fp8_block",
    "fp8_channel",
    "mxfp8",
    "bfloat16",
)


MANY_ENTRIES = """
extern "C" void run(int tiles, unsigned blocks, unsigned first, unsigned second, const u8* x,
                    const u8* slots, const int* pairs, const int* of_blocks, u8* between, float* outputs,
                    int count, float alpha, float limit, u8* permuted, int chunks) {
  run_grid((chunks + 255) / 256, 1, 256, [=] { permute(x, permuted, chunks); });
  run_grid(first, blocks, 256, [=] {
    gate_up_many(permuted, slots, pairs, of_blocks, between, count, alpha, limit);
  });
  run_grid(second, blocks, 256, [=] {
    down_many(between, slots, pairs, of_blocks, outputs, count);
  });
}
"""


def host_library(source: str, entries: str) -> ctypes.CDLL:
    """Returns the kernels, compiled for the host."""
    options = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")
    library, _ = compiled(("g++", *options), SHIM.read_text() + source + entries)
    return ctypes.CDLL(str(library))


def aligned(slots: LayerSlots, ids: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pairs by slot in blocks of `height`, and the blocks' slots, one without a slot at the end."""
    chosen = slots.slot_of_expert[ids.long().clamp(min=0)].where(ids >= 0, -1).flatten().tolist()
    pairs: list[int] = []
    block_slots: list[int] = []
    for slot in range(slots.count):
        own = [pair for pair, of in enumerate(chosen) if of == slot]
        blocks = -(-len(own) // height)
        pairs += own + [len(chosen)] * (blocks * height - len(own))
        block_slots += [slot] * blocks
    pairs += [len(chosen)] * height
    return torch.tensor(pairs, dtype=torch.int32), torch.tensor([*block_slots, -1], dtype=torch.int32)


def computed(
    shape: Shape, slots: LayerSlots, library: ctypes.CDLL, tiles: int, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Returns float32 `[rows, hidden]`: what the kernels and the weighted sum of their outputs give."""
    hidden_states, ids, weights = inputs
    kind = slots.kind
    pairs, block_slots = aligned(slots, ids, 8 * tiles)
    between = torch.full((ids.numel(), kind.intermediate_columns), float("nan"), dtype=torch.bfloat16)
    outputs = torch.full((ids.numel(), kind.hidden_size), float("nan"))
    # Of the block's warps: each takes 16 channels of gate and up, or 32 columns.
    width = WARPS if tiles <= max(TILES) else MANY_WARPS
    channels = width * (16 if shape.geometry.is_gated else 32)
    permuted = torch.full_like(hidden_states, float("nan"))
    library.run(
        tiles,
        len(block_slots),
        -(-kind.intermediate_columns // channels),
        -(-kind.hidden_size // (32 * width)),
        *(ctypes.c_void_p(each.data_ptr()) for each in (hidden_states, slots.weights, pairs, block_slots)),
        *(ctypes.c_void_p(each.data_ptr()) for each in (between, outputs)),
        ids.numel(),
        ctypes.c_float(shape.geometry.alpha),
        ctypes.c_float(slots.limit),
        ctypes.c_void_p(permuted.data_ptr()),
        hidden_states.numel() // 8,
    )
    is_here = (ids >= 0) & (slots.slot_of_expert[ids.long().clamp(min=0)] >= 0)
    each = outputs.view(*ids.shape, -1).where(is_here[..., None], 0)
    return (each * weights[..., None]).sum(1)


def pairs_computed(
    shape: Shape,
    slots: LayerSlots,
    library: ctypes.CDLL,
    inputs: tuple[torch.Tensor, ...],
    partial: torch.Tensor | None,
) -> torch.Tensor:
    """Returns float32 `[rows, hidden]`: what the kernels of single rows give; `partial` stays as it is."""
    hidden_states, ids, weights = inputs
    kind, rows = slots.kind, ids.shape[0]
    between = torch.full((ids.numel(), kind.intermediate_columns), float("nan"), dtype=torch.bfloat16)
    result = torch.full((rows, kind.hidden_size), float("nan"))
    before = result if partial is None else partial
    library.run_pairs(
        -(-kind.intermediate_columns // (16 if shape.geometry.is_gated else 32)),
        -(-kind.hidden_size // 16),
        *(
            ctypes.c_void_p(each.data_ptr())
            for each in (hidden_states, slots.weights, ids, slots.slot_of_expert, between, weights, before)
        ),
        0 if partial is None else partial.itemsize,
        ctypes.c_void_p(result.data_ptr()),
        rows,
        ctypes.c_float(shape.geometry.alpha),
        ctypes.c_float(slots.limit),
    )
    return result


def check_pairs(shape: Shape, weight_format: str, rows: int) -> None:
    """The kernels of single rows and those of one tile give what the reference gives, added to anything."""
    slots = resident_layer(shape, weight_format, (3, 1, 0))
    constants = grouped_shape(slots.kind, shape.geometry)
    source = pair_panels.program(constants) + "KERNELS(1)\n"
    library = host_library(source, ENTRIES + PAIR_ENTRIES)
    inputs = routed(shape, rows, dtype=torch.bfloat16)
    expected = TorchResidentKernels(shape.geometry).forward(slots, *inputs, None)
    check_close(computed(shape, slots, library, 1, inputs), expected)
    check_close(pairs_computed(shape, slots, library, inputs, None), expected)
    for dtype in (torch.float32, torch.bfloat16):
        partial = torch.randn(expected.shape).to(dtype)
        found = pairs_computed(shape, slots, library, inputs, partial)
        check_close(found - partial.float(), expected)


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of what lies between the two products."""
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < tolerances.RESIDENT_BFLOAT16


def check(
    shape: Shape,
    weight_format: str,
    tiles: tuple[int, ...],
    rows: int,
) -> None:
    """All rows equal the reference's."""
    slots = resident_layer(shape, weight_format, (3, 1, 0))
    for panels in slots.kind.panels:
        assert multiplies(panels, panels.k)
    constants = grouped_shape(slots.kind, shape.geometry)
    if tiles in (SOME, MANY):
        assert warpgroup_panels.multiplies(constants)
        library = host_library(warpgroup_panels.program(constants, 8 * tiles[0]), MANY_ENTRIES)
    else:
        library = host_library("#define ALL_TILES\n" + program(constants), ENTRIES)
    inputs = routed(shape, rows, dtype=torch.bfloat16)
    expected = TorchResidentKernels(shape.geometry).forward(slots, *inputs, None)
    for count in tiles:
        check_close(computed(shape, slots, library, count, inputs), expected)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_formats_are_the_references(weight_format: str) -> None:
    """Every kind of code and scale decodes as the reference says; lengths end inside of groups and steps."""
    shape = Shape(hidden=136, intermediate=40, has_bias=weight_format == "mxfp4")
    check_pairs(shape, weight_format, 5)


@pytest.mark.parametrize("activation", ["silu_clamped", "gpt_oss", "clamped_silu", "gelu_tanh", "relu2"])
def test_activations_are_the_references(activation: str) -> None:
    """Each activation, also that of no gate, whose two panels are neighbours."""
    check_pairs(Shape(activation=activation, limit=0.7, top_k=3), "int4_g32", 5)


def test_blocks_of_many_rows_are_the_references() -> None:
    """Tiles side by side, an expert with more pairs than a block, and blocks that are not full."""
    check(Shape(hidden=40, intermediate=16, top_k=3), "int4_g32", TILES, 40)


@pytest.mark.parametrize(
    "weight_format",
    ["int4_g32", "int4_g32_mins_products", "int6_g16_products", "nvfp4", "fp8_block", "bfloat16"],
)
def test_rows_of_warpgroups_are_the_references(weight_format: str) -> None:
    """Blocks that are full, half full and empty, and stages that are no whole round of registers."""
    shape = Shape(hidden=192, intermediate=64, top_k=2)
    check(shape, weight_format, MANY, 400)


def test_warpgroups_of_experts_without_gate_are_the_references() -> None:
    """Both panels of a lane are neighbours, and what lies between is permuted; smaller blocks."""
    shape = Shape(hidden=64, intermediate=128, top_k=2, activation="relu2")
    check(shape, "mxfp4", SOME, 120)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_compiles_the_kernels_for_every_architecture() -> None:
    """Nothing of a newer GPU's is used, and registers hold what a lane needs."""
    shape = Shape(hidden=2048, intermediate=768, experts=128, top_k=8)
    kind = resident_layer(Shape(), "int4_g32", ()).kind
    constants = grouped_shape(kind, shape.geometry)
    kernels = "".join(f"KERNELS({tiles})\n" for tiles in TILES)
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
    command = ["nvcc", "-std=c++17", "-fatbin", "-Xptxas", "-v", *targets]
    _, said = compiled(command, pair_panels.program(constants) + kernels, ".cu")
    spills = re.findall(r"(\d+) bytes spill stores", said)
    assert len(spills) == (2 * len(TILES) + 4) * len(ARCHITECTURES)
    assert set(spills) == {"0"}
