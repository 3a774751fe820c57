"""The one configuration tree: every leaf is a YAML key, a CLI flag (`--leaf-name`) and a documented field.

Leaf names are unique over all sections, so that a flag needs no prefix. Defaults are here and nowhere
else; no process reads a setting from its environment (`MOEBIUS_ISA`, for tests of `kernels/`, is the
one exception and is read by C++). Loading, merging and the closest-match errors live in
`moebius/config/loader.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field

from moebius.config.division import ParallelConfig as ParallelConfig
from moebius.config.division import PlacementConfig as PlacementConfig
from moebius.config.gateway import GatewayConfig as GatewayConfig
from moebius.config.gateway import ImageConfig as ImageConfig
from moebius.config.operations import Section as Section
from moebius.config.operations import SecurityConfig as SecurityConfig
from moebius.config.operations import SpeculationSettings as SpeculationSettings
from moebius.config.operations import SupervisorConfig as SupervisorConfig
from moebius.config.operations import TelemetryConfig as TelemetryConfig


class ModelConfigSection(Section):
    """Which checkpoint is served, and how it is read."""

    model: str = Field(
        default="",
        description="Directory in Hugging Face format, GGUF model, or name on the hub (owner/name)",
    )
    expert_checkpoint: str = Field(
        default="",
        description="Read routed experts from this directory or GGUF model; empty: from MODEL",
    )
    revision: str = Field(default="", description="Branch, tag or commit of a model on the hub; empty: main")
    offline: bool = Field(
        default=False,
        description="Use only files that are already downloaded; never ask the Hugging Face hub",
    )
    served_model_name: str = Field(
        default="", description="Name clients send; empty: the directory's or file's name"
    )
    model_aliases: tuple[str, ...] = Field(
        default=("claude-*",),
        description="More names that clients may send; * matches anything. Claude Code sends claude-...",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of dense weights, activations and KV; auto: the checkpoint's, bfloat16 for float16",
    )
    dense_weights: Literal["auto", "dequantise", "keep"] = Field(
        default="auto",
        description="Dense layers that are quantised, or bfloat16 on a CPU: convert while loading, or keep "
        "them as stored, all that packed formats hold; auto: keep on a CPU, and on GPUs without room for all "
        "experts and the KV cache beside converted ones",
    )
    embedding_tables: Literal["auto", "ram", "disk"] = Field(
        default="auto",
        description="Tables of n-grams: in RAM, or on disk, where each step reads its rows; auto: on disk if "
        "RAM has no room beside experts",
    )
    experts_per_token: int | None = Field(
        default=None, ge=1, description="Routed experts that each token uses; unset: as the checkpoint says"
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Prompt + output, tokens; unset: the checkpoint's; up to its original length, LongRoPE's "
        "short factors count",
    )
    identity_file: str = Field(
        default="",
        description="Digests of the files read, compared at each restart of a process; empty: serve has one",
    )
    sleep_file: str = Field(
        default="",
        description="Exists while the engine sleeps, which goes on after a restart; empty: serve has one",
    )
    language_model_only: bool = Field(
        default=False, description="Do not load the vision tower; requests with images are refused"
    )


# Outputs computed in one step where nothing is set and everything fits.
DEFAULT_NUM_SEQS, DEFAULT_BATCHED_TOKENS = 64, 512


class GpuConfig(SpeculationSettings):
    """The engine process."""

    gpu_address: str = Field(default="127.0.0.1:50051", description="gRPC address gpu_service listens on")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of dense layers and attention"
    )
    page_size: int = Field(default=16, ge=1, le=256, description="Tokens per KV page")
    num_pages: int | None = Field(default=None, ge=2, description="KV pages; unset: kv_cache_gib decides")
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="KV cache, at least, GiB, if num_pages is unset; unset: 1 on a CPU, the rest of a GPU",
    )
    # Off until page-locking it piece by piece has been seen on a GPU.
    kv_offload_gib: Annotated[float, Ge(0)] | Literal["auto"] = Field(
        default=0.0,
        description="RAM for prefixes that the KV cache evicts, GiB; auto: a fifth of what is free beside "
        "experts, 0 on a CPU, whose KV cache is RAM",
    )
    kv_offload_dir: str = Field(
        default="",
        description="tmpfs directory where these prefixes outlive the engine; `serve` creates one itself",
    )
    kv_disk_gib: float = Field(
        default=0.0, ge=0, description="Disk for prefixes, GiB of all engines that share kv_disk_dir; 0: none"
    )
    kv_disk_dir: str = Field(
        default="", description="Directory of prefixes on disk, which outlive everything"
    )
    kv_disk_key_file: str = Field(
        default="",
        description="File with a key (32 bytes, or 64 hexadecimal digits) that encrypts prefixes on disk; "
        "empty: they are not",
    )
    kv_events_config: str = Field(
        default="",
        description="vLLM's JSON for a stream of what the prefix cache holds, for routers; empty: none",
    )
    elastic_memory: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="KV pages and experts lend each other memory (auto: on one GPU; on: on a CPU, too)",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        default="auto", description="Type of cached keys and values; auto: the activations' type"
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of each GPU's memory that the engine may use"
    )
    gpu_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory of each GPU that the engine may use, GiB; unset: gpu_memory_utilization of it",
    )
    attention_backend: Literal["auto", "flashinfer", "triton", "cpu", "torch"] = Field(
        default="auto", description="Attention kernels; auto: the first of these that is installed"
    )
    cuda_graphs: bool = Field(default=True, description="Run steps on a GPU as captured CUDA graphs")
    cuda_graph_max_batch_size: int = Field(
        default=256,
        ge=1,
        description="Largest decode batch that has a graph; at most max_num_seqs",
    )
    cuda_graph_max_prompt_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Largest step with prompts that has a graph; unset: 2048 if all experts are on one GPU",
    )
    jit_cache_dir: str = Field(
        default="", description="Directory of GPU kernels compiled at start; empty: the user's cache"
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="Sequences computed in one step; unset: 64, fewer if memory is short, up to 256 if all "
        "experts are on GPUs",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=16,
        description="Tokens computed in one step, at most; unset: 512, thousands if all experts are on GPUs",
    )
    prefill_experts: Literal["auto", "cpu", "stream"] = Field(
        default="auto",
        description="Experts of prompts: on expert servers, streamed to the GPU, or both as measured (auto)",
    )
    fetch_experts: Literal["auto", "off"] = Field(
        default="auto",
        description="Experts that decode steps lack: some copied to the GPU where that is faster, or none",
    )
    stream_min_rows: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in a step from which experts are streamed to the GPU; unset: measured",
    )
    prefill_chunk_max: int | None = Field(
        default=None,
        ge=16,
        le=65536,
        description="Prompt tokens of a step with streamed experts; unset: 16384, fewer if memory is short",
    )
    prefill_lane_min_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Prompts from this length have own steps; unset: measured, none with several GPUs",
    )
    max_itl_ms: float | None = Field(
        default=None,
        ge=0,
        description="Time a long prompt may add between tokens of other requests; unset: their own step time",
    )
    max_waiting_requests: int = Field(
        default=1024, ge=1, description="Sequences queued in the engine; more are refused"
    )
    prefix_caching: bool = Field(default=True, description="Reuse KV pages of equal prompt prefixes")
    state_snapshots: int | None = Field(
        default=None,
        ge=0,
        description="States of linear attention kept where prefixes end; unset: as many as max_num_seqs",
    )
    overlap_scheduling: bool = Field(default=True, description="Schedule step N+1 while step N computes")
    gpu_threads: int = Field(
        default=0, ge=0, description="torch threads on a CPU device; 0: by the physical cores it may use"
    )
    random_seed: int = Field(
        default=0, ge=0, description="Seed for requests without one, mixed with their id"
    )
    sleep_after_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds without requests after which the engine gives back all GPU memory; 0: never",
    )
    wake_on_request: bool = Field(
        default=True, description="Requests wake a sleeping engine and wait for it; else they are refused"
    )
    gpu_metrics_port: int = Field(
        default=0, ge=0, le=65535, description="Port of gpu_service's metrics and probes; 0: none"
    )

    @property
    def kv_offload_bytes(self) -> int:
        """RAM for prefixes below the device; 0 without prefix caching, and before `auto` is decided."""
        size = self.kv_offload_gib
        return 0 if size == "auto" or not self.prefix_caching else int(size * 2**30)

    def usable_bytes(self, total: int) -> int:
        """Returns what the engine may use of a GPU of `total` bytes."""
        if self.gpu_memory_gib is not None:
            return min(int(self.gpu_memory_gib * 2**30), total)
        return int(self.gpu_memory_utilization * total)

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, or its default."""
        return DEFAULT_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def num_batched_tokens(self) -> int:
        """`max_num_batched_tokens`, or its default."""
        chosen = self.max_num_batched_tokens
        return DEFAULT_BATCHED_TOKENS if chosen is None else chosen

    @property
    def prompt_graph_tokens(self) -> int:
        """`cuda_graph_max_prompt_tokens`; 0 where it is not chosen yet."""
        return self.cuda_graph_max_prompt_tokens or 0

    @property
    def num_rows(self) -> int:
        """Rows of a decode step, at most: of sequences, and of their drafts if few sequences leave room."""
        if not self.may_draft:
            return self.num_seqs
        return max(self.num_seqs, min(DEFAULT_NUM_SEQS, self.num_seqs * (1 + self.num_draft_tokens)))


