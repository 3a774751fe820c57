"""One rank's plan of memory under the given settings and under others: what is chosen, what would fit.

An engine asks before it loads, `moebius plan` on a GPU that need not be there; both get the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch

from gpu_service.assembly.draft_model import draft_model_bytes
from gpu_service.assembly.kv_memory import (
    DeviceKvMemory,
    KvMemory,
    SharedKvMemory,
    cache_shape,
    shared_kv_bytes,
)
from gpu_service.cache.request_states import all_states_bytes
from gpu_service.device import TORCH_DTYPES
from gpu_service.loader.held import HeldWeights
from gpu_service.loader.load import plan_weights
from gpu_service.memory.contexts import ROOM_REQUESTS, ROOM_TOKENS, kept_tokens
from gpu_service.memory.device_memory import MemoryUse, gib, make_device_memory
from gpu_service.memory.ledger import MemoryLedger
from gpu_service.memory.mildest import Chosen, mildest_change
from gpu_service.memory.plan import (
    ExpertMemory,
    MemoryPlan,
    MemoryShort,
    VisionMemory,
    most_chunk_tokens,
    plan_memory,
    prompt_sizes,
)
from gpu_service.models.common import CausalLM
from gpu_service.parallel.group import RankGroup
from moebius.config import DEFAULT_BATCHED_TOKENS, DEFAULT_NUM_SEQS, MoebiusConfig
from moebius.errors import UserError
from moebius.models.config import ModelConfig
from moebius.models.layers.layer import Layers
from moebius.models.served import with_dense_form

# Tokens of a streamed step where no setting says how many.
PREFILL_CHUNKS = (16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024)
# Tokens of a step where nothing is computed elsewhere; on small GPUs, which compute less, requests that
# decode would wait too long for thousands of prompt tokens. The same bounds are vLLM's.
_BATCHED_TOKENS, _SMALL_GPU_TOKENS, _SMALL_GPU_BYTES = (8192, 6144, 4096, 3072, 2048, 1024), 2048, 64 * 2**30
# Outputs of a step where no setting says how many: many where all experts are on GPUs, which then compute
# them at once, and the KV cache has room for this number of tokens of each.
_MANY_SEQS, _SEQ_TOKENS = (256, 192, 128, 96), 512
NUM_SEQS = (DEFAULT_NUM_SEQS, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
# Fewer tokens in a step make prompts slow; a context shorter than this is of no use.
_LEAST_BATCHED_TOKENS, _LEAST_CONTEXT = 64, 4096
# Of the KV cache, besides the state of the outputs, where no size is set: room for this many requests of the
# longest kind. `moebius plan` leaves the first when it fills a GPU with experts.
_ROOMS = (ROOM_REQUESTS, 1)
# Of the KV cache of a CPU: what states of outputs take at most.
_CPU_STATES_PART = 2
# What they may take beside the smallest KV cache.
_CPU_STATES_BYTES = 2**28
# Tokens of the largest step with prompts that has a graph, where no setting says it. Longer steps keep a GPU
# busier than their launches keep the host.
_PROMPT_GRAPHS = (2048, 1024, 512)
# Tokens that a proposal leaves room for, the best last; the first: what one step needs.
_LEAST_ROOMS = (0, 2048, 4096, 8192)


@dataclass(frozen=True)
class Trial:
    """Settings, and experts on the GPU over all layers."""

    config: MoebiusConfig
    num_experts: int


Fits = Callable[[Trial], bool]


@dataclass(frozen=True)
class _Setting:
    """One that can be lowered; `values` from the mildest on, all below what is set."""

    values: Sequence[Any]
    change: Callable[[Trial, Any], Trial]
    words: Callable[[Any], str]


def smallest_change(config: MoebiusConfig, num_experts: int, longest: int, fits: Fits) -> str | None:
    """Returns the settings to change, as options of the command line; None: no change of these settings is
    enough.

    One setting alone where one is enough, and of several that are the first in the order of `_settings`; else
    as few as possible. Of equally few, those that leave the KV cache most room for a request. `longest`:
    tokens of the longest request now.
    """
    found: list[list[str]] = []
    for tokens in (min(longest, room) for room in _LEAST_ROOMS):

        def fits_with_room(trial: Trial, tokens: int = tokens) -> bool:
            return fits(_with_room(trial, tokens))

        change = _smallest(Trial(config, num_experts), longest, fits_with_room)
        if change is None:
            break
        found.append(change)
    if not found:
        return None
    # The last of equals.
    fewest = min(reversed(found), key=len)
    return " ".join(fewest)


def _smallest(trial: Trial, longest: int, fits: Fits) -> list[str] | None:
    """Returns the mildest change of settings that fits, as command-line options; None: no change does."""
    settings = _settings(trial, longest)
    changed = mildest_change(
        [len(setting.values) for setting in settings],
        lambda chosen: fits(_apply(trial, settings, chosen)),
    )
    if changed is None:
        return None
    return [settings[number].words(settings[number].values[index]) for number, index in changed.items()]


def chosen_num_seqs(config: MoebiusConfig, fits: Fits, num_experts: int, longest: int) -> int:
    """Returns the number of outputs per step where no setting says how many: the most that fit with room for
    requests in the KV cache.

    1 where there is no room for one; the default where not even that fits, so that the refusal is about it.
    """
    if config.gpu.max_num_seqs is not None:
        return config.gpu.max_num_seqs
    for tokens in _room_tokens(longest):
        for count in NUM_SEQS:
            trial = Trial(_with_gpu(config, max_num_seqs=count), num_experts)
            if fits(_with_room(trial, tokens)):
                return count
    alone = Trial(_with_gpu(config, max_num_seqs=1), num_experts)
    return 1 if fits(alone) else DEFAULT_NUM_SEQS


def shared_num_seqs(config: MoebiusConfig, model: ModelConfig, layers: Layers) -> int:
    """Returns the same for an engine on a CPU, whose memory is others', too: states of outputs take at most
    twice what the KV cache may, where that is more than a little. `layers`: the rank's own.
    """
    if config.gpu.max_num_seqs is not None:
        return config.gpu.max_num_seqs
    shape = cache_shape(config.gpu, model, layers, torch.device("cpu"))
    most = max(_CPU_STATES_BYTES, _CPU_STATES_PART * shared_kv_bytes(config.gpu, shape))
    for count in NUM_SEQS:
        gpu = config.gpu.model_copy(update={"max_num_seqs": count})
        if all_states_bytes(gpu, layers, TORCH_DTYPES[model.dtype]) <= most:
            return count
    return 1


def _room_tokens(longest: int) -> list[int]:
    return [count * min(longest, ROOM_TOKENS) for count in _ROOMS]


def _with_room(trial: Trial, tokens: int) -> Trial:
    """Returns the same with a KV cache of `tokens` tokens; 0, or a size that is set: unchanged."""
    gpu = trial.config.gpu
    if not tokens or gpu.num_pages is not None or gpu.kv_cache_gib is not None:
        return trial
    pages = 1 + -(-max(tokens, gpu.num_batched_tokens) // gpu.page_size)
    return replace(trial, config=_with_gpu(trial.config, num_pages=pages))


def _apply(trial: Trial, settings: Sequence[_Setting], changed: Chosen) -> Trial:
    for number, index in changed.items():
        trial = settings[number].change(trial, settings[number].values[index])
    return trial


def _settings(trial: Trial, longest: int) -> list[_Setting]:
    """Returns the settings in the order in which they are proposed."""
    config, gpu = trial.config, trial.config.gpu
    tokens = gpu.num_batched_tokens
    kinds: list[tuple[str, Sequence[Any]]] = [
        ("max_num_seqs", [count for count in (*_MANY_SEQS, *NUM_SEQS) if count < gpu.num_seqs]),
        ("prefill_chunk_max", _halves(gpu.prefill_chunk_max or 0, tokens, 16)),
        ("max_num_batched_tokens", _halves(tokens, min(tokens, _LEAST_BATCHED_TOKENS), 16)),
        ("kv_cache_dtype", ["fp8_e4m3"] if gpu.kv_cache_dtype == "auto" else []),
    ]
    found = [_gpu_setting(name, values) for name, values in kinds]
    found.append(
        _model_setting("dense_weights", ["keep"] if config.model.dense_weights == "dequantise" else [])
    )
    found.append(_model_setting("max_model_len", _halves(longest, min(longest, _LEAST_CONTEXT), 1)))
    if gpu.kv_cache_gib is not None:
        whole = gpu.kv_cache_gib
        found.append(_gpu_setting("kv_cache_gib", [round(whole * part / 64, 3) for part in range(63, 0, -1)]))
    found.append(
        _Setting(
            range(trial.num_experts - 1, -1, -1),
            lambda before, count: replace(before, num_experts=count),
            lambda count: f"at most {count} of the {trial.num_experts} experts on the GPU",
        )
    )
    if gpu.cuda_graphs:
        largest = min(gpu.cuda_graph_max_batch_size, gpu.num_rows)
        sizes = [size for size in (128, 64, 32, 16, 8, 4, 2, 1) if size < largest]
        found.append(_gpu_setting("cuda_graph_max_batch_size", sizes))
        prompts = gpu.cuda_graph_max_prompt_tokens or 0
        sizes = [size for size in (*_PROMPT_GRAPHS, 0) if size < prompts]
        found.append(_gpu_setting("cuda_graph_max_prompt_tokens", sizes))
    return found


def _halves(whole: int, least: int, unit: int) -> list[int]:
    """Returns 3/4, 1/2, 3/8, 1/4, ... of it, whole units."""
    values: list[int] = []
    size = whole
    while size >= least:
        values += [size * 3 // 4 // unit * unit, size // 2 // unit * unit]
        size //= 2
    return [value for value in values if least <= value < whole]


def _gpu_setting(name: str, values: Sequence[Any]) -> _Setting:
    return _Setting(
        values,
        lambda trial, value: replace(trial, config=_with_gpu(trial.config, **{name: value})),
        lambda value: f"--{name.replace('_', '-')} {value}",
    )


def _model_setting(name: str, values: Sequence[Any]) -> _Setting:
    def change(trial: Trial, value: Any) -> Trial:
        model = trial.config.model.model_copy(update={name: value})
        return replace(trial, config=trial.config.model_copy(update={"model": model}))

    return _Setting(values, change, lambda value: f"--{name.replace('_', '-')} {value}")


def _with_gpu(config: MoebiusConfig, **changes: Any) -> MoebiusConfig:
    return config.model_copy(update={"gpu": config.gpu.model_copy(update=changes)})


_log = structlog.get_logger(__name__)


class RankPlan:
    """Plans one rank."""

    def __init__(
        self,
        config: MoebiusConfig,
        held: HeldWeights,
        use: MemoryUse,
        experts: ExpertMemory,
        vision: VisionMemory | None = None,
    ) -> None:
        """`held`: its weights under `config`; `use`: the device before loading."""
        self._config = config
        self._use = use
        self._experts = experts
        self._vision = vision
        # By how dense weights are kept, their bytes, which hundreds of trials ask for.
        self._dense_bytes = {config.model.dense_weights: held.device_bytes}
        self._model, self._parallel, self._layers = held.config, held.parallel, held.rank_layers
        self._longest = held.config.max_model_len
        self._device = torch.device("cpu" if held.on_cpu else "meta")
        # The same of a draft model.
        drafting = draft_model_bytes(config, self._model, self._device)
        self._drafting_bytes = {config.model.dense_weights: drafting}

    def make(self, config: MoebiusConfig) -> MemoryPlan:
        """Returns the ledger under these settings. Raises MemoryShort: it cannot fit; as `prefill_chunk`."""
        chosen = _with_gpu(config, prefill_chunk_max=self.prefill_chunk(config))
        return self._plan(Trial(chosen, self._experts.count))

    def fits(self) -> bool:
        """Returns whether there is a plan under the settings, with as few outputs in a step as may be."""
        gpu = self._config.gpu
        config = self._config if gpu.max_num_seqs is not None else _with_gpu(self._config, max_num_seqs=1)
        # A chunk that was asked for and does not fit is refused by name, later.
        chosen = _with_gpu(config, prefill_chunk_max=0)
        return self._fits(Trial(chosen, self._experts.count))

    def has_room(self, tokens: int) -> bool:
        """Returns whether the experts fit beside a KV cache of this number of tokens, or of the size that is
        set, with as many outputs in a step as are set or usual.
        """
        return self._fits(_with_room(Trial(self._usual_step(), self._experts.count), tokens))

    def kept_tokens(self) -> int:
        """Returns the tokens of KV cache that experts leave room for on this rank's GPU."""
        config = self._usual_step()
        try:
            free_bytes = self._plan(Trial(config, 0)).kv_bytes
        except UserError:
            free_bytes = 0
        page_bytes = cache_shape(config.gpu, self._model, self._layers, torch.device("meta")).page_bytes
        return kept_tokens(self._longest, free_bytes, page_bytes / config.gpu.page_size)

    def saved_bytes(self, config: MoebiusConfig) -> int:
        """Returns how many bytes dense weights take less under other settings of how they are held."""
        return self._held_bytes(self._config) - self._held_bytes(config)

    def _usual_step(self) -> MoebiusConfig:
        return _with_gpu(self._config, max_num_seqs=self._config.gpu.num_seqs, prefill_chunk_max=0)

    def num_seqs(self) -> int:
        """Returns what `max_num_seqs` is, or becomes where it is unset."""
        gpu, dtype = self._config.gpu, TORCH_DTYPES[self._model.dtype]
        has_states = all_states_bytes(gpu, self._layers, dtype) > 0
        if gpu.max_num_seqs is None and self._experts.is_everything and not has_states:
            for count in _MANY_SEQS:
                trial = Trial(_with_gpu(self._config, max_num_seqs=count), self._experts.count)
                if self._fits(_with_room(trial, count * _SEQ_TOKENS)):
                    return count
        return chosen_num_seqs(self._config, self._fits, self._experts.count, self._longest)

    def batched_tokens(self, config: MoebiusConfig) -> int:
        """Returns what `max_num_batched_tokens` is, or becomes where it is unset.

        Where expert servers compute a part of each step, longer steps gain nothing: they stay short, and long
        prompts have steps of their own (`prefill_chunk`).
        """
        wanted = config.gpu.max_num_batched_tokens
        if wanted is not None:
            return wanted
        if not self._experts.is_everything:
            return DEFAULT_BATCHED_TOKENS
        most = most_chunk_tokens(self._model, self._parallel)
        if self._use.total < _SMALL_GPU_BYTES:
            most = min(most, _SMALL_GPU_TOKENS)
        for tokens in _BATCHED_TOKENS:
            trial = Trial(_with_gpu(config, max_num_batched_tokens=tokens), self._experts.count)
            room = max(tokens, _room_tokens(self._longest)[0])
            if tokens <= most and self._fits(_with_room(trial, room)):
                return tokens
        return DEFAULT_BATCHED_TOKENS

    def prompt_graph_tokens(self, config: MoebiusConfig) -> int:
        """Returns what `cuda_graph_max_prompt_tokens` is, or becomes where it is unset: what leaves requests
        their room in the KV cache. 0: steps with prompts run without graphs.
        """
        wanted = config.gpu.cuda_graph_max_prompt_tokens
        if wanted is not None:
            return wanted
        for tokens in _PROMPT_GRAPHS:
            trial = Trial(_with_gpu(config, cuda_graph_max_prompt_tokens=tokens), self._experts.count)
            whole = self._experts.is_everything
            if not prompt_sizes(self._model, trial.config.gpu, self._parallel, whole):
                return 0
            if self._fits(_with_room(trial, _room_tokens(self._longest)[0])):
                return tokens
        return 0

    def prefill_chunk(self, config: MoebiusConfig) -> int:
        """Returns what `prefill_chunk_max` is, or becomes where it is unset; 0: no step streams more than
        others.

        Raises UserError for a value that is impossible whatever the memory.
        """
        gpu, most = config.gpu, most_chunk_tokens(self._model, self._parallel)
        if not self._experts.ring_bytes:
            return 0
        wanted = gpu.prefill_chunk_max
        if wanted and not gpu.num_batched_tokens <= wanted <= most:
            raise UserError(
                f"prefill_chunk_max: {wanted} is not allowed; allowed: {gpu.num_batched_tokens} "
                f"(max_num_batched_tokens) to {min(most, 65536)}"
            )
        if wanted is not None:
            return wanted
        for tokens in PREFILL_CHUNKS:
            trial = Trial(_with_gpu(config, prefill_chunk_max=tokens), self._experts.count)
            # The cache has to hold what such a step computes, and others' requests.
            room = tokens + _room_tokens(self._longest)[-1]
            if gpu.num_batched_tokens < tokens <= most and self._fits(_with_room(trial, room)):
                return tokens
        return 0

    def refusal(self, config: MoebiusConfig, error: MemoryShort) -> UserError:
        """The error with what would make it fit."""
        change = smallest_change(config, self._experts.count, self._longest, self._fits)
        ranks = self._parallel.tp_size
        if change is not None:
            words = f"it fits with {change}"
        else:
            words = "no setting alone or with others makes it fit"
            if config.gpu.gpu_memory_gib is not None:
                words += " at this gpu_memory_gib"
            elif config.gpu.gpu_memory_utilization < 0.95:
                words += " at this gpu_memory_utilization"
        usable = config.gpu.usable_bytes(self._use.total)
        total = (usable + error.missing) / (usable / self._use.total)
        more = f"as it is set, with tensor_parallel_size above {ranks} or a GPU of {gib(int(total))} GiB"
        return UserError(f"{error}: {words}; {more}")

    def _fits(self, trial: Trial) -> bool:
        try:
            self._plan(trial)
        except UserError:
            return False
        return True

    def _plan(self, trial: Trial) -> MemoryPlan:
        dense_bytes, longest = self._held_bytes(trial.config), trial.config.model.max_model_len
        shape = cache_shape(trial.config.gpu, self._model, self._layers, torch.device("meta"))
        held = replace(self._experts, count=trial.num_experts)
        # Weights do not depend on it.
        config = self._model.with_max_model_len(longest or self._longest)
        sizes = dense_bytes, self._use, shape.page_bytes, held, self._parallel, self._vision
        return plan_memory(
            trial.config, config, *sizes, self._drafting_bytes[trial.config.model.dense_weights]
        )

    def _held_bytes(self, config: MoebiusConfig) -> int:
        """Returns the bytes of dense weights as the settings keep them. Raises UserError where they cannot be
        kept so.
        """
        key = config.model.dense_weights
        if key not in self._dense_bytes:
            held = plan_weights(config.model, self._model, self._parallel, self._device)
            self._dense_bytes[key] = held.device_bytes
            self._drafting_bytes[key] = draft_model_bytes(config, self._model, self._device)
        return self._dense_bytes[key]


