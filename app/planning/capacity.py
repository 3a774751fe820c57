"""The plan: bytes of every part, tokens that fit, speed, notes; and what is said when it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.planning.gpu_models import GpuModel
from app.planning.hardware import Hardware
from app.planning.measured_hosts import origins
from app.planning.memory import Component, Residency, total_bytes
from app.planning.speed import Speed, Work
from moebius.checkpoint.index import has_weights
from moebius.config import MoebiusConfig, ParallelConfig, PlacementConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.planning.cold import ColdExperts
    from app.planning.dense import DenseChoice

GIB = 2**30


class DoesNotFit(UserError):
    """The hardware is too small for the plan; the message says by how much, and what would fit."""


def gib(nbytes: float) -> str:
    """Returns formats bytes for sentences: whole GiB, one digit below ten."""
    return f"{nbytes / GIB:.1f}" if nbytes < 10 * GIB else f"{nbytes / GIB:.0f}"


def ram_refusal(wanted: int, experts: int, allowed: int, chosen: str, alternatives: Mapping[str, int]) -> str:
    """`alternatives`: expert_dtype -> what all would take; of them the ones that take less are named."""
    text = (
        f"needs {gib(wanted)} GiB of RAM ({gib(experts)} for experts in {chosen}), "
        f"{gib(allowed)} GiB are allowed"
    )
    smaller = {name: size for name, size in alternatives.items() if size < wanted}
    if smaller:
        needed = ", ".join(f"{name} needs {gib(size)}" for name, size in smaller.items())
        text += f"; --expert-dtype {needed}"
    if all(size > allowed for size in smaller.values()):
        text += (
            "; none of these fits: more RAM, more of the experts on GPUs, or expert servers on other hosts"
        )
    return text


def node_refusal(node: int, wanted: int, allowed: int) -> str:
    """A NUMA node that its expert servers do not fit, although all nodes together would do."""
    return (
        f"NUMA node {node} needs {gib(wanted)} GiB for its expert servers, {gib(allowed)} GiB of it are "
        "allowed; "
        "split_shares or a number of expert_servers that the nodes divide evenly would spread them"
    )


def kv_refusal(context: int, concurrency: int, tokens: int, token_bytes: float) -> str:
    """Returns a wanted context and concurrency that the KV cache has no room for."""
    wanted = context * concurrency
    text = (
        f"{concurrency} streams of {context} tokens need {gib(wanted * token_bytes)} GiB of KV cache, "
        f"{gib(tokens * token_bytes)} GiB ({tokens} tokens) are left"
    )
    fits = []
    if tokens >= context:
        fits.append(f"{tokens // context} streams of {context} tokens")
    if tokens >= concurrency:
        fits.append(f"{concurrency} streams of {tokens // concurrency} tokens")
    return f"{text}; what would fit: {', or '.join(fits)}" if fits else text


def model_name(config: MoebiusConfig) -> str:
    """Returns the name of the checkpoint's directory, or of the repository of one in the hub's cache."""
    path = Path(config.model.model)
    named = config.model.served_model_name if path.parent.name == "snapshots" else ""
    return named.rpartition("/")[2] or path.name


@dataclass(frozen=True, slots=True)
class Filled:
    """What `moebius serve` decides where no setting says what GPUs hold; filled by `Planner.fill`."""

    placement: PlacementConfig
    max_num_seqs: int | None  # None: the engine chooses.
    parallel: ParallelConfig
    reason: str  # Why the stages have these layers; empty: there is one.
    dense: DenseChoice | None = None  # What `dense_weights: auto` becomes; None: nothing is decided.


MEASURED_HERE, ASSUMED = "measured on this host", "assumed"
DEFAULT_CONTEXT = 8192
# Kept for KV where no number of streams is given.
DEFAULT_CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """What the KV cache shall hold; None: DEFAULT_…, as far as there is room. Filled by the command line."""

    context: int | None = None
    concurrency: int | None = None
    streams: tuple[int, ...] = (1, 4, 16, 32)  # Numbers of streams that decode speed is predicted for.

    @property
    def is_demanded(self) -> bool:
        """Returns whether a plan that has no room for it is refused."""
        return self.context is not None or self.concurrency is not None

    def tokens(self, max_model_len: int) -> tuple[int, int]:
        """Returns context and concurrency, the first at most what the model allows."""
        context = self.context or min(DEFAULT_CONTEXT, max_model_len)
        return context, self.concurrency or (1 if self.context else DEFAULT_CONCURRENCY)


@dataclass(frozen=True, slots=True)
class KvPool:
    """The KV cache, the same on every rank; bytes over all layers of the rank that has least room."""

    pages: int
    page_size: int
    token_bytes: float

    windows: Mapping[int, float] = field(default_factory=dict)  # As `Work.windows`.

    @property
    def tokens(self) -> int:
        """That fit; one page is the dummy."""
        return max(0, self.pages - 1) * self.page_size


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Filled by `Planner.plan`."""

    model: str
    model_type: str
    # What the plan is for: settings that decide it, by name.
    settings: Mapping[str, str]
    hardware: Hardware
    components: tuple[Component, ...]
    # Place -> bytes that may be planned with there.
    budgets: Mapping[str, int]
    residency: Residency
    kv: KvPool
    expert_kernels: str  # Where the times of expert kernels are from: MEASURED_HERE or ASSUMED.
    # Tokens of each stream that speeds are predicted for.
    context: int
    decode: tuple[Speed, ...]
    prefill: Speed
    notes: tuple[str, ...]  # What the reader has to know: what is assumed, what was not read.
    drop_resident: str = "auto"  # What it becomes, where something is resident.
    start_seconds: float = 0.0  # Until requests are answered, where nothing has to be compiled.
    cold: ColdExperts | None = None  # Experts on disk; None: all are in memory.
    dense: DenseChoice | None = None  # What `dense_weights: auto` became; None: nothing was to be decided.
    kv_offload_gib: float = 0.0  # RAM for prefixes, as set or as chosen beside experts.
    max_num_seqs: int | None = None  # Chosen beside experts; None: an engine chooses the same by itself.

    @property
    def total(self) -> int:
        """The bytes of all components in all places."""
        return sum(part.nbytes for part in self.components)

    def total_of(self, place: str) -> int:
        """Returns the bytes of all components in one place."""
        return total_bytes(self.components, place)

    @property
    def places(self) -> tuple[str, ...]:
        """All places: GPUs by rank, then RAM."""
        return tuple(dict.fromkeys(part.place for part in self.components))

    @property
    def serve_flags(self) -> str:
        """Options that let `moebius serve` do what was planned, in addition to those that were given."""
        ranks = self.settings["tensor_parallel_size"]
        parts = [f"--tensor-parallel-size {ranks}"] if ranks != "1" else []
        if "pipeline_layers" in self.settings:
            stages = self.settings["pipeline_parallel_size"]
            parts.append(
                f"--pipeline-parallel-size {stages} --pipeline-layers {self.settings['pipeline_layers']}"
            )
        if self.dense is not None:
            parts.append(f"--dense-weights {self.dense.setting}")
        if self.max_num_seqs is not None:
            parts.append(f"--max-num-seqs {self.max_num_seqs}")
        return " ".join([*parts, self.residency.flags]).strip()


