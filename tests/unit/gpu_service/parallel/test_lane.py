"""Guards that a step of the prefill lane and one of the main lane never use one communicator."""

from __future__ import annotations

import torch

from gpu_service.core.parallel import SoloCollectives
from gpu_service.device.stream import HostDeviceStream
from gpu_service.parallel.collectives import LaneCollectives


class Noted(SoloCollectives):
    """Notes what it is asked."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._seen.append(self._name)
        return tensor


def test_each_stream_has_collectives_of_its_own() -> None:
    """Those of the lane's stream only within it, not in a turn of the main lane between two layers, nor
    before there is a lane.
    """
    seen: list[str] = []
    main, lane = HostDeviceStream(), HostDeviceStream()
    collectives, tensor = LaneCollectives(Noted("main", seen), Noted("lane", seen)), torch.zeros(1)
    with lane.active():
        collectives.all_reduce(tensor)
    collectives.is_lane = lambda: lane.is_current
    with lane.active():
        collectives.all_reduce(tensor)
        with main.active():
            collectives.all_reduce(tensor)
        collectives.all_reduce(tensor)
    collectives.all_reduce(tensor)
    assert seen == ["main", "lane", "main", "lane", "main"]