def make_kv_memory(
    config: MoebiusConfig,
    model: CausalLM,
    experts: ExpertMemory,
    group: RankGroup,
    device: torch.device,
    vision: VisionMemory | None = None,
) -> tuple[KvMemory, MoebiusConfig]:
    """Plans KV memory before anything is loaded, with `model` on the meta device; also returns the settings
    with what is chosen.

    Ranks choose alike. Raises UserError when it cannot fit.
    """
    memory = make_device_memory(device)
    if memory is None:
        count = group.minimum("max_num_seqs", shared_num_seqs(config, model.config, model.rank_layers))
        # The default is what an unset number means.
        config = config if count == config.gpu.num_seqs else with_num_seqs(config, count)
        return SharedKvMemory(
            config, cache_shape(config.gpu, model.config, model.rank_layers, device)
        ), config
    before = memory.use()
    rank = RankPlan(config, _held(config, model), before, experts, vision)
    chosen = with_num_seqs(config, group.minimum("max_num_seqs", rank.num_seqs()))
    tokens = group.minimum("max_num_batched_tokens", rank.batched_tokens(chosen))
    chosen = _with_gpu(chosen, max_num_batched_tokens=tokens)
    chunk = group.minimum("prefill_chunk_max", rank.prefill_chunk(chosen))
    chosen = _with_gpu(chosen, prefill_chunk_max=chunk)
    captured = group.minimum("cuda_graph_max_prompt_tokens", rank.prompt_graph_tokens(chosen))
    chosen = _with_gpu(chosen, cuda_graph_max_prompt_tokens=captured)
    _log.info("tokens of a step", max_num_batched_tokens=tokens, prefill_chunk_max=chunk)
    shape = cache_shape(chosen.gpu, model.config, model.rank_layers, device)
    try:
        plan = rank.make(chosen)
    except MemoryShort as error:
        raise rank.refusal(config, error) from None
    return DeviceKvMemory(chosen, shape, MemoryLedger(plan, memory, before)), chosen


