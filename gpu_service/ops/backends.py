"""Which implementation of every op a device runs: decided once, at start, and said in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import structlog
import torch

from gpu_service.ops.activation import (
    apply_gate,
    clamped_swiglu_and_mul,
    gelu_and_mul,
    gelu_tanh_and_mul,
    silu,
    silu_and_mul,
)
from gpu_service.ops.block_attention import block_scores, mean_block_scores
from gpu_service.ops.example_sizes import SMALL, Sizes
from gpu_service.ops.examples import example
from gpu_service.ops.gated_streams import (
    gate_values,
    inject_update,
    mix_gated_streams,
    norm_streams,
)
from gpu_service.ops.hyper_connections import collapse_streams, mix_streams
from gpu_service.ops.kimi_delta import kimi_delta_extend, kimi_delta_update
from gpu_service.ops.kv import append_kv, mean_index_keys, pool_index_keys, rotate_and_append
from gpu_service.ops.latent import absorb_query, project_values
from gpu_service.ops.linear import add_norm_linear, add_norm_route, fp8_linear, linear
from gpu_service.ops.linear_attention import (
    causal_conv_extend,
    causal_conv_update,
    gated_delta_extend,
    gated_delta_update,
)
from gpu_service.ops.ngrams import ngram_rows, table_rows
from gpu_service.ops.norm import (
    fused_add_rms_norm,
    gated_group_rms_norm,
    gated_rms_norm,
    rms_norm,
    sigmoid_gated_rms_norm,
)
from gpu_service.ops.overflow import note_overflow
from gpu_service.ops.panel_linear import panel_linear, panel_rows
from gpu_service.ops.registry import Implementation, Op, joined
from gpu_service.ops.rope import apply_rope, qk_norm_rope, rope_table
from gpu_service.ops.router import choose_by_kind, route, zero_experts
from gpu_service.ops.sampling import argmax_and_finite, mask_logits, truncate_probabilities
from gpu_service.ops.selective_scan import selective_scan_extend, selective_scan_update
from gpu_service.ops.state_space import state_space_extend, state_space_update
from moebius.errors import brief
from moebius.process.progress import counted, phase

_log = structlog.get_logger(__name__)

# The table of rotations comes before what reads it.
OPS: tuple[Op[..., Any], ...] = (
    rms_norm,
    fused_add_rms_norm,
    rope_table,
    apply_rope,
    qk_norm_rope,
    silu,
    silu_and_mul,
    gelu_and_mul,
    gelu_tanh_and_mul,
    clamped_swiglu_and_mul,
    apply_gate,
    block_scores,
    mean_block_scores,
    append_kv,
    rotate_and_append,
    pool_index_keys,
    mean_index_keys,
    absorb_query,
    project_values,
    causal_conv_update,
    causal_conv_extend,
    gated_delta_update,
    gated_delta_extend,
    selective_scan_update,
    selective_scan_extend,
    state_space_update,
    state_space_extend,
    gated_rms_norm,
    gated_group_rms_norm,
    kimi_delta_update,
    kimi_delta_extend,
    sigmoid_gated_rms_norm,
    collapse_streams,
    mix_streams,
    norm_streams,
    mix_gated_streams,
    inject_update,
    gate_values,
    ngram_rows,
    table_rows,
    route,
    zero_experts,
    choose_by_kind,
    linear,
    fp8_linear,
    panel_linear,
    panel_rows,
    add_norm_linear,
    add_norm_route,
    argmax_and_finite,
    mask_logits,
    truncate_probabilities,
    note_overflow,
)
# The setting `attention_backend` -> libraries to look in, best first; torch is what is left.
BACKENDS: dict[str, tuple[str, ...]] = {
    "auto": ("flashinfer", "triton"),
    "flashinfer": ("flashinfer", "triton"),
    "triton": ("triton",),
    "cpu": (),
    "torch": (),
}
_SLOWER = "ops on torch take several launches in place of one: slower decode steps, the same results"
# Of a line that says what an op uses: between libraries, and what is left after them.
_THEN, _REFERENCE = " > ", "torch"
_INSTALL = "pip install 'moebius[gpu]'"
# Modules that import a library and say what it has.
TABLES = {"flashinfer": "gpu_service.ops.flashinfer", "triton": "gpu_service.ops.triton.table"}
# FlashInfer's cache write and rotation take page tables and float32 tables, whose making costs more
# launches in every layer or step than they save; they serve where there is no Triton.
_TRITON_FIRST = frozenset({"append_kv", "rope_table", "apply_rope"})

Tables = Mapping[str, Mapping[str, Implementation]]


def install(
    device: torch.device,
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sequence[Sizes] = (SMALL,),
    attention_modules: Callable[[], Sequence[Any]] = tuple,
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Choose for a device and for activations of a dtype; afterwards every op dispatches there.

    `attention_modules`: what FlashInfer has to compile for attention as well, at the same time. `known`: as
    in `install_tables`.

    Every implementation is called once with arguments of each of `sizes`, a model's own (which also compiles
    it, and shows whether it fits on the device): one that fails, or a library that is missing, costs a
    warning and leaves its ops to the next. Returns op name ->
    libraries in use, most wanted first. On a CPU nothing of a GPU is imported: ops run on the kernels
    of this machine where those can, with `backend` "torch" on the references.
    """
    if device.type == "cpu" and backend in ("auto", "cpu"):
        return _install_host_kernels()
    if device.type != "cuda":
        return {}
    return install_tables(device, load_tables(BACKENDS[backend], attention_modules), dtype, sizes, known)


