"""A stand-in for the part of FlashInfer 0.6.13 that is used: same names, arguments and memory, in torch.

Two things are as in the original and matter to the tests: plans are written into the pinned buffer, whose
copy to the device happens later (`run_copies`); and a wrapper in graph mode computes from the buffers it
was made with, whatever the last plan's arguments were.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Copy:
    """A plan on its way to the device."""

    source: torch.Tensor
    target: torch.Tensor


_queued: list[Copy] = []


def run_copies(number: int | None = None) -> None:
    """The device makes the oldest queued copies, or all."""
    for copy in _queued[:number]:
        copy.target.copy_(copy.source)
    del _queued[:number]


class FakeEvent:
    """Passes when the copies queued before it were made."""

    def __init__(self) -> None:
        self.last: Copy | None = None

    def record(self) -> None:
        """After all copies queued so far."""
        self.last = _queued[-1] if _queued else None

    def synchronize(self) -> None:
        """Lets those copies happen."""
        for number, copy in enumerate(_queued, start=1):
            if copy is self.last:
                run_copies(number)
                return


class PlanningWrapper:
    """What all wrappers share: a plan written to the host buffer, copied to the device some time later."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert kv_layout == "NHD"
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self.options = options
        self.graph = bool(options.get("use_cuda_graph"))
        self.num_plans = 0

    def write_plan(self) -> None:
        """Host work: overwrites the pinned buffer, queues its copy."""
        self.num_plans += 1
        source = self._pin_memory_int_workspace_buffer
        for copy in _queued:
            assert copy.source.data_ptr() != source.data_ptr(), "overwrites a plan not yet copied"
        source.view(torch.int64)[0] = self.signature
        _queued.append(Copy(source, self._int_workspace_buffer))

    @property
    def signature(self) -> int:
        """Tells this wrapper's last plan from all others."""
        return id(self) + self.num_plans

    def check_ready(self) -> None:
        """At `run`, in stream order: the plan was copied, and is still this wrapper's."""
        run_copies()
        assert int(self._int_workspace_buffer.view(torch.int64)[0]) == self.signature, "another's plan"


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """query `[n, H, D]` are the last n positions of key and value `[m, KV, D]`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    n, m = query.shape[0], key.shape[0]
    hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Refuses what would make a plan wait for the device."""
    assert tensor.device.type == "cpu"
    assert tensor.dtype == torch.int32
    return tensor


