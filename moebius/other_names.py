"""Settings by the names that vLLM, SGLang, llama.cpp, KTransformers and LvLLM have for them.

Each name stands for one of our settings, or has no effect here, or is refused with what does it here. Used
for command lines (`moebius/app/other_options.py`), and for flat configuration files (`config_loader.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from moebius.errors import ConfigError


@dataclass(frozen=True)
class OtherName:
    """What another server's name means here; filled by the table below: a leaf, or one of the notes."""

    leaf: str = ""  # our setting
    values: Mapping[str, str] = field(default_factory=dict)  # theirs to ours; others stay as they are
    fixed: str | None = None  # what the name alone stands for, of an option that takes no value
    no_effect: str = ""  # why nothing has to be set here
    refusal: str = ""  # what to do instead
    takes_value: bool = True

    def value(self, name: str, text: str) -> str:
        """The value of `leaf`. Raises ConfigError when the name or the value is refused."""
        if self.refusal:
            self.refuse(name)
        value = self.values.get(text, self.values.get(text.upper(), text))
        if value.startswith("!"):
            raise ConfigError(f"{name} {text}: {value[1:]}")
        return value

    def refuse(self, name: str) -> NoReturn:
        """Says what does it here. Raises ConfigError."""
        raise ConfigError(f"{name} is another server's option; {self.refusal}")


def _same(leaf: str, **values: str) -> OtherName:
    return OtherName(leaf, values)


def _flag(leaf: str, value: str) -> OtherName:
    return OtherName(leaf, fixed=value, takes_value=False)


def _none(why: str, takes_value: bool = False) -> OtherName:
    return OtherName(no_effect=why, takes_value=takes_value)


def _refused(instead: str, takes_value: bool = True) -> OtherName:
    return OtherName(refusal=instead, takes_value=takes_value)


_EXPERTS_ON_GPU = "here --gpu-layers, --gpu-experts or --gpu-experts-ratio say which experts are on the GPU"
_DENSE = "attention and dense layers are always on the GPU, experts as --gpu-layers and --gpu-experts say"
_FORMAT = "the checkpoint says which format its weights have"
_REMOTE_CODE = "no code of a checkpoint is ever run; its family is supported, or refused by name"
_REPLICAS = "start one engine per replica, and name them all in the gateway's settings"
_CHUNKS = "prompts are always computed in chunks (--max-num-batched-tokens)"
_WHOLE_EXPERTS = "here --expert-split expert gives every rank and server whole experts"
_LAYERS = "here --gpu-layers FIRST-LAST says whose experts are all on the GPU: the last layers, say"
_STEP = "here --max-num-batched-tokens, and --prefill-chunk-max where experts are streamed"
_KV_SIZE = "here --kv-cache-gib, or --num-pages times --page-size tokens"

