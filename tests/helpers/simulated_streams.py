"""A device whose streams run when a test lets them, in any order that events allow, in virtual time."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gpu_service.experts.resident.experts import LayerSlots, ResidentKernels, TorchResidentKernels
from gpu_service.experts.streaming.ring import TransferDevice


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream."""

    is_done: bool = False
    # Virtual seconds.
    time: float = 0.0


@dataclass
class _Stream:
    """Work in the order of launches: an event that is waited for or recorded, or something that is done."""

    work: deque[tuple[str, SimulatedEvent | Callable[[], None], float]] = field(default_factory=deque)
    time: float = 0.0

    @property
    def is_blocked(self) -> bool:
        """Nothing can run: it is empty, or waits for another stream."""
        if not self.work:
            return True
        kind, what, _ = self.work[0]
        return kind == "wait" and isinstance(what, SimulatedEvent) and not what.is_done

    def run_one(self) -> None:
        """The oldest work."""
        kind, what, seconds = self.work.popleft()
        if not isinstance(what, SimulatedEvent):
            self.time += seconds
            what()
        elif kind == "wait":
            self.time = max(self.time, what.time)
        else:
            what.is_done, what.time = True, self.time


class SimulatedDevice(TransferDevice):
    """`current` is the name of the compute stream that launches go to, `copy_stream` that of copies."""

    def __init__(self, rng: random.Random, bytes_per_second: float = 1e9) -> None:
        self.device = torch.device("cpu")
        self.current = "main"
        self.copy_stream = "copy"
        self._rng = rng
        self._rate = bytes_per_second
        self._streams: dict[str, _Stream] = defaultdict(_Stream)

    @property
    def time(self) -> float:
        """When everything that has run had ended."""
        return max((stream.time for stream in self._streams.values()), default=0.0)

    def launch(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """On the current compute stream."""
        self._streams[self.current].work.append(("run", work, seconds))

    def advance(self, count: int) -> None:
        """Runs a number of pieces of work, of whichever streams."""
        for _ in range(count):
            ready = [stream for stream in self._streams.values() if not stream.is_blocked]
            if not ready:
                return
            self._rng.choice(ready).run_one()

    def drain(self) -> None:
        """Runs everything. Fails where streams wait for one another for ever."""
        while any(stream.work for stream in self._streams.values()):
            assert any(not stream.is_blocked for stream in self._streams.values()), "streams are stuck"
            self.advance(1)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        return source

    def download(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        target = torch.full_like(source, -1) if into is None else into.fill_(-1)
        self.launch(lambda: target.copy_(source))  # type: ignore[arg-type]
        return target

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def work() -> None:
            target.copy_(source)

        self._streams[self.copy_stream].work.append(("run", work, target.numel() / self._rate))

    def record_copied(self) -> SimulatedEvent:
        return self._record(self.copy_stream)

    def record_read(self) -> SimulatedEvent:
        return self._record(self.current)

    def copy_waits(self, event: SimulatedEvent) -> None:
        self._streams[self.copy_stream].work.append(("wait", event, 0.0))

    def compute_waits(self, event: SimulatedEvent) -> None:
        self._streams[self.current].work.append(("wait", event, 0.0))

    def has_ended(self, event: SimulatedEvent) -> bool:
        return event.is_done

    def wait(self, event: SimulatedEvent) -> None:
        while not event.is_done:
            self.advance(1)

    def seconds_between(self, begin: SimulatedEvent, end: SimulatedEvent) -> float:
        assert begin.is_done
        assert end.is_done
        return end.time - begin.time

    def _record(self, name: str) -> SimulatedEvent:
        event = SimulatedEvent()
        self._streams[name].work.append(("record", event, 0.0))
        return event


class SimulatedKernels(ResidentKernels):
    """Products that happen when their stream comes to them; `read` is given what they find then."""

    def __init__(
        self,
        device: SimulatedDevice,
        read: Callable[[LayerSlots, torch.Tensor], None],
        seconds: float = 0.0,
    ) -> None:
        self._device = device
        self._read = read
        self._seconds = seconds

    def cpu_ids(
        self, slots: LayerSlots, topk_ids: torch.Tensor, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        return TorchResidentKernels.cpu_ids(self, slots, topk_ids, counts)  # type: ignore[arg-type]

    def forward(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        self._device.launch(lambda: self._read(slots, topk_ids), self._seconds)
        return torch.zeros_like(hidden_states) if partial is None else partial
