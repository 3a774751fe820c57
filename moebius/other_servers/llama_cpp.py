"""Names that llama.cpp and its fork ik_llama.cpp have for settings of llama-server."""

from __future__ import annotations

from moebius.other_servers.name import (
    KEEP_ALIVE,
    SEVERAL_MODELS,
    OtherName,
    flag,
    fulfilled,
    refused,
    same,
)
from moebius.other_servers.vllm_sglang import LORA, OF_MODEL

_DENSE = (
    "attention and dense layers are always on the GPU; experts as far as there is room, or as --gpu-layers"
)
_IN_RAM = "experts are packed into memory of the expert servers"
_REUSE = "prefixes stay in the KV cache (--prefix-caching)"
_EFFORT = "reasoning_effort and chat_template_kwargs are fields of each request"
_TOWER = "a tower in a file of its own is not read: give the checkpoint directory"
_KERNELS = "attention of its family is computed by kernels that are chosen by GPU and sizes"
_PINNED = "threads are pinned by NUMA node (--expert-threads, --numa-node), within the CPUs of the process"
_NO_SHIFT = "an output ends where the context does (--max-model-len)"
_REQUEST = "it is a field of each request"
_TOOLS = "clients run the tools that a model calls; the page has those of --web-mcp-servers"
_TOKENS = "max_tokens is a field of each request"
# Keys and values have one type, of 8 bits or of the activations.
_KV_TYPES = {
    **dict.fromkeys(("f16", "bf16"), "auto"),
    **dict.fromkeys(("q8_0", "q8_KV"), "fp8_e4m3"),
    **dict.fromkeys(
        ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1", "q6_0"),
        "!keys and values have 8 bits at least: --kv-cache-dtype fp8_e4m3",
    ),
    "f32": "!keys and values have the type of activations: --dtype float32",
}