# One table for all, since people type what they are used to; names as flags, without the dashes.
OTHER_NAMES: dict[str, OtherName] = {
    # vLLM and SGLang
    "tp": _same("tensor_parallel_size"),
    "tp-size": _same("tensor_parallel_size"),
    "pp": _same("pipeline_parallel_size"),
    "pp-size": _same("pipeline_parallel_size"),
    "context-length": _same("max_model_len"),
    "mem-fraction-static": _same("gpu_memory_utilization"),
    "chunked-prefill-size": _same("max_num_batched_tokens"),
    "max-running-requests": _same("max_num_seqs"),
    "max-queued-requests": _same("max_waiting_requests"),
    "cuda-graph-max-bs": _same("cuda_graph_max_batch_size"),
    "enforce-eager": _flag("cuda_graphs", "false"),
    "disable-cuda-graph": _flag("cuda_graphs", "false"),
    "enable-prefix-caching": _flag("prefix_caching", "true"),
    "no-enable-prefix-caching": _flag("prefix_caching", "false"),
    "disable-radix-cache": _flag("prefix_caching", "false"),
    "disable-overlap-schedule": _flag("overlap_scheduling", "false"),
    "async-scheduling": _flag("overlap_scheduling", "true"),
    "seed": _same("random_seed"),
    "allowed-origins": _same("cors_origins"),
    "root-path": _refused("put the prefix into the proxy that adds it"),
    "enable-chunked-prefill": _none("prompts are always computed in chunks"),
    "enable-mixed-chunk": _none("steps always mix prompts and decoding"),
    "enable-auto-tool-choice": _none("tools are on wherever their format is known (--tool-call-parser)"),
    "trust-remote-code": _none(_REMOTE_CODE),
    "disable-shared-experts-fusion": _none("shared experts are computed on the GPU, apart from routed ones"),
    "disable-log-requests": _none("requests are not logged"),
    "enable-p2p-check": _none("GPUs are checked at every start"),
    "tokenizer-mode": _none("the checkpoint's own tokenizer is used", takes_value=True),
    "distributed-executor-backend": _none("ranks are processes of the supervisor", takes_value=True),
    "load-format": _none(_FORMAT, takes_value=True),
    "quantization": _none(_FORMAT, takes_value=True),
    "no-enable-chunked-prefill": _refused(_CHUNKS, False),
    "max-total-tokens": _refused(_KV_SIZE),
    "num-gpu-blocks-override": _refused(_KV_SIZE),
    "swap-space": _refused("KV pages are not moved to RAM; preempted requests are computed again"),
    "cpu-offload-gb": _refused(_EXPERTS_ON_GPU),
    "enable-expert-parallel": _refused(_WHOLE_EXPERTS, False),
    "ep-size": _refused(_WHOLE_EXPERTS),
    "data-parallel-size": _refused(_REPLICAS),
    "dp": _refused(_REPLICAS),
    "dp-size": _refused(_REPLICAS),
    "download-dir": _refused("models are kept where HF_HOME says"),
    "hf-token": _refused("a token is read from HF_TOKEN, or from where `hf auth login` put it"),
    "tokenizer": _refused("the tokenizer is the checkpoint's; a chat template of your own: --chat-template"),
    "lora-modules": _refused("LoRA adapters are not supported: merge them into the checkpoint"),
    "enable-lora": _refused("LoRA adapters are not supported: merge them into the checkpoint", False),
    # llama.cpp
    "ctx-size": _same("max_model_len"),
    "c": _same("max_model_len"),
    "parallel": _same("max_num_seqs"),
    "np": _same("max_num_seqs"),
    "threads": _same("expert_threads"),
    "t": _same("expert_threads"),
    "alias": _same("served_model_name"),
    "a": _same("served_model_name"),
    "chat-template-file": _same("chat_template"),
    "n-gpu-layers": _none(_DENSE, takes_value=True),
    "ngl": _none(_DENSE, takes_value=True),
    "cpu-moe": _none("routed experts are on the CPUs unless they are put on the GPU"),
    "cmoe": _none("routed experts are on the CPUs unless they are put on the GPU"),
    "flash-attn": _none("attention is always of that kind (--attention-backend)", takes_value=True),
    "fa": _none("attention is always of that kind (--attention-backend)", takes_value=True),
    "jinja": _none("chat templates are always rendered by Jinja"),
    "cont-batching": _none("batching is always continuous"),
    "cb": _none("batching is always continuous"),
    "no-mmap": _none("experts are packed into memory of the expert servers"),
    "mlock": _none("memory that the GPU reads is locked by its registration"),
    "n-cpu-moe": _refused(_LAYERS),
    "ncmoe": _refused(_LAYERS),
    "override-tensor": _refused(_EXPERTS_ON_GPU),
    "ot": _refused(_EXPERTS_ON_GPU),
    "tensor-split": _refused("GPUs share every layer evenly (--tensor-parallel-size)"),
    "ts": _refused("GPUs share every layer evenly (--tensor-parallel-size)"),
    "split-mode": _refused("here --tensor-parallel-size or --pipeline-parallel-size"),
    "sm": _refused("here --tensor-parallel-size or --pipeline-parallel-size"),
    "batch-size": _refused(_STEP),
    "ubatch-size": _refused(_STEP),
    "b": _refused(_STEP),
    "ub": _refused(_STEP),
    "cache-type-k": _refused("here --kv-cache-dtype fp8"),
    "cache-type-v": _refused("here --kv-cache-dtype fp8"),
    "ctk": _refused("here --kv-cache-dtype fp8"),
    "ctv": _refused("here --kv-cache-dtype fp8"),
    "numa": _refused("expert servers are pinned to their NUMA nodes (--expert-servers, --numa-node)"),
    "mmproj": _refused("a tower in a file of its own is not read: give the checkpoint directory"),
    # KTransformers with SGLang
    "kt-cpuinfer": _same("expert_threads"),
    "kt-threadpool-count": _same("expert_servers"),
    "kt-num-gpu-experts": _same("gpu_experts"),
    "kt-gpu-experts-ratio": _same("gpu_experts_ratio"),
    "kt-expert-placement-strategy": _same("placement_strategy"),
    "kt-gpu-prefill-token-threshold": _same("stream_min_rows"),
    "kt-method": OtherName(
        "expert_dtype",
        {
            "AMXINT4": "int4",
            "AMXINT8": "int8",
            "BF16": "keep",
            "FP8": "keep",
            "FP8_PERCHANNEL": "keep",
            "RAWINT4": "keep",
            "GPTQ_INT4": "keep",
            "MXFP4": "keep",
            "LLAMAFILE": "!give the .gguf file as MODEL instead",
        },
    ),
    "kt-weight-path": _refused("experts are read from MODEL, in the format it has, and packed while loading"),
    "kt-max-deferred-experts-per-token": _refused("no expert is deferred: answers would change"),
    "kt-enable-dynamic-expert-update": _refused(
        "see docs/placement.md for how experts get on the GPU", False
    ),
    # LvLLM; its variables in lower case are keys of its configuration file
    "lk-threads": _same("expert_threads"),
    "lk-thread-binding": _none("threads are pinned to the cores of their NUMA node", takes_value=True),
    "lk-power-saving": _none("threads sleep when there is nothing to compute", takes_value=True),
    "lk-numa-huge": _none("packed experts take 2 MiB pages where there are any", takes_value=True),
    "lvllm-moe-numa-enabled": _none("experts are on the CPU sockets, unless put on a GPU", takes_value=True),
    "lvllm-moe-use-weight": _same("expert_dtype", TO_DTYPE="bfloat16", KEEP="keep", INT4="int4", INT8="int8"),
    "lvllm-gpu-resident-moe-layers": _same("gpu_layers"),
    "lvllm-gpu-prefill-min-batch-size": _same("stream_min_rows"),
    "lvllm-gpu-prefetch-window": _none("copies run ahead as far as the ring allows", takes_value=True),
    "lvllm-enable-numa-interleave": _none("every server's share lies on its own NUMA node", takes_value=True),
    "lvllm-enable-moe-layerwise-load": _none("experts are packed layer by layer", takes_value=True),
}

# Values that other servers have for our settings, by leaf.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3", "bf16": "auto", "bfloat16": "auto"},
    "device": {"gpu": "cuda"},
    "expert_dtype": {"bf16": "bfloat16", "fp32": "float32"},
}

# What has another meaning here than people expect.
MEANINGS: dict[str, str] = {
    "top-k": "sampling is set in each request (top_k); experts per token: --experts-per-token",
    "temperature": "it is a field of each request",
    "top-p": "it is a field of each request",
}


def other_name(name: str) -> OtherName | None:
    """What an option, a key or an environment variable of another server means here; None: unknown."""
    spelling = name.lstrip("-").lower().replace("_", "-")
    meaning = MEANINGS.get(spelling)
    return OTHER_NAMES.get(spelling) if meaning is None else _refused(meaning)


def note(text: str) -> None:
    """One line on stderr for the person who typed or wrote the name."""
    print(f"moebius: note: {text}", file=sys.stderr, flush=True)
