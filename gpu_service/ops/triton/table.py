"""What Triton offers: one launch for each op, or a few; any shape, dtype and stride unless it says so."""

from __future__ import annotations

from gpu_service.ops.registry import Implementation
from gpu_service.ops.triton.activation import (
    clamped_swiglu_and_mul,
    gelu_and_mul,
    gelu_tanh_and_mul,
    silu_and_mul,
)
from gpu_service.ops.triton.block_attention import block_scores, mean_block_scores
from gpu_service.ops.triton.gated_streams import (
    gate_values,
    inject_update,
    mix_gated_streams,
    norm_streams,
)
from gpu_service.ops.triton.gemv import add_norm_linear, can_add_norm_linear, can_linear, linear
from gpu_service.ops.triton.hyper_connections import collapse_streams, mix_streams
from gpu_service.ops.triton.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.triton.kimi_delta import supports_extend as supports_kimi_extend
from gpu_service.ops.triton.kv import append_kv, mean_index_keys, pool_index_keys
from gpu_service.ops.triton.linear import fp8_linear
from gpu_service.ops.triton.linear_attention import (
    causal_conv_update,
    gated_delta_update,
    gated_rms_norm,
    sigmoid_gated_rms_norm,
)
from gpu_service.ops.triton.linear_attention_chunks import (
    causal_conv_extend,
    gated_delta_extend,
    supports_extend,
)
from gpu_service.ops.triton.ngrams import ngram_rows, table_rows
from gpu_service.ops.triton.norm import fused_add_rms_norm, rms_norm
from gpu_service.ops.triton.norm_route import add_norm_route, can_add_norm_route
from gpu_service.ops.triton.overflow import note_overflow
from gpu_service.ops.triton.panel_linear import panel_linear, panel_rows
from gpu_service.ops.triton.rope import (
    apply_rope,
    can_rotate_and_append,
    qk_norm_rope,
    rope_table,
    rotate_and_append,
)
from gpu_service.ops.triton.router import choose_by_kind, route, zero_experts
from gpu_service.ops.triton.sampling import argmax_and_finite, mask_logits
from gpu_service.ops.triton.selective_scan import selective_scan_extend, selective_scan_update
from gpu_service.ops.triton.state_space import (
    gated_group_rms_norm,
    state_space_extend,
    state_space_update,
)

IMPLEMENTATIONS = {
    "rms_norm": Implementation(rms_norm),
    "fused_add_rms_norm": Implementation(fused_add_rms_norm),
    "rope_table": Implementation(rope_table),
    "apply_rope": Implementation(apply_rope),
    "qk_norm_rope": Implementation(qk_norm_rope),
    "silu_and_mul": Implementation(silu_and_mul),
    "gelu_and_mul": Implementation(gelu_and_mul),
    "gelu_tanh_and_mul": Implementation(gelu_tanh_and_mul),
    "clamped_swiglu_and_mul": Implementation(clamped_swiglu_and_mul),
    "block_scores": Implementation(block_scores),
    "mean_block_scores": Implementation(mean_block_scores),
    "append_kv": Implementation(append_kv),
    "rotate_and_append": Implementation(rotate_and_append, can_rotate_and_append),
    "pool_index_keys": Implementation(pool_index_keys),
    "mean_index_keys": Implementation(mean_index_keys),
    "causal_conv_update": Implementation(causal_conv_update),
    "causal_conv_extend": Implementation(causal_conv_extend),
    "gated_delta_update": Implementation(gated_delta_update),
    "gated_delta_extend": Implementation(gated_delta_extend, supports_extend),
    "kimi_delta_update": Implementation(kimi_delta_update),
    "kimi_delta_extend": Implementation(kimi_delta_extend, supports_kimi_extend),
    "gated_rms_norm": Implementation(gated_rms_norm),
    "gated_group_rms_norm": Implementation(gated_group_rms_norm),
    "selective_scan_update": Implementation(selective_scan_update),
    "selective_scan_extend": Implementation(selective_scan_extend),
    "state_space_update": Implementation(state_space_update),
    "state_space_extend": Implementation(state_space_extend),
    "sigmoid_gated_rms_norm": Implementation(sigmoid_gated_rms_norm),
    "collapse_streams": Implementation(collapse_streams),
    "mix_streams": Implementation(mix_streams),
    "norm_streams": Implementation(norm_streams),
    "mix_gated_streams": Implementation(mix_gated_streams),
    "inject_update": Implementation(inject_update),
    "gate_values": Implementation(gate_values),
    "ngram_rows": Implementation(ngram_rows),
    "table_rows": Implementation(table_rows),
    "route": Implementation(route),
    "zero_experts": Implementation(zero_experts),
    "choose_by_kind": Implementation(choose_by_kind),
    "linear": Implementation(linear, can_linear),
    "add_norm_linear": Implementation(add_norm_linear, can_add_norm_linear),
    "add_norm_route": Implementation(add_norm_route, can_add_norm_route),
    "fp8_linear": Implementation(fp8_linear),
    "panel_linear": Implementation(panel_linear),
    "panel_rows": Implementation(panel_rows),
    "argmax_and_finite": Implementation(argmax_and_finite),
    "mask_logits": Implementation(mask_logits),
    "note_overflow": Implementation(note_overflow),
}
