"""Packed panels back to plain float32 matrices, by torch on any device: the reference of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu_service.ops.panels import PanelFormat, PanelViews, views
from moebius.kernels.weight_formats import CODE_MIDDLES, CODEBOOKS, PANEL_COLUMNS, grid

# By bits of an element: element i of a word's k, k+1, ... lies in bits shift[i] ... shift[i] + bits - 1.
WORD_SHIFTS = {32: (0,), 16: (0, 16), 8: (0, 8, 16, 24), 4: (0, 16, 4, 20, 8, 24, 12, 28)}
# The k, of eight, that a vector of planes has in its four bytes: of even vectors, and of odd ones.
_VECTOR_BYTES = ((0, 4, 1, 5), (2, 6, 3, 7))
FLOAT4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True, slots=True)
class UnpackedMatrix:
    """float32 `[out, in]`, and float32 `[out]` where there are biases; filled by `unpack_panels`."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def unpack_panels(panels: PanelFormat, packed: torch.Tensor, rows: int) -> UnpackedMatrix:
    """Returns the first `rows` output features of uint8 `[panels, panel_bytes]`, contiguous."""
    weights = _grid_values(panels, packed) if panels.is_grid else _code_values(panels, _codes(panels, packed))
    count = packed.shape[0]
    group = torch.arange(panels.k, device=packed.device) // max(panels.group_size, 1)
    if panels.zeros:
        zeros = packed[:, panels.zeros_offset : panels.zeros_offset + panels.groups * PANEL_COLUMNS]
        weights -= zeros.reshape(count, panels.groups, PANEL_COLUMNS)[:, group].float()
    elif panels.code in CODE_MIDDLES and not panels.mins:
        weights -= CODE_MIDDLES[panels.code]
    if panels.scale:
        weights *= _group_values(panels, packed, panels.scales_offset)[:, group]
    if panels.mins:
        weights += _group_values(panels, packed, panels.mins_offset)[:, group]
    floats = views(packed, panels)
    if panels.column_scale:
        weights *= _columns(floats, count, panels.column_scale_offset)[:, None]
    matrix = weights.permute(0, 2, 1).reshape(count * PANEL_COLUMNS, panels.k)[:rows].contiguous()
    bias = _columns(floats, count, panels.bias_offset).reshape(-1)[:rows] if panels.has_bias else None
    return UnpackedMatrix(matrix, bias)


