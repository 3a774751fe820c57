"""What the engine needs of whatever computes its steps; it knows no device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpu_service.engine.input_builder import StepPlan
from gpu_service.request import TokenLogprobs

Result = TypeVar("Result")


@dataclass(slots=True)
class StepResult:
    """Host values of one step; S = rows that sampled, in the plan's order."""

    token_ids: list[int] = field(default_factory=list)  # [S]
    finite: list[bool] = field(default_factory=list)  # [S]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by sampled row
    # By batch index: position of the first scored token, and the records.
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    num_replays: int = 0
    seconds: float = 0.0


class DeviceLost(RuntimeError):
    """The device can run nothing any more, for this process."""


class Pending(ABC, Generic[Result]):
    """Something launched that has not ended, or has."""

    @abstractmethod
    def wait(self) -> Result:
        """Blocks until it has ended; returns its result or raises its exception."""


class StepRunner(ABC):
    """Runs steps one after another in launch order; later ones see all effects of earlier ones.

    At most two steps are launched and not waited for. A step that fails does not stop later ones: the
    exception is delivered by its `Pending`. After ExpertUnavailable a step, and those launched behind it,
    are run again inside `wait`, so the engine never sees it unless recovery fails. After DeviceLost nothing
    can be launched.
    """

    @abstractmethod
    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Starts a step and returns without waiting for it (or, for the inline twin, when it is done)."""

    @abstractmethod
    def zero_pages(self, pages: list[int]) -> None:
        """Clears pages after the launched steps and before later ones."""

    @property
    def is_recovering(self) -> bool:
        """Whether steps wait for lost expert servers. Any thread may ask."""
        return False

    def interrupt(self) -> None:
        """Steps that wait for lost expert servers fail at once, later ones too. Any thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Finishes what was launched; nothing may be launched afterwards."""
