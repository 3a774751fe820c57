"""What to change where a model does not fit: the mildest settings with which it does, tried by planning.

Settings are tried in the order of what they cost: first what changes no answer, then formats, experts last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.planning.capacity import CapacityPlan, DoesNotFit, Wish
from app.planning.gpu_use import make_planner
from app.planning.hardware import Hardware
from app.planning.memory import has_placement
from app.planning.planner import Planner
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.config.leaves import leaves
from moebius.errors import UserError

# Names and values of leaves.
Settings = Mapping[str, Any]
# Types of GGUF whose packed experts are smaller than requantised ones can be, the largest first, and the
# packed format of each (docs/gguf.md).
SMALLER_TYPES = {"Q3_K": "int3_g16_products", "Q2_K": "int2_g16_mins_products"}
_CONTEXTS, _BATCHED_TOKENS = (65536, 32768, 16384, 8192, 4096), (4096, 2048, 1024, 512, 256, 128)


@dataclass(frozen=True)
class Change:
    """Settings with which a model fits, and the plan with them; filled by `smallest_change`."""

    settings: Settings
    plan: CapacityPlan

    def applied(self, config: MoebiusConfig) -> MoebiusConfig:
        """Returns other settings with the same change."""
        return with_settings(config, self.settings)


def with_settings(config: MoebiusConfig, settings: Settings) -> MoebiusConfig:
    """Returns the settings with some leaves of any section replaced."""
    for leaf in leaves():
        if leaf.name in settings:
            section = getattr(config, leaf.section)
            changed = section.model_copy(update={leaf.name: settings[leaf.name]})
            config = config.model_copy(update={leaf.section: changed})
    return config


def smallest_change(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> Change | None:
    """Returns one setting if one is enough, else as few as possible, each at its mildest value; None: with
    all of them it does not fit either.
    """
    from gpu_service.memory.mildest import Chosen, mildest_change

    axes, planners = _axes(config, hardware, wish), dict[str, Planner]()

    def chosen_settings(chosen: Chosen) -> Settings:
        found: dict[str, Any] = {}
        for number, index in chosen.items():
            found |= axes[number][index]
        return found

    def planned(settings: Settings) -> CapacityPlan | None:
        try:
            planner = _planner(with_settings(config, settings), hardware, fill, planners)
            return planner.plan(hardware, wish, fill, explain=False)
        except (UserError, ValueError):
            return None

    changed = mildest_change(
        [len(axis) for axis in axes], lambda chosen: planned(chosen_settings(chosen)) is not None
    )
    settings = None if changed is None else chosen_settings(changed)
    plan = None if settings is None else planned(settings)
    return None if settings is None or plan is None else Change(settings, plan)


def _planner(config: MoebiusConfig, hardware: Hardware, fill: bool, planners: dict[str, Planner]) -> Planner:
    """Returns a planner of these settings; a model is composed once for each form of it."""
    gpu = config.gpu
    key = f"{config.model.dense_weights} {config.model.max_model_len} {gpu.kv_cache_dtype}"
    if hardware.gpu is None or gpu.device == "cpu":
        key += f" {gpu.max_num_seqs}"  # a forecast for CPUs counts states
    if key not in planners:
        planners[key] = make_planner(config, hardware, fill)
    found = planners[key]
    return found.with_settings(config.model_copy(update={"parallel": found.config.parallel}))


def _axes(config: MoebiusConfig, hardware: Hardware, wish: Wish) -> list[Sequence[Settings]]:
    """Returns each setting that takes memory with its smaller values, the mildest first, of which none is
    against the wish.
    """
    from gpu_service.assembly.rank_plan import NUM_SEQS

    gpu, model = config.gpu, config.model
    on_gpu = hardware.gpu is not None and gpu.device != "cpu"
    found: list[Sequence[Settings]] = [_values("max_num_seqs", [n for n in NUM_SEQS if n < gpu.num_seqs])]
    if has_placement(config):
        nothing = PlacementConfig()
        names = ("gpu_layers", "gpu_experts", "gpu_experts_ratio")
        found.append([{name: getattr(nothing, name) for name in names}])
    if on_gpu:
        found.append(_values("kv_cache_gib", [None] if gpu.kv_cache_gib is not None else []))
        found.append(_values("num_pages", [None] if gpu.num_pages is not None else []))
        tokens = [n for n in _BATCHED_TOKENS if n < gpu.num_batched_tokens]
        found.append(_values("max_num_batched_tokens", tokens))
        found.append(_values("prefill_experts", ["cpu"] if gpu.prefill_experts != "cpu" else []))
    else:
        smaller = [size for size in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25) if size < (gpu.kv_cache_gib or 1.0)]
        found.append(_values("kv_cache_gib", smaller))
    found.append(_values("kv_cache_dtype", ["fp8_e4m3"] if gpu.kv_cache_dtype == "auto" else []))
    found.append(_values("dense_weights", ["keep"] if model.dense_weights == "dequantise" else []))
    lengths = [n for n in _CONTEXTS if (wish.context or 0) <= n < (model.max_model_len or 2**30)]
    found.append(_values("max_model_len", lengths))
    dtypes = ("float32", "bfloat16", "int8", "int4")
    kept = -1 if config.experts.expert_dtype == "keep" else dtypes.index(config.experts.expert_dtype)
    found.append(_values("expert_dtype", [name for name in dtypes[2:] if dtypes.index(name) > kept]))
    if not on_gpu:
        found.append(_values("cold_experts", ["disk"] if config.experts.cold_experts == "auto" else []))
    return found


def _values(name: str, values: Sequence[Any]) -> list[Settings]:
    return [{name: value} for value in values]


def smaller_quantisation(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> str:
    """Returns the largest type of GGUF that experts would have to be quantised to for the model to fit, as
    files of another publisher may be; empty: with none of them it fits.
    """
    config = with_settings(config, {"expert_dtype": "keep"})
    try:
        planner = make_planner(config, hardware, fill)
        least = {
            name: value for axis in _axes(config, hardware, wish) if axis for name, value in axis[-1].items()
        }
        del least["expert_dtype"]
        for kind, packed in SMALLER_TYPES.items():
            stored = {
                layer: replace(found, gate_up=packed, down=packed) for layer, found in planner.stored.items()
            }
            for settings in ({}, least):
                other = planner.with_settings(with_settings(planner.config, settings))
                other.stored = stored
                if _fits(other, hardware, wish, fill):
                    return kind
    except (UserError, ValueError):
        return ""
    return ""


def _fits(planner: Planner, hardware: Hardware, wish: Wish, fill: bool) -> bool:
    try:
        planner.plan(hardware, wish, fill, explain=False)
    except DoesNotFit:
        return False
    return True
