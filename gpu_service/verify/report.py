"""What the self-test of experts found, and how it refuses to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_service.verify.probe import Probe
from moebius.errors import UserError

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
    # As `Probe.errors` orders them.
    errors: tuple[ExpertError, ...]


@dataclass(frozen=True)
class SelfTestReport:
    """What was measured; filled by `run_self_test`."""

    layers: tuple[ProbedLayer, ...]
    seconds: float

    @property
    def errors(self) -> tuple[ExpertError, ...]:
        """Of all layers."""
        return tuple(error for layer in self.layers for error in layer.errors)

    @property
    def worst_by_layer(self) -> dict[int, float]:
        """The largest relative error of each layer that was looked at."""
        worst: dict[int, float] = {}
        for found in self.errors:
            worst[found.layer] = max(worst.get(found.layer, 0.0), found.error)
        return worst


def to_name(wrong: Sequence[ExpertError]) -> list[ExpertError]:
    """Those an error lists: a single expert says more than several together, which are wrong with it."""
    return ([one for one in wrong if len(one.experts) == 1] or list(wrong))[:_MAX_LISTED]


def refusal(named: Sequence[ExpertError], count: int) -> str:
    """Of `count` wrong answers those that `to_name` chose."""
    listed = "; ".join(map(str, named))
    more = f"; and {count - len(named)} more" if count > len(named) else ""
    return (
        "self-test: experts do not compute what the checkpoint's weights give in float32, so nothing is "
        f"served: {listed}{more}. If the model is meant to be like this, --self-test-layers 0 switches the "
        "test off"
    )
