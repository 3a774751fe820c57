"""Guards how an expert server that is bound to no node places its threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from expert_service import host as host_module
from expert_service.host import place_process
from moebius.config import ExpertConfig


@pytest.mark.parametrize(
    ("cpus", "recommended", "settings", "threads", "pinned"),
    [
        (range(16), 16, {"expert_threads": 15}, 15, tuple(range(15))),
        (range(4, 12), 8, {}, 8, tuple(range(4, 12))),
        # A cgroup's quota, or another server on the same CPUs: the scheduler had better choose.
        (range(16), 4, {}, 4, ()),
        (range(16), 16, {"split_count": 2}, 8, ()),
        # More threads than CPUs, and machines so small that everything has to share.
        (range(4), 4, {"expert_threads": 6}, 6, ()),
        (range(2), 2, {}, 2, ()),
    ],
)
def test_threads_have_a_cpu_each_where_the_server_has_them_to_itself(
    monkeypatch: pytest.MonkeyPatch,
    cpus: range,
    recommended: int,
    settings: dict[str, int],
    threads: int,
    pinned: tuple[int, ...],
) -> None:
    """All but two at most; else threads go where the process may go."""
    topology = SimpleNamespace(
        usable_cpus=lambda: tuple(cpus), recommended_threads=lambda node: recommended, nodes=()
    )
    monkeypatch.setattr(host_module, "Topology", SimpleNamespace(detect=lambda: topology))
    found = place_process(ExpertConfig.model_validate(settings))
    assert (found.numa_node, found.num_threads, found.cpus) == (-1, threads, pinned)
