"""What `dense_weights: auto` becomes on GPUs: kept as stored where memory is short, else dequantised.

Kept as they are stored, dense weights leave memory to experts and the KV cache; dequantised, they are faster
in steps of many rows. So they are kept where a plan with dequantised ones would have to leave experts to
servers, or tokens out of the cache (docs/decisions/0074-dense-weights-by-auto-are-decided-by-memory.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from app.planning.capacity import DoesNotFit, Wish
from app.planning.hardware import Hardware
from app.planning.memory import all_resident, chosen_residency, has_placement
from app.planning.stages import lacks_stage_layers, with_stage_layers
from moebius.config import MoebiusConfig
from moebius.models.served import with_dense_form

if TYPE_CHECKING:
    from app.planning.planner import Planner

Form = Literal["keep", "dequantise"]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DenseChoice:
    """What was decided where both forms differ; filled by `with_dense_weights`."""

    setting: Form  # Of `dense_weights`.
    reason: str
    # Of all ranks together, in each form.
    stored_bytes: int
    dequantised_bytes: int

    @property
    def line(self) -> str:
        """One line: the form, what both forms take, and why."""
        stored, values = (f"{size / _GIB:.2f} GiB" for size in (self.stored_bytes, self.dequantised_bytes))
        sizes = f"as stored, {stored} instead of {values}"
        if self.setting == "dequantise":
            sizes = f"dequantised, {values} instead of {stored}"
        return f"{sizes} (dense_weights auto: {self.reason})"


def is_undecided(planner: Planner) -> bool:
    """Returns whether a plan has to decide `dense_weights`."""
    return planner.on_gpu and planner.config.model.dense_weights == "auto"


def with_dense_choice(config: MoebiusConfig, choice: DenseChoice | None) -> MoebiusConfig:
    """Returns the settings with what a plan decided; None: as they are."""
    return config if choice is None else with_dense_form(config, choice.setting)


def with_dense_weights(planner: Planner, hardware: Hardware, wish: Wish | None, fill: bool) -> Planner:
    """Returns the planner with what `dense_weights: auto` becomes on such GPUs.

    Raises UserError for settings that cannot be.
    """
    dequantised, kept = planner.with_dense("dequantise"), planner.with_dense("keep")
    sizes = _dense_bytes(kept), _dense_bytes(dequantised)
    if sizes[0] == sizes[1]:
        return dequantised
    if lacks_stage_layers(dequantised):
        dequantised = with_stage_layers(dequantised, hardware, wish, fill)
    places = fill and not has_placement(planner.config)
    residency = (all_resident if places else chosen_residency)(planner.config, planner.geometry)
    tokens = dequantised.wanted_tokens(hardware, wish)
    fits = dequantised.holds(residency, hardware, tokens)
    if wish is not None and wish.is_demanded:
        fits = fits and not _is_refused(dequantised, hardware, wish, fill)
    experts = "all experts" if places else "the experts that settings place"
    if not planner.geometry.moe_layers:
        experts = "everything else"
    words = "fit beside them" if fits else "would not fit"
    reason = f"{experts} and {tokens} tokens of KV cache {words}"
    chosen = dequantised if fits else kept
    chosen.dense = DenseChoice("dequantise" if fits else "keep", reason, *sizes)
    return chosen


def _is_refused(planner: Planner, hardware: Hardware, wish: Wish, fill: bool) -> bool:
    """Returns whether an engine that has room for longer steps would leave too little to the wished cache."""
    try:
        planner.plan(hardware, wish, fill, explain=False)
    except DoesNotFit:
        return True
    return False


def _dense_bytes(planner: Planner) -> int:
    return sum(rank.dense_bytes + rank.drafting_bytes for rank in planner.forecast.ranks)