def stages_note(parallel: ParallelConfig, gpu: GpuModel) -> str:
    """Returns what is made of unequal GPUs, and why."""
    layers = parallel.pipeline_layers
    if not layers:
        return "ranks share every layer evenly: each GPU counts with the least that one of them has"
    return (
        f"pipeline stages of {' and '.join(map(str, layers))} layers, by memory and speed of {gpu.name}: "
        f"tensor_parallel_size {len(gpu.kinds)} would use as much of each GPU as the least of them has"
    )


def make_notes(
    config: MoebiusConfig, work: Work, hardware: Hardware, kv: KvPool, context: int, fetches: bool
) -> tuple[str, ...]:
    """Returns one sentence each; `fetches`: as `rings.steps_fetch` says."""
    notes = []
    if not has_weights(config.model.model):
        notes.append("no files of weights are there: types and formats are what config.json says")
        if config.model.dense_weights == "keep" and hardware.gpu is None:
            notes.append("dense_weights keep: which layers are quantised is not known, they count whole")
    assumed = [name for name, origin in hardware.origin.items() if origin == "assumed"]
    if assumed:
        notes.append(f"assumed: {', '.join(assumed)}; --measure measures here, options say otherwise")
    if problem := hardware.origin.get("kernel_times"):
        notes.append(f"measured times of the expert kernels {problem}")
    if config.experts.expert_addresses:
        notes.append("expert servers of expert_addresses are on other hosts: their memory is not counted")
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    if hardware.gpu is not None and hardware.gpus > ranks:
        notes.append(
            f"of {hardware.gpus} GPUs {ranks} are used: tensor_parallel_size has to divide the model's heads"
        )
    if hardware.gpu is not None and hardware.gpu.is_mixed:
        notes.append(stages_note(config.parallel, hardware.gpu))
    if kv.tokens < context:
        notes.append(f"the KV cache holds {kv.tokens} tokens, less than one stream of {context}")
    notes += origins(hardware, work.expert_times is not None or not work.moe_layers)
    notes.append("even routing is assumed; skewed routing touches fewer experts and is faster")
    if hardware.gpu is not None and work.moe_layers and work.resident_share < 1.0 and fetches:
        notes.append(
            "experts that decode steps fetch over the link are not counted; with all experts in RAM and "
            "neighbouring tokens that share 45 % of theirs host D had 185 tokens/s instead of 84"
        )
    return tuple(notes)
