"""How many KV pages fit, from what the device says once everything else was allocated or measured."""

from __future__ import annotations

from gpu_service.memory.device_memory import MemoryUse, gib
from gpu_service.memory.plan import GRAPHS, IMAGES, SLACK, MemoryPlan, wanted_kv_bytes
from gpu_service.model_config import ModelConfig
from moebius.config import MoebiusConfig
from moebius.errors import UserError

# Copies of all slots at full length are the most pages that requests and the prefix cache can make use of.
_USEFUL_COPIES = 2


def useful_pages(config: MoebiusConfig, model_config: ModelConfig) -> int:
    """More pages than this would only cost memory."""
    per_request = -(-model_config.max_model_len // config.gpu.page_size)
    return 1 + _USEFUL_COPIES * config.gpu.num_seqs * per_request


def size_kv_pool(plan: MemoryPlan, config: MoebiusConfig, model_config: ModelConfig, use: MemoryUse) -> int:
    """Pages of the pool; `use` is the device after weights were loaded and the largest step was profiled.

    The profile's blocks stay reserved, so a step's activations are in what is used already; only what
    comes later (graphs, images, slack) is set aside. Raises UserError when what was measured leaves too
    little.
    """
    later = plan.of(GRAPHS) + plan.of(IMAGES) + plan.of(SLACK)
    left = use.free - (use.total - plan.budget) - later
    where = (
        f"after loading and one step of {config.gpu.max_num_batched_tokens} tokens {gib(max(left, 0))} GiB "
        f"of the {gib(plan.budget)} GiB planned with are left"
    )
    wanted = wanted_kv_bytes(config, plan.page_bytes)
    if wanted is not None and wanted > left:
        asked = "num_pages" if config.gpu.num_pages is not None else "kv_cache_gib"
        raise UserError(
            f"GPU memory: the KV cache that {asked} asks for takes {gib(wanted)} GiB, but {where}"
        )
    pages = (left if wanted is None else wanted) // plan.page_bytes
    if wanted is None:
        pages = min(pages, useful_pages(config, model_config))
    if pages < 2:
        raise UserError(
            f"GPU memory: {where}; the KV cache needs two pages, {2 * plan.page_bytes} bytes. A smaller "
            "max_num_batched_tokens or fewer gpu_experts leave more"
        )
    return pages
