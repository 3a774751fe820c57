"""Which missing experts of a layer a step copies: the contract of the kernels, and their reference on a host.

A step has `rows` choices of each expert. Of the experts that are in no slot, one after another is given to
the link, the most chosen of late first, as long as the layer is done sooner for it, or later by less than
what later steps save:

    max(server_seconds * pairs left to servers, link_seconds * experts copied)
        - server_seconds * (choices of late of who comes, less those of this step and of who leaves)

What an expert was chosen of late, with a half-life of tokens, it is taken to be chosen again before another
takes its slot. An expert that is copied takes an empty slot, or that of the least chosen of late among those
that the step does not need. It is computed in its slot in this step already, and stays until another takes
the slot.

Tensor-parallel ranks choose for all: each has all places' map and makes the same choice, copies what comes to
its own slots and computes what is in them. Their links copy at once, so the copies that count are those of
the rank with most.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import numpy as np
import torch

from gpu_service.experts.fetching.slots import COPIED, IN_SLOTS, LEFT, FetchLayer

# Tokens after which a choice counts half. Over simulated routing with neighbours that share 45 % of their
# experts, skewed and not, one and eight streams, 16 was within 6 % of the best of 8 and 32 everywhere.
HALF_LIFE_TOKENS = 16.0


def kept_after(rows: int) -> float:
    """Returns the factor by which a score decays in a step of `rows` token rows."""
    return float(0.5 ** (rows / HALF_LIFE_TOKENS))


class FetchKernels(ABC):
    """The kernels of one device.

    Calls only launch work, which graphs may hold; T = token rows, K = experts a row.
    """

    @abstractmethod
    def choose(self, layer: FetchLayer, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Divides int32 `[T, K]` ids that are not resident: those of servers and those in fetch slots.

        Two new tensors like it with -1 where the other has the choice, or another rank's fetch slots.
        `layer.coming` says what `copy` has to bring; maps, scores and counters are those after the step.
        """

    @abstractmethod
    def copy(self, layer: FetchLayer) -> None:
        """Begins to bring what `choose` has chosen, next to what the current stream is given from now on."""

    @abstractmethod
    def join(self) -> None:
        """What the current stream is given from now on follows the copies."""


class TorchFetchKernels(FetchKernels):
    """The reference: the device is the host, which reads every id and copies in place."""

    def choose(self, layer: FetchLayer, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, places = topk_ids.numpy(), layer.places.numpy()
        experts = ids[(ids >= 0) & (ids < layer.num_experts)]
        rows = np.bincount(experts, minlength=layer.num_experts)
        scores = layer.scores.numpy()
        scores[:] = scores * np.float32(kept_after(ids.shape[0])) + rows.astype(np.float32)
        self._give_to_links(layer, rows, scores)
        is_own = (places >= 0) & (places % layer.num_ranks == layer.rank)
        slots = np.where(is_own, places // layer.num_ranks, -1)
        layer.slot_of_expert.numpy()[:] = slots
        held = layer.groups[0].expert_of_slot  # which products on a host look at
        held[:] = [-1] * layer.count
        for expert in np.flatnonzero(is_own).tolist():
            held[slots[expert]] = expert
        is_expert = (ids >= 0) & (ids < layer.num_experts)
        known = np.where(is_expert, ids, 0)
        in_slot, in_own = is_expert & (places[known] >= 0), is_expert & is_own[known]
        layer.counters[IN_SLOTS] += int(in_slot.sum())
        layer.counters[LEFT] += int(rows.sum() - in_slot.sum())
        served = torch.where(torch.from_numpy(in_slot), -1, topk_ids)
        return served, torch.where(torch.from_numpy(in_own), topk_ids, -1)

    def _give_to_links(
        self, layer: FetchLayer, rows: np.ndarray[tuple[int], np.dtype[np.int64]], scores: np.ndarray
    ) -> None:
        places, server_seconds, link_seconds = layer.places.numpy(), *layer.prices.numpy()
        is_missing = (rows > 0) & (places < 0)
        candidates = np.where(is_missing & (layer.addresses[0].numpy() != 0), scores, np.float32(-1))
        leavers = np.where((places >= 0) & (rows == 0), scores, np.float32(np.inf))
        left, coming = np.float32(rows[is_missing].sum()), list[int]()
        now, copied = left * server_seconds, np.zeros(layer.num_ranks, np.float32)
        occupied = int((places >= 0).sum())
        while left > 0:
            best, leaver, has_room = (
                int(candidates.argmax()),
                int(leavers.argmin()),
                occupied < layer.num_places,
            )
            if candidates[best] <= 0 or not (has_room or np.isfinite(leavers[leaver])):
                break
            place = occupied if has_room else int(places[leaver])
            slot, rank = divmod(place, layer.num_ranks)
            copied[rank] += 1
            then = max((left - rows[best]) * server_seconds, copied.max() * link_seconds)
            lost = np.float32(0) if has_room else leavers[leaver]
            gained = max(candidates[best] - np.float32(rows[best]) - lost, np.float32(0))
            if not then < now + gained * server_seconds:
                copied[rank] -= 1
                break
            if has_room:
                occupied += 1
            else:
                places[leaver], leavers[leaver] = -1, np.inf
            places[best], candidates[best] = place, -1
            left, now = np.float32(left - rows[best]), then
            if rank == layer.rank:
                coming += [best, slot]
        layer.coming[0] = len(coming) // 2
        layer.coming[1 : 1 + len(coming)] = torch.tensor(coming, dtype=torch.int32)
        layer.counters[COPIED] += int(copied.sum())

    def copy(self, layer: FetchLayer) -> None:
        count, pairs = int(layer.coming[0]), layer.coming[1:].view(-1, 2).tolist()
        for expert, slot in pairs[:count]:
            for group, slots in enumerate(layer.groups):
                target, source = slots.weights[slot], int(layer.addresses[group, expert])
                ctypes.memmove(target.data_ptr(), source, target.nbytes)

    def join(self) -> None:
        """Copies have ended."""
