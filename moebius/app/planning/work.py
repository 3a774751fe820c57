"""From the model and its settings to the numbers that speeds follow from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moebius.app.planning.capacity import expert_format
from moebius.app.planning.components import num_servers
from moebius.app.planning.expert_bytes import StoredExperts
from moebius.app.planning.hardware import Hardware
from moebius.app.planning.residency import Residency
from moebius.app.planning.speed import Work
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.mailbox_plan import request_rows

if TYPE_CHECKING:
    from gpu_service.assembly.forecast import Forecast, RankForecast
    from gpu_service.model_config import ModelConfig


def make_work(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredExperts],
    forecast: Forecast,
    residency: Residency,
    hardware: Hardware,
) -> Work:
    """Experts of layers in several formats count with their mean size and the format of most."""
    name, expert_bytes, weights = expert_format(config, geometry, stored)
    ranks, model = config.parallel.tensor_parallel_size, forecast.model_config
    busiest = _busiest_of_stages(forecast)
    mailbox = config.experts.expert_transport == "mailbox"
    return Work(
        num_layers=model.num_layers,
        moe_layers=len(geometry.moe_layers),
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        hidden_size=geometry.hidden_size,
        dense_bytes=sum(rank.read_bytes for rank in busiest),
        dense_elements=sum(rank.read_elements for rank in busiest),
        kv_token_bytes=sum(rank.page_bytes for rank in busiest) / config.gpu.page_size,
        attention_width=_attention_width(model) // ranks,
        expert_bytes=expert_bytes,
        resident_expert_bytes=expert_bytes / ranks,
        expert_weights=weights,
        weight_format=name,
        resident_share=residency.share,
        servers=num_servers(config, hardware.sockets),
        ranks=ranks,
        request_rows=request_rows(config) if mailbox else config.gpu.max_num_batched_tokens,
        item_bytes=model.torch_dtype.itemsize,
    )


def _busiest_of_stages(forecast: Forecast) -> list[RankForecast]:
    stages: dict[int, RankForecast] = {}
    for rank in forecast.ranks:
        if rank.stage not in stages or rank.read_bytes > stages[rank.stage].read_bytes:
            stages[rank.stage] = rank
    return list(stages.values())


def _attention_width(model: ModelConfig) -> int:
    """Elements over all heads of a score, and of a weighted sum; of latents the mean of both."""
    if model.mla is None:
        return model.num_heads * model.head_dim
    return model.num_heads * (model.mla.cached_dim + model.mla.kv_lora_rank) // 2
