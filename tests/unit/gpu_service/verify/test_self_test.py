"""Guards the self-test before serving: right experts pass, one wrong matrix is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.client import ExpertClient, ExpertComputeFailed, ExpertUnavailable, Ticket
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.make import make_resident_experts
from gpu_service.verify.errors import ROWS, allowed_error
from gpu_service.verify.probe import spread
from gpu_service.verify.self_test import ExpertsUnderTest, SelfTestFailed, run_self_test
from moebius.config import ExpertConfig, ModelConfigSection, MoebiusConfig, PlacementConfig
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe

MODEL = TinyMoe(num_layers=4)
WRONG = "model.layers.3.mlp.experts.6.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the checkpoint."""
    return MODEL.write(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, as a loader would have it that takes the halves of one matrix for one another."""
    matrix = MODEL.tensors()[WRONG]
    return MODEL.write(tmp_path_factory.mktemp("bad"), {WRONG: np.roll(matrix, len(matrix) // 2, axis=0)})


def settings(model: Path, placement: dict[str, Any] | None = None, **experts: Any) -> MoebiusConfig:
    """Returns the experts in process unless said otherwise."""
    return MoebiusConfig(
        model=ModelConfigSection(model=str(model)),
        experts=ExpertConfig(**({"expert_transport": "local"} | experts)),
        placement=PlacementConfig(**(placement or {})),
    )


def under_test(
    loaded: Path,
    experts: ExpertClient | None = None,
    placed: MoebiusConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> ExpertsUnderTest:
    """Returns what an engine has that loaded its experts from `loaded`; `placed` says which are on its
    device.
    """
    geometry = read_geometry(loaded)
    client = experts or LocalExpertClient(str(loaded), geometry, dtype)
    stream = HostDeviceStream()
    resident = None
    if placed is not None:
        resident = make_resident_experts(placed, geometry, stream.device, dtype)
    return ExpertsUnderTest(geometry, geometry.moe_layers, client, resident, stream, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_experts_pass(good: Path, dtype: torch.dtype) -> None:
    """First and last layer, first and last expert among them; on the device and in servers."""
    config = settings(good, {"gpu_experts": 3})
    report = run_self_test(config, under_test(good, placed=config, dtype=dtype))
    assert report is not None
    assert sorted(report.worst_by_layer) == [0, 2, 3]
    assert max(report.worst_by_layer.values()) < ROWS["float32" if dtype == torch.float32 else "bfloat16"]
    alone = {(one.layer, one.experts[0]) for one in report.errors if len(one.experts) == 1}
    assert {(0, 0), (0, 6), (3, 0), (3, 6)} <= alone
    assert {one.place for one in report.errors if len(one.experts) == 1} == {
        "the engine's own process",
        "the engine's device",
    }


def test_a_wrong_slice_is_refused_by_name(good: Path, bad: Path) -> None:
    """Layer, expert, who computed it, error and what is allowed; the right experts are not named."""
    config = settings(good, expert_transport="mailbox", split_count=2, expert_split="expert")
    with pytest.raises(SelfTestFailed) as caught:
        run_self_test(config, under_test(bad))
    message = str(caught.value)
    assert "layer 3, expert 6 on expert server 1: relative error 1" in message
    assert f"allowed {ROWS['float32']:g}" in message
    assert "layer 0" not in message
    assert "expert 0" not in message


def test_servers_that_divide_every_expert_are_all_named(good: Path, bad: Path) -> None:
    """With the intermediate channels divided either may be wrong."""
    addresses = ("unix:/a", "unix:/b")
    config = settings(good, expert_transport="grpc", split_count=2, expert_addresses=addresses)
    with pytest.raises(SelfTestFailed, match=r"expert servers 0 \(unix:/a\), 1 \(unix:/b\), each of which"):
        run_self_test(config, under_test(bad))


def test_a_wrong_expert_on_the_device_is_refused(good: Path, bad: Path) -> None:
    """What is resident is compared as well as what servers hold."""
    good_client = LocalExpertClient(str(good), read_geometry(good), torch.float32)
    placed = settings(bad, {"gpu_layers": "3"})
    with pytest.raises(SelfTestFailed, match=r"layer 3, expert 6 on the engine's device"):
        run_self_test(settings(good), under_test(bad, good_client, placed))


def test_settings_bound_or_end_it(good: Path, bad: Path) -> None:
    """One expert of one layer reads just that; none switches it off, whatever is loaded."""
    report = run_self_test(settings(good, self_test_layers=1, self_test_experts=1), under_test(bad))
    assert report is not None
    assert {(one.layer, one.experts) for one in report.errors} == {(0, (0,))}
    assert run_self_test(settings(good, self_test_layers=0), under_test(bad)) is None


class _Lost(LocalExpertClient):
    """Loses its server once, or refuses every request."""

    failure_once: Exception | None = None
    recoveries = 0

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Raises what it was given."""
        if self.failure_once is not None:
            raise self.failure_once
        return super().collect(ticket, partial)

    def recover(self, timeout_s: float) -> None:
        """The server is back."""
        self.recoveries += 1
        self.failure_once = None


def test_a_server_lost_meanwhile_is_waited_for(good: Path) -> None:
    """The step is run again once it is back; what a server refuses is not tried again."""
    client = _Lost(str(good), read_geometry(good), torch.float32)
    client.failure_once = ExpertUnavailable(0, "gone")
    report = run_self_test(settings(good), under_test(good, client))
    assert report is not None
    assert client.recoveries == 1
    client.failure_once = ExpertComputeFailed("expert server 0: no such layer")
    with pytest.raises(SelfTestFailed, match="no such layer"):
        run_self_test(settings(good), under_test(good, client))
    assert client.recoveries == 1


def test_requantised_experts_pass_within_their_format(good: Path) -> None:
    """int4 is far from exact and accepted as int4; the same answers are refused as unrounded ones."""
    geometry = read_geometry(good)
    client = LocalExpertClient(str(good), geometry, torch.float32, "int4")
    report = run_self_test(settings(good, expert_dtype="int4"), under_test(good, client))
    assert report is not None
    assert min(report.worst_by_layer.values()) > 0.03
    with pytest.raises(SelfTestFailed, match=r"layer 0, expert 0 .*; and 8 more"):
        run_self_test(settings(good), under_test(good, client))


def test_what_is_allowed_follows_the_format() -> None:
    """Coarser weights and rows are allowed more; a wider limit of requantising, too."""
    exact = allowed_error("float32", "keep", ["int4_g32"], 0.15)
    assert exact == allowed_error("float32", "keep", ["float32"], 0.15) == ROWS["float32"]
    assert allowed_error("bfloat16", "keep", ["int8_w8a8"], 0.15) > allowed_error(
        "bfloat16", "keep", ["int8"], 0.15
    )
    of = {kind: allowed_error("bfloat16", kind, ["float32"], 0.01) for kind in ("bfloat16", "int8", "int4")}  # type: ignore[arg-type]
    assert of["bfloat16"] < of["int8"] < of["int4"] < 1
    assert allowed_error("bfloat16", "int8", ["bfloat16"], 0.4) > 2 * 0.4


def test_a_nan_is_refused(good: Path) -> None:
    """NaN is no small error."""
    client = _NanClient(str(good), read_geometry(good), torch.float32)
    with pytest.raises(SelfTestFailed, match="relative error inf"):
        run_self_test(settings(good), under_test(good, client))


class _NanClient(LocalExpertClient):
    """Answers with one NaN."""

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """The first value is none."""
        answer = super().collect(ticket, partial)
        answer[0, 0] = torch.nan
        return answer


def test_a_stage_without_moe_layers_takes_part(good: Path) -> None:
    """Its servers are asked nothing, and it passes."""
    report = run_self_test(settings(good), replace(under_test(good), layers=()))
    assert report is not None
    assert report.errors == ()


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_spread_has_both_ends(count: int) -> None:
    """Evenly spread, ascending, no item twice."""
    found = spread(range(3, 10), count)
    assert len(found) == min(count, 7)
    assert found[0] == 3
    assert count == 1 or found[-1] == 9
    assert list(found) == sorted(set(found))
