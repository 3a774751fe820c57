"""Before an engine serves: a few experts of the loaded model against the checkpoint, by the real way.

Rows go to expert servers as those of requests do (`submit`, `collect`), and to experts on the device.
Nothing of it is seen by a recorder, a cache or a sampler. Every rank tests its own layers; ranks of a stage
add up their parts and come to the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.device.stream import DeviceStream
from gpu_service.experts.client import ExpertClient, ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.layers.asked_experts import ask_experts
from gpu_service.verify.errors import allowed_error, rounded_to, rows_dtype
from gpu_service.verify.probe import Probe, make_probe, place_of, shares_experts, spread, wrong_servers
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry

# How many wrong experts an error lists before it only counts the rest.
_MAX_LISTED = 4


class SelfTestFailed(UserError):
    """Loaded experts do not compute what the checkpoint says."""


@dataclass(frozen=True)
class ExpertError:
    """One expert, or several chosen together by the same rows; filled by `run_self_test`."""

    layer: int
    experts: tuple[int, ...]
    # Who computed it, for people.
    place: str
    error: float
    allowed: float

    def __str__(self) -> str:
        names = ", ".join(map(str, self.experts))
        what = f"expert {names}" if len(self.experts) == 1 else f"experts {names} together"
        return (
            f"layer {self.layer}, {what} on {self.place}: relative error {self.error:.3g}, "
            f"allowed {self.allowed:.3g}"
        )


@dataclass(frozen=True)
class ProbedLayer:
    """What a layer's experts were asked, and what they have to answer; filled by `run_self_test`."""

    probe: Probe
    # The reference's answer, float32 `[T, H]` on the CPU: files may be others by the time it is needed again.
    wanted: torch.Tensor
    errors: tuple[ExpertError, ...]  # As `Probe.errors` orders them.


@dataclass(frozen=True)
class SelfTestReport:
    """What was measured; filled by `run_self_test`."""

    layers: tuple[ProbedLayer, ...]
    seconds: float

    @property
    def errors(self) -> tuple[ExpertError, ...]:
        """Every measured error, layer by layer."""
        return tuple(error for layer in self.layers for error in layer.errors)

    @property
    def worst_by_layer(self) -> dict[int, float]:
        """The largest relative error of each layer that was looked at."""
        worst: dict[int, float] = {}
        for found in self.errors:
            worst[found.layer] = max(worst.get(found.layer, 0.0), found.error)
        return worst


def to_name(wrong: Sequence[ExpertError]) -> list[ExpertError]:
    """Returns those an error lists: a single expert says more than several together, which are
    wrong with it.
    """
    return ([one for one in wrong if len(one.experts) == 1] or list(wrong))[:_MAX_LISTED]


def refusal(named: Sequence[ExpertError], count: int) -> str:
    """Returns the message that names, of `count` wrong answers, those that `to_name` chose."""
    listed = "; ".join(map(str, named))
    more = f"; and {count - len(named)} more" if count > len(named) else ""
    return (
        "self-test: experts do not compute what the checkpoint's weights give in float32, so nothing is "
        f"served: {listed}{more}. If the model is meant to be like this, --self-test-layers 0 switches the "
        "test off"
    )


