"""The plan and what each phase really took, as a table and as metrics; watches that nothing follows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog
from prometheus_client import REGISTRY, CollectorRegistry

from gpu_service.memory.device_memory import DeviceMemory, MemoryUse, gib
from gpu_service.memory.plan import ACTIVATIONS, ALLOCATOR_SLACK, CONTEXT, GIB, MemoryPlan
from gpu_service.telemetry.figures import Figure, export_figures
from moebius.errors import UserError


def render(plan: MemoryPlan, measured: Mapping[str, int] | None = None) -> str:
    """Returns a table of planned and, where known, measured GiB per part, its last line the sum."""
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


_log = structlog.get_logger(__name__)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class MemoryLedger:
    """The ledger of one rank's device. `reached` is called after each phase, `seal` before readiness."""

    def __init__(
        self,
        plan: MemoryPlan,
        memory: DeviceMemory,
        before: MemoryUse,
        show: Callable[[str], None] = _to_stderr,
    ) -> None:
        """`before`: the device as `plan_memory` saw it. Prints the plan."""
        self.plan = plan
        self.measured: dict[str, int] = {}
        self._memory = memory
        self._last = before
        self._show = show
        self._sealed: MemoryUse | None = None
        # Times that memory was asked of the device within `later`.
        self._foreseen = 0
        show(f"GPU memory, before loading\n{render(plan)}")

    def reached(self, part: str) -> None:
        """Counts what was allocated since the last call as that of `part`."""
        now = self._memory.use()
        self.measured[part] = self.measured.get(part, 0) + now.allocated - self._last.allocated
        self._last = now
        planned = self.plan.of(part)
        _log.debug(
            "GPU memory",
            part=part,
            gib=round(self.measured[part] / GIB, 3),
            planned_gib=round(planned / GIB, 3),
            free_gib=round(now.free / GIB, 3),
        )

    def activations(self, nbytes: int, part: str = ACTIVATIONS) -> None:
        """Notes what `profile_activations` measured: no tensor of it lives, but its blocks stay reserved."""
        self.measured[part] = nbytes
        self._last = self._memory.use()

    def has_room(self, part: str) -> bool:
        """Returns whether what is planned for a part is free, and as much again as steps may ask for."""
        return self._memory.use().free >= self.plan.of(part) + ALLOCATOR_SLACK

    @contextmanager
    def later(self, part: str) -> Iterator[None]:
        """Counts what is allocated within the context as that of `part`, also after `seal`. No step runs."""
        before = self._memory.use()
        try:
            yield
        finally:
            now = self._memory.use()
            self.measured[part] = self.measured.get(part, 0) + now.allocated - before.allocated
            self._foreseen += now.device_allocations - before.device_allocations

    def seal(self) -> None:
        """Everything that lives as long as the process has been allocated: print what it took.

        More than was planned with is a warning. Raises UserError when so little is free that a step which
        asks for a little more could fail: then requests would, in service.
        """
        now = self._memory.use()
        self.measured[CONTEXT] = max(0, now.outside)
        self._sealed = now
        self._show(f"GPU memory, before serving\n{render(self.plan, self.measured)}")
        used, budget = now.total - now.free, self.plan.budget
        if now.free < ALLOCATOR_SLACK:
            raise UserError(
                f"GPU memory: {gib(now.free)} GiB are free before serving, less than {gib(ALLOCATOR_SLACK)} "
                "GiB; less gpu_memory_utilization, gpu_memory_gib, num_pages or kv_cache_gib leaves room"
            )
        if used > budget:
            _log.warning(
                "more GPU memory is used than was planned with",
                used_gib=gib(used),
                planned_gib=gib(budget),
                free_gib=gib(now.free),
            )

    def late_allocations(self) -> int:
        """Returns how often memory was asked of the device since `seal`, but within `later`: 0 unless a step
        exceeded the plan.
        """
        if self._sealed is None:
            return 0
        return self._memory.device_allocations() - self._sealed.device_allocations - self._foreseen


def export(ledger: MemoryLedger, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
    """Adds the ledger to a registry, in bytes."""

    def figures() -> list[Figure]:
        planned = {line.part: line.nbytes for line in ledger.plan.lines}
        measured = dict(ledger.measured)
        late = "Times memory was asked of the device while serving; 0 unless a step exceeded the plan"
        return [
            Figure(
                "gpu_memory_planned_bytes", "Planned before loading", planned, is_counter=False, by="part"
            ),
            Figure("gpu_memory_bytes", "Measured while loading", measured, is_counter=False, by="part"),
            Figure("gpu_memory_late_allocations", late, ledger.late_allocations(), is_counter=False),
        ]

    export_figures(figures, model_name, registry)
