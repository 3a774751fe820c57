"""How the scheduler lets the number of pages change: nothing of it is known here but when it may."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_service.engine.step import Batch
    from gpu_service.scheduler.scheduler import Scheduler


class PageSupply(ABC):
    """Adds pages to the scheduler's pool and withdraws free ones."""

    @abstractmethod
    def before_step(self, scheduler: Scheduler) -> None:
        """Called before a step is planned, and before it is asked whether one can be."""

    @abstractmethod
    def planned(self, batch: Batch) -> None:
        """A step is going to be launched."""

    @abstractmethod
    def ended(self, batch: Batch) -> None:
        """The step has ended and will not be run again."""


class FixedPages(PageSupply):
    """The null object: the pool has all its pages from the start."""

    def before_step(self, scheduler: Scheduler) -> None:
        """Nothing changes."""

    def planned(self, batch: Batch) -> None:
        """Nothing is waited for."""

    def ended(self, batch: Batch) -> None:
        """Nothing is waited for."""
