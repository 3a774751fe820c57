"""The notation of layer lists: `0-3,9`."""

from __future__ import annotations

from collections.abc import Sequence

from moebius.errors import UserError


def parse_layers(
    text: str, moe_layers: Sequence[int], num_layers: int, setting: str = "gpu_layers"
) -> tuple[int, ...]:
    """The layers of a list such as `0-1,9`, ascending; empty text: none.

    Raises UserError naming `setting` and what is not a number or a range, not a layer of the model, or a
    layer without experts.
    """
    chosen: set[int] = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise UserError(f"{setting}: {part!r} is not allowed; allowed: layers and ranges, as in 0-1,9")
        begin, end = int(first), int(last) if dash else int(first)
        if end < begin:
            raise UserError(f"{setting}: {part!r} is not allowed; a range begins with its smaller layer")
        if end >= num_layers:
            raise UserError(f"{setting}: layer {end} does not exist; the model has layers 0-{num_layers - 1}")
        chosen.update(range(begin, end + 1))
    without = sorted(chosen - set(moe_layers))
    if without:
        raise UserError(
            f"{setting}: layer {without[0]} has no routed experts; allowed: {format_layers(moe_layers)}"
        )
    return tuple(sorted(chosen))


def format_layers(layers: Sequence[int]) -> str:
    """`0-3,9` for (0, 1, 2, 3, 9); `none` when empty."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"