TABLE: dict[str, OtherName] = {
    "ctx-size c": OtherName("max_model_len", {"0": "none"}),
    "parallel np": OtherName("max_num_seqs", {"-1": "none", "auto": "none"}),
    "threads t": OtherName("expert_threads", {"-1": "0"}, unit="threads"),
    "alias a": same("served_model_name"),
    "chat-template-file": same("chat_template"),
    "ui webui": flag("web_page", "true"),
    "no-ui no-webui": flag("web_page", "false"),
    "no-op-offload nopo": flag("prefill_experts", "cpu"),
    "n-gpu-layers ngl gpu-layers-draft": OtherName(fulfilled=_DENSE, values={"0": "@device=cpu"}),
    "cpu-moe cmoe": OtherName(fixed="exps=CPU", takes_value=False, unit="tensors"),
    "n-cpu-moe ncmoe": OtherName(unit="tensors"),
    "override-tensor ot": OtherName(unit="tensors"),
    "threads-batch tb": OtherName("expert_threads", {"-1": "0"}, unit="threads"),
    "op-offload": fulfilled(
        "experts of long prompts are streamed to the GPU where it pays (--prefill-experts)"
    ),
    "flash-attn fa": OtherName(
        fulfilled="attention is always of that kind (--attention-backend)",
        values=dict.fromkeys(("off", "0"), "!attention never stores its scores"),
    ),
    "fit": OtherName(
        fulfilled="experts and the KV cache take what is left of --gpu-memory-utilization",
        values={"off": "!say what is on the GPU: --gpu-experts, --gpu-layers, --kv-cache-gib"},
    ),
    "fit-target fitt fit-ctx fitc": refused("the share of GPU memory: --gpu-memory-utilization"),
    "jinja": fulfilled("chat templates are always rendered by Jinja"),
    "no-jinja": refused("chat templates are always rendered by Jinja (--chat-template)", False),
    "cont-batching cb": fulfilled("batching is always continuous"),
    "no-cont-batching nocb": refused("batching is always continuous", False),
    "no-mmap repack no-host run-time-repack rtr": fulfilled(_IN_RAM),
    "mmap no-repack nr": refused(_IN_RAM, False),
    "load-mode lm": refused(_IN_RAM, idle="mlock"),
    "mlock": fulfilled("memory that the GPU reads is locked by its registration"),
    "cache-prompt": flag("prefix_caching", "true"),
    "no-cache-prompt": flag("prefix_caching", "false"),
    "kv-unified kvu": fulfilled("all requests share one KV cache (--prefix-caching)"),
    "swa-full": refused("layers with a window keep only its pages", False),
    "cache-ram cram": OtherName(
        "kv_offload_gib", {"0": "@=", "-1": "!the RAM for prefixes has a size: --kv-offload-gib"}, unit="mib"
    ),
    "ctx-checkpoints ctxcp swa-checkpoints checkpoint-min-step cms": refused(_REUSE),
    "cache-reuse slot-prompt-similarity sps": refused("equal prefixes are reused whatever request had them"),
    "defrag-thold dt": fulfilled("pages need no order in the KV cache", takes_value=True),
    "slots props": fulfilled("both are served, with /v1/live and /metrics"),
    "no-slots": refused("what runs is at /slots, /v1/live and /metrics", False),
    "moe-cache-mib moe-cache moe-expert-cache-size": refused(
        "experts follow traffic: --placement-strategy adaptive, --gpu-experts"
    ),
    "n-cpu-ffn ncffn": refused("attention and dense layers are always on the GPU"),
    "tensor-split ts": refused("GPUs share every layer evenly (--tensor-parallel-size)"),
    "split-mode sm": refused("here --tensor-parallel-size or --pipeline-parallel-size"),
    "main-gpu mg dev": refused("CUDA_VISIBLE_DEVICES says which GPUs are used; --device takes cpu or cuda"),
    "list-devices": refused("`moebius topology` and `moebius doctor` say what is there", False),
    "batch-size b": fulfilled(
        "a prompt is scheduled whole, in steps of --max-num-batched-tokens", takes_value=True
    ),
    "ubatch-size ub": same("max_num_batched_tokens"),
    "cache-type-k cache-type-v ctk ctv": OtherName("kv_cache_dtype", _KV_TYPES),
    "no-kv-offload nkvo": refused("the KV cache is where attention is computed (--device)", False),
    "kvo kv-offload": fulfilled("the KV cache is where attention is computed (--device)"),
    "numa": fulfilled("expert servers are pinned to their NUMA nodes (--expert-servers)", takes_value=True),
    "cpu-mask C cpu-range Cr cpu-strict prio poll": refused(_PINNED),
    "cpu-mask-batch Cb cpu-range-batch Crb cpu-strict-batch prio-batch poll-batch": refused(_PINNED),
    "rpc": refused("here --expert-addresses names expert servers of other hosts"),
    "hf-file hff model-url mu docker-repo dr": refused(
        "give a path, owner/name or owner/name:Q4_K_M as MODEL"
    ),
    "mmproj mm mmproj-url mmu": refused(_TOWER),
    "mmproj-auto mmproj-offload no-mmproj-offload": fulfilled(
        "the tower is part of the checkpoint (--language-model-only)"
    ),
    "no-mmproj no-mmproj-auto": flag("language_model_only", "true"),
    "image-min-tokens image-max-tokens": refused("here --max-image-megapixels"),
    "media-path": same("image_dir"),
    "verbose v": flag("log_level", "debug"),
    "log-verbosity lv verbosity": refused("here --log-level"),
    "log-file": refused("lines go to stderr; --log-format json suits collectors"),
    "log-jsonl": flag("log_format", "json"),
    "log-colors": fulfilled("lines for people are coloured on a terminal", takes_value=True),
    "log-prefix log-timestamps": fulfilled("every line has its time and process"),
    "log-disable log-verbose-prompt": refused("see --log-level and --log-format", False),
    "timeout to": refused("here --header-timeout-s, --body-timeout-s and --idle-timeout-s"),
    "reasoning-format": refused(
        "here --reasoning-parser (reasoning_content is a field of the answer)", idle="deepseek"
    ),
    "reasoning-budget": refused("thinking_token_budget is a field of each request", idle="-1"),
    "reasoning rea reasoning-effort": refused(_EFFORT),
    "cors-credentials": fulfilled("bearer tokens need no cookies (--cors-origins)"),
    "threads-http": refused("one event loop serves all connections (--workers)", idle="-1"),
    "sse-ping-interval": same("sse_keepalive_s"),
    "perf escape special spm-infill direct-io dio backend-sampling bs check-tensors": refused(
        "it has no counterpart here", False
    ),
    "context-shift": refused(_NO_SHIFT, False),
    "no-context-shift": fulfilled(_NO_SHIFT),
    "keep": refused(_NO_SHIFT),
    "model-draft md spec-draft-model": OtherName("speculative_model", unit="checkpoint"),
    "ngld gpu-layers-draft-model cd devd": refused(
        "a draft model is whole on the device that computes dense layers, for contexts as long as MODEL's"
    ),
    "draft draft-n draft-max spec-draft-n-max": same("num_draft_tokens"),
    "draft-min draft-n-min draft-p-min spec-draft-n-min": fulfilled(
        "how many draft tokens are worth it is measured (--adaptive-drafts)", takes_value=True
    ),
    "lookup-cache-static lookup-cache-dynamic lcs lcd": refused(
        "n-grams are looked up in the request's own text (--speculative-method ngram)"
    ),
    "lora lora-scaled control-vector control-vector-scaled": refused(LORA),
    "rope-scaling rope-scale yarn-orig-ctx override-kv rope-freq-base rope-freq-scale": refused(OF_MODEL),
    "yarn-ext-factor yarn-attn-factor yarn-beta-fast yarn-beta-slow": refused(OF_MODEL),
    "models-dir models-max models-preset": refused(SEVERAL_MODELS),
    "models-autoload": fulfilled("a model of the configuration file is loaded by its first request"),
    "no-models-autoload": refused("the first request of a model loads it", False),
    "sleep-idle-seconds": same("sleep_after_s", **{"-1": "0"}),
    "slot-save-path": same("slot_save_path"),
    "reranking rerank": fulfilled("the model scores texts beside writing them"),
    "pooling": refused("pooling is a field of each request of embeddings", idle="last"),
    "path ui-config webui-config": refused("the page at / is built in (--web-page)"),
    "tools mcp-servers-config mcp-servers-json": refused(_TOOLS),
    "agent ag": refused(_TOOLS, False),
    "fit-print": refused("`moebius plan MODEL` prints what fits", False),
    "gpt-oss-20b-default gpt-oss-120b-default embd-gemma-default": refused("give MODEL", False),
    "fim-qwen-1.5b-default fim-qwen-3b-default fim-qwen-7b-default fim-qwen-30b-default": refused(
        "give MODEL", False
    ),
    # ollama run
    "keepalive": KEEP_ALIVE,
    "format": refused("response_format is a field of each request"),
    "hidethinking nowordwrap": refused("answers are shown by moebius chat", False),
    "insecure": refused("models are of the Hugging Face hub, or a path", False),
    # ik_llama.cpp
    "mla mla-use attention-max-batch amb": fulfilled(_KERNELS, takes_value=True),
    "fused-moe fmoe": fulfilled("gate and up of an expert are computed together"),
    "smart-expert-reduction ser": refused("here --experts-per-token, the same for every token"),
    "thp transparent-huge-pages": fulfilled("packed experts take 2 MiB pages where there are any"),
    # Sampling, which is set in each request
    "top-k": refused("sampling is set in each request (top_k); experts per token: --experts-per-token"),
    "temperature temp": refused(_REQUEST, idle="1 1.0"),
    "top-p": refused(_REQUEST, idle="1 1.0"),
    "min-p presence-penalty frequency-penalty logit-bias samplers": refused(_REQUEST),
    "repeat-penalty repetition-penalty": refused(_REQUEST, idle="1 1.0"),
    "ignore-eos": refused(_REQUEST, False),
    "n predict n-predict": refused(_TOKENS, idle="-1"),
    "typical mirostat dry-multiplier xtc-probability": refused("it is not supported", idle="1.0"),
    "grammar": refused("response_format, structured_outputs and tools are fields of each request"),
    "json-schema": refused("response_format is a field of each request"),
}
