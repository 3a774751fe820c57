"""Makes the plan: reads configuration and headers once, asks engine and expert servers' own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from app.planning.capacity import (
    ASSUMED,
    MEASURED_HERE,
    CapacityPlan,
    DoesNotFit,
    Filled,
    KvPool,
    Wish,
    kv_refusal,
    make_notes,
    model_name,
    node_refusal,
    ram_refusal,
    stages_note,
)
from app.planning.cold import ColdExperts, cold_parts, with_cold_experts
from app.planning.engine_memory import engine_parts
from app.planning.hardware import Hardware
from app.planning.memory import (
    RAM,
    Component,
    Residency,
    StoredExperts,
    chosen_residency,
    expert_servers,
    filled_residency,
    has_placement,
    nothing_resident,
    ram_components,
    resident_bytes,
    stored_experts,
    total_bytes,
    with_split,
)
from app.planning.prefixes import with_prefixes
from app.planning.rings import ring_bytes
from app.planning.sequences import plan_with_num_seqs, with_num_seqs
from app.planning.speed import (
    ColdReads,
    Work,
    make_work,
    predict_decode,
    predict_prefill,
    server_threads,
    windows_of,
)
from app.planning.stages import in_turn, lacks_stage_layers, with_all_gpus, with_stage_layers
from app.planning.start import predict_start
from app.planning.tables import with_tables
from moebius.config import MoebiusConfig, Section
from moebius.errors import ConfigError, UserError
from moebius.experts.placement import keeps_residents
from moebius.experts.slices import REQUANTISED
from moebius.models.served import read_served_geometry, with_drafts

if TYPE_CHECKING:
    from gpu_service.memory.plan import ExpertMemory, MemoryPlan


# Tokens of one request that a GPU full of experts still has room for, the best first, and which part of the
# memory for experts and cache such a request may take.
LONG_CONTEXTS, _LONG_CONTEXT_PART = (131072, 98304, 65536, 49152), 4


class Planner:
    """One model with one set of settings; `plan` for any hardware that has the GPUs."""

    def __init__(self, config: MoebiusConfig, on_gpu: bool) -> None:
        """Raises CheckpointError, ModelConfigError or ConfigError: what `moebius serve` would refuse."""
        from gpu_service.assembly.forecast import Forecast

        self.asked = config.placement  # Before `drop_resident` auto is decided.
        # Outputs of a step that leave room for experts; None: as an engine chooses.
        self.seqs_beside_experts: int | None = None
        self.on_gpu = on_gpu
        # Experts on disk, and what steps read of them; None: all are in memory.
        self.cold: ColdExperts | None = None
        self._reads: ColdReads | None = None
        self.geometry = read_served_geometry(config)
        self.stored: Mapping[int, StoredExperts] = stored_experts(
            config.model.model, self.geometry, config.model.expert_checkpoint
        )
        self.config = config = with_split(with_drafts(config), self.geometry, self.stored)
        self.forecast = Forecast(config, on_gpu)
        self.model = self.forecast.model_config

    def plan(
        self, hardware: Hardware, wish: Wish | None = None, fill: bool = True, explain: bool = True
    ) -> CapacityPlan:
        """`fill`: as many experts on GPUs as fit, where no setting says how many.

        Raises DoesNotFit when the hardware is too small, UserError for settings that cannot be. Without
        `explain` it does not look for settings that would fit, which takes longer than the plan.
        """
        if lacks_stage_layers(self):
            return with_stage_layers(self, hardware, wish, fill).plan(hardware, wish, fill, explain)
        if self.config.gpu.max_num_seqs is None:
            return plan_with_num_seqs(self, hardware, wish, fill, explain)
        wish = wish or Wish()
        context, concurrency = wish.tokens(self.model.max_model_len)
        if context > self.model.max_model_len:
            raise UserError(f"--context: {context} is not allowed; allowed: up to {self.model.max_model_len}")
        kv_tokens = context * concurrency if wish.is_demanded else self.kept_tokens(hardware)
        residency = self._residency(hardware, kv_tokens, fill)
        planner = self._with_step_sizes(hardware, residency) if self.on_gpu else self
        planner = with_tables(planner._with_kept(hardware, residency), hardware, residency)
        planner = with_cold_experts(planner, hardware, residency)
        return with_prefixes(planner, hardware, residency)._planned(
            hardware, wish, residency, kv_tokens, fill, explain
        )

    def fill(self, hardware: Hardware) -> Filled:
        """Returns what `moebius serve` places on GPUs of so much memory, beside so much RAM.

        Raises DoesNotFit when not even the rest of the model fits, UserError for settings that cannot be.
        """
        if lacks_stage_layers(self):
            return with_stage_layers(self, hardware).fill(hardware)
        if self.config.gpu.max_num_seqs is None:
            return with_num_seqs(self, hardware, fill=True).fill(hardware)
        residency = self._residency(hardware, self.kept_tokens(hardware), fill=True)
        chosen: dict[str, object] = {}
        if residency.is_filled:
            each = max(residency.by_layer.values(), default=0)
            # A share of all: a start that knows what is chosen divides it among layers.
            chosen = {"gpu_experts_ratio": each / self.geometry.num_experts}
        placement = self._with_kept(hardware, residency).config.placement
        assert hardware.gpu is not None
        parallel = self.config.parallel
        reason = stages_note(parallel, hardware.gpu) if parallel.pipeline_layers else ""
        return Filled(placement.model_copy(update=chosen), self.seqs_beside_experts, parallel, reason)

    def _with_kept(self, hardware: Hardware, residency: Residency) -> Planner:
        """Returns the same with what `drop_resident` auto becomes."""
        placement = self.config.placement
        if placement.drop_resident != "auto" or not residency.count:
            return self
        chosen = "keep" if self._keeps(hardware, residency) else "drop"
        return self._with(placement=placement.model_copy(update={"drop_resident": chosen}))

    def _keeps(self, hardware: Hardware, residency: Residency) -> bool:
        """Returns whether servers hold resident experts, too, for exchanges: if RAM allows it."""
        # Neither that of several ranks nor that of a CPU engine changes (docs/placement.md).
        is_fixed = len(self.forecast.ranks) > 1 or not self.on_gpu
        if is_fixed or residency.is_everything or not keeps_residents(self.config.placement):
            return False
        try:
            kv = self._pool(self._ledgers(hardware, residency))
            parts = list(self.ram_parts(hardware, residency, kv))
            self.check_ram(hardware, parts, 0, fill=False, explain=False)
        except DoesNotFit:
            return False
        return True

    def kept_tokens(self, hardware: Hardware) -> int:
        """Returns the tokens of KV cache that experts leave room for on a GPU: a long context if it is cheap.

        That is one of at most a quarter of what experts and cache could have together.
        """
        longest = self.model.max_model_len
        context, concurrency = Wish().tokens(longest)
        if self.on_gpu:
            room = self.room_bytes(hardware, nothing_resident(self.geometry))
            all_tokens = int(room / self.token_bytes())
            for tokens in LONG_CONTEXTS:
                if context * concurrency < tokens <= longest and tokens * _LONG_CONTEXT_PART <= all_tokens:
                    return tokens
        return context * concurrency

    def room_bytes(self, hardware: Hardware, residency: Residency) -> int:
        """Returns what the KV cache could have, if all that is left is its; 0: the rest does not fit."""
        try:
            return min(ledger.kv_bytes for ledger in self._ledgers(hardware, residency))
        except DoesNotFit:
            return 0

    def _planned(
        self,
        hardware: Hardware,
        wish: Wish,
        residency: Residency,
        kv_tokens: int,
        fill: bool,
        explain: bool,
    ) -> CapacityPlan:
        """Returns the plan with these residents, beside which there is room for `kv_tokens`."""
        context, concurrency = wish.tokens(self.model.max_model_len)
        if self.on_gpu:
            ledgers = self._ledgers(hardware, residency, explain)
            kv, components, budgets = self._gpu_parts(hardware, ledgers)
        else:
            kv, components, budgets = self.cpu_kv(), [], {}
        if wish.is_demanded and kv.tokens < context * concurrency:
            raise DoesNotFit(kv_refusal(context, concurrency, kv.tokens, kv.token_bytes))
        components += self.ram_parts(hardware, residency, kv)
        budgets[RAM] = hardware.ram_bytes
        self.check_ram(hardware, components, kv_tokens, fill, explain)
        work = self.work(residency, hardware)
        paced = in_turn(self, hardware, work) if self.on_gpu else hardware
        streamed = self._streamed_tokens(hardware, residency)
        return CapacityPlan(
            model=model_name(self.config),
            model_type=self.geometry.model_type,
            settings=self._settings() | ({"prefill_chunk_max": str(streamed)} if streamed else {}),
            hardware=hardware,
            components=tuple(components),
            budgets=budgets,
            residency=residency,
            kv=kv,
            expert_kernels=ASSUMED if work.expert_times is None else MEASURED_HERE,
            context=context,
            decode=predict_decode(work, paced, wish.streams, context),
            prefill=predict_prefill(work, paced, self.config.gpu.num_batched_tokens, context, streamed),
            drop_resident=self.config.placement.drop_resident,
            cold=self.cold,
            kv_offload_gib=self.config.gpu.kv_offload_bytes / 2**30,
            max_num_seqs=self.seqs_beside_experts,
            start_seconds=predict_start(self.geometry, self.stored, self._dense_bytes(), hardware),
            notes=make_notes(self.config, work, hardware, kv, context),
        )

    def _residency(self, hardware: Hardware, kv_tokens: int, fill: bool) -> Residency:
        if has_placement(self.config) or not fill or not self.on_gpu or not self.geometry.moe_layers:
            return chosen_residency(self.config, self.geometry)

        def fits(residency: Residency) -> bool:
            try:
                return self._pool(self._ledgers(hardware, residency)).tokens >= kv_tokens
            except DoesNotFit:
                return False

        def streams(each: Residency) -> bool:
            return fits(each) and (each.is_everything or self._streamed_tokens(hardware, each) > 0)

        # Prompts gain more by long steps that stream than by the experts that would fit in their place.
        found = filled_residency(self.config, self.geometry, streams)
        return found if streams(found) else filled_residency(self.config, self.geometry, fits)

    def _with_step_sizes(self, hardware: Hardware, residency: Residency) -> Planner:
        """Returns the same, with the tokens of a step, and of the largest graph of one with prompts, that an
        engine would choose.
        """
        found, rest = self, (self._memory(hardware), self.all_held(residency, hardware))
        tokens = self.forecast.batched_tokens(found.config, *rest)
        found = found.with_gpu(max_num_batched_tokens=tokens)
        captured = self.forecast.prompt_graph_tokens(found.config, *rest)
        return found.with_gpu(cuda_graph_max_prompt_tokens=captured)

    def with_gpu(self, **changes: object) -> Planner:
        """Returns the same with other settings of the engine."""
        return self._with(gpu=self.config.gpu.model_copy(update=changes))

    def with_settings(self, config: MoebiusConfig) -> Planner:
        """Returns the same with other settings that change neither the model's tensors nor its ranks."""
        other = copy(self)
        other.config, other.asked = config, config.placement
        return other

    def with_cold(self, cold: ColdExperts, reads: ColdReads) -> Planner:
        """Returns the same with experts on disk."""
        other = copy(self)
        other.cold, other._reads = cold, reads
        return other

    def work(self, residency: Residency, hardware: Hardware) -> Work:
        """Returns what a step asks for."""
        found = make_work(self.config, self.geometry, self.stored, self.forecast, residency, hardware)
        return replace(found, cold=self._reads)

    def _with(self, **sections: Section) -> Planner:
        """Returns the same with other sections of the settings."""
        other = copy(self)
        other.config = self.config.model_copy(update=sections)
        return other

    def _ledgers(
        self, hardware: Hardware, residency: Residency, explain: bool = False
    ) -> tuple[MemoryPlan, ...]:
        """Returns every rank's plan. Raises DoesNotFit in the ledger's words, if asked with what would do."""
        from gpu_service.memory.plan import MemoryShort

        memory = self._memory(hardware)
        held = self.all_held(residency, hardware)
        try:
            return self.forecast.device_plans(self.config, memory, held)
        except ConfigError:
            raise
        except MemoryShort as error:
            words = self.forecast.refusal(self.config, memory, held, error) if explain else error
            raise DoesNotFit(str(words)) from error
        except UserError as error:
            raise DoesNotFit(str(error)) from error

    def all_held(self, residency: Residency, hardware: Hardware) -> list[ExpertMemory]:
        """Returns what the ranks hold, one after the other, with slots to fetch to and rings to stream
        through as far as `moebius serve` has room for them: rings come first.
        """
        held = [self.held(rank, residency) for rank in range(len(self.forecast.ranks))]
        mode, serves = self.config.gpu.prefill_experts, self.config.experts.expert_transport == "mailbox"
        if mode == "cpu" or not serves:
            return held
        rings = [ring_bytes(self, rank, residency, hardware) for rank in range(len(held))]
        for fetches in (True, False):
            sizes = [ring + fetch if fetches else ring for ring, fetch in rings]
            with_rings = [replace(found, ring_bytes=size) for found, size in zip(held, sizes, strict=True)]
            if not any(sizes) or self.forecast.has_room(self.config, self._memory(hardware), with_rings):
                return with_rings
        return with_rings if mode == "stream" else held

    def _memory(self, hardware: Hardware) -> list[int]:
        """Returns the bytes of memory of each rank's GPU."""
        return hardware.rank_bytes(len(self.forecast.ranks))

    def resident_bytes(
        self, residency: Residency, layers: Sequence[int], tp_rank: int = 0
    ) -> tuple[int, int]:
        """Returns the number of resident experts of these layers, and the bytes that a rank has of them."""
        widest = "bfloat16" if self.model.dtype == "bfloat16" else "float32"
        experts = self.config, self.geometry, self.stored, residency.resident
        return resident_bytes(*experts, layers, tp_rank, widest)

    def held(self, rank: int, residency: Residency) -> ExpertMemory:
        """Returns what a rank holds of resident experts."""
        from gpu_service.memory.plan import ExpertMemory

        found = self.forecast.ranks[rank]
        count, total = self.resident_bytes(residency, found.moe_layers, found.tp_rank)
        each = total // count if count else 0
        return ExpertMemory(count, each, is_everything=residency.is_everything)

    def _pool(self, ledgers: tuple[MemoryPlan, ...]) -> KvPool:
        """Returns every rank's KV pool: the one with least room decides, none takes more than is usable.

        Stages whose layers keep states alone bound nothing.
        """
        settings, useful = self.config.gpu, self.forecast.useful_pages(self.config)
        room = (ledger.kv_bytes // ledger.page_bytes for ledger in ledgers if ledger.page_bytes)
        pages = min(room, default=useful)
        if settings.num_pages is None and settings.kv_cache_gib is None:
            pages = min(pages, useful)
        return KvPool(pages, settings.page_size, self.token_bytes(), windows_of(self.model))

    def token_bytes(self) -> float:
        """Returns the bytes of a token on the rank whose layers take most."""
        return max(rank.page_bytes for rank in self.forecast.ranks) / self.config.gpu.page_size

    def _gpu_parts(
        self, hardware: Hardware, ledgers: tuple[MemoryPlan, ...]
    ) -> tuple[KvPool, list[Component], dict[str, int]]:
        pool = self._pool(ledgers)
        components, budgets = [], {}
        for rank, ledger in enumerate(ledgers):
            place = f"GPU {rank}"
            budgets[place] = ledger.budget
            for line in ledger.lines:
                if line.nbytes:
                    size = pool.pages * ledger.page_bytes if line.part == "KV cache" else line.nbytes
                    components.append(Component(place, line.part, size))
        return pool, components, budgets

    def cpu_kv(self) -> KvPool:
        """Returns the pool of an engine on a CPU."""
        pages = self.forecast.shared_pages(self.config)
        return KvPool(pages, self.config.gpu.page_size, self.token_bytes(), windows_of(self.model))

    def ram_parts(self, hardware: Hardware, residency: Residency, kv: KvPool) -> tuple[Component, ...]:
        """Returns everything that all processes have in RAM."""
        config, engine = self.config, engine_parts(self, hardware, residency, kv)
        served = {} if residency.is_everything else self.stored
        servers = expert_servers(config, self.geometry, served, hardware.sockets) if served else ()
        if hardware.origin.get("cores") == "detected":
            threads = sum(server_threads(config, hardware))
        else:
            threads = config.experts.expert_threads * len(servers) or hardware.cores
        found = ram_components(config, self.geometry, served, servers, engine, threads, residency.resident)
        return cold_parts(found, self.cold)

    def check_ram(
        self, hardware: Hardware, components: list[Component], kv_tokens: int, fill: bool, explain: bool
    ) -> None:
        """Raises DoesNotFit, if asked with what other formats of experts would take."""
        wanted, allowed = total_bytes(components, RAM), hardware.ram_bytes
        if wanted > allowed:
            others = self._ram_by_dtype(hardware, kv_tokens, fill) if explain else {}
            experts = sum(part.nbytes for part in components if part.part.startswith("experts of"))
            raise DoesNotFit(ram_refusal(wanted, experts, allowed, self._settings()["experts"], others))
        for node in sorted({part.node for part in components if part.node >= 0}):
            there = sum(part.nbytes for part in components if part.node == node)
            if there > allowed // hardware.sockets:
                raise DoesNotFit(node_refusal(node, there, allowed // hardware.sockets))

    def _ram_by_dtype(self, hardware: Hardware, kv_tokens: int, fill: bool) -> dict[str, int]:
        """What RAM each `expert_dtype` would take; smaller experts also leave more of them on GPUs."""
        found = {}
        for dtype in ("keep", *REQUANTISED):
            changed = self.config.experts.model_copy(update={"expert_dtype": dtype})
            other = self._with(experts=changed, placement=self.asked)
            try:
                residency = other._residency(hardware, kv_tokens, fill)
                other = other._with_kept(hardware, residency)
                kv = self._pool(other._ledgers(hardware, residency)) if self.on_gpu else self.cpu_kv()
                found[dtype] = total_bytes(other.ram_parts(hardware, residency, kv), RAM)
            except UserError:
                continue  # no format to keep, or residents that do not fit so
        return found

    def _streamed_tokens(self, hardware: Hardware, residency: Residency) -> int:
        """Returns the number of tokens of a step whose experts are streamed; 0: there are no such steps."""
        if not self.on_gpu:
            return 0
        held = self.all_held(residency, hardware)
        return self.forecast.prefill_chunk(self.config, self._memory(hardware), held) or 0

    def _dense_bytes(self) -> int:
        return sum(rank.dense_bytes for rank in self.forecast.ranks)

    def _settings(self) -> dict[str, str]:
        """Returns what decides the plan, for its head."""
        formats = {layer.gate_up or "no packed format" for layer in self.stored.values()}
        stored = ", ".join(sorted(formats)) or "none"
        parallel = self.config.parallel
        return {
            "experts": REQUANTISED.get(self.config.experts.expert_dtype, stored),
            "experts stored": stored,
            "dense weights": self.model.dtype,
            "tensor_parallel_size": str(parallel.tensor_parallel_size),
            "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
            **({"pipeline_layers": ",".join(map(str, found))} if (found := parallel.pipeline_layers) else {}),
            "gpu_expert_split": parallel.gpu_expert_split,
            "max_num_seqs": str(self.config.gpu.num_seqs),
            "max_num_batched_tokens": str(self.config.gpu.num_batched_tokens),
        }


def make_planner(config: MoebiusConfig, hardware: Hardware, fill: bool = True) -> Planner:
    """Returns a planner of these settings. With `fill` all GPUs that the model allows are tensor-parallel
    ranks, or pipeline stages where they are unequal, where no setting says how many.

    Raises UserError for more ranks than GPUs.
    """
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    on_gpu = hardware.gpu is not None and config.gpu.device != "cpu"
    if config.gpu.device == "cuda" and not on_gpu:
        raise UserError("device cuda: there is no GPU to plan with here; `moebius plan --gpus` names others")
    if not on_gpu:
        return Planner(config, on_gpu)
    if ranks > hardware.gpus:
        raise UserError(f"{ranks} ranks need as many GPUs, there are {hardware.gpus}")
    if ranks > 1 or not fill:
        return Planner(config, on_gpu)
    if hardware.gpu is not None and hardware.gpu.is_mixed:
        with suppress(ConfigError):  # Layers that one stage has to have together.
            return Planner(with_all_gpus(config, hardware), on_gpu)
    for count in range(hardware.gpus, 1, -1):
        parallel = config.parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            return Planner(config.model_copy(update={"parallel": parallel}), on_gpu)
        except ConfigError:
            continue
    return Planner(config, on_gpu)


def plan_capacity(
    config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool, explain: bool = True
) -> CapacityPlan:
    """Returns the capacity, as `Planner.plan`; a refusal names how many GPUs, up to 8, would do, if asked to
    `explain`.
    """
    planner = make_planner(config, hardware, fill)
    if not planner.on_gpu:
        hardware = replace(hardware, gpus=0, gpu=None)
    try:
        return planner.plan(hardware, wish, fill, explain)
    except DoesNotFit as error:
        more = _enough_gpus(config, hardware, wish, fill) if explain else None
        if more is None:
            raise
        raise DoesNotFit(f"{error}; {more} such GPUs with tensor_parallel_size {more} would do") from error


def _enough_gpus(config: MoebiusConfig, hardware: Hardware, wish: Wish, fill: bool) -> int | None:
    parallel = config.parallel
    if hardware.gpu is None or hardware.gpu.is_mixed or parallel.num_ranks > 1:
        return None
    for count in (2, 4, 8):
        if count <= hardware.gpus:
            continue
        changed = parallel.model_copy(update={"tensor_parallel_size": count})
        try:
            planner = Planner(config.model_copy(update={"parallel": changed}), True)
            planner.plan(replace(hardware, gpus=count), wish, fill, explain=False)
        except UserError:
            continue
        return count
    return None
