"""Names that vLLM and SGLang have for settings: those that change what is computed, and where."""

from __future__ import annotations

from moebius.other_servers.name import IDLE, OtherName, flag, fulfilled, refused, same

EXPERTS_ON_GPU = "here --gpu-layers, --gpu-experts or --gpu-experts-ratio say which experts are on the GPU"
FORMAT = "the checkpoint says which format its weights have"
REPLICAS = (
    "--data-parallel-size starts engines on one host; those of several hosts are named in --engines of the "
    "gateway"
)
WHOLE_EXPERTS = (
    "here --gpu-expert-split expert gives every rank whole experts: rows are on all ranks, none are exchanged"
)
STEP = "here --max-num-batched-tokens, and --prefill-chunk-max where experts are streamed"
KV_IN_RAM = "--kv-offload-gib is the RAM for prefixes that the KV cache evicts"
KV_ON_DISK = "prefixes are on disk with --kv-disk-gib and --kv-disk-dir"
OTHER_DRAFTS = (
    "of second models an EAGLE-3 head or a smaller model with the same tokenizer proposes draft tokens; here "
    "--speculative-method eagle3 or draft_model, with --speculative-model"
)
LORA = "LoRA adapters are merged into the checkpoint beforehand: moebius models merge MODEL ADAPTER DIR"
OF_MODEL = "edit config.json in a copy of the checkpoint"
ENGINES_ATTEND = (
    "with --data-parallel-size each engine attends to requests of its own, and expert servers compute for all"
)
NO_CONTEXT_PARALLEL = (
    "not implemented: all pages of a context are on every rank of a stage. For longer ones: "
    "--tensor-parallel-size up to the number of KV heads, --pipeline-parallel-size, which divides layers and "
    "their KV, --kv-cache-dtype fp8_e4m3"
)
FIXED_BY_RANKS = (
    "experts on GPUs follow what requests choose: --placement-strategy adaptive, with ranks and "
    "--drop-resident keep; --placement-strategy frequency begins with those of --expert-statistics"
)
ONE_MICRO_BATCH = "pipeline stages take turns: one batch of --max-num-seqs is in flight"
KERNELS = "kernels are chosen by GPU and sizes (--attention-backend, --small-all-reduce)"
_HOSTS = "ranks on several hosts: --rank-hosts, --host-index, --rank-address (docs/parallel.md)"
_SPECULATION = (
    "here --speculative-method, --num-draft-tokens, --speculative-model, --ngram-match-min and "
    "--ngram-match-max"
)
_NOT_COMPILED = "no code is compiled by torch: kernels are our own, decode steps are graphs (--cuda-graphs)"
_CHUNKS = "prompts are always computed in chunks (--max-num-batched-tokens)"
_TWO_ROLES = "prompts and decoding are computed by the same engine; long prompts have steps of their own"
_STATES = "states and windows are kept as the family needs them (--state-snapshots)"
_MTP = (
    "mtp deepseek_mtp glm4_moe_mtp glm4_moe_lite_mtp qwen3_next_mtp qwen3_5_mtp ernie_mtp mimo_mtp "
    "exaone_moe_mtp longcat_flash_mtp step3p5_mtp nemotron_h_mtp pangu_ultra_moe_mtp draft-mtp NEXTN EAGLE"
)
_EAGLE = (
    "draft tokens come from the model's own MTP layers (--speculative-method mtp), as in SGLang where no "
    "draft model is named; of heads in a checkpoint of their own those of EAGLE3 are supported"
)
_NGRAM = "NGRAM ngram-cache ngram-simple ngram-mod ngram-map-k ngram-map-k4v ngram_gpu"
_DRAFT_MODEL = "draft_model STANDALONE draft-simple draft"
_OTHER_DRAFTS = "eagle medusa mlp_speculator suffix dspark DSPARK dflash DFLASH draft-eagle3 draft-dflash"
# Names of formats that only a checkpoint can have; others may ask for requantisation, too.
_STORED = (
    "awq awq_marlin moe_wna16 gptq gptq_marlin compressed-tensors auto-round inc gguf mxfp4 modelopt "
    "modelopt_fp4 modelopt_fp8 modelopt_mixed nvfp4 petit_nvfp4 w4afp8 deepseek_v4_fp8 blockwise_int8"
)
METHODS = {
    "none": "off",
    **dict.fromkeys(_NGRAM.split(), "ngram"),
    **dict.fromkeys(_MTP.split(), "mtp"),
    **dict.fromkeys(("eagle3", "EAGLE3"), "eagle3"),
    **dict.fromkeys(_DRAFT_MODEL.split(), "draft_model"),
    **dict.fromkeys(_OTHER_DRAFTS.split(), f"!{OTHER_DRAFTS}"),
}
_GRAPH_SIZES = "batch sizes of graphs are chosen up to --cuda-graph-max-batch-size"
_GRAPHS = {
    "NONE": "false",
    **dict.fromkeys(("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"), "true"),
}

