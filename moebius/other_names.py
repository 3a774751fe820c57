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
_REPLICAS = "start one engine per replica, and name them all in --engines of the gateway"
_CHUNKS = "prompts are always computed in chunks (--max-num-batched-tokens)"
_WHOLE_EXPERTS = "here --expert-split expert gives every rank and server whole experts"
_LAYERS = "here --gpu-layers FIRST-LAST says whose experts are all on the GPU: the last layers, say"
_STEP = "here --max-num-batched-tokens, and --prefill-chunk-max where experts are streamed"
_KV_SIZE = "here --kv-cache-gib, or --num-pages times --page-size tokens"
_KV_TYPE = "here --kv-cache-dtype fp8"
_KV_STAYS = "KV pages are not moved to RAM or disk; preempted requests are computed again"
_HOSTS = "ranks on several hosts: --rank-hosts, --host-index, --rank-address (docs/parallel.md)"
_SPECULATION = "speculative decoding is not supported"
_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_OF_MODEL = "edit config.json in a copy of the checkpoint"
_IN_RAM = "experts are packed into memory of the expert servers"
_ON_CPUS = "routed experts are on the CPUs unless they are put on the GPU"
_BY_RANKS = "here --tensor-parallel-size or --pipeline-parallel-size"
_GRAPHS = {
    "NONE": "false",
    **dict.fromkeys(("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"), "true"),
}
_REQUEST = "it is a field of each request"

