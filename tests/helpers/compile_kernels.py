"""Compiles every Triton kernel for GPU architectures, GPU or not; a program of its own, see `compile_triton`.

python -m tests.helpers.compile_kernels 86 120          a line of JSON for each kernel, a covering set
python -m tests.helpers.compile_kernels --all 86        at the sizes of all published models
python -m tests.helpers.compile_kernels --table FILE... docs/gpu-architectures.md's table of such lines
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.helpers.compile_cases import Case, cases
from tests.helpers.compile_triton import ARCHITECTURES, launches_compile, usage

# Bytes of shared memory from which a kernel is in the table.
_LARGE = 8192


def rows(architecture: int, chosen: list[Case]) -> Iterator[dict[str, Any]]:
    """Yields each kernel once: the case that needed it first, and what it takes; or why a case failed."""
    with launches_compile(architecture) as compiled:
        for case in chosen:
            seen = len(compiled)
            row = {"architecture": architecture, "case": case.name}
            try:
                case.launch()
            except Exception as error:  # a compiler may raise anything, and every case is to be seen
                yield {**row, "error": f"{type(error).__name__}: {str(error)[-500:]}"}
            for kernel in compiled[seen:]:
                registers, stack = usage(kernel)
                yield {
                    **row,
                    "kernel": kernel.metadata.name,
                    "shared": kernel.metadata.shared,
                    "registers": registers,
                    "stack": stack,
                    "warps": kernel.metadata.num_warps,
                    "stages": kernel.metadata.num_stages,
                }


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: of each kernel with a tile in shared memory, the most that any of its variants takes."""
    most: dict[str, dict[int, list[int]]] = {}
    for row in found:
        if "error" not in row:
            cell = most.setdefault(row["kernel"], {}).setdefault(row["architecture"], [0, 0, 0])
            taken = row["shared"], row["registers"], row["stack"]
            cell[:] = [max(pair) for pair in zip(cell, taken, strict=True)]
    yield "| kernel | " + " | ".join(f"sm_{architecture}" for architecture in ARCHITECTURES) + " |"
    yield "|---|" + "---|" * len(ARCHITECTURES)
    for name, by_architecture in sorted(most.items()):
        if max(cell[0] for cell in by_architecture.values()) < _LARGE:
            continue
        cells = (by_architecture.get(architecture) for architecture in ARCHITECTURES)
        written = [f"{c[0] / 1024:.0f} / {c[1]} / {c[2]}" if c else "" for c in cells]
        yield f"| `{name}` | " + " | ".join(written) + " |"


def _zeros(*size: Any, generator: torch.Generator | None = None, **settings: Any) -> torch.Tensor:
    """Takes the place of `torch.randn`."""
    return torch.zeros(*size, **settings)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--table":
        lines = [line for name in arguments[1:] for line in Path(name).read_text().splitlines()]
        print("\n".join(table([json.loads(line) for line in lines])))
        return
    # Nothing is computed: random numbers would take longer than all that was compiled before.
    torch.randn = _zeros
    chosen, failed = list(cases(arguments[0])), False
    for architecture in arguments[1:]:
        for row in rows(int(architecture), chosen):
            print(json.dumps(row), flush=True)
            failed = failed or "error" in row
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
