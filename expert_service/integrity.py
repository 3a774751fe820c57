"""The watch over packed experts: what memory has changed is found, and packed again from the checkpoint.

Experts are compared with the checksums that packing gave them: what a predecessor had packed soon, all once
within the configured time, the chosen ones at once where an output is not finite (see the C++ engine,
kernels/moe/expert_engine.h). Calls that need a damaged expert wait for its repair: none is answered with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog

from expert_service.segment import report_pages
from moebius.experts.slices import REQUANTISED, ExpertSlice, SliceRequest
from moebius.experts.verify_pace import VerifyPace
from moebius.kernels import DamagedExpert, ExpertEngine, SegmentError
from moebius.kernels.source import SourceMatrix
from moebius.models.geometry import MoeGeometry

log = structlog.get_logger(__name__)

# How often it is tried again to repair an expert that could not be: its checkpoint may be there again.
RETRY_S = 10.0

Matrices = tuple[SourceMatrix | None, SourceMatrix, SourceMatrix]


class CheckpointExperts:
    """Reads single experts of a slice once more, long after all were packed."""

    def __init__(self, request: SliceRequest, model: MoeGeometry, part: ExpertSlice) -> None:
        """Reads nothing yet."""
        self._request, self._model, self._part = request, model, part

    @contextmanager
    def read(self, layer: int, expert: int) -> Iterator[Matrices]:
        """Yields gate, up and down, for `ExpertEngine.repair_expert`. Raises CheckpointError or OSError."""
        # Here, because a process that uses what a predecessor has packed is waited for, and needs none of it.
        from moebius.checkpoint.mapped_reader import MappedReader
        from moebius.models.expert_checkpoint import ExpertCheckpoint

        request, part = self._request, self._part
        checkpoint = ExpertCheckpoint.open(request.model_path, self._model, request.expert_checkpoint)
        keeps = REQUANTISED.get(request.weight_dtype) is None
        with MappedReader(None) as reader:
            found = checkpoint.expert(layer, expert)
            yield found.read(reader, part.intermediate_begin, part.intermediate_end, keeps)


class WeightsWatch:
    """A thread that compares checksums and repairs; it ends with the process, or by `stop`."""

    def __init__(
        self,
        engine: ExpertEngine,
        source: CheckpointExperts,
        sizes: Mapping[tuple[int, int], int],
        unchecked: Iterable[tuple[int, int]],
        interval_s: float,
        on_damage: Callable[[], None] = lambda: None,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`sizes`: bytes of every expert held here, by (layer, id); `unchecked`: those a predecessor packed.

        `interval_s`: in which all are compared once; 0: only `unchecked`, and what is suspect. From the
        thread, `on_damage` is called for each damaged expert before it is repaired, `on_problem` with the
        reason when one cannot be, and with "" when all could after all.
        """
        self._engine, self._source, self._sizes = engine, source, sizes
        self._unchecked, self._interval_s = tuple(unchecked), interval_s
        self._on_damage, self._on_problem = on_damage, on_problem
        self._lost: dict[tuple[int, int], str] = {}
        self._retry_at = 0.0
        # Seconds of the latest comparison of all experts; 0: there was none yet.
        self.pass_seconds = 0.0
        # Experts found damaged.
        self.damages = 0
        # Of an expert that cannot be repaired; empty: there is none.
        self.problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-watch", daemon=True)

    def start(self) -> None:
        """Calls that need a damaged expert wait for a repair from now on."""
        self._engine.expect_repairs(True)
        self._thread.start()

    def stop(self) -> None:
        """Lets it end after the expert it is at; does not wait."""
        self._stop.set()
        self._engine.interrupt_damage_wait()

    def _run(self) -> None:
        try:
            if self._unchecked:
                self._compare(self._unchecked, 0.0)
            # Only now: the kernel counts what this process has mapped, of a predecessor's pages what it read.
            report_pages(self._engine)
            while not self._stop.is_set():
                if not self._interval_s:
                    self._attend(self._wake_s)
                elif self._compare(tuple(self._sizes), self._interval_s):
                    self._attend(0.0)
        finally:
            self._engine.expect_repairs(False)

    @property
    def _wake_s(self) -> float:
        return RETRY_S if self._lost else 60.0

    def _compare(self, experts: Sequence[tuple[int, int]], interval_s: float) -> bool:
        """Compares each expert once, evenly over the interval, at a share of the time; False: it was
        stopped.
        """
        pace, damaged = VerifyPace(sum(self._sizes[key] for key in experts), interval_s), 0
        for layer, expert in experts:
            start = time.monotonic()
            damaged += not self._engine.verify_expert(layer, expert)
            if not self._attend(pace.pause_s(self._sizes[layer, expert], time.monotonic() - start)):
                return False
        self.pass_seconds = pace.elapsed_s
        log.info(
            "checksums of packed experts compared",
            experts=len(experts),
            damaged=damaged,
            seconds=round(self.pass_seconds, 3),
        )
        return True

    def _attend(self, seconds: float) -> bool:
        """Repairs what is found meanwhile, by whichever thread; False: the watch is to stop."""
        end = time.monotonic() + seconds
        while not self._stop.is_set():
            found = self._engine.wait_for_damage(min(self._wake_s, max(0.0, end - time.monotonic())))
            if found is not None:
                self.damages += 1
                self._on_damage()
                self._repair(*found)
            elif self._lost and time.monotonic() >= self._retry_at:
                for layer, expert in tuple(self._lost):
                    self._repair(layer, expert)
            elif time.monotonic() >= end:
                return True
        return False

    def _repair(self, layer: int, expert: int) -> None:
        begin = time.monotonic()
        problem = self._repacked(layer, expert)
        if not problem:
            seconds = round(time.monotonic() - begin, 3)
            log.error(
                f"an expert was {self._how} and is packed again",
                layer=layer,
                expert=expert,
                seconds=seconds,
                **self._reading,
            )
            self._lost.pop((layer, expert), None)
        else:
            self._retry_at = time.monotonic() + RETRY_S
            self._engine.give_up_expert(layer, expert, problem)
            if self._lost.get((layer, expert)) != problem:
                log.error(
                    f"an expert is {self._how} and cannot be packed again: what needs it is refused",
                    layer=layer,
                    expert=expert,
                    reason=problem,
                    retry_s=RETRY_S,
                    **self._reading,
                )
            self._lost[layer, expert] = problem
        text = "; ".join(
            f"layer {layer}, expert {expert} is {self._how} and cannot be packed again: {why}"
            for (layer, expert), why in tuple(self._lost.items())[:1]
        )
        if text != self.problem:
            self.problem = text
            self._on_problem(text)

    @property
    def _how(self) -> str:
        return "damaged in memory" if self._engine.cold_slots is None else "damaged on disk or in memory"

    @property
    def _reading(self) -> dict[str, str]:
        """What the disk said last, for the log."""
        return {"reading": self._engine.read_problem} if self._engine.read_problem else {}

    def _repacked(self, layer: int, expert: int) -> str:
        """Returns why it is not; empty: it is."""
        try:
            with self._source.read(layer, expert) as matrices:
                if self._engine.repair_expert(layer, expert, *matrices):
                    return ""
            return "the checkpoint gives other weights than those that were packed: it has changed since"
        except (OSError, ValueError, MemoryError, DamagedExpert, SegmentError) as error:
            return str(error)