# One table for all, since people type what they are used to; names as flags, without the dashes, those of one
# meaning in one line.
_TABLE: dict[str, OtherName] = {
    # vLLM and SGLang
    "tp tp-size": _same("tensor_parallel_size"),
    "pp pp-size": _same("pipeline_parallel_size"),
    "context-length": _same("max_model_len"),
    "mem-fraction-static": _same("gpu_memory_utilization"),
    "chunked-prefill-size": _same("max_num_batched_tokens"),
    "max-running-requests": _same("max_num_seqs"),
    "max-queued-requests": _same("max_waiting_requests"),
    "cuda-graph-max-bs": _same("cuda_graph_max_batch_size"),
    "compilation-config.cudagraph-mode": OtherName("cuda_graphs", _GRAPHS),
    "enforce-eager disable-cuda-graph": _flag("cuda_graphs", "false"),
    "enable-prefix-caching": _flag("prefix_caching", "true"),
    "no-enable-prefix-caching disable-radix-cache": _flag("prefix_caching", "false"),
    "disable-overlap-schedule": _flag("overlap_scheduling", "false"),
    "async-scheduling": _flag("overlap_scheduling", "true"),
    "seed s": _same("random_seed"),
    "block-size": _same("page_size"),
    "allowed-origins": _same("cors_origins"),
    "api-server-count": _same("workers"),
    "uvicorn-log-level": _same("log_level", TRACE="debug", CRITICAL="error"),
    "ssl-keyfile ssl-key-file": _same("http_key_file"),
    "ssl-certfile ssl-cert-file": _same("http_cert_file"),
    "ssl-ca-certs": _same("http_client_ca_file"),
    "watchdog-timeout": _same("hang_timeout_s"),
    "compilation-config compilation-config.mode O performance-mode": _none(
        "kernels are chosen by GPU and sizes; graphs of decode steps: --cuda-graphs", takes_value=True
    ),
    "enable-torch-compile disable-cuda-graph-padding disable-cascade-attn disable-custom-all-reduce": _none(
        "kernels are chosen by GPU and sizes (--attention-backend, --small-all-reduce)"
    ),
    "moe-backend moe-runner-backend fp8-gemm-backend sampling-backend mm-encoder-tp-mode": _none(
        "kernels are chosen by GPU and sizes", takes_value=True
    ),
    "mamba-ssm-cache-dtype mamba-scheduler-strategy swa-full-tokens-ratio": _none(
        "states and windows are kept as the family needs them", takes_value=True
    ),
    "grammar-backend guided-decoding-backend structured-outputs-config": _none(
        "grammars are always compiled by llguidance", takes_value=True
    ),
    "schedule-policy scheduling-policy schedule-conservativeness": _none(
        "requests run in the order they come", takes_value=True
    ),
    "stream-interval": _none("every token is sent as it comes", takes_value=True),
    "chat-template-content-format": _none("templates get the form they ask for", takes_value=True),
    "generation-config": _none("its sampling fields are the defaults of requests", takes_value=True),
    "max-logprobs": _none("requests may ask for up to 20", takes_value=True),
    "enable-chunked-prefill": _none("prompts are always computed in chunks"),
    "enable-mixed-chunk": _none("steps always mix prompts and decoding"),
    "enable-auto-tool-choice": _none("tools are on wherever their format is known (--tool-call-parser)"),
    "enable-metrics metrics disable-log-stats": _none("metrics are always served at /metrics"),
    "enable-multimodal": _none("images are taken where the family has them (--language-model-only)"),
    "trust-remote-code": _none(_REMOTE_CODE),
    "disable-shared-experts-fusion": _none("shared experts are computed on the GPU, apart from routed ones"),
    "disable-log-requests": _none("requests are not logged"),
    "enable-p2p-check": _none("GPUs are checked at every start"),
    "skip-server-warmup warmup no-warmup": _none("a server is ready once its kernels are"),
    "tokenizer-mode": _none("the checkpoint's own tokenizer is used", takes_value=True),
    "distributed-executor-backend": _none("ranks are processes of the supervisor", takes_value=True),
    "load-format quantization q": _none(_FORMAT, takes_value=True),
    "calculate-kv-scales": _none("keys and values are stored without scales"),
    "log-level-http": _none("--log-level is that of all processes", takes_value=True),
    "no-enable-chunked-prefill": _refused(_CHUNKS, False),
    "max-prefill-tokens": _refused(_STEP),
    "max-total-tokens num-gpu-blocks-override kv-cache-memory-bytes": _refused(_KV_SIZE),
    "swap-space kv-transfer-config": _refused(_KV_STAYS),
    "enable-hierarchical-cache": _refused(_KV_STAYS, False),
    "cpu-offload-gb": _refused(_EXPERTS_ON_GPU),
    "enable-expert-parallel": _refused(_WHOLE_EXPERTS, False),
    "ep ep-size expert-parallel-size": _refused(_WHOLE_EXPERTS),
    "enable-eplb enable-dp-attention": _refused(_EXPERTS_ON_GPU, False),
    "moe-a2a-backend all2all-backend": _refused(_WHOLE_EXPERTS),
    "data-parallel-size dp dp-size": _refused(_REPLICAS),
    "nnodes node-rank master-addr dist-init-addr": _refused(_HOSTS),
    "headless": _refused(_HOSTS, False),
    "speculative-config speculative-algorithm speculative-num-steps speculative-eagle-topk": _refused(
        _SPECULATION
    ),
    "speculative-num-draft-tokens model-draft md spec-type": _refused(_SPECULATION),
    "hf-overrides json-model-override-args rope-scaling rope-scale yarn-orig-ctx": _refused(_OF_MODEL),
    "limit-mm-per-prompt": _refused("here --max-images-per-request"),
    "default-chat-template-kwargs chat-template-kwargs": _refused(
        "chat_template_kwargs is a field of each request"
    ),
    "override-generation-config": _refused("edit generation_config.json in a copy of the checkpoint"),
    "enable-log-requests": _refused("requests are traced, not logged: --otlp-endpoint", False),
    "root-path api-prefix path-prefix": _refused("put the prefix into the proxy that adds it"),
    "download-dir": _refused("models are kept where HF_HOME says"),
    "hf-token hft": _refused("a token is read from HF_TOKEN, or from where `hf auth login` put it"),
    "tokenizer tokenizer-path": _refused(
        "the tokenizer is the checkpoint's; a chat template of your own: --chat-template"
    ),
    "lora-modules lora": _refused(_LORA),
    "enable-lora": _refused(_LORA, False),
    "is-embedding embedding": _refused("models that answer with text are served, no others", False),
    # llama.cpp
    "ctx-size c": _same("max_model_len"),
    "parallel np": _same("max_num_seqs"),
    "threads t": _same("expert_threads"),
    "alias a": _same("served_model_name"),
    "chat-template-file": _same("chat_template"),
    "webui": _flag("web_page", "true"),
    "no-webui": _flag("web_page", "false"),
    "no-op-offload": _flag("prefill_experts", "cpu"),
    "n-gpu-layers ngl": _none(_DENSE, takes_value=True),
    "threads-batch tb": _none("the same threads compute prompts and decode", takes_value=True),
    "cpu-moe cmoe": _none(_ON_CPUS),
    "op-offload": _none("experts of long prompts are streamed to the GPU where it pays (--prefill-experts)"),
    "flash-attn fa": _none("attention is always of that kind (--attention-backend)", takes_value=True),
    "fit fit-target fitt fit-ctx fitc": _none(
        "the KV cache takes what is left of --gpu-memory-utilization", takes_value=True
    ),
    "jinja": _none("chat templates are always rendered by Jinja"),
    "cont-batching cb": _none("batching is always continuous"),
    "no-mmap repack no-repack no-host": _none(_IN_RAM),
    "load-mode lm": _none(_IN_RAM, takes_value=True),
    "mlock": _none("memory that the GPU reads is locked by its registration"),
    "cache-prompt kv-unified kvu swa-full": _none("all requests share one KV cache (--prefix-caching)"),
    "cache-ram ctx-checkpoints": _none("prefixes stay in the KV cache (--prefix-caching)", takes_value=True),
    "slots props": _none("what runs is at /v1/live and /metrics"),
    "n-cpu-moe ncmoe": _refused(_LAYERS),
    "override-tensor ot moe-cache-mib": _refused(_EXPERTS_ON_GPU),
    "n-cpu-ffn ncffn": _refused("attention and dense layers are always on the GPU"),
    "tensor-split ts": _refused("GPUs share every layer evenly (--tensor-parallel-size)"),
    "split-mode sm": _refused(_BY_RANKS),
    "main-gpu mg dev": _refused("CUDA_VISIBLE_DEVICES says which GPUs are used; --device takes cpu or cuda"),
    "list-devices": _refused("`moebius topology` and `moebius doctor` say what is there", False),
    "batch-size ubatch-size b ub": _refused(_STEP),
    "cache-type-k cache-type-v ctk ctv": _refused(_KV_TYPE),
    "no-kv-offload nkvo": _refused("the KV cache is where attention is computed (--device)", False),
    "numa": _refused("expert servers are pinned to their NUMA nodes (--expert-servers, --numa-node)"),
    "cpu-mask C cpu-range Cr cpu-strict prio poll": _refused(
        "threads are pinned by NUMA node (--expert-threads, --numa-node), within the CPUs of the process"
    ),
    "rpc": _refused("here --expert-addresses names expert servers of other hosts"),
    "hf-file hff model-url mu docker-repo dr": _refused(
        "give a path, owner/name or owner/name:Q4_K_M as MODEL"
    ),
    "mmproj": _refused("a tower in a file of its own is not read: give the checkpoint directory"),
    "no-jinja": _refused("chat templates are always rendered by Jinja (--chat-template)", False),
    "verbose v": _refused("here --log-level debug", False),
    "log-verbosity lv": _refused("here --log-level"),
    "log-file": _refused("lines go to stderr; --log-format json suits collectors"),
    "timeout to": _refused("here --header-timeout-s, --body-timeout-s and --idle-timeout-s"),
    "reasoning-format": _refused("here --reasoning-parser"),
    "reasoning-budget": _refused("thinking_token_budget is a field of each request"),
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
            **dict.fromkeys(("BF16", "FP8", "FP8_PERCHANNEL", "RAWINT4", "GPTQ_INT4", "MXFP4"), "keep"),
            "LLAMAFILE": "keep",
        },
    ),
    "kt-weight-path kt-amx-weight-path": _same("expert_checkpoint"),
    "kt-max-deferred-experts-per-token": _refused("no expert is deferred: answers would change"),
    "kt-enable-dynamic-expert-update": _refused(
        "see docs/placement.md for how experts get on the GPU", False
    ),
    "init-expert-location": _refused(
        "here --expert-statistics, as `moebius experts record dump` writes them"
    ),
    # LvLLM; its variables in lower case are keys of its configuration file
    "lk-threads": _same("expert_threads"),
    "lk-thread-binding": _none("threads are pinned to the cores of their NUMA node", takes_value=True),
    "lk-power-saving": _none("threads sleep when there is nothing to compute", takes_value=True),
    "lk-numa-huge": _none("packed experts take 2 MiB pages where there are any", takes_value=True),
    "lvllm-moe-numa-enabled": _none("experts are on the CPU sockets, unless put on a GPU", takes_value=True),
    "lvllm-moe-use-weight": _same("expert_dtype", TO_DTYPE="bfloat16", KEEP="keep", INT4="int4", INT8="int8"),
    "lvllm-gpu-resident-moe-layers": _same("gpu_layers"),
    "lvllm-gpu-resident-moe-experts": _same("gpu_experts"),
    "lvllm-gpu-prefill-min-batch-size": _same("stream_min_rows"),
    "lvllm-gpu-prefetch-window": _none("copies run ahead as far as the ring allows", takes_value=True),
    "lvllm-enable-numa-interleave": _none("every server's share lies on its own NUMA node", takes_value=True),
    "lvllm-enable-moe-layerwise-load": _none("experts are packed layer by layer", takes_value=True),
}
OTHER_NAMES = {name: other for names, other in _TABLE.items() for name in names.split()}

