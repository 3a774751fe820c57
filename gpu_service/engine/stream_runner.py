"""Steps on a machine without a GPU: the host computes them, on a thread of their own or in place."""

from __future__ import annotations

import time

import structlog
import torch

from gpu_service.engine.input_builder import StepPlan
from gpu_service.engine.model_runner import ModelRunner, launching
from gpu_service.engine.step_outputs import to_result
from gpu_service.engine.step_runner import Pending, StepResult, StepRunner
from gpu_service.engine.stream import Stream
from gpu_service.experts.client import ExpertClient, ExpertUnavailable

_log = structlog.get_logger(__name__)


class StreamRunner(StepRunner):
    """The twin of `DeviceRunner`: expert clients block and raise inside the step."""

    def __init__(self, runner: ModelRunner, stream: Stream, recovery_timeout_s: float = 300.0) -> None:
        self._runner = runner
        self._stream = stream
        self._recovery_timeout_s = recovery_timeout_s
        self._is_recovering = False

    @property
    def is_recovering(self) -> bool:
        """See the base class."""
        return self._is_recovering

    def interrupt(self) -> None:
        """See the base class."""
        if self._runner.experts is not None:
            self._runner.experts.interrupt()

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """See the base class."""
        return self._stream.launch(lambda: self._run(plan))

    def zero_pages(self, pages: list[int]) -> None:
        """See the base class."""
        self._stream.launch(lambda: self._zero_pages(pages))

    def close(self) -> None:
        """See the base class."""
        self._stream.close()

    def _zero_pages(self, pages: list[int]) -> None:
        with torch.inference_mode():
            self._runner.zero_pages(pages)

    def _run(self, plan: StepPlan) -> StepResult:
        """Runs the step; again, to the same KV slots, after a lost expert server came back."""
        started = time.monotonic()
        num_replays = 0
        while True:
            try:
                with launching(plan):
                    result = to_result(plan, self._runner.run(plan))
                break
            except ExpertUnavailable as error:
                # Experts are asked before anything is sampled, so the penalties' counts are untouched.
                remaining = started + self._recovery_timeout_s - time.monotonic()
                if self._runner.experts is None or remaining <= 0:
                    raise
                _log.warning("expert server lost, waiting for it to return", error=str(error))
                self._recover(self._runner.experts, remaining)
                num_replays += 1
                _log.info("expert servers are back, the step is run again")
        result.num_replays = num_replays
        result.seconds = time.monotonic() - started
        return result

    def _recover(self, experts: ExpertClient, timeout_s: float) -> None:
        self._is_recovering = True
        try:
            experts.recover(timeout_s)
        finally:
            self._is_recovering = False
