"""Ops of a layer on a CPU by the kernels of `kernels/dense`: one call where torch takes several dispatches.

Each implementation takes what its `supports` says; anything else is left to the torch reference. All compute
in float32 and round where the reference does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from gpu_service.ops.registry import Implementation
from gpu_service.ops.rope import RopeTable
from moebius import _kernels
from moebius.models.layers.router import RouterConfig

_FLOATS = (torch.float32, torch.bfloat16)
# The numbers of kernels/dense/row_ops.h.
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2, "none": 3}
_POSTS = {"none": 0, "renormalize": 1, "softmax": 2, "sigmoid": 3, "sigmoid_renormalize": 4}


# Rows up to which a router's logits are products row by row; for more, a matrix product reads less.
MOST_SCORED_ROWS = 16
# Rows up to which the two products of latent attention by head take no longer than torch's.
MOST_HEAD_ROWS = 64


@functools.cache
def routing_rule(config: RouterConfig) -> _kernels.RoutingRule | None:
    """Returns the rule by which `route` chooses; None: the kernels do not know it."""
    if config.score not in _SCORES or config.post not in _POSTS:
        return None
    return _kernels.RoutingRule(
        config.num_choices,
        config.top_k,
        config.num_groups,
        config.top_groups,
        config.group_score == "max",
        _SCORES[config.score],
        _POSTS[config.post],
        config.logit_softcap,
        config.renormalize_epsilon,
        config.scale,
    )


@functools.cache
def dense_threads(num_threads: int) -> _kernels.DenseThreads:
    """Returns the threads of all dense layers of this process."""
    return _kernels.DenseThreads(num_threads)


def _is_bfloat16(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class HostKernels:
    """The implementations on one set of threads."""

    def __init__(self, threads: _kernels.DenseThreads) -> None:
        self._threads = threads

    def rms_norm(self, hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Computes `ops.norm.rms_norm`."""
        rows = hidden_states.contiguous()
        output = torch.empty_like(rows)
        self._add_norm(rows, None, weight, eps, output)
        return output

    def fused_add_rms_norm(
        self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Computes `ops.norm.fused_add_rms_norm`."""
        output = update if update.dtype == residual.dtype else torch.empty_like(residual)
        self._add_norm(residual, update, weight, eps, output)
        return output

    def _add_norm(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        output: torch.Tensor,
    ) -> None:
        size = weight.shape[0]
        self._threads.add_norm(
            residual.data_ptr(),
            _is_bfloat16(residual),
            _address(update),
            update is not None and _is_bfloat16(update),
            weight.data_ptr(),
            _is_bfloat16(weight),
            output.data_ptr(),
            eps,
            size,
            residual.numel() // size,
        )

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Computes `ops.activation.silu_and_mul`."""
        size = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], size)
        rows = output.numel() // size
        self._threads.gate(_is_bfloat16(gate_up), gate_up.data_ptr(), output.data_ptr(), size, rows)
        return output

    def apply_rope(self, heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """Computes `ops.rope.apply_rope`."""
        rows, total, head_dim = heads.shape
        self._threads.rotate(
            _is_bfloat16(heads),
            heads.data_ptr(),
            heads.stride(0),
            total,
            head_dim,
            heads.stride(1),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            table.cos.shape[-1],
            table.interleaved,
            rows,
        )
        return heads

    def silu(self, values: torch.Tensor) -> torch.Tensor:
        """Computes `ops.activation.silu`."""
        rows, size = values.shape
        output = torch.empty(rows, size, dtype=values.dtype)
        self._threads.silu(
            _is_bfloat16(values), values.data_ptr(), values.stride(0), output.data_ptr(), size, rows
        )
        return output

    def rotate_and_append(
        self,
        heads: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        eps: float,
        num_heads: int,
        table: RopeTable,
        value: torch.Tensor,
        kv_slots: torch.Tensor,
        slot_mapping: torch.Tensor,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `ops.kv.rotate_and_append`; queries and keys are views of `heads`."""
        rows, total, head_dim = heads.shape
        self._threads.rotate_and_append(
            _is_bfloat16(heads),
            heads.data_ptr(),
            heads.stride(0),
            total,
            num_heads,
            head_dim,
            _address(q_weight),
            _address(k_weight),
            q_weight is not None and _is_bfloat16(q_weight),
            eps,
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            table.cos.shape[-1],
            table.interleaved,
            value.data_ptr(),
            value.stride(0),
            kv_slots.data_ptr(),
            slot_mapping.data_ptr(),
            rows,
            kv_slots.dtype != heads.dtype,
            key_scale,
            value_scale,
        )
        return heads[:, :num_heads], heads[:, num_heads:]

    def route(
        self,
        router_logits: torch.Tensor,
        correction_bias: torch.Tensor | None,
        config: RouterConfig,
        valid_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `ops.router.route`."""
        logits = router_logits.float().contiguous()
        rows, top_k = logits.shape[0], config.top_k
        weights = torch.empty(rows, top_k)
        ids = torch.empty(rows, top_k, dtype=torch.int32)
        rule = routing_rule(config)
        assert rule is not None, "`_routes` has looked"
        self._threads.route(
            logits.data_ptr(),
            _address(correction_bias),
            _address(valid_rows),
            weights.data_ptr(),
            ids.data_ptr(),
            rows,
            rule,
        )
        return weights, ids

    def absorb_query(self, query_nope: torch.Tensor, key_weight: torch.Tensor) -> torch.Tensor:
        """Computes `ops.latent.absorb_query` of few rows."""
        return self._multiply_heads(query_nope, key_weight, key_weight.shape[2], False)

    def project_values(self, attended: torch.Tensor, value_weight: torch.Tensor) -> torch.Tensor:
        """Computes `ops.latent.project_values` of few rows."""
        return self._multiply_heads(attended, value_weight, value_weight.shape[1], True)

    def _multiply_heads(
        self, rows: torch.Tensor, weight: torch.Tensor, outputs: int, is_transposed: bool
    ) -> torch.Tensor:
        num_heads, matrix_rows, latent_dim = weight.shape
        output = rows.new_empty(rows.shape[0], num_heads, outputs)
        self._threads.multiply_heads(
            _is_bfloat16(rows),
            rows.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            weight.data_ptr(),
            weight.stride(0),
            output.data_ptr(),
            rows.shape[0],
            num_heads,
            matrix_rows,
            latent_dim,
            is_transposed,
        )
        return output

    def linear(
        self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes `ops.linear.linear` of few rows to one output each."""
        products = torch.empty(hidden_states.shape[0], 1)
        self._threads.score_experts(
            hidden_states.data_ptr(),
            _is_bfloat16(hidden_states),
            products.shape[0],
            weight.shape[1],
            weight.data_ptr(),
            _is_bfloat16(weight),
            0,
            products.data_ptr(),
            1,
        )
        return products.to(hidden_states.dtype)

    def add_norm_route(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        correction_bias: torch.Tensor | None,
        config: RouterConfig,
        valid_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes `ops.linear.add_norm_route` of few rows."""
        normed = torch.empty_like(residual)
        self._add_norm(residual, update, norm_weight, eps, normed)
        rows, experts = residual.shape[0], weight.shape[0]
        logits = torch.empty(rows, experts)
        wide_bias = None if bias is None else bias.float()
        self._threads.score_experts(
            normed.data_ptr(),
            _is_bfloat16(normed),
            rows,
            weight.shape[1],
            weight.data_ptr(),
            _is_bfloat16(weight),
            _address(wide_bias),
            logits.data_ptr(),
            experts,
        )
        return residual, normed, *self.route(logits, correction_bias, config, valid_rows)


def _norms(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return hidden_states.dtype in _FLOATS and weight.dtype in (hidden_states.dtype, torch.float32)


def _adds_and_norms(update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    fits = update.dtype in (residual.dtype, torch.float32) and update.is_contiguous()
    fits = fits and residual.is_contiguous()
    return fits and _norms(residual, weight, eps)


def _gates(gate_up: torch.Tensor) -> bool:
    return gate_up.dtype in _FLOATS and gate_up.is_contiguous()


def _activates(values: torch.Tensor) -> bool:
    return values.dtype in _FLOATS and values.dim() == 2 and values.stride(1) == 1


def _applies_rope(heads: torch.Tensor, table: RopeTable) -> bool:
    head_dim, dtype = heads.shape[2], heads.dtype
    rows = heads.stride(2) == 1 and table.cos.is_contiguous() and table.sin.is_contiguous()
    return rows and table.cos.dtype == dtype and dtype in _FLOATS and head_dim % 16 == 0


def _rotates(
    heads: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    table: RopeTable,
    value: torch.Tensor,
    kv_slots: torch.Tensor,
    *_: object,
) -> bool:
    head_dim, dtype = heads.shape[2], heads.dtype
    same = all(tensor.dtype == dtype for tensor in (value, table.cos))
    same = same and kv_slots.dtype in (dtype, torch.float8_e4m3fn)
    weights = {weight.dtype for weight in (q_weight, k_weight) if weight is not None}
    same = same and weights in ({dtype}, {torch.float32}, set())
    rows = (heads.stride(1), heads.stride(2), value.stride(1), value.stride(2))
    whole = rows == (head_dim, 1, head_dim, 1) and table.cos.is_contiguous() and table.sin.is_contiguous()
    return same and whole and dtype in _FLOATS and head_dim % 16 == 0


def _routes(
    router_logits: torch.Tensor, correction_bias: torch.Tensor | None, config: RouterConfig, *_: object
) -> bool:
    bias = correction_bias is None or correction_bias.dtype == torch.float32
    return bias and routing_rule(config) is not None


def _multiplies_heads(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    latent_dim = weight.shape[2]
    whole = rows.stride(2) == 1 and weight.stride()[1:] == (latent_dim, 1) and latent_dim % 16 == 0
    same = rows.dtype == weight.dtype and rows.dtype in _FLOATS
    return whole and same and rows.shape[0] <= MOST_HEAD_ROWS


def _is_single(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if weight.shape[0] != 1 or hidden_states.dim() != 2 or hidden_states.shape[0] > MOST_SCORED_ROWS:
        return False
    whole = hidden_states.is_contiguous() and weight.is_contiguous() and bias is None
    return whole and weight.dtype == hidden_states.dtype and weight.dtype in _FLOATS


def _adds_and_routes(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    *_: object,
) -> bool:
    fits = _norms(residual, norm_weight, eps) and residual.shape[0] <= MOST_SCORED_ROWS
    fits = fits and residual.is_contiguous()
    if update is not None:
        fits = fits and _adds_and_norms(update, residual, norm_weight, eps)
    plain = weight.dtype in _FLOATS and weight.is_contiguous()
    return fits and plain and _routes(residual, correction_bias, config)


def implementations(threads: _kernels.DenseThreads) -> Mapping[str, Implementation]:
    """Returns the implementations by the names of the ops."""
    kernels = HostKernels(threads)
    return {
        "rms_norm": Implementation(kernels.rms_norm, _norms),
        "fused_add_rms_norm": Implementation(kernels.fused_add_rms_norm, _adds_and_norms),
        "silu_and_mul": Implementation(kernels.silu_and_mul, _gates),
        "silu": Implementation(kernels.silu, _activates),
        "apply_rope": Implementation(kernels.apply_rope, _applies_rope),
        "rotate_and_append": Implementation(kernels.rotate_and_append, _rotates),
        "absorb_query": Implementation(kernels.absorb_query, _multiplies_heads),
        "project_values": Implementation(kernels.project_values, _multiplies_heads),
        "route": Implementation(kernels.route, _routes),
        "linear": Implementation(kernels.linear, _is_single),
        "add_norm_route": Implementation(kernels.add_norm_route, _adds_and_routes),
    }