_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ExpertsUnderTest:
    """How this rank reaches its experts; filled by the assembly."""

    geometry: MoeGeometry
    # Decoder layers with routed experts of this rank.
    layers: tuple[int, ...]
    experts: ExpertClient | None
    resident: ResidentExperts | None
    stream: DeviceStream
    dtype: torch.dtype
    parallel: ParallelContext = SOLO

    def compute(
        self, layer: int, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`probe.Compute`: as the MoE block does."""
        asked = ask_experts(layer, hidden_states, ids, weights, self.experts, self.resident)
        return self.parallel.tensor_group.all_reduce(asked.collect(None).to(hidden_states.device))


def run_self_test(config: MoebiusConfig, tested: ExpertsUnderTest) -> SelfTestReport | None:
    """All ranks call it at once, once servers are ready; None: the settings switch it off.

    Raises SelfTestFailed naming layer, expert, server, error and what is allowed; ExpertUnavailable when a
    server that was lost meanwhile does not return in time.
    """
    layers = spread(tested.layers, config.experts.self_test_layers)
    if not config.experts.self_test_layers:
        _log.warning("the self-test of experts is switched off")
        return None
    begin = time.monotonic()
    probes = [_probe(tested, layer, config.experts.self_test_experts) for layer in layers]
    found = _compute(probes, tested, config.experts.expert_recovery_s)
    with torch.inference_mode():
        report = SelfTestReport(tuple(_compare(config, tested, probes, found)), time.monotonic() - begin)
    errors = report.errors
    wrong = [one for one in errors if not one.error <= one.allowed]
    if wrong:
        raise SelfTestFailed(
            refusal([_with_server(config, tested, one) for one in to_name(wrong)], len(wrong))
        )
    _log.info(
        "experts compute what the checkpoint says",
        layers=list(layers),
        tested=len(errors),
        largest_error=float(f"{max((one.error for one in errors), default=0.0):.3g}"),
        allowed=float(f"{min((one.allowed for one in errors), default=0.0):.3g}"),
        seconds=round(report.seconds, 3),
    )
    return report


def check_again(tested: ExpertsUnderTest, report: SelfTestReport) -> str:
    """Returns what of a passed self-test is different now, in words; empty: nothing. All ranks call it at
    once.

    Compares with what was wanted then, not with the files, which may have changed since. One step, so that it
    ends within the deadline of an answer for each layer. Raises ExpertUnavailable when a server is lost.
    """
    try:
        found = _step([layer.probe for layer in report.layers], tested)
    except ExpertComputeFailed as error:
        return str(error)
    wrong = [
        replace(before, error=error)
        for layer, answer in zip(report.layers, found, strict=True)
        for before, (_, error) in zip(layer.errors, layer.probe.errors(answer, layer.wanted), strict=True)
        if not error <= before.allowed
    ]
    return "; ".join(map(str, to_name(wrong)))


def _probe(tested: ExpertsUnderTest, layer: int, count: int) -> Probe:
    """Some experts on the device, where there are any, and some on servers."""
    on_device = () if tested.resident is None else tested.resident.experts(layer)
    served = sorted(set(range(tested.geometry.num_experts)) - set(on_device))
    chosen = (*spread(served, count), *spread(on_device, count))
    return make_probe(layer, chosen, tested.geometry.hidden_size, tested.geometry.top_k, tested.dtype)


def _compute(probes: Sequence[Probe], tested: ExpertsUnderTest, recovery_s: float) -> list[torch.Tensor]:
    """One step; again after a lost server has come back. Ranks begin and repeat it together."""
    deadline = time.monotonic() + recovery_s
    while True:
        try:
            return _step(probes, tested)
        except ExpertComputeFailed as error:
            raise SelfTestFailed(f"self-test: {error}") from error
        except ExpertUnavailable as error:
            # Ranks read different clocks, and go on or give up together.
            if tested.experts is None or tested.experts.agree_on(time.monotonic() >= deadline):
                raise
            _log.warning("expert server lost during the self-test, waiting for it", error=str(error))
            with tested.stream.active():
                tested.experts.recover(max(0.0, deadline - time.monotonic()))


def _step(probes: Sequence[Probe], tested: ExpertsUnderTest) -> list[torch.Tensor]:
    with tested.stream.active(), torch.inference_mode():
        if tested.experts is not None:
            tested.experts.begin_step()
        answers = [probe.run(tested.compute, tested.stream.device) for probe in probes]
        tested.stream.synchronize()
        failure = None if tested.experts is None else tested.experts.failure()
        if failure is not None:
            raise failure
        return [answer.cpu() for answer in answers]


def _with_server(config: MoebiusConfig, tested: ExpertsUnderTest, wrong: ExpertError) -> ExpertError:
    """Returns the same, naming those of several servers whose part of the expert is wrong."""
    expert = wrong.experts[0]
    on_device = () if tested.resident is None else tested.resident.experts(wrong.layer)
    if len(wrong.experts) > 1 or expert in on_device or not shares_experts(config.experts):
        return wrong
    found = wrong_servers(config, tested.geometry, tested.dtype, wrong.layer, expert, wrong.allowed)
    if found is None:
        return wrong
    if not found:
        return replace(wrong, place=f"{wrong.place} (but each alone is right, so the hand-off is wrong)")
    return replace(wrong, place=" and ".join(f"expert server {name}" for name in found))


def _compare(
    config: MoebiusConfig, tested: ExpertsUnderTest, probes: Sequence[Probe], found: Sequence[torch.Tensor]
) -> list[ProbedLayer]:
    reference = LocalExpertClient(
        config.model.model,
        tested.geometry,
        tested.dtype,
        keeps=False,
        expert_checkpoint=config.model.expert_checkpoint,
    )
    rows = rows_dtype(tested.dtype)
    layers = []
    for probe, answer in zip(probes, found, strict=True):
        wanted = reference.collect(
            reference.submit(probe.layer, probe.hidden_states, probe.topk_ids, probe.topk_weights)
        )
        stored = [reference.checkpoint.expert(probe.layer, expert) for expert in probe.experts]
        formats = [name for one in stored for name in one.formats]
        kind = rounded_to(config.experts.expert_dtype, stored)
        allowed = allowed_error(rows, kind, formats, config.experts.max_requantise_error)
        on_device = () if tested.resident is None else tested.resident.experts(probe.layer)
        errors = tuple(
            ExpertError(
                probe.layer, experts, place_of(config, tested.geometry, experts, on_device), error, allowed
            )
            for experts, error in probe.errors(answer, wanted)
        )
        layers.append(ProbedLayer(probe, wanted, errors))
    return layers