def _install_host_kernels() -> dict[str, str]:
    """Installs the host's kernels as `install`; nothing is to be tried, since nothing is compiled."""
    from gpu_service.ops import host_kernels, host_recurrent

    threads = host_kernels.dense_threads(torch.get_num_threads())
    found = {**host_kernels.implementations(threads), **host_recurrent.implementations(threads)}
    for op in OPS:
        own = found.get(op.name)
        op.use("cpu", None if own is None else joined([own], op.reference))
    return {op.name: "cpu > torch" if op.name in found else "torch" for op in OPS}


def install_tables(
    device: torch.device,
    tables: Tables,
    dtype: torch.dtype,
    sizes: Sequence[Sizes] = (SMALL,),
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the same from tables already loaded, in order of preference, and for a device of any type.

    `known`: what this returned before for the same device, libraries and arguments; nothing is tried of ops
    whose libraries still have them. Steps run them before they are captured, which loads them.
    """
    chosen, failures = {}, _Failures()
    for op in counted(OPS, "trying GPU kernels", len(OPS)):
        op.use(device.type, None)
        chain = _known_chain(op, tables, (known or {}).get(op.name))
        if chain is None:
            chain = _usable(op, tables, _TryOut(device, dtype, sizes), failures)
        if chain:
            op.use(device.type, joined([implementation for _, implementation in chain], op.reference))
        names = [name for name, _ in chain]
        complete = bool(chain) and chain[-1][1].supports is None
        chosen[op.name] = _THEN.join(names if complete else [*names, _REFERENCE])
    failures.report(chosen)
    _log.info("implementations of the ops are chosen", device=str(device), **chosen)
    return chosen


def uninstall(device_type: str) -> None:
    """Make every op run its torch reference on this device type again."""
    for op in OPS:
        op.use(device_type, None)


def load_tables(
    names: Sequence[str], attention_modules: Callable[[], Sequence[Any]] = tuple
) -> dict[str, Mapping[str, Implementation]]:
    """Import libraries and let them compile; one warning for each that cannot be used here."""
    tables: dict[str, Mapping[str, Implementation]] = {}
    for name in names:
        try:
            with phase(f"importing {name}"):
                table = import_module(TABLES[name])
            if hasattr(table, "prepare"):
                table.prepare(attention_modules())
            tables[name] = table.IMPLEMENTATIONS
        # Libraries check versions, compilers and drivers, each with exceptions of its own.
        except Exception as error:
            _log.warning(
                "a library of GPU kernels cannot be used",
                library=name,
                error=brief(error),
                install=_INSTALL,
            )
    return tables


class _Failures:
    """Collects what did not work, so that each library is complained about once."""

    def __init__(self) -> None:
        self._reasons: dict[str, dict[str, str]] = {}

    def add(self, library: str, op: str, error: Exception) -> None:
        self._reasons.setdefault(library, {})[op] = brief(error)

    def report(self, chosen: Mapping[str, str]) -> None:
        """`chosen`: op name -> libraries in use instead."""
        for library, reasons in self._reasons.items():
            instead = {op: chosen[op] for op in reasons}
            _log.warning(
                "a library of GPU kernels failed; these ops use the next one",
                library=library,
                ops=list(reasons),
                error="; ".join(dict.fromkeys(reasons.values())),
                instead=instead,
                cost=_SLOWER if "torch" in instead.values() else "speed only: results stay the same",
            )


@dataclass(frozen=True, slots=True)
class _TryOut:
    """Calls implementations as a model will; filled by `install_tables`."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sequence[Sizes]

    def works(self, op: Op[..., Any], implementation: Implementation) -> bool:
        """False: not made for this dtype, or for any of the sizes. Raises what the library raises."""
        called = False
        for sizes in self.sizes:
            arguments = example(op.name, self.device, self.dtype, sizes)
            if implementation.supports is None or implementation.supports(*arguments):
                implementation.function(*arguments)
                called = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return called


def _known_chain(
    op: Op[..., Any], tables: Tables, known: str | None
) -> list[tuple[str, Implementation]] | None:
    """Returns the implementations that a line of `install_tables` names; None: it names others than there
    are, or none was made.
    """
    if known is None:
        return None
    chain: list[tuple[str, Implementation]] = []
    for name in known.split(_THEN):
        if name == _REFERENCE:
            return chain
        implementation = tables.get(name, {}).get(op.name)
        if implementation is None:
            return None
        chain.append((name, implementation))
    # Without the reference, the last one has to take everything.
    return chain if chain[-1][1].supports is None else None


def _usable(
    op: Op[..., Any], tables: Tables, try_out: _TryOut, failures: _Failures
) -> list[tuple[str, Implementation]]:
    """Returns this op's implementations that work, best first, up to one that takes everything."""
    names = list(tables)
    if op.name in _TRITON_FIRST:
        names.sort(key=lambda name: name != "triton")
    chain: list[tuple[str, Implementation]] = []
    for name in names:
        implementation = tables[name].get(op.name)
        if implementation is None:
            continue
        try:
            if not try_out.works(op, implementation):
                continue
        # A compiler, a driver or a kernel may raise anything.
        except Exception as error:
            failures.add(name, op.name, error)
            continue
        chain.append((name, implementation))
        if implementation.supports is None:
            break
    return chain
