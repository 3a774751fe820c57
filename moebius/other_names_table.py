"""The table of names that vLLM, SGLang, llama.cpp, KTransformers and LvLLM have for settings."""

from __future__ import annotations

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


def no_effect(why: str, takes_value: bool = False) -> OtherName:
    return OtherName(no_effect=why, takes_value=takes_value)


def refused(instead: str, takes_value: bool = True) -> OtherName:
    return OtherName(refusal=instead, takes_value=takes_value)


_EXPERTS_ON_GPU = "here --gpu-layers, --gpu-experts or --gpu-experts-ratio say which experts are on the GPU"
_DENSE = "attention and dense layers are always on the GPU, experts as --gpu-layers and --gpu-experts say"
_FORMAT = "the checkpoint says which format its weights have"
_REMOTE_CODE = "no code of a checkpoint is ever run; its family is supported, or refused by name"
_REPLICAS = "start one engine per replica, and name them all in --engines of the gateway"
_CHUNKS = "prompts are always computed in chunks (--max-num-batched-tokens)"
_WHOLE_EXPERTS = "here --expert-split expert gives every rank and server whole experts"
_LAYERS = (
    "it keeps the experts of the first N layers in RAM; here --gpu-layers N-LAST names the layers whose "
    "experts are on the GPU, up to the model's last, or --gpu-experts-ratio a share of each layer's "
    "(default: all in RAM)"
)
_STEP = "here --max-num-batched-tokens, and --prefill-chunk-max where experts are streamed"
_KV_SIZE = "here --kv-cache-gib, or --num-pages times --page-size tokens"
_KV_TYPE = "here --kv-cache-dtype fp8"
_KV_STAYS = "KV pages are not moved to RAM or disk; preempted requests are computed again"
_HOSTS = "ranks on several hosts: --rank-hosts, --host-index, --rank-address (docs/parallel.md)"
_SPECULATION = "here --speculative-method, --num-draft-tokens, --ngram-match-min and --ngram-match-max"
_NO_DRAFT_MODEL = "no second model proposes draft tokens; here --speculative-method"
_NO_DRAFT_LEAST = "how many draft tokens are worth it is measured (--adaptive-drafts)"
_METHODS = {
    "none": "off",
    **dict.fromkeys(("NGRAM", "ngram-cache", "ngram-simple", "ngram-mod"), "ngram"),
    **dict.fromkeys(("ngram-map-k", "ngram-map-k4v"), "ngram"),
    **dict.fromkeys(("NEXTN", "EAGLE", "deepseek_mtp", "draft-mtp"), "mtp"),
    **dict.fromkeys(
        ("eagle", "eagle3", "EAGLE3", "STANDALONE", "medusa", "mlp_speculator", "draft_model", "suffix"),
        f"!{_NO_DRAFT_MODEL}",
    ),
    **dict.fromkeys(("draft-simple", "draft-eagle3"), f"!{_NO_DRAFT_MODEL}"),
}
_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_OF_MODEL = "edit config.json in a copy of the checkpoint"
_IN_RAM = "experts are packed into memory of the expert servers"
_ON_CPUS = "routed experts are on the CPUs unless they are put on the GPU"
_BY_RANKS = "here --tensor-parallel-size or --pipeline-parallel-size"
_GRAPHS = {
    "NONE": "false",
    **dict.fromkeys(("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"), "true"),
}
_KERNELS = "kernels are chosen by GPU and sizes (--attention-backend, --small-all-reduce)"
_ONE_MODEL = "one server serves one model: start another on another --port"
_TWO_ROLES = "prompts and decoding are computed by the same engine; long prompts have steps of their own"
_EFFORT = "reasoning_effort and chat_template_kwargs are fields of each request"