# Values that other servers have for our settings, by leaf.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "max_model_len": {"auto": "none", "-1": "none"},
    "dtype": {"bf16": "bfloat16", "fp32": "float32", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3", "bf16": "auto", "bfloat16": "auto"},
    "device": {"gpu": "cuda"},
    "expert_dtype": {"bf16": "bfloat16", "fp32": "float32"},
}

# What has another meaning here than people expect.
MEANINGS: dict[str, str] = {
    "top-k": "sampling is set in each request (top_k); experts per token: --experts-per-token",
    "n": "max_tokens is a field of each request",
    "predict": "max_tokens is a field of each request",
    "n-predict": "max_tokens is a field of each request",
    **dict.fromkeys(("temperature", "temp", "top-p", "min-p", "repeat-penalty", "samplers"), _REQUEST),
    "grammar": "response_format, structured_outputs and tools are fields of each request",
    "json-schema": "response_format is a field of each request",
}


def other_name(name: str) -> OtherName | None:
    """What an option, a key or an environment variable of another server means here; None: unknown."""
    # Short options differ by case: -c is a context's length, -C a mask of CPUs.
    short = name.startswith("-") and not name.startswith("--")
    spelling = (name if short else name.lower()).lstrip("-").replace("_", "-")
    meaning = MEANINGS.get(spelling)
    return OTHER_NAMES.get(spelling) if meaning is None else _refused(meaning)


def note(text: str) -> None:
    """One line on stderr for the person who typed or wrote the name."""
    print(f"moebius: note: {text}", file=sys.stderr, flush=True)
