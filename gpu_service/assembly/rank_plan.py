"""One rank's plan of memory under the given settings and under others: what is chosen, what would fit.

An engine asks before it loads, `moebius plan` on a GPU that need not be there; both get the same answers.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from gpu_service.assembly.kv_memory import DeviceKvMemory, KvMemory, SharedKvMemory, cache_shape
from gpu_service.loader.load import shape_weights
from gpu_service.memory.device_memory import MemoryUse, gib, make_device_memory
from gpu_service.memory.fitting import Trial, chosen_num_seqs, smallest_change
from gpu_service.memory.ledger import MemoryLedger
from gpu_service.memory.plan import ExpertMemory, MemoryPlan, MemoryShort, VisionMemory, plan_memory
from gpu_service.models.common import CausalLM
from gpu_service.models.registry import build_model
from gpu_service.parallel.group import RankGroup
from moebius.checkpoint.index import has_weights
from moebius.config import DEFAULT_NUM_SEQS, MoebiusConfig
from moebius.errors import UserError

_log = structlog.get_logger(__name__)


class RankPlan:
    """Of one rank; `model` is its part as `config` composes it, memory or not."""

    def __init__(
        self,
        config: MoebiusConfig,
        model: CausalLM,
        use: MemoryUse,
        experts: ExpertMemory,
        vision: VisionMemory | None = None,
    ) -> None:
        """`use`: the device before loading."""
        self._config = config
        self._use = use
        self._experts = experts
        self._vision = vision
        self._models: dict[str, CausalLM] = {config.model.dense_weights: model}
        self._parallel, self._longest = model.parallel, model.config.max_model_len

    def make(self, config: MoebiusConfig) -> MemoryPlan:
        """The ledger under these settings. Raises MemoryShort: it can not fit."""
        return self._plan(Trial(config, self._experts.count))

    def num_seqs(self) -> int:
        """What `max_num_seqs` is, or becomes where it is unset."""
        return chosen_num_seqs(self._config, self._fits, self._experts.count, self._longest)

    def refusal(self, config: MoebiusConfig, error: MemoryShort) -> UserError:
        """The error with what would make it fit."""
        change = smallest_change(config, self._experts.count, self._longest, self._fits)
        ranks = self._parallel.tp_size
        if change is not None:
            words = f"it fits with {change}"
        else:
            words = "no setting alone or with others makes it fit"
            if config.gpu.gpu_memory_utilization < 0.95:
                words += " at this gpu_memory_utilization"
        total = (self._use.total * config.gpu.gpu_memory_utilization + error.missing) / (
            config.gpu.gpu_memory_utilization
        )
        more = f"as it is set, with tensor_parallel_size above {ranks} or a GPU of {gib(int(total))} GiB"
        return UserError(f"{error}: {words}; {more}")

    def _fits(self, trial: Trial) -> bool:
        try:
            self._plan(trial)
        except UserError:
            return False
        return True

    def _plan(self, trial: Trial) -> MemoryPlan:
        model, longest = self._model(trial.config), trial.config.model.max_model_len
        page_bytes = cache_shape(trial.config.gpu, model.rank_config, torch.device("meta")).page_bytes
        held = replace(self._experts, count=trial.num_experts)
        # Weights do not depend on it.
        config = replace(model.config, max_model_len=longest or self._longest)
        return plan_memory(
            trial.config, config, model, self._use, page_bytes, held, self._parallel, self._vision
        )

    def _model(self, config: MoebiusConfig) -> CausalLM:
        """Composed anew where dense weights are kept otherwise. Raises UserError where they can not be."""
        key = config.model.dense_weights
        if key not in self._models:
            composed = self._models[self._config.model.dense_weights]
            model = build_model(composed.config, device=torch.device("meta"), parallel=self._parallel)
            if has_weights(config.model.model):
                shape_weights(model, config.model)
            self._models[key] = model
        return self._models[key]


def make_kv_memory(
    config: MoebiusConfig,
    model: CausalLM,
    experts: ExpertMemory,
    group: RankGroup,
    device: torch.device,
    vision: VisionMemory | None = None,
) -> tuple[KvMemory, MoebiusConfig]:
    """Before anything is loaded: `model` is on the meta device. Also the settings with what is chosen.

    Ranks choose alike. Raises UserError when it can not fit.
    """
    memory = make_device_memory(device)
    if memory is None:
        return SharedKvMemory(config, cache_shape(config.gpu, model.rank_config, device)), config
    before = memory.use()
    rank = RankPlan(config, model, before, experts, vision)
    chosen = with_num_seqs(config, group.minimum("max_num_seqs", rank.num_seqs()))
    shape = cache_shape(chosen.gpu, model.rank_config, device)
    try:
        plan = rank.make(chosen)
    except MemoryShort as error:
        raise rank.refusal(config, error) from None
    return DeviceKvMemory(chosen, shape, MemoryLedger(plan, memory, before)), chosen


def with_num_seqs(config: MoebiusConfig, count: int) -> MoebiusConfig:
    """The same settings; says so where nobody chose that many."""
    if config.gpu.max_num_seqs is None:
        _log.info("max_num_seqs is chosen by what fits", max_num_seqs=count, default=DEFAULT_NUM_SEQS)
    gpu = config.gpu.model_copy(update={"max_num_seqs": count})
    return config.model_copy(update={"gpu": gpu})