def _group_values(panels: PanelFormat, packed: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns scales or mins, float32 `[panels, groups, 16]`, or `[panels, groups, 1]` of whole panels."""
    count, columns = packed.shape[0], 1 if panels.panel_scale else PANEL_COLUMNS
    groups = panels.groups
    typed = views(packed, panels).scales.view(count, -1)
    begin = offset * typed.shape[1] // packed.shape[1]
    if panels.scale == "products":
        factors = packed[:, offset : offset + -(-groups // panels.factor_groups) * 32].contiguous()
        if panels.whole_low_bits:
            whole = _scale_fields(panels, packed, offset + panels.whole_offset, panels.whole_low_bits)
            if panels.whole_high_bits:
                begin = offset + panels.whole_high_offset
                high = _scale_fields(panels, packed, begin, panels.whole_high_bits)
                whole = whole | high << panels.whole_low_bits
            middle = 1 << panels.whole_low_bits + panels.whole_high_bits - 1
            whole = (whole * 2 + 1 if panels.is_grid else whole - middle).float()
        elif panels.is_iq1:
            signs = _iq1_signs(panels, packed)[:, :groups]
            whole = ((signs >> 6 & 3 | signs >> 12 & 4) * 2 + 1).float()
        elif panels.code == "tq1":
            whole = torch.ones(count, groups, PANEL_COLUMNS, device=packed.device)
        elif panels.is_grid:
            whole = ((_grid_words(panels, packed)[:, :groups, -1] >> 28 & 15) * 2 + 1).float()
        else:
            begin = (panels.scales_offset if panels.joined else offset) + panels.whole_offset
            stored = packed[:, begin : begin + groups * PANEL_COLUMNS].contiguous()
            if panels.joined:
                stored = stored >> 4 if offset == panels.mins_offset else stored & 15
            whole = stored.view(torch.int8).float()
        shared = torch.arange(groups, device=packed.device) // panels.factor_groups
        factors = factors.view(torch.float16).float().view(count, -1, PANEL_COLUMNS)[:, shared]
        return factors * whole.view(count, -1, PANEL_COLUMNS)
    values = typed[:, begin : begin + groups * columns].reshape(count, groups, columns)
    return _scale_values(panels, values)


def _scale_fields(panels: PanelFormat, packed: torch.Tensor, begin: int, bits: int) -> torch.Tensor:
    """Returns `bits` of each group's bytes from `begin` on, int32 `[panels, groups, 16]`."""
    rows = -(-panels.groups * bits // 8)
    held = packed[:, begin : begin + rows * PANEL_COLUMNS].reshape(-1, rows, 1, PANEL_COLUMNS).int()
    places = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)[:, None]
    return (held >> places & ((1 << bits) - 1)).flatten(1, 2)[:, : panels.groups]


def _columns(typed: PanelViews, count: int, offset: int) -> torch.Tensor:
    """Returns float32 `[panels, 16]` at a byte offset."""
    return typed.floats.view(count, -1)[:, offset // 4 : offset // 4 + PANEL_COLUMNS]


def _grid_words(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """Returns the words of each 32 k, int32 `[panels, 32 k's, lines, 16]`."""
    words = packed[:, : panels.scales_offset].contiguous().view(torch.int32)
    return words.view(packed.shape[0], -1, panels.bits, PANEL_COLUMNS)


def _iq1_signs(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """Returns what a section of signs has for each 32 k, int32 `[panels, 32 k's, 16]`."""
    end = panels.signs_offset + panels.k_padded // 32 * PANEL_COLUMNS * 2
    halves = packed[:, panels.signs_offset : end].contiguous().view(torch.int16).int() & 0xFFFF
    return halves.view(packed.shape[0], -1, PANEL_COLUMNS)


def _iq1_values(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """`_grid_values` of rows that are an eighth more or less."""
    words, signs = _grid_words(panels, packed)[:, :, 0], _iq1_signs(panels, packed)
    numbers, less = [], []
    for i in range(4):
        both, byte = words >> (i // 2 * 16), signs >> (i // 2 * 8)
        numbers.append(both & 2047 if i % 2 == 0 else both >> 11 & 31 | (byte & 63) << 5)
        less.append((signs >> 15 if panels.code == "iq1_s" else byte >> (6 + i % 2)) & 1)
    table = torch.from_numpy(grid(panels.code).view(np.int8)).to(packed.device).float()
    values = table[torch.stack(numbers, 2)] + 1 - 2 * torch.stack(less, 2).unsqueeze(-1)
    values = values.movedim(-1, -2).reshape(packed.shape[0], panels.k_padded, PANEL_COLUMNS)
    return (values * panels.grid_unit)[:, : panels.k].contiguous()


def _digit_values(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """`_grid_values` of digits to the base of 3."""
    words, halves = _grid_words(panels, packed)[:, :, 0], _iq1_signs(panels, packed)
    begin = panels.signs_offset + panels.k_padded
    bits = packed[:, begin : begin + panels.k_padded // 64 * PANEL_COLUMNS]
    bits = bits.view(packed.shape[0], -1, 1, PANEL_COLUMNS).int()
    bits = torch.cat([bits, bits >> 4], 2).flatten(1, 2)
    held = [(words >> byte * 8) * power for power in (1, 3, 9, 27, 81) for byte in range(4)]
    held += [(halves >> byte * 8) * power for power in (1, 3, 9, 27, 81) for byte in range(2)]
    held += [bits << 6, (bits & 12) << 4]
    bytes_ = torch.stack(held, 2).to(torch.int8).reshape(packed.shape[0], panels.k_padded, PANEL_COLUMNS)
    return ((bytes_ > 42).float() - (bytes_ < -42).float())[:, : panels.k].contiguous()


def _grid_values(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """Returns rows of the grid with their signs, float32 `[panels, k, 16]`."""
    if panels.is_iq1:
        return _iq1_values(panels, packed)
    if panels.code == "tq1":
        return _digit_values(panels, packed)
    words = _grid_words(panels, packed)
    shape = packed.shape[0], panels.k_padded, PANEL_COLUMNS

    def fields(of: torch.Tensor, width: int, places: tuple[int, ...]) -> torch.Tensor:
        """Returns fields of words `[..., 16]`, as the last axis but one."""
        at = torch.tensor(places, dtype=torch.int32, device=packed.device)
        return of.unsqueeze(-2) >> at[:, None] & ((1 << width) - 1)

    bytes_, sevens = (0, 8, 16, 24), (0, 7, 14, 21)
    if panels.code in ("iq3_xxs", "iq2_xxs"):
        numbers = fields(words[:, :, :-1], 8, bytes_)
        signs = fields(fields(words[:, :, -1], 7, sevens), 1, tuple(range(7)))
    elif panels.code == "iq2_xs":
        numbers = fields(words, 9, (0, 16))
        signs = fields(fields(words, 7, (9, 25)), 1, tuple(range(7)))
    else:
        begin = panels.signs_offset
        more = packed[:, begin : begin + panels.k_padded // 32 * PANEL_COLUMNS]
        more = more.view(packed.shape[0], -1, PANEL_COLUMNS).int()
        if panels.code == "iq2_s":
            numbers = fields(words, 10, (0, 16))
            six = fields(words, 6, (10, 26)).flatten(2, 3)
            signs = fields(six | fields(more, 2, (0, 2, 4, 6)) << 6, 1, tuple(range(8)))
        else:
            own, shared = words[:, :, ::2], words[:, :, 1]
            fourth = fields(shared, 9, (0, 23)).unsqueeze(-2)
            numbers = torch.cat([fields(own, 9, (0, 10, 23)), fourth], -2)
            signs = fields(more, 4, (0, 4)) | fields(shared, 7, (9, 16)) << 4
            signs = signs | (own >> 19 & 15) << 11 | (own >> 9 & 1) << 15
            signs = fields(signs, 1, tuple(range(16)))
    if panels.code in ("iq3_xxs", "iq2_xxs", "iq2_xs"):
        signs = torch.cat([signs, signs.sum(-2, keepdim=True) % 2], -2)
    table = torch.from_numpy(grid(panels.code)).to(packed.device).float() * panels.grid_unit
    values = table[numbers].movedim(-1, -2).reshape(shape)
    return torch.where(signs.reshape(shape) == 1, -values, values)[:, : panels.k].contiguous()


def _codes(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """Returns the elements' bits, int32 `[panels, k, 16]`."""
    if panels.bits not in WORD_SHIFTS:
        return _plane_codes(panels, packed)
    shifts = torch.tensor(WORD_SHIFTS[panels.bits], dtype=torch.int32, device=packed.device)
    words = packed[:, : panels.scales_offset].contiguous().view(torch.int32)
    lines = words.view(packed.shape[0], -1, 1, PANEL_COLUMNS)
    codes = lines >> shifts[None, None, :, None]
    if panels.bits < 32:
        codes &= (1 << panels.bits) - 1
    return codes.reshape(packed.shape[0], panels.k_padded, PANEL_COLUMNS)[:, : panels.k].contiguous()


def _plane_codes(panels: PanelFormat, packed: torch.Tensor) -> torch.Tensor:
    """`_codes` of elements of 2, 3, 5 and 6 bits."""
    count, low = packed.shape[0], 2 if panels.bits < 4 else 4
    lines = packed[:, : panels.scales_offset].reshape(count, -1, panels.bits, 64).int()

    def plane(begin: int, width: int) -> torch.Tensor:
        places = torch.arange(0, 8, width, dtype=torch.int32, device=packed.device)[:, None]
        fields = lines[:, :, begin : begin + width, None] >> places & ((1 << width) - 1)
        return fields.view(count, -1, 4, 2, PANEL_COLUMNS, 4)

    vectors = plane(0, low)
    if panels.bits > low:
        vectors |= plane(low, panels.bits - low) << low
    codes = torch.empty_like(vectors).view(count, -1, 4, 8, PANEL_COLUMNS)
    for vector, places in enumerate(_VECTOR_BYTES):
        codes[:, :, :, list(places)] = vectors[:, :, :, vector].movedim(-1, 3)
    return codes.reshape(count, panels.k_padded, PANEL_COLUMNS)[:, : panels.k].contiguous()


def _code_values(panels: PanelFormat, codes: torch.Tensor) -> torch.Tensor:
    """Returns float32 of the same shape."""
    match panels.code:
        case "float32":
            return codes.view(torch.float32).clone()
        case "bfloat16":
            return (codes << 16).view(torch.float32)
        case "float16":
            return codes.to(torch.int16).view(torch.float16).float()
        case "float8":
            return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        case "int8":
            return codes.to(torch.int8).float()
        case "int2" | "int3" | "int4" | "int5" | "int6":
            return codes.float()
        case "iq4":
            return torch.tensor(CODEBOOKS[panels.code], dtype=torch.float32, device=codes.device)[codes]
        case "float4":
            return torch.tensor(FLOAT4_VALUES, dtype=torch.float32, device=codes.device)[codes]
    raise ValueError(f"weights of type {panels.code} cannot be unpacked")


def _scale_values(panels: PanelFormat, scales: torch.Tensor) -> torch.Tensor:
    match panels.scale:
        case "e8m0":
            powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
            return torch.where(scales == 255, torch.nan, powers)
        case "e4m3":
            return scales.view(torch.float8_e4m3fn).float()
    return scales.float()
