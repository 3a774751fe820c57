"""Products of rows that share an expert with packed panels: `grouped_panels.cu` from the host.

For few to some rows of each expert (8 to 32), where Triton's tiles wait at barriers and exchange what they
unpacked: there every lane unpacks the operands of its own tensor-core instructions in registers, as Marlin
does (Frantar et al., 2024).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu_service.device.limits import device_limits
from gpu_service.ops.panels import PanelFormat
from moebius.kernels.weight_formats import CODEBOOKS

if TYPE_CHECKING:
    from gpu_service.device.cuda_driver import Kernel

SOURCES = ("panel_codes.cuh", "panel_products.cuh", "panel_results.cuh", "grouped_panels.cu")
# Rows of an expert that a tensor-core instruction takes, and how many such tiles a block may have.
TILE_ROWS = 8
TILES = (1, 2, 4)
WARPS = 4
# k of one step of a warp, eight for each lane of a group of four; and bits of each weight that it loads
# ahead: four steps of 4-bit codes.
PART, BITS_AHEAD = 32, 16
# Tensor cores multiply bfloat16 from here on.
LEAST_ARCHITECTURE = 80

_SCALES = ("none", "float32", "bfloat16", "float16", "e8m0", "e4m3")
_SCALE_BYTES = {"none": 0, "float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1}
_CODES = ("integer", "float4", "table", "int8", "float8", "bfloat16")
_INTEGERS = ("int4", "int5", "int6")
# Tables of 16 values, which bfloat16 holds.
_TABLES = ("iq4",)
_ACTIVATIONS = ("silu", "silu_clamped", "gelu_tanh", "relu2", "clamped_silu", "gpt_oss")
INT, FLOAT, POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_uint64


@dataclass(frozen=True)
class GroupedShape:
    """The experts of a layer as constants of kernels; filled by `grouped_shape`.

    Offsets and sizes in bytes: panel i of gate lies at `i * gate_step` of an expert, of up at `up_at + i *
    up_step`, of down behind `down_at`.
    """

    gate_up: PanelFormat
    down: PanelFormat
    expert_bytes: int
    gate_step: int
    up_at: int
    up_step: int
    down_at: int
    hidden: int
    intermediate_columns: int
    top_k: int
    gated: bool
    activation: str


def multiplies(panels: PanelFormat, row_length: int) -> bool:
    """Returns whether kernels take panels of this format, whose rows are `row_length` elements apart."""
    is_code = panels.code in (*_CODES, *_INTEGERS, *_TABLES)
    in_groups = panels.group_size == 16 or panels.group_size % PART == 0
    has_scales = in_groups and (panels.scale or "none") in (*_SCALES, "products")
    is_plain = not (panels.ordered or panels.quantised_rows) and panels.k_padded % PART == 0
    return is_code and has_scales and is_plain and panels.k % 8 == 0 == row_length % 8


def is_available(device: torch.device) -> bool:
    """Returns whether the device has the instructions, and the compiler is installed."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return device_limits(device).architecture >= LEAST_ARCHITECTURE and _has_compiler()


@cache
def _has_compiler() -> bool:
    try:
        import cuda.bindings.driver
        import cuda.core
    except ImportError:
        return False
    return all((cuda.bindings.driver, cuda.core))


