"""What the engine needs of whatever computes its steps; it knows no device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from gpu_service.engine.results import StepResult
from gpu_service.engine.step import StepPlan

Result = TypeVar("Result")


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
    exception is delivered by its `Pending`. After ExpertUnavailable a step, and those launched after it,
    are run again inside `wait`, so the engine never sees it unless recovery fails. After DeviceLost nothing
    can be launched.
    """

    @abstractmethod
    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Starts a step and returns without waiting for it (or, for `InlineStream`, when it is done)."""

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