class PagedWrapper(PlanningWrapper):
    """Both paged wrappers: requests' pages from indptr, indices and last_page_len."""

    def set_pages(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        """Sets pages as the originals: graph mode copies into its own buffers, else the arguments
        are kept.
        """
        assert len(indices) == int(indptr[-1])
        if not self.graph:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = host(indptr).clone(), indices
            self._paged_kv_last_page_len_buf = host(last).clone()
            return
        assert len(last) == len(self._paged_kv_last_page_len_buf), "the batch size is frozen"
        self._paged_kv_indptr_buf.copy_(host(indptr))
        self._paged_kv_last_page_len_buf.copy_(host(last))
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

    def attend(
        self,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        starts: list[int],
        out: torch.Tensor,
        k_scale: float | None,
        v_scale: float | None,
    ) -> torch.Tensor:
        """Returns every request over its pages."""
        self.check_ready()
        keys, values = pages
        assert keys.stride() == values.stride(), "FlashInfer takes one set of strides for both"
        assert (query.dtype, keys.dtype) == self.types  # type: ignore[attr-defined]
        bounds = self._paged_kv_indptr_buf.tolist()
        for request, last in enumerate(self._paged_kv_last_page_len_buf.tolist()):
            assert 1 <= last <= keys.shape[1]
            own = self._paged_kv_indices_buf[bounds[request] : bounds[request + 1]].long()
            length = (len(own) - 1) * keys.shape[1] + last
            rows = slice(starts[request], starts[request + 1])
            key = keys.float()[own].flatten(0, 1)[:length] * (k_scale or 1.0)
            value = values.float()[own].flatten(0, 1)[:length] * (v_scale or 1.0)
            out[rows] = causal_attention(query[rows], key, value, self.scale).to(out.dtype)  # type: ignore[attr-defined]
        return out


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query per request."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        super().__init__(workspace, kv_layout, **options)
        if self.graph:
            self._paged_kv_indptr_buf = options["paged_kv_indptr_buffer"]
            self._paged_kv_indices_buf = options["paged_kv_indices_buffer"]
            self._paged_kv_last_page_len_buf = options["paged_kv_last_page_len_buffer"]

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
             head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype,
             sm_scale: float, disable_split_kv: bool = False) -> None:  # fmt: skip
        group = num_qo_heads // num_kv_heads
        assert self.options["use_tensor_cores"] or group in (1, 2, 3, 4, 8), "no kernel for this group"
        self.set_pages(indptr, indices, last_page_len)
        self.types, self.scale = (q_data_type, kv_data_type), sm_scale
        self.write_plan()

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor,
            k_scale: float | None = None, v_scale: float | None = None) -> torch.Tensor:  # fmt: skip
        starts = list(range(len(self._paged_kv_last_page_len_buf) + 1))
        assert q.shape[0] == starts[-1]
        return self.attend(q, paged_kv_cache, starts, out, k_scale, v_scale)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Several queries per request."""

    def plan(self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
             num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool,
             q_data_type: torch.dtype, kv_data_type: torch.dtype, sm_scale: float,
             disable_split_kv: bool = False) -> None:  # fmt: skip
        assert causal
        self.set_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.starts = host(qo_indptr).tolist()
        self.types, self.scale = (q_data_type, kv_data_type), sm_scale
        self.write_plan()

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor,
            k_scale: float | None = None, v_scale: float | None = None) -> torch.Tensor:  # fmt: skip
        return self.attend(q, paged_kv_cache, self.starts, out, k_scale, v_scale)


class BatchPrefillWithRaggedKVCacheWrapper(PlanningWrapper):
    """Queries, keys and values of whole requests, no pages."""

    def plan(self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
             head_dim_vo: int | None = None, *, causal: bool, q_data_type: torch.dtype,
             kv_data_type: torch.dtype, sm_scale: float, disable_split_kv: bool = False) -> None:  # fmt: skip
        assert causal
        assert torch.equal(host(qo_indptr), host(kv_indptr))
        self.starts, self.scale = qo_indptr.tolist(), sm_scale
        self.write_plan()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.check_ready()
        for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            rows = slice(begin, end)
            out[rows] = causal_attention(q[rows], k[rows], v[rows], self.scale).to(out.dtype)
        return out


class BatchMLAPagedAttentionWrapper(PlanningWrapper):
    """Absorbed latent attention."""

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        super().__init__(workspace, "NHD", **options)
        if self.graph:
            self._kv_indices_buf = options["kv_indices"]

    def plan(self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int,
             head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
             q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:  # fmt: skip
        if self.graph:
            assert len(qo_indptr) == len(self.options["qo_indptr"]), "the batch size is frozen"
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        else:
            self._kv_indices_buf = kv_indices
        self.starts, self.bounds = host(qo_indptr).tolist(), host(kv_indptr).tolist()
        self.lengths, self.scale, self.page_size = host(kv_len_arr).tolist(), sm_scale, page_size
        assert causal or len(self.starts) - 1 == self.starts[-1]
        self.write_plan()

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
            *, out: torch.Tensor) -> torch.Tensor:  # fmt: skip
        self.check_ready()
        query = torch.cat((q_nope, q_pe), dim=-1)
        for request, length in enumerate(self.lengths):
            own = self._kv_indices_buf[self.bounds[request] : self.bounds[request + 1]].long()
            latent = ckv_cache[own].flatten(0, 1)[:length, None]
            key = torch.cat((latent, kpe_cache[own].flatten(0, 1)[:length, None]), dim=-1)
            rows = slice(self.starts[request], self.starts[request + 1])
            out[rows] = causal_attention(query[rows], key, latent, self.scale).to(out.dtype)
        return out


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: Any, indices: Any, last_page_len: Any,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: torch.dtype,
    kv_data_type: torch.dtype, sm_scale: float, disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor,
) -> None:  # fmt: skip
    """Plans as FlashInfer for a wrapper planned before; the caller has filled the device's copies."""
    assert self.graph
    assert self.num_plans > 0
    assert len(last_page_len) == len(self._paged_kv_last_page_len_buf), "the batch size is frozen"
    # The plan is made from the host's copy, the kernels read the device's: they must tell the same.
    assert torch.equal(host(global_override_indptr_cpu), self._paged_kv_indptr_buf)
    assert torch.equal(host(last_page_len), self._paged_kv_last_page_len_buf)
    assert indices.data_ptr() == self._paged_kv_indices_buf.data_ptr()
    assert self.types == (q_data_type, kv_data_type)
    self.scale = sm_scale
    self.write_plan()


decode = SimpleNamespace(fast_decode_plan=fast_decode_plan)
mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