def structure(name: str, panels: PanelFormat, bits_ahead: int) -> str:
    """Returns the C++ of one kind of panel; `bits_ahead`: as `BITS_AHEAD`."""
    scale = "float16" if panels.scale == "products" else panels.scale or "none"
    parts = -(-panels.k // PART)
    code = "table" if panels.code in _TABLES else "integer" if panels.code in _INTEGERS else panels.code
    constants: dict[str, int | str] = {
        "kK": panels.k,
        "kBits": panels.bits,
        "kLowBits": panels.low_bits,
        "kAhead": max(1, bits_ahead // panels.bits // 2 * 2),
        "kCode": f"CODE_{code.upper()}",
        "kMiddle": panels.middle,
        "kGroup": panels.group_size,
        "kAllGroups": panels.groups,
        "kPartsOfGroup": 1 if panels.group_size == 16 else panels.group_size // PART or parts,
        "kScale": f"SCALE_{scale.upper()}",
        "kScaleBytes": _SCALE_BYTES[scale],
        "kPanelScale": int(panels.panel_scale),
        "kProducts": int(panels.scale == "products"),
        "kFactorGroups": max(1, panels.factor_groups),
        "kJoined": int(panels.joined),
        "kZeros": int(panels.zeros),
        "kMins": int(panels.mins),
        "kColumnScale": int(panels.column_scale),
        "kBias": int(panels.has_bias),
        "kScalesAt": panels.scales_offset,
        "kWholeAt": panels.whole_offset,
        "kZerosAt": panels.zeros_offset,
        "kMinsAt": panels.mins_offset,
        "kColumnScaleAt": panels.column_scale_offset,
        "kBiasAt": panels.bias_offset,
        "kPanelBytes": panels.panel_bytes,
    }
    lines = [f"  static constexpr int {key} = {value};" for key, value in constants.items()]
    lines += [f"  static constexpr unsigned {key} = {value}u;" for key, value in _table(panels).items()]
    return "\n".join([f"struct {name} {{", *lines, "};", ""])


def _table(panels: PanelFormat) -> dict[str, int]:
    """Returns the high and the low bytes of a table's values in bfloat16, four to a word."""
    if panels.code not in _TABLES:
        return {}
    values = torch.tensor(CODEBOOKS[panels.code], dtype=torch.bfloat16).view(torch.int16).tolist()
    return {
        f"k{half}{word}": sum(
            (value >> shift & 255) << 8 * i for i, value in enumerate(values[4 * word :][:4])
        )
        for half, shift in (("Low", 0), ("High", 8))
        for word in range(4)
    }


def constants(
    shape: GroupedShape, warps: int, bits_ahead: int = BITS_AHEAD, down_bits_ahead: int = 0, **more: int
) -> str:
    """Returns what sources of kernels for one kind of layer begin with; `warps`: of a block; `bits_ahead`: as
    `BITS_AHEAD`, of down too unless that has a number of its own; `more`: numbers that a source takes.
    """
    lines = [f"#define ACTIVATION_{name.upper()} {number}" for number, name in enumerate(_ACTIVATIONS)]
    numbers = more | {
        "kTopK": shape.top_k,
        "kGated": int(shape.gated),
        "kHidden": shape.hidden,
        "kIntermediateColumns": shape.intermediate_columns,
    }
    lines += [f"constexpr int {key} = {value};" for key, value in numbers.items()]
    lines.append(f"constexpr int kActivation = ACTIVATION_{shape.activation.upper()};")
    offsets = {
        "kExpertBytes": shape.expert_bytes,
        "kGateStep": shape.gate_step,
        "kUpAt": shape.up_at,
        "kUpStep": shape.up_step,
        "kDownAt": shape.down_at,
    }
    lines += [f"constexpr unsigned long long {key} = {value};" for key, value in offsets.items()]
    gate_up = structure("GateUp", shape.gate_up, bits_ahead)
    down = structure("Down", shape.down, down_bits_ahead or bits_ahead)
    return names(warps) + "\n".join([*lines, gate_up, down])


def names(warps: int) -> str:
    """Returns what `panel_codes.cuh` and `panel_products.cuh` take besides structures.

    `warps`: of a block.
    """
    lines = [f"#define SCALE_{name.upper()} {number}" for number, name in enumerate(_SCALES)]
    lines += [f"#define CODE_{name.upper()} {number}" for number, name in enumerate(_CODES)]
    lines += [f"constexpr int kWarps = {warps};", f"constexpr int kPart = {PART};"]
    return "\n".join([*lines, ""])


def sources(*names: str) -> str:
    """Returns the text of files beside this one, one after another."""
    return "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


def program(shape: GroupedShape) -> str:
    """Returns the complete source for one kind of layer."""
    kernels = "".join(f"KERNELS({tiles})\n" for tiles in TILES)
    return constants(shape, WARPS) + sources(*SOURCES) + kernels


class PanelKernels(ABC):
    """Kernels of one kind of layer on one device, for blocks of pairs that share an expert."""

    def __init__(self, shape: GroupedShape, warps: int) -> None:
        """`warps`: of a block; each takes 32 columns, or 16 channels of gate and up."""
        self._threads, channels = 32 * warps, 16 if shape.gated else 32
        self._gate_up_blocks = -(-shape.intermediate_columns // (channels * warps))
        self._down_blocks = -(-shape.hidden // self._threads)

    @abstractmethod
    def _kernels(self, rows: int) -> tuple[Kernel, Kernel]:
        """Returns gate and up's kernel, and down's, for blocks of `rows` pairs."""

    @abstractmethod
    def _grid(self, blocks: int, columns: int) -> tuple[int, int]:
        """Returns the grid of a launch for `blocks` blocks of pairs and `columns` of columns."""

    def _ordered(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns rows in the order of columns that the kernels read."""
        return hidden_states

    def gate_up(
        self,
        hidden_states: torch.Tensor,
        slots: torch.Tensor,
        pairs: torch.Tensor,
        block_slots: torch.Tensor,
        intermediate: torch.Tensor,
        alpha: float,
        limit: float,
    ) -> None:
        """Writes activations of all pairs to `intermediate`, bfloat16 `[pairs, intermediate_columns]`, in the
        order of columns that `down` reads.

        `hidden_states`: bfloat16 `[rows, hidden]`; `slots`: uint8 `[slots, expert_bytes]`; `pairs`, int32
        `[blocks * rows of a block]`, and `block_slots`, int32 `[blocks]`, as `align` returns them.
        """
        blocks = block_slots.shape[0]
        kernel, _ = self._kernels(pairs.shape[0] // blocks)
        tensors = self._ordered(hidden_states), slots, pairs, block_slots, intermediate
        kernel.launch(
            torch.cuda.current_stream(slots.device).cuda_stream,
            self._grid(blocks, self._gate_up_blocks),
            self._threads,
            *(tensor.data_ptr() for tensor in tensors),
            intermediate.shape[0],
            alpha,
            limit,
        )

    def down(
        self,
        intermediate: torch.Tensor,
        slots: torch.Tensor,
        pairs: torch.Tensor,
        block_slots: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        """Writes products of all pairs to `outputs`, float32 `[pairs, hidden]`, without their weights."""
        blocks = block_slots.shape[0]
        _, kernel = self._kernels(pairs.shape[0] // blocks)
        kernel.launch(
            torch.cuda.current_stream(slots.device).cuda_stream,
            self._grid(blocks, self._down_blocks),
            self._threads,
            *(tensor.data_ptr() for tensor in (intermediate, slots, pairs, block_slots, outputs)),
            outputs.shape[0],
        )


class GroupedPanels(PanelKernels):
    """Kernels for blocks of few rows: each number of `TILES`."""

    def __init__(self, shape: GroupedShape, device: torch.device) -> None:
        """Raises UserError when NVRTC is missing or compiled code cannot be kept."""
        from gpu_service.device.cuda_driver import Module
        from gpu_service.device.cuda_program import compiled

        super().__init__(shape, WARPS)
        arch = f"sm_{device_limits(device).architecture}"
        module = Module(compiled(program(shape), "grouped panels", arch))
        pointers = (POINTER,) * 5
        self._by_tiles = {
            tiles: (
                module.kernel(f"gate_up_{tiles}", *pointers, INT, FLOAT, FLOAT),
                module.kernel(f"down_{tiles}", *pointers, INT),
            )
            for tiles in TILES
        }

    def _kernels(self, rows: int) -> tuple[Kernel, Kernel]:
        return self._by_tiles[rows // TILE_ROWS]

    def _grid(self, blocks: int, columns: int) -> tuple[int, int]:
        return blocks, columns
