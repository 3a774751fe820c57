"""Guards tensor-core kernels of dense panels: their source, on the host, against the dequantised weights."""

from __future__ import annotations

import ctypes
import re
import shutil

import numpy as np
import pytest
import torch

from gpu_service.ops import dense_panels
from gpu_service.ops.dense_panels import COLUMNS, WARPS, program
from gpu_service.ops.grouped_panels import TILE_ROWS, TILES, multiplies
from gpu_service.ops.panels import panel_format
from tests import tolerances
from tests.helpers.compiled_sources import compiled
from tests.helpers.panel_weights import FORMATS, encoded, panel_weight, relative_error
from tests.helpers.quantised_sources import ENCODERS
from tests.kernels.test_grouped_panels import ARCHITECTURES, host_library

ENTRIES = """
extern "C" void run(int tiles, unsigned blocks, unsigned strips, const u8* x, const u8* panels,
                    const u8* bias, u8* output, int rows, int features, int x_stride, int output_stride,
                    int bias_bytes) {
  run_grid(blocks, strips, 32 * kWarps, [=] {
    if (tiles == 1) dense_1(x, panels, bias, output, rows, features, x_stride, output_stride, bias_bytes);
    if (tiles == 2) dense_2(x, panels, bias, output, rows, features, x_stride, output_stride, bias_bytes);
    if (tiles == 4) dense_4(x, panels, bias, output, rows, features, x_stride, output_stride, bias_bytes);
  });
}
"""
# Rows of a weight: more than two panels, the last of which holds some; columns: no whole steps for all warps.
FEATURES, K = 72, 328


def _format(name: str) -> str:
    return ENCODERS[name](np.ones((8, 32), np.float32)).format


TAKEN = [name for name in FORMATS if multiplies(panel_format(_format(name), K), K)]


def product(
    library: ctypes.CDLL,
    tiles: int,
    x: torch.Tensor,
    memory: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
) -> torch.Tensor:
    """Returns `output`, to which the kernel for blocks of that number of tiles wrote."""
    library.run(
        tiles,
        -(-len(x) // (tiles * TILE_ROWS)),
        -(-output.shape[1] // COLUMNS),
        *(ctypes.c_void_p(each.data_ptr()) for each in (x, memory, x if bias is None else bias, output)),
        *output.shape,
        x.stride(0),
        output.stride(0),
        0 if bias is None else bias.element_size(),
    )
    return output


@pytest.mark.parametrize("name", TAKEN)
def test_formats_are_the_dequantised_weights(name: str) -> None:
    """Every code and scale; rows end inside of a tile, features inside of a panel, k inside of steps and
    groups."""
    (source,) = encoded(name, columns=K if "block" not in name else 384, rows=(FEATURES,))
    weight = panel_weight([source], "cpu", torch.bfloat16)
    columns = source.weights.shape[1]
    library = host_library(program(weight.parts[0].panels), ENTRIES)
    meant = torch.from_numpy(source.weights).double()
    torch.manual_seed(len(name))
    # Rows that lie in wider ones.
    x = torch.randn(11, columns + 16).bfloat16()[:, 8 : columns + 8]
    assert not dense_panels.takes(x[:, 4:], None), "such rows do not begin at whole sixteens of bytes"
    expected = x.double() @ meant.T
    for tiles, bias in ((1, None), (2, torch.randn(FEATURES)), (2, torch.randn(FEATURES).bfloat16())):
        output = torch.full((11, FEATURES), float("nan"), dtype=torch.bfloat16)
        found = product(library, tiles, x, weight.memory, bias, output)
        wanted = expected if bias is None else expected + bias.double()
        assert relative_error(found, wanted) < tolerances.RESIDENT_BFLOAT16


@pytest.mark.parametrize("tiles", TILES)
def test_blocks_write_their_rows_and_columns_alone(tiles: int) -> None:
    """Several blocks of rows, a part of wider outputs that begins at any element, and nothing beside it."""
    (source,) = encoded("int4_g32_mins_products", columns=256, rows=(40,))
    weight = panel_weight([source], "cpu", torch.bfloat16)
    library = host_library(program(weight.parts[0].panels), ENTRIES)
    rows = 2 * tiles * TILE_ROWS - 3
    x = torch.randn(rows, 256).bfloat16()
    assert dense_panels.takes(x, None)
    wide = torch.full((rows, 40 + 9), 7.0, dtype=torch.bfloat16)
    found = product(library, tiles, x, weight.memory, None, wide[:, 5:45])
    expected = x.double() @ torch.from_numpy(source.weights).double().T
    assert relative_error(found, expected) < tolerances.RESIDENT_BFLOAT16
    assert (wide[:, :5] == 7).all()
    assert (wide[:, 45:] == 7).all()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["int4_g32_mins_products", "int6_g16_products", "int8_g32_f16"])
def test_nvcc_compiles_the_kernels_for_every_architecture(name: str) -> None:
    """Nothing of a newer GPU's is used, and registers hold what a lane needs: of one tile of two blocks at
    once."""
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in ARCHITECTURES]
    command = ["nvcc", "-std=c++17", "-fatbin", "-Xptxas", "-v", *targets]
    _, said = compiled(command, program(panel_format(name, 2048)), ".cu")
    spills = [int(each) for each in re.findall(r"(\d+) bytes spill stores", said)]
    assert len(spills) == len(TILES) * len(ARCHITECTURES)
    # Outside of loops at most.
    assert max(spills) <= 32
    of_one_tile = re.findall(r"function 'dense_1'.*?Used (\d+) registers", said, re.DOTALL)
    assert len(of_one_tile) == len(ARCHITECTURES)
    assert max(map(int, of_one_tile)) * 32 * WARPS * 2 <= 65536
