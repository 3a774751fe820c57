"""Time to first token and inter-token latency of a sweep as one SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

import numpy as np

from moebius.errors import UserError

_WIDTH, _HEIGHT, _MARGIN_LEFT, _MARGIN_TOP, _MARGIN_BOTTOM, _GAP = 420, 260, 60, 36, 44, 24
_COLOURS = ("#1f6fb4", "#d1603d", "#2f8f5b", "#8a5bb0", "#b8860b", "#5b6b7b", "#c2457d", "#3aa6a6")
_SHOWN = (("ttft", "Time to first token"), ("itl", "Inter-token latency"))


class PlottedRow(Protocol):
    """What is read of a row."""

    @property
    def name(self) -> str:
        """Stands in the legend."""

    def values(self, latency: str) -> list[float]:
        """Returns milliseconds."""


@dataclass(frozen=True)
class _Line:
    """One line of a panel; filled by the functions below."""

    name: str
    points: list[tuple[float, float]]


def write_plot(rows: Sequence[PlottedRow], path: Path) -> None:
    """Two panels of cumulative distributions, a line per row; with several rows two of percentiles by row.

    Raises UserError when the file cannot be written.
    """
    try:
        path.write_text(plot(rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--plot {path}: {error.strerror}") from None


def plot(rows: Sequence[PlottedRow]) -> str:
    """Returns the SVG document."""
    panels = [_distribution(rows, latency, title, column) for column, (latency, title) in enumerate(_SHOWN)]
    lines = 1
    if len(rows) > 1:
        lines = 2
        panels += [_by_row(rows, latency, title, column) for column, (latency, title) in enumerate(_SHOWN)]
    legend_top = lines * (_HEIGHT + _GAP)
    legend = [
        f'<g transform="translate({_MARGIN_LEFT},{legend_top + 18 * index})">'
        f'<rect width="14" height="4" y="-4" fill="{_colour(index)}"/>'
        f'<text x="22">{escape(row.name)}</text></g>'
        for index, row in enumerate(rows)
    ]
    width, height = 2 * (_WIDTH + _GAP), legend_top + 18 * len(rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *panels,
            *legend,
            "</svg>\n",
        ]
    )


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _distribution(rows: Sequence[PlottedRow], latency: str, title: str, column: int) -> str:
    """Returns which share of the values is at most x."""
    lines = []
    for row in rows:
        values = np.sort(np.array(row.values(latency)))
        # A few hundred points draw the same line as a million.
        shares = np.linspace(0, 1, min(len(values), 200)) if len(values) else np.array([])
        points = [(float(np.quantile(values, share)), float(share)) for share in shares]
        lines.append(_Line(row.name, points))
    highest = max((x for line in lines for x, _ in line.points), default=1.0)
    return _panel(f"{title}: share of values within", "ms", lines, column, 0, highest, 1.0, None)


def _by_row(rows: Sequence[PlottedRow], latency: str, title: str, column: int) -> str:
    """Returns median and 99th percentile, row after row."""
    lines = []
    for percent in (50, 99):
        found = [(index, row.values(latency)) for index, row in enumerate(rows)]
        points = [(float(index), float(np.percentile(values, percent))) for index, values in found if values]
        lines.append(_Line(f"p{percent}", points))
    highest = max((y for line in lines for _, y in line.points), default=1.0)
    names = [row.name for row in rows]
    return _panel(f"{title}, ms: p50 and p99", "", lines, column, 1, len(rows) - 1.0, highest, names)


def _panel(
    title: str, unit: str, lines: Sequence[_Line], column: int, line_of_panels: int,
    x_most: float, y_most: float, names: Sequence[str] | None,
) -> str:  # fmt: skip
    width, height = _WIDTH - _MARGIN_LEFT, _HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM
    x_top, y_top = x_most or 1.0, y_most or 1.0
    parts = [f'<text y="-14" font-weight="bold">{escape(title)}</text>']
    for value in _ticks(y_top):
        y = height * (1 - value / y_top)
        parts.append(f'<line x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if names is None:
        for value in _ticks(x_top):
            x = width * value / x_top
            parts.append(f'<text x="{x:.1f}" y="{height + 18}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<text x="{width}" y="{height + 36}" text-anchor="end">{escape(unit)}</text>')
    else:
        for index, _ in enumerate(names):
            x = width * index / x_top
            dot = f'<circle cx="{x:.1f}" cy="{height + 14}" r="4" fill="{_colour(index)}"/>'
            parts.append(dot)
    for index, line in enumerate(lines):
        points = " ".join(f"{width * x / x_top:.1f},{height * (1 - y / y_top):.1f}" for x, y in line.points)
        colour = _colour(index) if names is None else "#222"
        dashes = "" if names is None or index == 0 else ' stroke-dasharray="5 4"'
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        )
    parts.append(f'<rect width="{width}" height="{height}" fill="none" stroke="#888"/>')
    left = column * (_WIDTH + _GAP) + _MARGIN_LEFT
    top = line_of_panels * (_HEIGHT + _GAP) + _MARGIN_TOP
    return f'<g transform="translate({left},{top})">{"".join(parts)}</g>'


def _ticks(most: float) -> list[float]:
    """Returns round numbers from 0 to at most `most`, four to eight of them."""
    step = 10.0 ** math.floor(math.log10(most))
    for part in (0.1, 0.2, 0.25, 0.5, 1.0):
        if most / (step * part) <= 6:
            step *= part
            break
    return [round(index * step, 10) for index in range(int(most / step + 1e-9) + 1)]
