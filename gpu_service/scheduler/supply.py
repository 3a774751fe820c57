"""How the scheduler lets the number of pages change: nothing of it is known here but when it may."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from gpu_service.cache.request_cache import RequestCache
from gpu_service.core.request import Request, SchedulerLimits
from gpu_service.core.step import Batch


class Queues(Protocol):
    """What a supply reads of the scheduler."""

    limits: SchedulerLimits
    cache: RequestCache
    next_step: int  # the number of the next batch

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without a slot, in order of seniority."""

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a slot, in order of seniority."""


class PageSupply(ABC):
    """Adds pages to the scheduler's pool and withdraws free ones."""

    @abstractmethod
    def before_step(self, queues: Queues) -> None:
        """Called once before each step that is planned."""

    @abstractmethod
    def planned(self, batch: Batch) -> None:
        """A step is going to be launched."""

    @abstractmethod
    def ended(self, batch: Batch) -> None:
        """The step has ended and will not be run again."""
