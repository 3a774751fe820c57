"""From the model and its settings to the numbers that speeds follow from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moebius.app.planning.capacity import expert_format
from moebius.app.planning.components import num_servers
from moebius.app.planning.expert_bytes import StoredExperts
from moebius.app.planning.hardware import Hardware
from moebius.app.planning.residency import Residency
from moebius.app.planning.speed import ExpertTimes, Work
from moebius.app.supervisor.cpus import place_experts, usable_cpus
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig
from moebius.kernel_times import find_times, this_host
from moebius.kernels import float32_isa, isa_level
from moebius.mailbox_plan import request_rows
from moebius.packed_layout import PANEL_COLUMNS

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
    """Experts of layers in several formats count with their mean size and the layout of most."""
    formats, expert_bytes = expert_format(config, geometry, stored)
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
        expert_weights=3 * geometry.hidden_size * geometry.moe_intermediate_size,
        expert_times=measured_times(config, geometry, formats, model.dtype, hardware),
        resident_share=residency.share,
        servers=num_servers(config, hardware.sockets),
        ranks=ranks,
        request_rows=request_rows(config) if mailbox else config.gpu.max_num_batched_tokens,
        item_bytes=model.torch_dtype.itemsize,
    )


def measured_times(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    formats: tuple[str, str] | None,
    dtype: str,
    hardware: Hardware,
) -> ExpertTimes | None:
    """From `hardware.kernel_times`; None: no server of as many threads has measured both matrices' formats.

    `dtype`: of the model's activations.
    """
    experts = config.experts
    if formats is None or not hardware.kernel_times or experts.expert_addresses:
        return None
    threads = experts.expert_threads
    if not threads:
        engines = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
        nodes, quota = usable_cpus()
        count = num_servers(config, hardware.sockets)
        threads = place_experts(nodes, count, quota, engines if hardware.gpu else 0)[0].threads
    on = this_host(threads, float32_isa() if experts.batch_invariant_experts else isa_level())
    rows = "bfloat16" if dtype == "bfloat16" else "float32"
    hidden, inner = geometry.hidden_size, geometry.moe_intermediate_size
    gate_up = find_times(hardware.kernel_times, on, formats[0], rows, hidden)
    down = find_times(hardware.kernel_times, on, formats[1], rows, inner)
    if gate_up is None or down is None:
        return None
    gate_up_panels, down_panels = 2 * -(-inner // PANEL_COLUMNS), -(-hidden // PANEL_COLUMNS)
    return ExpertTimes(gate_up, down, gate_up_panels, down_panels, hidden, inner)


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
