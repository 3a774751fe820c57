"""Settings of how a model is divided: among ranks, and between GPUs and expert servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moebius.config.operations import Section

SmallAllReduce = Literal["nccl", "one-shot", "auto"]


class ParallelConfig(Section):
    """How one model is divided over GPUs: one process per rank, pipeline stages of tensor-parallel groups."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="GPUs that share every layer")
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64, description="Stages of consecutive layers")
    pipeline_layers: tuple[int, ...] = Field(
        default=(),
        description="Layers of each stage, as in 30,18; empty: by memory and speed of its GPUs where the "
        "driver names them, else nearly equal numbers",
    )
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Engines behind one port, a GPU each: they compute requests of their own, and share the "
        "expert servers",
    )
    data_parallel_rank: int = Field(
        default=0, ge=0, description="Index of this engine among them; chosen by the supervisor"
    )
    rank: int = Field(default=0, ge=0, description="Which rank this engine process is")
    rank_hosts: int = Field(
        default=1, ge=1, le=64, description="Number of hosts; each runs the same number of ranks"
    )
    host_index: int = Field(default=0, ge=0, description="Index of this host; rank 0 is on host 0")
    rank_address: str = Field(
        default="", description="Where ranks meet (host:port); empty: chosen by the supervisor"
    )
    rank_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Longest silence of a rank before its group ends, seconds; also the longest that others "
        "wait for it in a step",
    )
    small_all_reduce: SmallAllReduce = Field(
        default="nccl",
        description="How GPUs add small tensors; one-shot: each reads the others' memory, over NVLink, up to "
        "256 KiB; auto: up to the size that is measured at start",
    )
    gpu_expert_split: Literal["auto", "tensor", "expert"] = Field(
        default="auto",
        description="How tensor-parallel ranks divide resident experts: by channels (tensor), or whole "
        "experts to each (expert); auto: whole ones where a rank's channels would be few or uneven",
    )

    @property
    def num_ranks(self) -> int:
        """The number of ranks on all hosts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def host_ranks(self) -> range:
        """The numbers of the ranks that run on this host, in the order of its GPUs."""
        each = self.num_ranks // self.rank_hosts
        return range(self.host_index * each, (self.host_index + 1) * each)


class PlacementConfig(Section):
    """Which routed experts are computed on the GPU."""

    gpu_layers: str = Field(
        default="",
        description="Layers whose experts are all on the GPU, as in 0-1,9,40- (from 40 on); empty: none",
    )
    gpu_experts: int | None = Field(
        default=None,
        ge=0,
        description="Experts on the GPU in each MoE layer that gpu_layers does not name; unset: all that fit",
    )
    gpu_experts_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="As gpu_experts, but as a share (0 to 1) of all these layers' experts",
    )
    placement_strategy: Literal["adaptive", "uniform", "frequency", "front-loading", "random"] = Field(
        default="adaptive", description="Which experts are on the GPU; adaptive: those that requests choose"
    )
    expert_statistics: str = Field(
        default="",
        description="File of recorded expert counts: for 'frequency', and to begin 'adaptive' with",
    )
    drop_resident: Literal["auto", "keep", "drop"] = Field(
        default="auto",
        description="Whether expert servers leave out experts that are on the GPU (drop) or keep all in RAM, "
        "so that they can be exchanged (keep); auto: keep with 'adaptive', as far as the RAM allows",
    )
    placement_seed: int = Field(default=42, ge=0, description="Seed of the strategy 'random'")
    expert_recorder: Literal["off", "stat", "per_pass", "per_token"] = Field(
        default="off", description="What is recorded of routing at start; `moebius experts record` changes it"
    )
