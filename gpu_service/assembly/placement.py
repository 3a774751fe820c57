"""The placement of experts that follows traffic: whether there is one, and what it begins with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

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
    """Returns whether residents may change by the settings: expert servers hold them, too, and no rank has to
    agree.
    """
    placement = config.placement
    is_adaptive = placement.placement_strategy == "adaptive" and keeps_residents(placement)
    # An engine on a CPU has nothing to gain; it does so where it is asked to, as tests do.
    is_worth_it = device.type == "cuda" or placement.drop_resident == "keep"
    return is_adaptive and is_worth_it and group.parallel.tp_size == 1


def routing_record(
    config: MoebiusConfig, moe: RankMoe | None, group: RankGroup, device: torch.device, fingerprint: str
) -> RoutingRecord | None:
    """Where this checkpoint's routing is kept, by `EngineIdentity.experts`; None: the placement does not
    follow it.
    """
    if moe is None or not follows_traffic(config, group, device):
        return None
    return RoutingRecord(moe.geometry, fingerprint)


def known_routing(config: MoebiusConfig, moe: RankMoe, record: RoutingRecord | None) -> Known:
    """Returns the counts by layer: of the file that the settings name, else of this model's last run; empty:
    none.
    """
    if record is None:
        return {}
    named = recorded_counts(config.placement, moe.geometry)
    return record.read() if named is None else named


def make_adaptive(
    moe: RankMoe | None,
    resident: ResidentExperts | None,
    streamer: ExpertStreamer | None,
    record: RoutingRecord | None,
    known: Known,
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
    exchanges = SlotExchanges(resident, device, streamer, moe.costs.copied)
    return AdaptivePlacement(
        resident,
        counts,
        exchanges,
        moe.costs,
        before,
        lambda found: record.write(layers, found),
        make_supply(resident, exchanges, device),
    )
