"""Ops of layers with a state of each request, and gates, on a CPU: see `host_kernels`.

Steps of one token a request, or of one depth of draft tokens; prompts are left to the torch references.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from gpu_service.ops.registry import Implementation
from moebius import _kernels
from moebius.models.layers.gqa import GateActivation

_FLOATS = (torch.float32, torch.bfloat16)
# What the columns of a head's state are a multiple of.
VALUE_MULTIPLE = 16


class HostRecurrent:
    """The implementations on one set of threads."""

    def __init__(self, threads: _kernels.DenseThreads) -> None:
        self._threads = threads

    def causal_conv_update(
        self,
        rows: torch.Tensor,
        states: torch.Tensor,
        weight: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
        bias: torch.Tensor | None = None,
        activates: bool = True,
    ) -> torch.Tensor:
        """Computes `ops.linear_attention.causal_conv_update`."""
        taps = weight.t().float().contiguous()
        wide_bias = None if bias is None else bias.float()
        output = torch.empty(rows.shape, dtype=rows.dtype)
        num_rows, channels = rows.shape
        self._threads.convolve(
            rows.dtype == torch.bfloat16,
            activates,
            rows.data_ptr(),
            rows.stride(0),
            num_rows,
            channels,
            taps.shape[0],
            states.data_ptr(),
            reads.data_ptr(),
            writes.data_ptr(),
            taps.data_ptr(),
            0 if wide_bias is None else wide_bias.data_ptr(),
            output.data_ptr(),
        )
        return output

    def gated_delta_update(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        states: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes `ops.linear_attention.gated_delta_update`."""
        decay = _kernels.DecayRule(a_log.data_ptr(), dt_bias.data_ptr())
        return self._delta(qkv, a, b, decay, states, reads, writes)

    def kimi_delta_update(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        bound: float | None,
        states: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes `ops.kimi_delta.kimi_delta_update`."""
        decay = _kernels.DecayRule(a_log.data_ptr(), dt_bias.data_ptr(), True, bound)
        return self._delta(qkv, a, b, decay, states, reads, writes)

    def _delta(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        decay: _kernels.DecayRule,
        states: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes either delta rule."""
        _, heads, key_dim, value_dim = states.shape
        output = torch.empty(qkv.shape[0], heads, value_dim, dtype=qkv.dtype)
        self._threads.update_delta(
            qkv.dtype == torch.bfloat16,
            qkv.data_ptr(),
            qkv.stride(0),
            a.data_ptr(),
            a.stride(0),
            b.data_ptr(),
            b.stride(0),
            decay,
            states.data_ptr(),
            reads.data_ptr(),
            writes.data_ptr(),
            output.data_ptr(),
            qkv.shape[0],
            (qkv.shape[1] - heads * value_dim) // (2 * key_dim),
            heads,
            key_dim,
            value_dim,
        )
        return output

    def state_space_update(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        d: torch.Tensor,
        states: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes `ops.state_space.state_space_update`."""
        _, heads, state_dim, head_dim = states.shape
        output = torch.empty(xbc.shape[0], heads, head_dim)
        self._threads.update_state_space(
            xbc.dtype == torch.bfloat16,
            xbc.data_ptr(),
            xbc.stride(0),
            dt.data_ptr(),
            dt.stride(0),
            _kernels.StepRule(a_log.data_ptr(), dt_bias.data_ptr(), d.data_ptr()),
            states.data_ptr(),
            reads.data_ptr(),
            writes.data_ptr(),
            output.data_ptr(),
            xbc.shape[0],
            (xbc.shape[1] - heads * head_dim) // (2 * state_dim),
            heads,
            state_dim,
            head_dim,
        )
        return output

    def selective_scan_update(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        gate: torch.Tensor,
        a_log: torch.Tensor,
        d: torch.Tensor,
        states: torch.Tensor,
        reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:
        """Computes `ops.selective_scan.selective_scan_update`."""
        output = torch.empty(x.shape, dtype=x.dtype)
        self._threads.scan(
            x.dtype == torch.bfloat16,
            _columns(x),
            _columns(dt),
            _columns(b),
            _columns(c),
            _columns(gate),
            a_log.data_ptr(),
            d.data_ptr(),
            states.data_ptr(),
            reads.data_ptr(),
            writes.data_ptr(),
            output.data_ptr(),
            x.shape[0],
            x.shape[1],
            b.shape[1],
        )
        return output

    def gated_group_rms_norm(
        self, values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
    ) -> torch.Tensor:
        """Computes `ops.norm.gated_group_rms_norm`."""
        rows, columns = values.shape
        output = torch.empty(rows, columns, dtype=weight.dtype)
        self._threads.gated_group_norm(
            weight.dtype == torch.bfloat16,
            values.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            weight.data_ptr(),
            output.data_ptr(),
            eps,
            columns // num_groups,
            num_groups,
            rows,
        )
        return output

    def gated_norm(
        self, is_sigmoid: bool, values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Computes `ops.norm.gated_rms_norm`, or `sigmoid_gated_rms_norm`."""
        rows, heads, size = values.shape
        output = torch.empty(rows, heads * size, dtype=values.dtype)
        self._threads.gated_norm(
            values.dtype == torch.bfloat16,
            is_sigmoid,
            values.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            weight.data_ptr(),
            output.data_ptr(),
            eps,
            size,
            heads,
            rows,
        )
        return output

    def apply_gate(
        self, values: torch.Tensor, gates: torch.Tensor, activation: GateActivation = "sigmoid"
    ) -> torch.Tensor:
        """Computes `ops.activation.apply_gate`."""
        rows, size = values.shape
        self._threads.apply_gate(
            values.dtype == torch.bfloat16,
            activation == "softplus",
            values.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            values.data_ptr(),
            size,
            gates.shape[1],
            rows,
        )
        return values


def _columns(rows: torch.Tensor) -> tuple[int, int]:
    """Returns where rows begin, and the elements from one to the next."""
    return rows.data_ptr(), rows.stride(0)


def _has_rows(*tensors: torch.Tensor) -> bool:
    """Returns whether these are rows, columns contiguous, of one type that the kernels compute."""
    dtype = tensors[0].dtype
    return dtype in _FLOATS and all(one.dtype == dtype and one.stride(-1) == 1 for one in tensors)


def _are_contiguous_float32(*tensors: torch.Tensor) -> bool:
    """Returns whether these are constants and states as kernels read them."""
    return all(one.is_contiguous() and one.dtype == torch.float32 for one in tensors)


def _convolves(rows: torch.Tensor, states: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
    return _has_rows(rows, states) and states.is_contiguous()


def _updates(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    *_: object,
) -> bool:
    constants = _are_contiguous_float32(a_log, dt_bias, states)
    return _has_rows(qkv, a, b) and constants and states.shape[3] % VALUE_MULTIPLE == 0


def _updates_elements(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    *_: object,
) -> bool:
    return _updates(qkv, a, b, a_log, dt_bias, states)


def _steps(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    *_: object,
) -> bool:
    constants = _are_contiguous_float32(a_log, dt_bias, d, states)
    return _has_rows(xbc, dt) and constants and states.shape[3] % VALUE_MULTIPLE == 0


def _scans(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    *_: object,
) -> bool:
    return _has_rows(x, dt, b, c, gate) and _are_contiguous_float32(a_log, d, states)


def _norms_groups(values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
    return values.dtype == torch.float32 and values.is_contiguous() and _has_rows(gate, weight)


def _norms(values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> bool:
    return _has_rows(values, gate, weight) and values.is_contiguous()


def _gates(values: torch.Tensor, gates: torch.Tensor, activation: str = "sigmoid") -> bool:
    return _has_rows(values, gates) and values.is_contiguous()


def implementations(threads: _kernels.DenseThreads) -> Mapping[str, Implementation]:
    """Returns the implementations by the names of the ops."""
    kernels = HostRecurrent(threads)
    return {
        "causal_conv_update": Implementation(kernels.causal_conv_update, _convolves),
        "gated_delta_update": Implementation(kernels.gated_delta_update, _updates),
        "kimi_delta_update": Implementation(kernels.kimi_delta_update, _updates_elements),
        "state_space_update": Implementation(kernels.state_space_update, _steps),
        "selective_scan_update": Implementation(kernels.selective_scan_update, _scans),
        "gated_group_rms_norm": Implementation(kernels.gated_group_rms_norm, _norms_groups),
        "gated_rms_norm": Implementation(partial(kernels.gated_norm, False), _norms),
        "sigmoid_gated_rms_norm": Implementation(partial(kernels.gated_norm, True), _norms),
        "apply_gate": Implementation(kernels.apply_gate, _gates),
    }
