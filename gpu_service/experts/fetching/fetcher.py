"""The host's part of fetching: where experts may be copied from, what that costs, and what has happened.

A step's kernels read registered memory by address. So the thread that opens and closes the servers' segments
waits, before it gives any up, until every step that may read them has ended (`withdraw`), and a step that
begins later finds no addresses any more.

With several ranks each has a fetcher, whose device concludes from what all hosts offer (`agreement.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from gpu_service.experts.costs import SHARED_MEMORY, ExpertCosts
from gpu_service.experts.fetching.agreement import FetchAgreement
from gpu_service.experts.fetching.kernels import FetchKernels
from gpu_service.experts.fetching.slots import COPIED, IN_SLOTS, LEFT, FetchState, addresses_of
from gpu_service.experts.fetching.step import FetchedExperts, FetchedStep
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.streamer import ExpertSource, ExpertStreamer

_log = structlog.get_logger(__name__)
# Steps of more token rows fetch nothing: nearly every expert has rows then.
MOST_ROWS = 64
# A copy by kernels beside servers takes so much longer than by the copy engine alone: on one H200 51.5 GB/s
# became 43 while threads read 147 GB/s of the same memory.
BESIDE_SERVERS = 1.2
# How often prices are set and counters read, at most.
_REFRESH_S = 0.1
# Prices that are another by less are left alone.
_NOTABLE = 0.02
# After a find of damage, while servers pack the expert again and compare the others.
_CAREFUL_S = 60.0
# Half-life of the share of pairs in fetch slots that steps are predicted with, pairs.
_SHARE_OVER = 4096.0


@dataclass(frozen=True, slots=True)
class FetchFigures:
    """Since the start, of all layers or of one; filled by `ExpertFetcher`."""

    experts: int  # copied
    nbytes: int
    # Choices of decoding rows that were of no resident expert: in fetch slots, and left to servers.
    in_slots: int
    left: int


class ExpertFetcher:
    """The fetcher of one rank. Driven by the thread that launches steps; `withdraw` and the figures
    by any.
    """

    def __init__(
        self,
        state: FetchState,
        kernels: FetchKernels,
        streamer: ExpertStreamer,
        costs: ExpertCosts,
        agreement: FetchAgreement | None = None,
    ) -> None:
        """`streamer`: whose source has the servers' segments, and whose kernels multiply what is in slots.

        `agreement`: of several ranks.
        """
        self.state = state
        self._agreement = agreement
        # On the host, what the device may copy from now; None: nothing.
        self._offered: torch.Tensor | None = None
        self._kernels, self._streamer = kernels, streamer
        self._device, self._costs = streamer.device, costs
        # Set once there is a client of expert servers; see `ExpertClient.damages`.
        self.damages: Callable[[], int] = int
        self._known_damages, self._careful_until = 0, 0.0
        self._is_distrusted = False
        self._changed = threading.Condition()
        # What addresses on the device are of; whether a step that may use them is being launched; the end of
        # the latest such step.
        self._segments: ExpertSegments | None = None
        self._is_launching = self._is_closed = False
        self._end: Any = None
        self._refreshed, self._was_link_taken = 0.0, False
        self._priced: dict[int, tuple[float, float]] = {}
        self._totals: list[list[int]] = [[0] * state.counters.shape[1] for _ in state.layers]
        self._on_the_way: tuple[torch.Tensor, Any] | None = None
        # Where the last counters came, which the next ones may take.
        self._place: torch.Tensor | None = None
        # Decayed sums of pairs that were not resident, and of those in fetch slots.
        self._recent = 0.0, 0.0

    @property
    def layers_side(self) -> FetchedExperts:
        """Returns what a captured graph holds of every step."""
        return FetchedExperts(self.state.layers, self._kernels, self._streamer.kernels, self._agreement)

    def begin(self) -> FetchedStep:
        """Begins a step of decoding rows before it is launched; its `launched` has to follow.

        Waits for nothing.
        """
        now = time.monotonic()
        damages = self.damages()
        if damages != self._known_damages:
            self._known_damages, self._careful_until = damages, now + _CAREFUL_S
            self.distrust()
        with self._changed:
            if self._is_launching:  # of a step whose launch failed half-way
                self._note_end()
            source = self._streamer.source if now >= self._careful_until else None
            segments = None if source is None else source.segments()
            if segments is not self._segments or self._is_distrusted:
                self._use(segments, source)
                self._is_distrusted = False
            self._is_launching = segments is not None
        # Beside a lane's copies others take twice as long, and so does the lane for them.
        is_link_taken = self._streamer.has_lane_step
        if now - self._refreshed >= _REFRESH_S or is_link_taken != self._was_link_taken:
            self._refreshed, self._was_link_taken = now, is_link_taken
            self._count()
            self._set_prices(None if is_link_taken else segments)
        products, agreement = self._streamer.kernels, self._agreement
        is_any = bool if agreement is None else self._streamer.is_any
        parts = self.state.layers, self._kernels, products
        return FetchedStep(*parts, segments, self._launched, agreement, is_any)

    def distrust(self) -> None:
        """What is in fetch slots may be damaged: no later step uses it. Only by the thread that launches."""
        self._is_distrusted = True

    def withdraw(self) -> None:
        """Returns when no step reads the segments any more; to be called once they are not given out."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._is_launching)
            end = self._end
        if end is not None:
            self._device.wait(end)

    def close(self) -> None:
        """Steps must have ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def share(self) -> float:
        """The share in fetch slots of the latest decoding rows' choices that were not resident."""
        pairs, in_slots = self._recent
        return in_slots / pairs if pairs else 0.0

    @property
    def figures(self) -> FetchFigures:
        """The figures of all layers."""
        found = self.by_layer.values()
        return FetchFigures(
            sum(layer.experts for layer in found),
            sum(layer.nbytes for layer in found),
            sum(layer.in_slots for layer in found),
            sum(layer.left for layer in found),
        )

    @property
    def by_layer(self) -> dict[int, FetchFigures]:
        """The figures of each layer with fetch slots, as of about a tenth of a second ago."""
        each, totals = self.state.expert_bytes, self._totals
        return {
            layer: FetchFigures(counts[COPIED], counts[COPIED] * each[layer], counts[IN_SLOTS], counts[LEFT])
            for layer, counts in zip(self.state.layers, totals, strict=True)
        }

    def _launched(self) -> None:
        with self._changed:
            if self._is_launching:
                self._note_end()

    def _note_end(self) -> None:
        self._end, self._is_launching = self._device.record_read(), False
        self._changed.notify_all()

    def _use(self, segments: ExpertSegments | None, source: ExpertSource | None) -> None:
        """Later steps copy from these; what was copied from others is forgotten."""
        state, rows = self.state, []
        for layer, slots in state.layers.items():
            stored = []
            if segments is not None and source is not None:
                stored = [(part, source.address(segments, part)) for part in segments.stored[layer]]
            found = addresses_of([group.kind for group in slots.groups], stored, slots.num_experts)
            unused = state.addresses.shape[1] - len(found)
            rows.append(found + [[0] * slots.num_experts] * unused)
        addresses = torch.tensor(rows, dtype=torch.int64)
        state.addresses.copy_(self._device.upload(addresses))
        self._segments, self._refreshed = segments, 0.0
        self._offered = None if segments is None else addresses
        if self._agreement is None:
            state.forget()
        else:
            self._offer(self._agreement, is_changed=True)
        if segments is not None:
            _log.info("decode steps may fetch experts", experts=int((addresses[:, 0] != 0).sum()))

    def _set_prices(self, segments: ExpertSegments | None) -> None:
        """Sets the prices of copies from these segments; None: nothing is worth a copy now."""
        server, link = self._costs.figures.cpu_expert_seconds, self._costs.link
        prices = dict.fromkeys(self.state.layers, (0.0, 0.0))
        if segments is not None and server is not None:
            # Servers are slower while the link reads the same memory.
            sizes = self.state.expert_bytes.items()
            prices = {
                layer: (SHARED_MEMORY * server, BESIDE_SERVERS * nbytes / link) for layer, nbytes in sizes
            }
        if all(_is_near(prices[layer], self._priced.get(layer)) for layer in prices):
            return
        self._priced = prices
        if self._agreement is None:
            values = torch.tensor([prices[layer] for layer in self.state.layers], dtype=torch.float32)
            self.state.prices.copy_(self._device.upload(values))
        else:
            self._offer(self._agreement, is_changed=False)

    def _offer(self, agreement: FetchAgreement, is_changed: bool) -> None:
        """Gives the next step's exchange this rank's row."""
        prices = [self._priced.get(layer, (0.0, 0.0)) for layer in self.state.layers]
        row = agreement.values(prices, self._offered, is_changed)
        agreement.row.copy_(self._device.upload(row))

    def _count(self) -> None:
        """Takes the counters that were asked for last time, and asks for the next."""
        if self._on_the_way is not None:
            if not self._device.has_ended(self._on_the_way[1]):
                return
            totals = self._on_the_way[0].tolist()
            in_slots, left = (
                sum(new[column] - old[column] for new, old in zip(totals, self._totals, strict=True))
                for column in (IN_SLOTS, LEFT)
            )
            self._totals = totals
            kept = 0.5 ** ((in_slots + left) / _SHARE_OVER)
            pairs, hits = self._recent
            self._recent = kept * pairs + in_slots + left, kept * hits + in_slots
        # A copy: where the host is the device it would go on counting.
        self._place = self._device.download(self.state.counters.clone(), self._place)
        self._on_the_way = self._place, self._device.record_read()


def _is_near(prices: tuple[float, float], before: tuple[float, float] | None) -> bool:
    if before is None:
        return False
    return all(abs(new - old) <= _NOTABLE * old for new, old in zip(prices, before, strict=True))