# Names as flags, without the dashes, those of one meaning in one line.
TABLE: dict[str, OtherName] = {
    # How a model is divided
    "tp tp-size tensor-parallel": same("tensor_parallel_size"),
    "pp pp-size": same("pipeline_parallel_size"),
    "enable-expert-parallel enable-ep-moe": flag("gpu_expert_split", "expert"),
    "ep ep-size expert-parallel-size": OtherName(
        "gpu_expert_split", {"": "expert", "1": "tensor", **{str(size): "expert" for size in range(2, 65)}}
    ),
    "dp dp-size data-parallel-size-local": same("data_parallel_size"),
    "data-parallel-backend data-parallel-address data-parallel-rpc-port data-parallel-start-rank": refused(
        REPLICAS
    ),
    "load-balance-method": refused(REPLICAS),
    "enable-dp-lm-head data-parallel-hybrid-lb data-parallel-external-lb": refused(REPLICAS, False),
    "enable-dp-attention enable-dp-attention-local-control-broadcast": fulfilled(ENGINES_ATTEND),
    "enable-eplb enable-elastic-ep": refused(FIXED_BY_RANKS, False),
    "eplb-config eplb-algorithm eplb-rebalance-num-iterations init-expert-location": refused(
        FIXED_BY_RANKS, idle="trivial"
    ),
    "elastic-ep-backend": refused(FIXED_BY_RANKS),
    "ep-num-redundant-experts ep-dispatch-algorithm": refused(EXPERTS_ON_GPU),
    "expert-placement-strategy": refused(EXPERTS_ON_GPU, idle="linear"),
    "moe-a2a-backend all2all-backend moe-dense-tp-size deepep-mode": refused(WHOLE_EXPERTS),
    "nnodes": refused(_HOSTS, idle="1"),
    "node-rank master-addr master-port dist-init-addr": refused(_HOSTS),
    "headless": refused(_HOSTS, False),
    "decode-context-parallel-size prefill-context-parallel-size dcp pcp dcp-size attn-cp-size": refused(
        NO_CONTEXT_PARALLEL, idle="1"
    ),
    "attention-context-parallel-size dcp-kv-cache-interleave-size cp-kv-cache-interleave-size": refused(
        NO_CONTEXT_PARALLEL, idle="1"
    ),
    "dcp-comm-backend nsa-prefill-cp-mode": refused(NO_CONTEXT_PARALLEL),
    "enable-prefill-context-parallel enable-nsa-prefill-context-parallel": refused(
        NO_CONTEXT_PARALLEL, False
    ),
    "pp-max-micro-batch-size pp-async-batch-depth": refused(ONE_MICRO_BATCH, idle="1"),
    "moe-dp-size moe-data-parallel-size": refused(WHOLE_EXPERTS, idle="1"),
    "base-gpu-id gpu-id-step": refused("CUDA_VISIBLE_DEVICES says which GPUs are used"),
    "disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port": refused(_TWO_ROLES),
    "disable-custom-all-reduce": OtherName("small_all_reduce", fixed="nccl", takes_value=False, yields=True),
    "enable-pcie-oneshot-allreduce": flag("small_all_reduce", "one-shot"),
    "enable-p2p-check": fulfilled("GPUs are checked at every start"),
    "distributed-executor-backend": fulfilled("ranks are processes of the supervisor", takes_value=True),
    "numa-bind": fulfilled("processes run on the NUMA node of their GPU or memory (--numa-node)"),
    "numa-bind-nodes numa-bind-cpus numa-node": refused("NUMA nodes are found: --numa-node", many=True),
    # Lengths, batches and memory
    "context-length context-len": same("max_model_len"),
    "mem-fraction-static mem-frac mem-fraction": same("gpu_memory_utilization"),
    "chunked-prefill-size": OtherName("max_num_batched_tokens", {"-1": f"!{_CHUNKS}"}),
    "max-running-requests": same("max_num_seqs"),
    "max-queued-requests": same("max_waiting_requests"),
    "max-total-tokens": OtherName("num_pages", unit="tokens"),
    "num-gpu-blocks-override": same("num_pages"),
    "kv-cache-memory-bytes kv-cache-memory": refused(
        "here --kv-cache-gib, or --num-pages times --page-size tokens"
    ),
    "max-prefill-tokens": fulfilled(
        "a prompt is scheduled whole, in steps of --max-num-batched-tokens", takes_value=True
    ),
    "enable-chunked-prefill": fulfilled(_CHUNKS),
    "no-enable-chunked-prefill": refused(_CHUNKS, False),
    "enable-mixed-chunk": fulfilled("steps always mix prompts and decoding"),
    "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold": refused(
        "short prompts pass long ones, which have steps of their own (--prefill-lane-min-tokens)", idle="1"
    ),
    "block-size": same("page_size"),
    "enable-prefix-caching": flag("prefix_caching", "true"),
    "no-enable-prefix-caching disable-radix-cache": flag("prefix_caching", "false"),
    "radix-eviction-policy": refused("the prefix that was used longest ago goes first", idle="lru"),
    "prefix-caching-hash-algo": refused("prefixes are compared token by token", idle="builtin sha256"),
    "kv-offloading-size hicache-size": same("kv_offload_gib"),
    "enable-hierarchical-cache enable-lmcache": OtherName(
        "kv_offload_gib", fixed="", refusal=KV_IN_RAM, takes_value=False, yields=True
    ),
    "swap-space": refused(f"preempted requests are computed again but for kept prefixes: {KV_IN_RAM}"),
    "kv-offloading-backend": refused(f"{KV_IN_RAM}; {KV_ON_DISK}", idle="native"),
    "hicache-ratio": refused(KV_IN_RAM),
    "hicache-storage-backend": refused(KV_ON_DISK),
    "hicache-write-policy hicache-io-backend hicache-mem-layout": fulfilled(
        "what is evicted is copied while steps compute", takes_value=True
    ),
    "enable-kv-sharing": refused("each layer has keys and values as its family says", False),
    "kv-events-config": same("kv_events_config"),
    "kv-transfer-config": refused(f"{KV_IN_RAM}; {KV_ON_DISK}; engines send one another no keys and values"),
    "cpu-offload-gb": fulfilled("experts that have no room on the GPU are in RAM", takes_value=True),
    "offload-mode offload-group-size offload-backend": refused(EXPERTS_ON_GPU),
    "mamba-ssm-cache-dtype mamba-scheduler-strategy mamba-cache-mode": refused(_STATES),
    "mamba-full-memory-ratio max-mamba-cache-size swa-full-tokens-ratio": refused(_STATES),
    "disable-hybrid-swa-memory disable-hybrid-kv-cache-manager": refused(_STATES, False),
    "calculate-kv-scales": refused("keys and values are stored without scales", False),
    "enable-sleep-mode enable-memory-saver": fulfilled(
        "`moebius sleep`, POST /sleep and POST /release_memory_occupation give back the memory of GPUs"
    ),
    # The model
    "expert-distribution-recorder-mode": OtherName("expert_recorder", {"stat_approx": "stat"}),
    "seed s": same("random_seed"),
    "load-format": refused(FORMAT, idle="safetensors fastsafetensors"),
    "quantization q": OtherName(
        refusal=f"{FORMAT}; experts are requantised by --expert-dtype", idle=IDLE | set(_STORED.split())
    ),
    "quantization-param-path modelopt-quant torchao-config": refused(FORMAT),
    "config-format model-impl": refused("checkpoints are read by the family's own code", idle="hf vllm"),
    "trust-remote-code": fulfilled(
        "no code of a checkpoint is ever run; its family is supported, or refused by name"
    ),
    "hf-overrides json-model-override-args": refused(OF_MODEL),
    "hf-config-path": refused("config.json is read from the checkpoint"),
    "tokenizer tokenizer-path": OtherName(
        refusal="the tokenizer is the checkpoint's; a chat template of your own: --chat-template",
        unit="checkpoint",
    ),
    "tokenizer-mode": fulfilled("prompts are written as the checkpoint's tokenizer does", takes_value=True),
    "tokenizer-revision code-revision": refused("here --revision, for all files of a model"),
    "download-dir": refused("models are kept where HF_HOME says"),
    "hf-token hft": refused("a token is read from HF_TOKEN, or from where `hf auth login` put it"),
    "model-loader-extra-config": refused("checkpoints are read by the family's own code"),
    "model-loader-extra-config.enable-multithread-load model-loader-extra-config.num-threads": fulfilled(
        "files are read by several threads", takes_value=True
    ),
    "max-parallel-loading-workers": fulfilled("ranks load at the same time", takes_value=True),
    "weight-loader-disable-mmap": fulfilled("experts are packed into memory of the expert servers"),
    "safetensors-load-strategy": fulfilled("files are read once, in the order they are packed", True),
    "lora-modules lora-paths default-mm-loras": refused(LORA, many=True),
    "max-loras-per-batch max-lora-rank max-loras lora-target-modules": refused(LORA, many=True),
    "enable-lora enable-mixed-moe-lora-format": refused(LORA, False),
    "runner": refused("a model that answers with text gives embeddings, too", idle="generate"),
    "convert task pooler-config override-pooler-config": refused(
        "a model that answers with text gives embeddings, too"
    ),
    "is-embedding embedding embeddings": fulfilled("the model gives embeddings beside text"),
    # Speculation
    "speculative-config": refused(_SPECULATION),
    "speculative-config.method speculative-algorithm speculative-algo spec-type": OtherName(
        "speculative_method", METHODS, remarks={"EAGLE": _EAGLE}
    ),
    "speculative-config.num-speculative-tokens speculative-num-steps num-speculative-tokens": same(
        "num_draft_tokens"
    ),
    "speculative-num-draft-tokens": OtherName("num_draft_tokens", unit="draft_tokens_and_one"),
    "speculative-config.prompt-lookup-min speculative-ngram-min-match-window-size": same("ngram_match_min"),
    "speculative-config.prompt-lookup-max speculative-ngram-max-match-window-size": same("ngram_match_max"),
    # Where the model's own layers draft tokens, some name the model once more.
    "speculative-config.model speculative-draft-model-path speculative-draft speculative-model": OtherName(
        "speculative_model", unit="checkpoint"
    ),
    "speculative-config.draft-tensor-parallel-size speculative-draft-model-quantization": refused(
        "a draft head is divided as MODEL is, a draft model is whole on every rank, both in the type of "
        "MODEL's activations",
        idle="1 unquant",
    ),
    "speculative-token-map": refused("draft tokens are of the whole vocabulary, or of an EAGLE-3 head's own"),
    "speculative-config.moe-backend speculative-moe-runner-backend": refused(KERNELS),
    "speculative-config.draft-sample-method speculative-accept-threshold-single": refused(
        "a draft token is accepted where it equals what is sampled", idle="1.0 greedy"
    ),
    "speculative-eagle-topk": refused("draft tokens are a sequence, not a tree", idle="1"),
    # Kernels and graphs
    "cuda-graph-max-bs max-cudagraph-capture-size compilation-config.max-cudagraph-capture-size": same(
        "cuda_graph_max_batch_size"
    ),
    "compilation-config.cudagraph-mode": OtherName("cuda_graphs", _GRAPHS),
    "enforce-eager disable-cuda-graph": flag("cuda_graphs", "false"),
    "cuda-graph-bs cudagraph-capture-sizes cuda-graph-sizes": refused(_GRAPH_SIZES, many=True),
    "compilation-config.cudagraph-capture-sizes": refused(_GRAPH_SIZES),
    "max-seq-len-to-capture torch-compile-max-bs": refused(
        "graphs are captured by batch size (--cuda-graph-max-batch-size)"
    ),
    "piecewise-cuda-graph-max-tokens": same("cuda_graph_max_prompt_tokens"),
    "enable-piecewise-cuda-graph": fulfilled(
        "decode steps are whole graphs, those with prompts graphs in pieces (--cuda-graph-max-prompt-tokens)"
    ),
    "disable-piecewise-cuda-graph": flag("cuda_graph_max_prompt_tokens", "0"),
    "disable-cuda-graph-padding": refused(
        "batch sizes of graphs are chosen up to --cuda-graph-max-batch-size", False
    ),
    "compilation-config O optimization-level performance-mode": refused(_NOT_COMPILED),
    "O1 O2 O3 enable-torch-compile": refused(_NOT_COMPILED, False),
    "O0": fulfilled(_NOT_COMPILED),
    "disable-overlap-schedule no-async-scheduling": flag("overlap_scheduling", "false"),
    "async-scheduling": flag("overlap_scheduling", "true"),
    "num-scheduler-steps num-continuous-decode-steps": refused(
        "steps overlap one by one (--overlap-scheduling)", idle="1"
    ),
    "disable-cascade-attn disable-flashinfer-cutlass-moe-fp4-allgather": fulfilled(
        "there is no such kernel here"
    ),
    "disable-shared-experts-fusion": fulfilled(
        "shared experts are computed on the GPU, apart from routed ones"
    ),
    "disable-flashinfer-autotune": fulfilled("kernels are chosen by GPU and sizes"),
    "moe-backend moe-runner-backend fp8-gemm-backend fp4-gemm-backend fp8-gemm-runner-backend": refused(
        KERNELS
    ),
    "fp4-gemm-runner-backend bf16-gemm-backend sampling-backend linear-backend mamba-backend": refused(
        KERNELS
    ),
    "prefill-attention-backend decode-attention-backend mm-attention-backend": refused(KERNELS),
    "nsa-prefill-backend nsa-decode-backend dsa-prefill-backend dsa-decode-backend": refused(KERNELS),
    "kernel-config lora-backend mm-encoder-attn-backend attention-config": refused(KERNELS),
    "mm-encoder-tp-mode": fulfilled("each rank encodes images by itself", takes_value=True),
    "enable-nccl-nvls enable-symm-mem enable-flashinfer-allreduce-fusion enable-flashinfer-autotune": refused(
        KERNELS, False
    ),
    "enable-pcie-oneshot-allreduce-fusion enable-two-batch-overlap enable-single-batch-overlap": refused(
        KERNELS, False
    ),
    "enable-dbo enable-fused-qk-norm-rope enable-fused-moe-sum-all-reduce": refused(KERNELS, False),
    "enable-deterministic-inference": refused("here --batch-invariant-experts, for experts only", False),
}
