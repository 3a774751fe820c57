"""What an assembled engine process holds, and what clients may know of the served model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_service.assembly.kv_memory import KvMemory
from gpu_service.assembly.vision import Vision
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.engine.engine import Engine
from gpu_service.engine.late_graphs import BEGIN_GRAPHS
from gpu_service.engine.step_check import StepCheck
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.fetching.fetcher import ExpertFetcher
from gpu_service.experts.recorder import ExpertRecorder
from gpu_service.experts.resident.experts import ResidentExperts
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.experts.streaming.streamer import ExpertStreamer
from gpu_service.memory.elastic import ElasticMemory
from gpu_service.memory.shares import MemoryShares
from gpu_service.parallel.group import RankGroup
from gpu_service.verify.self_test import SelfTestReport
from moebius.checkpoint.gguf.files import companion_directory, served_name
from moebius.config import MoebiusConfig
from moebius.models.config import ModelConfig
from moebius.models.identity import Parts, check_unchanged, identity_text, model_parts
from moebius.models.read import read_config
from protos import engine_pb2 as pb


@dataclass(frozen=True, slots=True)
class Built:
    """Everything `main` serves and closes; filled by `build_engine`."""

    engine: Engine
    group: RankGroup
    experts: ExpertClient | None
    recorder: ExpertRecorder | None
    memory: KvMemory
    model_config: ModelConfig
    num_pages: int
    context_limit: int
    warm_up_tokens: int  # Length of the warm-up's longest prompt.
    # What was measured of this rank's experts before anything was served; None: switched off, or no experts.
    self_test: SelfTestReport | None = None
    vision: Vision | None = None  # None: the model is text-only, or is served without its tower.
    # None: no step streams experts.
    streamer: ExpertStreamer | None = None
    placement: AdaptivePlacement | None = None  # None: what is resident stays.
    resident: ResidentExperts | None = None  # None: nothing is.
    check: StepCheck | None = None  # Filled by `build_engine`.
    watch: ResidentWatch | None = None  # Over `resident`.
    compiler: ConstraintCompiler | None = None  # None: the checkpoint has no tokenizer.
    fetcher: ExpertFetcher | None = None  # None: decode steps copy no experts.
    kv_bytes: int = 0  # Of all pages that there may be.
    # Of all files that were read; filled by `build_engine` once they have proved to be unchanged.
    identity: Parts = field(default_factory=dict)

    @property
    def elastic(self) -> ElasticMemory | None:
        """None: KV pages and experts keep the memory that they have."""
        supply = self.engine.scheduler.supply
        return supply if isinstance(supply, ElasticMemory) else None

    @property
    def tiers(self) -> PrefixTiers | None:
        """None: what the KV cache evicts is computed again."""
        tiers = self.engine.scheduler.cache.tiers
        return tiers if isinstance(tiers, PrefixTiers) else None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the KV cache."""
        return self.kv_bytes // max(1, self.num_pages)

    def memory_shares(self) -> MemoryShares:
        """Returns who has this rank's memory of pages and experts now."""
        elastic = self.elastic
        return MemoryShares(
            kv=self.kv_bytes if elastic is None else elastic.kv_bytes,
            experts=0 if self.resident is None else self.resident.nbytes,
            stream=0 if self.streamer is None else self.streamer.ring.nbytes,
            fetch=0 if self.fetcher is None else self.fetcher.state.nbytes,
            free=0 if elastic is None else elastic.pool.free * elastic.pool.chunk_bytes,
            is_shared=elastic is not None,
        )

    def serves(self) -> None:
        """The engine is ready: what is captured late begins to be."""
        self.engine.call(BEGIN_GRAPHS)

    def close(self, timeout_s: float | None = None) -> bool:
        """Ends every request, then the engine, its experts and its rank's part in the group, in order.

        False: a step is still computing after `timeout_s`, and nothing was closed.
        """
        if not self.engine.stop(timeout_s):
            return False
        if self.tiers is not None:
            self.tiers.close()
        if (events := self.engine.scheduler.cache.tree.events) is not None:
            events.close()
        if self.watch is not None:
            self.watch.close()
        if self.placement is not None:
            self.placement.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.streamer is not None:
            self.streamer.close()
        if self.experts is not None:
            self.experts.close()
        self.group.close()
        return True


# What clients leave unset; `max_new_tokens` is the output's limit.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of generation_config.json that stand for what a request leaves unset."""
    return {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}


def model_info(config: MoebiusConfig, built: Built) -> pb.GetModelInfoResponse:
    """Returns static facts for clients.

    Raises WrongIdentity when files have been written since they were read.
    """
    directory = Path(config.model.model)
    model = built.model_config
    raw = read_config(directory)
    defaults = companion_directory(directory) / "generation_config.json"
    sampling = sampling_defaults(
        json.loads(defaults.read_text(encoding="utf-8")) if defaults.exists() else {}
    )
    check_unchanged(built.identity, lambda: model_parts(directory))
    pad = raw.get("pad_token_id")
    return pb.GetModelInfoResponse(
        model_path=str(directory),
        is_generation=True,
        max_context_length=built.context_limit,
        vocab_size=model.vocab_size,
        served_model_name=config.model.served_model_name or served_name(directory.resolve()),
        tokenizer_path=str(directory),
        model_type=model.model_type,
        architectures=raw.get("architectures") or [],
        eos_token_ids=model.eos_token_ids,
        pad_token_id=-1 if pad is None else pad,
        bos_token_id=-1 if model.bos_token_id is None else model.bos_token_id,
        max_req_input_len=built.context_limit - 1,
        default_sampling_params_json=json.dumps(sampling),
        supports_vision=model.vision is not None,
        max_waiting_requests=config.gpu.max_waiting_requests,
        identity=identity_text(built.identity),
        image_token_id=-1 if built.vision is None else built.vision.preparer.layout.placeholder,
        hidden_size=model.hidden_size,
    )
