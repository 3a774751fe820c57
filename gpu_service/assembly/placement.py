"""The placement of experts that follows traffic: whether there is one, and what it begins with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from gpu_service.experts.adaptive.agreed import AgreedExchanges
from gpu_service.experts.adaptive.counts import RoutingCounts
from gpu_service.experts.adaptive.exchange import SlotExchanges
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.adaptive.record import RoutingRecord
from gpu_service.experts.adaptive.supply import make_supply
from gpu_service.experts.costs import RankMoe
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.experts.streaming.ring import transfer_device
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.parallel.group import RankGroup
from moebius.config import MoebiusConfig
from moebius.experts.placement import keeps_residents, recorded_counts

_log = structlog.get_logger(__name__)
Known = Mapping[int, NDArray[np.int64]]


def follows_traffic(config: MoebiusConfig, group: RankGroup, device: torch.device) -> bool:
    """Returns whether residents may change by the settings: expert servers hold them, too.

    Ranks agree on every change, and so have to be asked for it.
    """
    placement = config.placement
    is_adaptive = placement.placement_strategy == "adaptive" and keeps_residents(placement)
    # An engine on a CPU has nothing to gain, and with ranks it was not measured whether GPUs have; they do so
    # where they are asked to.
    is_usual = device.type == "cuda" and group.parallel.tp_size == 1
    return is_adaptive and (is_usual or placement.drop_resident == "keep")


def routing_record(
    config: MoebiusConfig, moe: RankMoe | None, group: RankGroup, device: torch.device, fingerprint: str
) -> RoutingRecord | None:
    """Where this checkpoint's routing is kept, by `EngineIdentity.experts`; None: the placement does not
    follow it.
    """
    if moe is None or not follows_traffic(config, group, device):
        return None
    return RoutingRecord(moe.geometry, fingerprint)


def known_routing(
    config: MoebiusConfig, moe: RankMoe, record: RoutingRecord | None, group: RankGroup
) -> Known:
    """Returns the counts by layer: of the file that the settings name, else of this model's last run; empty:
    none. The same on all ranks, which call it at once.
    """
    if record is None:
        return {}
    named = recorded_counts(config.placement, moe.geometry)
    found = record.read() if named is None else named
    if group.parallel.tp_size == 1:
        return found
    layers, nothing = moe.geometry.moe_layers, np.zeros(moe.geometry.num_experts, np.int64)
    # Their files may be of different hosts, or written meanwhile.
    counts = torch.from_numpy(np.stack([found.get(layer, nothing) for layer in layers]).astype(np.int64))
    agreed = group.elementwise_largest(counts).numpy()
    return dict(zip(layers, agreed, strict=True)) if agreed.any() else {}


def make_adaptive(
    moe: RankMoe | None,
    resident: ResidentExperts | None,
    streamer: ExpertStreamer | None,
    record: RoutingRecord | None,
    known: Known,
    group: RankGroup,
) -> AdaptivePlacement | None:
    """Makes the placement before graphs are captured, which hold the counting; None: residents stay what they
    are.
    """
    if moe is None or resident is None or record is None:
        return None
    changing = [layer for layer in resident.slots if resident.share(layer) is Share.SOME]
    if not changing:
        return None
    layers, geometry = tuple(resident.slots), moe.geometry
    # What is copied from segments goes through the streamer's copy stream: events have to be of that one.
    own = resident.slots[layers[0]].weights.device
    device = transfer_device(own) if streamer is None else streamer.device
    resident.counts = counts = RoutingCounts(layers, geometry.num_experts, device)
    nothing = np.zeros(geometry.num_experts, np.int64)
    before = np.stack([known.get(layer, nothing) for layer in layers]) if known else None
    _log.info(
        "experts on the GPU follow what requests choose",
        layers=len(changing),
        slots=resident.num_experts,
        begins_with="earlier routing" if known else "an even spread",
    )
    parallel, copied = group.parallel, moe.costs.copied
    if parallel.tp_size == 1:
        exchanges = SlotExchanges(resident, device, streamer, copied)
    else:
        largest = group.elementwise_largest
        exchanges = AgreedExchanges(resident, device, streamer, copied, parallel, largest)
    return AdaptivePlacement(
        resident,
        counts,
        exchanges,
        moe.costs,
        before,
        (lambda found: record.write(layers, found)) if parallel.tp_rank == 0 else (lambda found: None),
        make_supply(resident, exchanges, device),
    )