# One table for all, since people type what they are used to; names as flags, without the dashes, those of one
# meaning in one line.
TABLE: dict[str, OtherName] = {
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
    "compilation-config compilation-config.mode O performance-mode": no_effect(
        "kernels are chosen by GPU and sizes; graphs of decode steps: --cuda-graphs", takes_value=True
    ),
    "enable-torch-compile disable-cuda-graph-padding disable-cascade-attn": no_effect(_KERNELS),
    "disable-custom-all-reduce": no_effect(_KERNELS),
    "moe-backend moe-runner-backend fp8-gemm-backend sampling-backend mm-encoder-tp-mode": no_effect(
        "kernels are chosen by GPU and sizes", takes_value=True
    ),
    "mamba-ssm-cache-dtype mamba-scheduler-strategy swa-full-tokens-ratio": no_effect(
        "states and windows are kept as the family needs them", takes_value=True
    ),
    "grammar-backend guided-decoding-backend structured-outputs-config": no_effect(
        "grammars are always compiled by llguidance", takes_value=True
    ),
    "schedule-policy scheduling-policy schedule-conservativeness": no_effect(
        "requests run in the order they come", takes_value=True
    ),
    "stream-interval": no_effect("every token is sent as it comes", takes_value=True),
    "chat-template-content-format": no_effect("templates get the form they ask for", takes_value=True),
    "generation-config": no_effect("its sampling fields are the defaults of requests", takes_value=True),
    "max-logprobs": no_effect("requests may ask for up to 20", takes_value=True),
    "enable-chunked-prefill": no_effect("prompts are always computed in chunks"),
    "enable-mixed-chunk": no_effect("steps always mix prompts and decoding"),
    "enable-auto-tool-choice": no_effect("tools are on wherever their format is known (--tool-call-parser)"),
    "enable-metrics metrics disable-log-stats": no_effect("metrics are always served at /metrics"),
    "enable-multimodal": no_effect("images are taken where the family has them (--language-model-only)"),
    "trust-remote-code": no_effect(_REMOTE_CODE),
    "disable-shared-experts-fusion": no_effect(
        "shared experts are computed on the GPU, apart from routed ones"
    ),
    "disable-log-requests": no_effect("requests are not logged"),
    "enable-p2p-check": no_effect("GPUs are checked at every start"),
    "skip-server-warmup warmup no-warmup": no_effect("a server is ready once its kernels are"),
    "tokenizer-mode": no_effect("the checkpoint's own tokenizer is used", takes_value=True),
    "distributed-executor-backend": no_effect("ranks are processes of the supervisor", takes_value=True),
    "load-format quantization q": no_effect(_FORMAT, takes_value=True),
    "calculate-kv-scales": no_effect("keys and values are stored without scales"),
    "log-level-http": no_effect("--log-level is that of all processes", takes_value=True),
    "no-enable-chunked-prefill": refused(_CHUNKS, False),
    "max-prefill-tokens": refused(_STEP),
    "max-total-tokens num-gpu-blocks-override kv-cache-memory-bytes": refused(_KV_SIZE),
    "swap-space kv-transfer-config": refused(_KV_STAYS),
    "enable-hierarchical-cache": refused(_KV_STAYS, False),
    "cpu-offload-gb": refused(_EXPERTS_ON_GPU),
    "enable-expert-parallel": _flag("expert_split", "expert"),
    "ep ep-size expert-parallel-size": refused(_WHOLE_EXPERTS),
    "enable-eplb enable-dp-attention": refused(_EXPERTS_ON_GPU, False),
    "moe-a2a-backend all2all-backend": refused(_WHOLE_EXPERTS),
    "data-parallel-size dp dp-size": refused(_REPLICAS),
    "nnodes node-rank master-addr dist-init-addr": refused(_HOSTS),
    "headless": refused(_HOSTS, False),
    "speculative-config": refused(_SPECULATION),
    "speculative-config.method speculative-algorithm spec-type": OtherName("speculative_method", _METHODS),
    "speculative-config.num-speculative-tokens speculative-num-steps": _same("num_draft_tokens"),
    "speculative-config.prompt-lookup-min speculative-ngram-min-match-window-size": _same("ngram_match_min"),
    "speculative-config.prompt-lookup-max speculative-ngram-max-match-window-size": _same("ngram_match_max"),
    "speculative-config.model model-draft md spec-draft-model": refused(_NO_DRAFT_MODEL),
    "speculative-num-draft-tokens": refused(
        "here --num-draft-tokens, which does not count the token that a step has without drafts"
    ),
    "speculative-eagle-topk": no_effect("draft tokens are a sequence, not a tree", takes_value=True),
    "hf-overrides json-model-override-args rope-scaling rope-scale yarn-orig-ctx": refused(_OF_MODEL),
    "limit-mm-per-prompt": refused("here --max-images-per-request"),
    "default-chat-template-kwargs chat-template-kwargs": refused(
        "chat_template_kwargs is a field of each request"
    ),
    "override-generation-config": refused("edit generation_config.json in a copy of the checkpoint"),
    "enable-log-requests": refused("requests are traced, not logged: --otlp-endpoint", False),
    "root-path api-prefix path-prefix": refused("put the prefix into the proxy that adds it"),
    "download-dir": refused("models are kept where HF_HOME says"),
    "hf-token hft": refused("a token is read from HF_TOKEN, or from where `hf auth login` put it"),
    "tokenizer tokenizer-path": refused(
        "the tokenizer is the checkpoint's; a chat template of your own: --chat-template"
    ),
    "lora-modules lora": refused(_LORA),
    "enable-lora": refused(_LORA, False),
    "is-embedding embedding": refused("models that answer with text are served, no others", False),
    "compilation-config.max-cudagraph-capture-size max-cudagraph-capture-size": _same(
        "cuda_graph_max_batch_size"
    ),
    "otlp-traces-endpoint": _same("otlp_endpoint"),
    "allowed-local-media-path media-path": _same("image_dir"),
    "allowed-media-domains": _same("image_url_hosts"),
    "dist-timeout": refused("here --ready-timeout-s and --rank-timeout-s"),
    "tokenizer-worker-num renderer-num-workers": _same("prompt_workers"),
    "log-config-file": refused("here --log-level and --log-format"),
    "enable-deterministic-inference": refused("here --batch-invariant-experts, for experts only", False),
    "skip-mm-profiling disable-fast-image-processor": no_effect(
        "images are prepared by the family's own code"
    ),
    "disable-piecewise-cuda-graph enable-piecewise-cuda-graph": no_effect(
        "whole decode steps are captured, prompts are not (--cuda-graphs)"
    ),
    "cudagraph-capture-sizes cuda-graph-sizes cuda-graph-bs torch-compile-max-bs": no_effect(
        "batch sizes of graphs are chosen up to --cuda-graph-max-batch-size", takes_value=True
    ),
    "piecewise-cuda-graph-max-tokens max-seq-len-to-capture optimization-level": no_effect(
        "graphs are captured by batch size (--cuda-graph-max-batch-size)", takes_value=True
    ),
    "O0 O1 O2 O3 enable-nccl-nvls enable-symm-mem enable-flashinfer-allreduce-fusion": no_effect(_KERNELS),
    "enable-flashinfer-autotune enable-two-batch-overlap enable-single-batch-overlap enable-dbo": no_effect(
        _KERNELS
    ),
    "prefill-attention-backend decode-attention-backend mm-attention-backend": no_effect(
        _KERNELS, takes_value=True
    ),
    "kernel-config lora-backend nsa-prefill-backend nsa-decode-backend mm-encoder-attn-backend": no_effect(
        _KERNELS, takes_value=True
    ),
    "fp4-gemm-backend fp8-gemm-runner-backend bf16-gemm-backend attention-config": no_effect(
        _KERNELS, takes_value=True
    ),
    "mamba-cache-mode mamba-full-memory-ratio max-mamba-cache-size": no_effect(
        "states have a pool of their own (--state-snapshots)", takes_value=True
    ),
    "disable-hybrid-swa-memory disable-hybrid-kv-cache-manager": no_effect(
        "states and windows are kept as the family needs them"
    ),
    "radix-eviction-policy prefix-caching-hash-algo": no_effect(
        "the prefix that was used longest ago goes first", takes_value=True
    ),
    "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold": no_effect(
        "short prompts pass long ones, which have steps of their own (--prefill-lane-min-tokens)",
        takes_value=True,
    ),
    "enable-prompt-tokens-details enable-cache-report": no_effect("usage always says how much was cached"),
    "enable-force-include-usage": refused("stream_options.include_usage is a field of each request", False),
    "disable-uvicorn-access-log disable-access-log-for-endpoints": no_effect("requests are not logged"),
    "disable-frontend-multiprocessing": no_effect("processes: --workers and --prompt-workers"),
    "enable-reasoning": no_effect("reasoning is read wherever its format is known (--reasoning-parser)"),
    "num-scheduler-steps num-continuous-decode-steps": no_effect(
        "steps overlap one by one (--overlap-scheduling)", takes_value=True
    ),
    "sleep-on-idle": no_effect("processes sleep when there is nothing to compute"),
    "decode-log-interval": no_effect("figures are at /metrics, not in the log", takes_value=True),
    "collect-detailed-traces": no_effect("traces have all spans (--trace-sample-ratio)", takes_value=True),
    "weight-loader-disable-mmap": no_effect(_IN_RAM),
    "model-loader-extra-config model-impl config-format max-parallel-loading-workers": no_effect(
        "checkpoints are read by the family's own code", takes_value=True
    ),
    "linear-backend mamba-backend": no_effect(_KERNELS, takes_value=True),
    "sampling-defaults": no_effect("generation_config.json has the defaults of requests", takes_value=True),
    "log-requests enable-request-time-stats-logging enable-log-outputs": refused(
        "requests are traced, not logged: --otlp-endpoint", False
    ),
    "log-requests-level max-log-len": refused("requests are traced, not logged: --otlp-endpoint"),
    "enable-trace": refused("here --otlp-endpoint", False),
    "data-parallel-size-local data-parallel-backend data-parallel-address data-parallel-rpc-port": refused(
        _REPLICAS
    ),
    "data-parallel-start-rank load-balance-method": refused(_REPLICAS),
    "enable-dp-lm-head data-parallel-hybrid-lb data-parallel-external-lb": refused(_REPLICAS, False),
    "decode-context-parallel-size prefill-context-parallel-size dcp pcp attn-cp-size": refused(_BY_RANKS),
    "moe-dense-tp-size deepep-mode eplb-config": refused(_WHOLE_EXPERTS),
    "ep-num-redundant-experts ep-dispatch-algorithm expert-placement-strategy": refused(_EXPERTS_ON_GPU),
    "expert-distribution-recorder-mode": _same("expert_recorder"),
    "disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port": refused(_TWO_ROLES),
    "hicache-ratio hicache-size hicache-write-policy hicache-io-backend hicache-storage-backend": refused(
        _KV_STAYS
    ),
    "kv-offloading-size kv-offloading-backend kv-events-config": refused(_KV_STAYS),
    "enable-lmcache enable-kv-sharing": refused(_KV_STAYS, False),
    "kv-cache-memory": refused(_KV_SIZE),
    "offload-mode offload-group-size offload-backend": refused(_EXPERTS_ON_GPU),
    "speculative-draft-model-path speculative-token-map": refused(_NO_DRAFT_MODEL),
    "speculative-accept-threshold-single": refused(
        "a draft token is accepted where it equals what is sampled"
    ),
    "lora-paths max-loras-per-batch max-lora-rank max-loras": refused(_LORA),
    "base-gpu-id gpu-id-step": refused("CUDA_VISIBLE_DEVICES says which GPUs are used"),
    "admin-api-key": refused("nothing is administered over HTTP; clients' keys: --api-key-file"),
    "uds": refused("the gateway listens on --host and --port"),
    "middleware logits-processors tool-parser-plugin reasoning-parser-plugin": refused(
        "no code of yours is loaded into the server"
    ),
    "enable-custom-logit-processor": refused("no code of requests is run", False),
    "task runner convert pooler-config": refused("models that answer with text are served, no others"),
    "hf-config-path": refused("config.json is read from the checkpoint"),
    "tokenizer-revision code-revision": refused("here --revision, for all files of a model"),
    "quantization-param-path modelopt-quant torchao-config": refused(_FORMAT),
    "mm-processor-kwargs": refused("here --max-image-megapixels, other values are the checkpoint's"),
    "mm-processor-cache-gb": refused("here --image-cache-mib"),
    "enable-sleep-mode enable-memory-saver": refused("memory is freed when the server ends", False),
    "allow-credentials": no_effect("bearer tokens need no cookies (--cors-origins)"),
    "allowed-methods allowed-headers": no_effect("all that the APIs need are allowed", takes_value=True),
    "grpc-mode": refused("routers reach the engine at --gpu-address (docs/routers.md)", False),
    # llama.cpp
    "ctx-size c": _same("max_model_len"),
    "parallel np": _same("max_num_seqs"),
    "threads t": _same("expert_threads"),
    "alias a": _same("served_model_name"),
    "chat-template-file": _same("chat_template"),
    "webui": _flag("web_page", "true"),
    "no-webui": _flag("web_page", "false"),
    "no-op-offload": _flag("prefill_experts", "cpu"),
    "n-gpu-layers ngl": no_effect(_DENSE, takes_value=True),
    "threads-batch tb": no_effect("the same threads compute prompts and decode", takes_value=True),
    "cpu-moe cmoe": no_effect(_ON_CPUS),
    "op-offload": no_effect(
        "experts of long prompts are streamed to the GPU where it pays (--prefill-experts)"
    ),
    "flash-attn fa": no_effect("attention is always of that kind (--attention-backend)", takes_value=True),
    "fit fit-target fitt fit-ctx fitc": no_effect(
        "the KV cache takes what is left of --gpu-memory-utilization", takes_value=True
    ),
    "jinja": no_effect("chat templates are always rendered by Jinja"),
    "cont-batching cb": no_effect("batching is always continuous"),
    "no-mmap repack no-repack no-host": no_effect(_IN_RAM),
    "load-mode lm": no_effect(_IN_RAM, takes_value=True),
    "mlock": no_effect("memory that the GPU reads is locked by its registration"),
    "cache-prompt kv-unified kvu swa-full": no_effect("all requests share one KV cache (--prefix-caching)"),
    "cache-ram ctx-checkpoints": no_effect(
        "prefixes stay in the KV cache (--prefix-caching)", takes_value=True
    ),
    "slots props": no_effect("what runs is at /v1/live and /metrics"),
    "n-cpu-moe ncmoe": refused(_LAYERS),
    "override-tensor ot moe-cache-mib": refused(_EXPERTS_ON_GPU),
    "n-cpu-ffn ncffn": refused("attention and dense layers are always on the GPU"),
    "tensor-split ts": refused("GPUs share every layer evenly (--tensor-parallel-size)"),
    "split-mode sm": refused(_BY_RANKS),
    "main-gpu mg dev": refused("CUDA_VISIBLE_DEVICES says which GPUs are used; --device takes cpu or cuda"),
    "list-devices": refused("`moebius topology` and `moebius doctor` say what is there", False),
    "batch-size ubatch-size b ub": refused(_STEP),
    "cache-type-k cache-type-v ctk ctv": refused(_KV_TYPE),
    "no-kv-offload nkvo": refused("the KV cache is where attention is computed (--device)", False),
    "numa": refused("expert servers are pinned to their NUMA nodes (--expert-servers, --numa-node)"),
    "cpu-mask C cpu-range Cr cpu-strict prio poll": refused(
        "threads are pinned by NUMA node (--expert-threads, --numa-node), within the CPUs of the process"
    ),
    "rpc": refused("here --expert-addresses names expert servers of other hosts"),
    "hf-file hff model-url mu docker-repo dr": refused(
        "give a path, owner/name or owner/name:Q4_K_M as MODEL"
    ),
    "mmproj": refused("a tower in a file of its own is not read: give the checkpoint directory"),
    "no-jinja": refused("chat templates are always rendered by Jinja (--chat-template)", False),
    "verbose v": refused("here --log-level debug", False),
    "log-verbosity lv": refused("here --log-level"),
    "log-file": refused("lines go to stderr; --log-format json suits collectors"),
    "timeout to": refused("here --header-timeout-s, --body-timeout-s and --idle-timeout-s"),
    "reasoning-format": refused("here --reasoning-parser"),
    "reasoning-budget": refused("thinking_token_budget is a field of each request"),
    "cors-credentials": no_effect("bearer tokens need no cookies (--cors-origins)"),
    "threads-http": no_effect("one event loop serves all connections (--workers)", takes_value=True),
    "ui": _flag("web_page", "true"),
    "no-ui": _flag("web_page", "false"),
    "no-cache-prompt": _flag("prefix_caching", "false"),
    "sse-ping-interval": _same("sse_keepalive_s"),
    "cram swa-checkpoints ctxcp checkpoint-min-step cms": no_effect(
        "prefixes stay in the KV cache (--prefix-caching)", takes_value=True
    ),
    "cache-reuse slot-prompt-similarity sps defrag-thold dt": no_effect(
        "equal prefixes are reused whatever request they came from (--prefix-caching)", takes_value=True
    ),
    "kvo kv-offload": no_effect("the KV cache is where attention is computed (--device)"),
    "nocb": no_effect("batching is always continuous"),
    "nr": no_effect(_IN_RAM),
    "mmproj-auto mmproj-offload": no_effect("the tower is part of the checkpoint (--language-model-only)"),
    "no-mmproj no-mmproj-auto": _flag("language_model_only", "true"),
    "log-colors log-verbose-prompt": no_effect(
        "lines for people are coloured on a terminal", takes_value=True
    ),
    "log-prefix log-timestamps log-disable": no_effect("see --log-level and --log-format"),
    "log-jsonl": _flag("log_format", "json"),
    "perf escape special spm-infill direct-io dio backend-sampling bs check-tensors": no_effect(
        "it has no counterpart here"
    ),
    "context-shift": refused("an output ends where the context does (--max-model-len)", False),
    "keep": refused("an output ends where the context does (--max-model-len)"),
    "cpu-mask-batch Cb cpu-range-batch Crb cpu-strict-batch prio-batch poll-batch": refused(
        "threads are pinned by NUMA node (--expert-threads, --numa-node), within the CPUs of the process"
    ),
    "draft draft-n draft-max spec-draft-n-max": _same("num_draft_tokens"),
    "draft-min draft-n-min draft-p-min spec-draft-n-min": no_effect(_NO_DRAFT_LEAST, takes_value=True),
    "ngld cd devd": refused(_NO_DRAFT_MODEL),
    "lookup-cache-static lookup-cache-dynamic lcs lcd": refused(
        "n-grams are looked up in the request's own text (--speculative-method ngram)"
    ),
    "lora-scaled control-vector control-vector-scaled": refused(_LORA),
    "override-kv rope-freq-base rope-freq-scale yarn-ext-factor yarn-attn-factor yarn-beta-fast": refused(
        _OF_MODEL
    ),
    "models-dir models-max models-preset": refused(_ONE_MODEL),
    "models-autoload": refused(_ONE_MODEL, False),
    "sleep-idle-seconds": refused("memory is freed when the server ends"),
    "slot-save-path": refused(_KV_STAYS),
    "mm mmproj-url mmu": refused("a tower in a file of its own is not read: give the checkpoint directory"),
    "image-min-tokens image-max-tokens": refused("here --max-image-megapixels"),
    "embeddings reranking rerank": refused("models that answer with text are served, no others", False),
    "pooling": refused("models that answer with text are served, no others"),
    "reasoning rea reasoning-effort": refused(_EFFORT),
    "path ui-config webui-config": refused("the page at / is built in (--web-page)"),
    "tools mcp-servers-config mcp-servers-json tool-server": refused(
        "clients run the tools that a model calls"
    ),
    "agent ag": refused("clients run the tools that a model calls", False),
    "fit-print": refused("`moebius plan MODEL` prints what fits", False),
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
    "kt-max-deferred-experts-per-token": refused("no expert is deferred: answers would change"),
    "kt-enable-dynamic-expert-update": refused("see docs/placement.md for how experts get on the GPU", False),
    "init-expert-location": refused("here --expert-statistics, as `moebius experts record dump` writes them"),
    # LvLLM; its variables in lower case are keys of its configuration file
    "lk-threads": _same("expert_threads"),
    "lk-thread-binding": no_effect("threads are pinned to the cores of their NUMA node", takes_value=True),
    "lk-power-saving": no_effect("threads sleep when there is nothing to compute", takes_value=True),
    "lk-numa-huge": no_effect("packed experts take 2 MiB pages where there are any", takes_value=True),
    "lvllm-moe-numa-enabled": no_effect(
        "experts are on the CPU sockets, unless put on a GPU", takes_value=True
    ),
    "lvllm-moe-use-weight": _same("expert_dtype", TO_DTYPE="bfloat16", KEEP="keep", INT4="int4", INT8="int8"),
    "lvllm-gpu-resident-moe-layers": _same("gpu_layers"),
    "lvllm-gpu-resident-moe-experts": _same("gpu_experts"),
    "lvllm-gpu-prefill-min-batch-size": _same("stream_min_rows"),
    "lvllm-gpu-prefetch-window": no_effect("copies run ahead as far as the ring allows", takes_value=True),
    "lvllm-enable-numa-interleave": no_effect(
        "every server's share lies on its own NUMA node", takes_value=True
    ),
    "lvllm-enable-moe-layerwise-load": no_effect("experts are packed layer by layer", takes_value=True),
}