def has_room_to_stream(
    config: MoebiusConfig,
    model: CausalLM,
    experts: ExpertMemory,
    group: RankGroup,
    device: torch.device,
    vision: VisionMemory | None = None,
) -> bool:
    """Returns whether the ring of `experts` fits with all else, on every rank; all of them call it."""
    memory = make_device_memory(device)
    fits = memory is None or RankPlan(config, _held(config, model), memory.use(), experts, vision).fits()
    return group.minimum("room to stream", int(fits)) == 1


def with_dense_weights(
    config: MoebiusConfig,
    model: CausalLM,
    experts: ExpertMemory,
    group: RankGroup,
    device: torch.device,
    vision: VisionMemory | None = None,
) -> MoebiusConfig:
    """Returns the settings with what `dense_weights: auto` becomes on a GPU, on every rank alike; all of them
    call it.

    Dequantised where `experts` and the KV cache that they leave room for fit beside that, else kept as they
    are stored (docs/decisions/0074-dense-weights-by-auto-are-decided-by-memory.md).
    """
    memory = make_device_memory(device)
    if memory is None or config.model.dense_weights != "auto":
        return config
    dequantised = with_dense_form(config, "dequantise")
    rank = RankPlan(dequantised, _held(dequantised, model), memory.use(), experts, vision)
    tokens = group.minimum("tokens of a long request", rank.kept_tokens())
    fits = group.minimum("room for dequantised weights", int(rank.has_room(tokens))) == 1
    kept = with_dense_form(config, "keep")
    if rank.saved_bytes(kept):
        _log.info(
            f"dense_weights auto: {'dequantised' if fits else 'kept as stored'}",
            reason=f"the experts and {tokens} tokens of KV cache {'' if fits else 'do not '}fit beside "
            "dequantised weights",
        )
    return dequantised if fits else kept


def _held(config: MoebiusConfig, model: CausalLM) -> HeldWeights:
    return plan_weights(config.model, model.config, model.parallel, model.device)


def with_num_seqs(config: MoebiusConfig, count: int) -> MoebiusConfig:
    """Returns the same settings; logs it where no setting chose that many."""
    if config.gpu.max_num_seqs is None:
        _log.info("max_num_seqs is chosen by what fits", max_num_seqs=count, default=DEFAULT_NUM_SEQS)
    gpu = config.gpu.model_copy(update={"max_num_seqs": count})
    return config.model_copy(update={"gpu": gpu})