class ExpertConfig(Section):
    """The expert servers, and how gpu_service reaches them."""

    expert_servers: int = Field(
        default=0, ge=0, description="Expert processes to start; 0: one per NUMA node"
    )
    expert_transport: Literal["mailbox", "grpc", "local"] = Field(
        default="mailbox",
        description="How gpu_service reaches experts; local computes them in process (reference)",
    )
    expert_split: Literal["tensor", "expert"] = Field(
        default="tensor", description="Each server has a slice of every expert (tensor), or whole experts"
    )
    split_index: int = Field(default=0, ge=0, description="Which share this expert process holds")
    split_count: int = Field(default=1, ge=1, description="Number of shares")
    split_shares: tuple[int, ...] = Field(default=(), description="Relative size of each share; empty: equal")
    expert_dtype: Literal["keep", "float32", "bfloat16", "int8", "int4"] = Field(
        default="keep",
        description="Type of experts in memory; keep: as in the checkpoint; others: requantise while loading",
    )
    # Normal weights lose 0.08 as int4 in groups of 32 and 0.008 as int8; what loses twice as much is not fit
    # to be requantised.
    max_requantise_error: float = Field(
        default=0.15, ge=0, description="Largest relative error that requantising a layer may make"
    )
    calibrate_kernels: bool = Field(
        default=True, description="Measure while loading which kernel is fastest for each number of rows"
    )
    batch_invariant_experts: bool = Field(
        default=False,
        description="Compute bfloat16 rows like float32 ones: slower, but results do not depend on the batch",
    )
    expert_threads: int = Field(
        default=0, ge=0, description="Threads per expert process; 0: by the physical cores it may use"
    )
    numa_node: Annotated[int, Ge(-1)] | Literal["auto", "cpuset"] = Field(
        default=-1,
        description="NUMA node this expert process binds to; -1: none; auto: its CPUs' node, or one by "
        "split_index; cpuset: its CPUs' node, or an error",
    )
    expert_address: str = Field(
        default="127.0.0.1:50061", description="gRPC address an expert process listens on"
    )
    expert_addresses: tuple[str, ...] = Field(
        default=(), description="gRPC addresses of all expert processes, by share"
    )
    expert_metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the first expert process's metrics and probes; 0: none",
    )
    expert_weights_dir: str = Field(
        default="",
        description="Directory where packed experts outlive their server: a tmpfs, or on a disk with "
        "cold_experts disk; empty: `serve` has one",
    )
    cold_experts: Literal["auto", "ram", "disk"] = Field(
        default="auto",
        description="Experts: all in RAM, or on disk with those in RAM that are used most; auto: on disk if "
        "RAM has no room for all and few are missed",
    )
    expert_memory_gib: float = Field(
        default=0.0,
        ge=0,
        description="RAM for experts that are on disk, GiB of all expert servers that `serve` starts; "
        "0: what is free",
    )
    verify_interval_s: float = Field(
        default=3600.0,
        ge=0,
        description="Seconds in which all experts, on GPUs too, are compared with checksums; 0: when suspect",
    )
    mailbox: str = Field(
        default="", description="Name of the shared-memory mailbox; empty: chosen by the supervisor"
    )
    mailbox_slots: int = Field(default=4, ge=1, le=64, description="Requests the mailbox holds at once")
    mailbox_rows: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Token rows per mailbox slot; unset: max_num_batched_tokens, at most 2048",
    )
    signal: Literal["doorbell", "memops"] = Field(
        default="doorbell",
        description="How a GPU signals expert servers and waits: by kernels, or by stream memory operations",
    )
    hand_off_copy_kib: int | None = Field(
        default=None,
        ge=0,
        description="KiB of rows from which a GPU's copy engine moves them; unset: measured at start",
    )
    defer_experts: int = Field(
        default=0,
        ge=0,
        description="How many experts of each token, of lowest router weight, are added one MoE layer late: "
        "CPUs compute them meanwhile, and answers change a little",
    )
    mailbox_deadline_ms: int = Field(
        default=10000, ge=1, description="Longest wait for an expert server's answer, milliseconds"
    )
    expert_recovery_s: float = Field(
        default=300.0, gt=0, description="Longest wait for a lost expert server to return"
    )
    self_test_layers: int = Field(
        default=3,
        ge=0,
        description="MoE layers whose experts are compared with the checkpoint before serving; 0: none",
    )
    self_test_experts: int = Field(
        default=3, ge=1, description="Experts of each such layer, on the servers and on the device each"
    )


class MoebiusConfig(Section):
    """The whole tree; filled by `loader.load_config` from defaults, YAML and flags, in that order."""

    model: ModelConfigSection = Field(default_factory=ModelConfigSection)
    images: ImageConfig = Field(default_factory=ImageConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    gpu: GpuConfig = Field(default_factory=GpuConfig)
    experts: ExpertConfig = Field(default_factory=ExpertConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    supervisor: SupervisorConfig = Field(default_factory=SupervisorConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
