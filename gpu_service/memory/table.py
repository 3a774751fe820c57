"""The ledger as people read it."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_service.memory.device_memory import gib
from gpu_service.memory.plan import MemoryPlan


def render(plan: MemoryPlan, measured: Mapping[str, int] | None = None) -> str:
    """A table of planned and, where known, measured GiB per part, its last line the sum."""
    measured = measured or {}
    rows = [("part", "planned GiB", "measured GiB" if measured else "")]
    for line in plan.lines:
        rows.append((line.part, gib(line.nbytes), gib(measured[line.part]) if line.part in measured else ""))
    planned = sum(line.nbytes for line in plan.lines)
    rows.append(("sum", gib(planned), gib(sum(measured.values())) if measured else ""))
    rows.append(("planned with", gib(plan.budget), f"of {gib(plan.total)}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{part:<{widths[0]}}  {first:>{widths[1]}}  {second:>{widths[2]}}".rstrip()
        for part, first, second in rows
    )
