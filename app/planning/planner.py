"""Makes the plan: reads configuration and headers once, asks engine and expert servers' own arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from app.planning.dense import DenseChoice, Form, is_undecided, with_dense_weights
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
from app.planning.rings import ring_bytes, steps_fetch
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
from app.planning.stages import in_turn, lacks_stage_layers, with_stage_layers
from app.planning.start import predict_start
from app.planning.tables import with_tables
from gpu_service.memory.contexts import kept_tokens
from moebius.config import MoebiusConfig, Section
from moebius.errors import ConfigError, UserError
from moebius.experts.placement import keeps_residents
from moebius.experts.slices import REQUANTISED
from moebius.models.served import read_served_geometry, with_dense_form, with_drafts

if TYPE_CHECKING:
    from gpu_service.memory.plan import ExpertMemory, MemoryPlan


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
        # What `dense_weights: auto` became; None: nothing was left to decide.
        self.dense: DenseChoice | None = None
        self.config = config = with_split(with_drafts(config), self.geometry, self.stored)
        self.forecast = Forecast(config, on_gpu)
        # By `dense_weights`, as far as they were asked for.
        self._forecasts: dict[Form, Forecast] = {}
        if on_gpu:
            held = config.model.dense_weights
            self._forecasts["dequantise" if held == "auto" else held] = self.forecast
        self.model = self.forecast.model_config

    def plan(
        self, hardware: Hardware, wish: Wish | None = None, fill: bool = True, explain: bool = True
    ) -> CapacityPlan:
        """`fill`: as many experts on GPUs as fit, where no setting says how many.

        Raises DoesNotFit when the hardware is too small, UserError for settings that cannot be. Without
        `explain` it does not look for settings that would fit, which takes longer than the plan.
        """
        if is_undecided(self):
            return with_dense_weights(self, hardware, wish, fill).plan(hardware, wish, fill, explain)
        if lacks_stage_layers(self):
            return with_stage_layers(self, hardware, wish, fill).plan(hardware, wish, fill, explain)
        if self.config.gpu.max_num_seqs is None:
            return plan_with_num_seqs(self, hardware, wish, fill, explain)
        wish = wish or Wish()
        context, _ = wish.tokens(self.model.max_model_len)
        if context > self.model.max_model_len:
            raise UserError(f"--context: {context} is not allowed; allowed: up to {self.model.max_model_len}")
        kv_tokens = self.wanted_tokens(hardware, wish)
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
        if is_undecided(self):
            return with_dense_weights(self, hardware, None, fill=True).fill(hardware)
        if lacks_stage_layers(self):
            return with_stage_layers(self, hardware).fill(hardware)
        if self.config.gpu.max_num_seqs is None:
            return with_num_seqs(self, hardware, None, fill=True).fill(hardware)
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
        placement = placement.model_copy(update=chosen)
        return Filled(placement, self.seqs_beside_experts, parallel, reason, self.dense)

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

    def wanted_tokens(self, hardware: Hardware, wish: Wish | None) -> int:
        """Returns the tokens of KV cache that experts leave room for: what is wished, else `kept_tokens`."""
        if wish is None or not wish.is_demanded:
            return self.kept_tokens(hardware)
        context, concurrency = wish.tokens(self.model.max_model_len)
        return context * concurrency

    def kept_tokens(self, hardware: Hardware) -> int:
        """Returns the tokens of KV cache that experts leave room for, on a GPU as `memory.contexts` says."""
        if not self.on_gpu:
            context, concurrency = Wish().tokens(self.model.max_model_len)
            return context * concurrency
        room = self.room_bytes(hardware, nothing_resident(self.geometry))
        return kept_tokens(self.model.max_model_len, room, self.token_bytes())

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
            dense=self.dense,
            kv_offload_gib=self.config.gpu.kv_offload_bytes / 2**30,
            max_num_seqs=self.seqs_beside_experts,
            start_seconds=predict_start(self.geometry, self.stored, self._dense_bytes(), hardware),
            notes=make_notes(self.config, work, hardware, kv, context, steps_fetch(self.config)),
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

    def with_dense(self, chosen: Form) -> Planner:
        """Returns the same with `dense_weights` as chosen, which changes what the ranks hold."""
        from gpu_service.assembly.forecast import Forecast

        other = self.with_settings(with_dense_form(self.config, chosen))
        if chosen not in self._forecasts:
            self._forecasts[chosen] = Forecast(other.config, self.on_gpu)
        other.forecast = self._forecasts[chosen]
        return other

    def with_cold(self, cold: ColdExperts, reads: ColdReads) -> Planner:
        """Returns the same with experts on disk."""
        other = copy(self)
        other.cold, other._reads = cold, reads
        return other

    @property
    def keeps_dense(self) -> bool:
        """Returns whether GPUs hold quantised dense weights as they are stored."""
        return self.on_gpu and self.config.model.dense_weights == "keep"

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
        for fetches in (True, False):
            wanted = self.wanted(residency, hardware, fetches)
            has_rings = any(each.ring_bytes for each in wanted)
            if not has_rings or self.forecast.has_room(self.config, self._memory(hardware), wanted):
                return wanted
        if self.config.gpu.prefill_experts == "stream":
            return wanted
        return [replace(each, ring_bytes=0) for each in wanted]

    def wanted(self, residency: Residency, hardware: Hardware, fetches: bool = True) -> list[ExpertMemory]:
        """Returns what the ranks hold, with rings and, where it `fetches`, with slots; if there is room."""
        held = [self.held(rank, residency) for rank in range(len(self.forecast.ranks))]
        if self.config.gpu.prefill_experts == "cpu" or self.config.experts.expert_transport != "mailbox":
            return held
        rings = [ring_bytes(self, rank, residency, hardware) for rank in range(len(held))]
        return [
            replace(found, ring_bytes=ring + fetch if fetches else ring)
            for found, (ring, fetch) in zip(held, rings, strict=True)
        ]

    def holds(self, residency: Residency, hardware: Hardware, tokens: int) -> bool:
        """Returns whether such residents, with their rings, fit beside a KV cache of these tokens."""
        held = self.wanted(residency, hardware)
        return self.forecast.holds(self.config, self._memory(hardware), held, tokens)

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
            "dense weights": "as stored" if self.keeps_dense else self.model.dtype,
            "tensor_parallel_size": str(parallel.tensor_parallel_size),
            "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
            **({"pipeline_layers": ",".join(map(str, found))} if (found := parallel.pipeline_layers) else {}),
            "gpu_expert_split": parallel.gpu_expert_split,
            "max_num_seqs": str(self.config.gpu.num_seqs),
            "max_num_batched_tokens": str(self.config.gpu.num_batched_tokens),
        }
